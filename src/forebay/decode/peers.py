"""The same drafter through the code of others, where it is installed: the packages `dflash` and `speculators`.

Guarantees: what is compared is theirs (their loading, their forward, their generation) against what our serving loop
gave, token by token and round by round; a package that is missing, or a drafter that its layout cannot say, is said to
be skipped and why. Neither package is a dependency. Called by `check` and by tests/interop.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forebay.decode.drafter import ServedDrafter
from forebay.decode.evaluate import eos_ids
from forebay.decode.serve import Generation
from forebay.errors import ContractError
from forebay.io.formats import StoredDrafter, write_drafter
from forebay.io.formats.zlab import zlab_tensors

MISSING = "the package {0} is not installed here (it pins another transformers: see docs/formats.md)"


def run_dflash(
    drafter: ServedDrafter, model: Any, generations: Sequence[Generation], max_new_tokens: int
) -> dict[str, Any]:
    """The prompts of `generations` (greedy, by our loop) through the package's model and generation."""
    if importlib.util.find_spec("dflash") is None:
        return {"skipped": MISSING.format("dflash")}
    if drafter.sample_from_anchor or drafter.vocabulary is not None:
        return {"skipped": "the package dflash serves neither sample_from_anchor nor a reduced vocabulary"}
    from dflash.model import DFlashDraftModel, dflash_generate

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(drafter.config))
        save_file(
            {k: t.contiguous() for k, t in drafter.tensors.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        theirs = DFlashDraftModel.from_pretrained(folder, dtype=drafter.dtype).eval()
    same, total, rounds = 0, 0, []
    first: dict[str, Any] | None = None
    for number, ours in enumerate(generations):
        tokens, lengths = _generate(dflash_generate, theirs, model, ours.prompt, max_new_tokens)
        rounds += lengths
        total += len(ours.tokens)
        same += sum(a == b for a, b in zip(tokens, ours.tokens, strict=False))
        # Their last round is cut at the limit, where ours counts whole.
        whole = [n + 1 for n in ours.accepted][:-1]
        if first is None and (tokens != ours.tokens or lengths[: len(whole)] != whole):
            first = {
                "prompt": number,
                "ours": ours.tokens,
                "theirs": tokens,
                "our_rounds": whole,
                "their_rounds": lengths,
            }
    report = {
        "prompts": len(generations),
        "identical": first is None,
        "same_tokens": same / max(total, 1),
        "tokens_per_round": sum(rounds) / max(len(rounds), 1),
    }
    return report if first is None else report | {"first_difference": first}


def _generate(
    generate: Any, drafter: Any, model: Any, prompt: list[int], max_new_tokens: int
) -> tuple[list[int], list[int]]:
    """Their tokens, and the tokens of each of their rounds, seen at the target: their own statistics need CUDA."""
    starts: list[int] = []
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        starts.append(int(kwargs["position_ids"][0, 0]))
        return forward(*args, **kwargs)

    model.forward = watched
    try:
        ids = torch.tensor([prompt], device=model.device)
        out = generate(drafter, model, ids, max_new_tokens, list(eos_ids(model)) or None)
    finally:
        model.forward = forward
    tokens = out[0, len(prompt) :].tolist()
    ends = [*starts[2:], len(prompt) + len(tokens) - 1]
    return tokens, [b - a for a, b in zip(starts[1:], ends, strict=True)]


def load_in_speculators(stored: StoredDrafter, target_folder: str | Path | None) -> dict[str, Any]:
    """The speculators export through the package's validation and loading, with the target of `target_folder`."""
    if importlib.util.find_spec("speculators") is None:
        return {"skipped": MISSING.format("speculators")}
    if target_folder is None:
        return {"skipped": "speculators reads the target's weights from a folder, and none was given"}
    from speculators.model import SpeculatorModel

    with tempfile.TemporaryDirectory() as place:
        try:
            folder = write_drafter(Path(place) / "drafter", stored, "speculators", target=str(target_folder))
        except ContractError as error:
            return {"skipped": str(error)}
        model = SpeculatorModel.from_pretrained(folder)
    state, spec, config = model.state_dict(), stored.spec, model.config
    written = zlab_tensors(spec, stored.tensors, stored.vocabulary, stored.head)
    differing = [
        name for name, tensor in written.items() if not torch.equal(state[name].cpu().to(tensor.dtype), tensor)
    ]
    fields = {
        "block_size": (spec.block_size, config.block_size),
        "mask_token_id": (spec.mask_token_id, config.mask_token_id),
        "aux_hidden_state_layer_ids": ([i + 1 for i in spec.target_layer_ids], list(model.target_layer_ids)),
        "sample_from_anchor": (spec.sample_from_anchor, config.sample_from_anchor),
        "sliding_causal": (spec.sliding_causal, not config.sliding_window_non_causal),
        "speculative_tokens": (
            spec.scored_slots,
            config.speculators_config.proposal_methods[0].speculative_tokens,
        ),
    }
    differing += [f"{name}: {ours} became {theirs}" for name, (ours, theirs) in fields.items() if ours != theirs]
    return {"identical": not differing, "differing": differing}
