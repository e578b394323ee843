"""Was the data written by the target? Greedy agreement of the target with a sample of prepared rows.

Guarantees: compares the supervised tokens only, each with the target's most likely token at that place, given all that
comes before it; the same rows for the same store. The verdict is a judgement with stated limits, not a proof: text
sampled at a high temperature agrees less than greedy text. Called by `api` after `prepare`, where a target is at hand.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.data.store import write_json

MOST_TOKENS_PER_ROW = 512
CLEARLY_OTHER, CLEARLY_OWN = 0.7, 0.95
SLACK = 0.03  # of agreement, for the noise of a sample


@dataclass(frozen=True)
class OnPolicy:
    """`agreement`: share of supervised tokens that are the target's own choice. `confidence`: the target's mean highest
    probability at the same places, which is what the agreement would be for text sampled from it at temperature 1."""

    rows: int
    tokens: int
    agreement: float
    confidence: float
    lowest_row: float

    @property
    def suspect(self) -> bool:
        """Whether something else than this target wrote the data, as far as this can tell."""
        low = self.agreement < CLEARLY_OTHER
        return low or (self.agreement < CLEARLY_OWN - SLACK and self.agreement < self.confidence - SLACK)

    @property
    def sentence(self) -> str:
        """What it means, with what to expect."""
        if not self.tokens:
            return "on-policy check: the store has no row to check"
        said = (
            f"on-policy check: the target agrees with {self.agreement:.1%} of {self.tokens:,} supervised tokens in "
            f"{self.rows} rows"
        )
        if self.suspect:
            return (
                f"{said}: warning, the data was clearly produced by something else (or sampled at a high temperature). "
                "A drafter learns to predict what it is trained on, so it would be accepted less: let the target "
                "answer the prompts with `forebay regenerate`"
            )
        if self.agreement >= CLEARLY_OWN:
            return f"{said}: its own greedy answers, as they should be"
        return f"{said}: plausible for its own sampled answers (about {self.confidence:.0%} at temperature 1)"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "suspect": self.suspect, "sentence": self.sentence}


def add_to_report(out: str | os.PathLike[str], result: OnPolicy) -> None:
    """Put the result into the report.json of a prepared folder, as `on_policy`."""
    path = Path(out) / "report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, report | {"on_policy": result.as_dict()})


@torch.inference_mode()
def check_on_policy(store: Any, target: Any, *, rows: int = 50, seed: int = 0) -> OnPolicy:
    """Compare up to `rows` rows of a token store with a loaded causal LM. Empty stores give an agreement of NaN."""
    chosen = np.random.default_rng(seed).permutation(len(store))[:rows]
    takes_positions = "logits_to_keep" in inspect.signature(target.forward).parameters
    device = next(target.parameters()).device
    hits = tokens = 0
    confidence, lowest = 0.0, 1.0
    for row in sorted(chosen.tolist()):
        ids = torch.from_numpy(np.array(store.tokens(row), np.int64)).to(device)
        places = torch.from_numpy(np.flatnonzero(store.mask(row))).to(device)
        places = places[places > 0][:MOST_TOKENS_PER_ROW]
        if not len(places):
            continue
        before = places - 1
        ids = ids[: int(places[-1]) + 1]
        if takes_positions:
            logits = target(input_ids=ids[None], logits_to_keep=before).logits[0]
        else:
            logits = target(input_ids=ids[None]).logits[0, before]
        agrees = logits.argmax(-1) == ids[places]
        confidence += float(torch.softmax(logits.float(), -1).amax(-1).sum())
        hits, tokens = hits + int(agrees.sum()), tokens + len(places)
        lowest = min(lowest, float(agrees.float().mean()))
    nothing = math.nan
    return OnPolicy(
        len(chosen), tokens, hits / tokens if tokens else nothing, confidence / tokens if tokens else nothing, lowest
    )
