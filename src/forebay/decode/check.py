"""Will an engine agree? The drafter's contract with a target, the loop's accept length, and the peers' own code.

Guarantees: `check_contract` compares every stored fact that the two must share before any tensor is multiplied, and
its error names both sides of every difference. `check_drafter` then runs the serving loop, and the packages `dflash`
and `speculators` where they are installed, on the same prompts, and compares token by token. It changes nothing.
Called by `api`.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forebay.decode.drafter import ServedDrafter
from forebay.decode.evaluate import eos_ids, evaluate
from forebay.decode.serve import Generation
from forebay.decode.target_side import text_config
from forebay.errors import ContractError
from forebay.io.drafters import find_drafter
from forebay.io.formats.card import engine_commands
from forebay.io.formats.zlab import write_zlab
from forebay.models.facts import read_facts


@dataclass(frozen=True)
class Term:
    """One line of the contract."""

    field: str
    drafter: Any
    target: Any
    ok: bool
    note: str = ""


def contract(config: Mapping[str, Any], model: nn.Module, name: str = "the target") -> list[Term]:
    """The contract of a z-lab configuration with a loaded target, field by field. Reads shapes, multiplies nothing."""
    language = text_config(model)
    dflash = config.get("dflash_config") or {}
    rows = model.get_input_embeddings().weight.shape[0]
    head = model.get_output_embeddings().weight.shape[0]
    width = config.get("target_hidden_size") or config["hidden_size"]
    ids, mask = dflash.get("target_layer_ids"), dflash.get("mask_token_id")
    layers = language.num_hidden_layers
    eos = eos_ids(model)
    terms = [
        Term("num_target_layers", config.get("num_target_layers"), layers, config.get("num_target_layers") == layers),
        Term("hidden_size", config["hidden_size"], language.hidden_size, config["hidden_size"] == language.hidden_size),
        Term("target_hidden_size", width, language.hidden_size, width == language.hidden_size),
        Term("vocab_size", config["vocab_size"], head, config["vocab_size"] == head, "rows of the target's head"),
        Term(
            "target_layer_ids",
            ids,
            f"0..{layers - 1}",
            bool(ids) and min(ids) >= 0 and max(ids) < layers,
            "0-based layers; HF hidden_states[id + 1]",
        ),
        Term("mask_token_id", mask, f"{rows} embedding rows", mask is not None and 0 <= mask < rows),
        Term("mask_token_id is no end of text", mask, list(eos), mask not in eos),
    ]
    return terms


def check_contract(config: Mapping[str, Any], model: nn.Module, name: str = "the target") -> list[Term]:
    """The contract's lines; ContractError naming both sides of every line that does not hold.

    Shapes first; then, with a forward of a few tokens of the target alone, the embedding scale and the weights'
    fingerprint where the drafter stores them.
    """
    terms = contract(config, model, name)
    _require(terms, name)
    dflash = config.get("dflash_config") or {}
    facts = read_facts(model, name)
    scale = float(dflash.get("input_embedding_scale", 1.0))
    same = abs(scale - facts.embed_scale) <= 1e-3 * max(1.0, facts.embed_scale)
    terms.append(Term("input_embedding_scale", scale, facts.embed_scale, same))
    stored = dflash.get("target_fingerprint")
    if stored is not None:
        note = f"of the weights; the drafter was trained with {dflash.get('target_name', 'another target')}"
        terms.append(Term("target_fingerprint", stored, facts.fingerprint, stored == facts.fingerprint, note))
    _require(terms, name)
    return terms


def _require(terms: Sequence[Term], name: str) -> None:
    wrong = [t for t in terms if not t.ok]
    if wrong:
        shown = "; ".join(
            f"{t.field}: drafter {t.drafter}, target {t.target}{f' ({t.note})' if t.note else ''}" for t in wrong
        )
        raise ContractError(f"the drafter does not belong to {name}: {shown}")


def check_drafter(
    folder: str | Path,
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    target_folder: str | Path | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 16,
    peer_prompts: int = 8,
) -> dict[str, Any]:
    """The whole check: contract, loop, peers. JSON-able; `ok` is False where text or peers differ.

    `folder`: an export, a checkpoint, or a run. `model`: the target in fp32. `target_folder` is where the peers find it
    (speculators reads its weights itself).
    Raises what reading the folder and `check_contract` raise.
    """
    found = find_drafter(folder, num_target_layers=text_config(model).num_hidden_layers)
    stored = found.drafter
    drafter = ServedDrafter.from_stored(stored, extras=found.extras)
    terms = check_contract(drafter.config, model, str(target_folder or "the target"))
    report, generations = evaluate(
        model, drafter, prompts, max_new_tokens=max_new_tokens, batch_size=batch_size, reference=True
    )
    chosen = generations[:peer_prompts]
    peers = {
        "dflash": _dflash(stored, model, chosen, max_new_tokens),
        "speculators": _speculators(stored, target_folder),
    }
    differing = [n for n, p in peers.items() if p.get("identical") is False or p.get("error")]
    return {
        "ok": report.identical_to_target is not False and not differing,
        "contract": [asdict(t) for t in terms],
        "trained_max_length": stored.spec.trained_max_length,
        "engines": engine_commands(
            stored.spec, format=stored.format, drafter=str(folder), target=str(target_folder or "TARGET")
        ),
        **report.to_dict(),
        "peers": peers,
    }


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _dflash(stored: Any, model: Any, generations: Sequence[Generation], max_new_tokens: int) -> dict[str, Any]:
    """The same prompts through the package's own model and generation."""
    if not _installed("dflash"):
        return {"skipped": "the package dflash is not installed here (it pins transformers: see docs/formats.md)"}
    if stored.spec.sample_from_anchor or stored.spec.draft_vocab_size is not None:
        return {"skipped": "the package dflash serves neither sample_from_anchor nor a reduced vocabulary"}
    from dflash.model import DFlashDraftModel, dflash_generate

    with tempfile.TemporaryDirectory() as place:
        theirs = DFlashDraftModel.from_pretrained(write_zlab(Path(place) / "drafter", stored), dtype=torch.float32)
    theirs.eval()
    tokens, rounds, same = 0, 0, 0
    first: dict[str, Any] | None = None
    lengths = []
    for number, ours in enumerate(generations):
        prompt = torch.tensor([ours.prompt])
        out = _generated(dflash_generate, theirs, model, prompt, max_new_tokens)
        text = out["tokens"]
        lengths += out["rounds"]
        rounds += len(out["rounds"])
        tokens += len(ours.tokens)
        same += sum(a == b for a, b in zip(text, ours.tokens, strict=False))
        counted = [n + 1 for n in ours.accepted]
        whole = out["rounds"][: len(counted)]
        # Their last round is cut at the limit where ours is counted whole.
        agree = text == ours.tokens and whole[: len(counted) - 1] == counted[:-1]
        if not agree and first is None:
            first = {"prompt": number, "ours": ours.tokens, "theirs": text, "rounds": [counted, out["rounds"]]}
    return {
        "prompts": len(generations),
        "identical": first is None,
        "same_tokens": same / max(tokens, 1),
        "mean_round": sum(lengths) / max(rounds, 1),
        **({"first_difference": first} if first else {}),
    }


def _generated(generate: Any, drafter: Any, model: Any, prompt: torch.Tensor, max_new_tokens: int) -> dict[str, Any]:
    """Run the package's loop and record its rounds (its own statistics call CUDA)."""
    starts: list[int] = []

    def target_forward(*args: Any, **kwargs: Any) -> Any:
        starts.append(int(kwargs["position_ids"][0, 0]))
        return forward(*args, **kwargs)

    forward, model.forward = model.forward, target_forward
    try:
        out = generate(drafter, model, prompt, max_new_tokens, list(eos_ids(model)) or None)
    finally:
        model.forward = forward
    tokens = out[0, prompt.shape[1] :].tolist()
    ends = [*starts[2:], prompt.shape[1] + len(tokens) - 1]
    return {"tokens": tokens, "rounds": [b - a for a, b in zip(starts[1:], ends, strict=True)]}


def _speculators(stored: Any, target_folder: str | Path | None) -> dict[str, Any]:
    """The speculators export through the package's own validation and loading."""
    if not _installed("speculators"):
        return {"skipped": "the package speculators is not installed here (it caps transformers: see docs/formats.md)"}
    if target_folder is None:
        return {"skipped": "speculators reads the target's weights from a folder, none is given"}
    from speculators.model import SpeculatorModel

    from forebay.io.formats.speculators import write_speculators

    with tempfile.TemporaryDirectory() as place:
        folder = write_speculators(Path(place) / "drafter", stored, verifier=str(target_folder))
        model = SpeculatorModel.from_pretrained(folder)
        loaded = model.state_dict()
        wrong = [n for n, t in stored.tensors.items() if not torch.equal(loaded[n].cpu().to(t.dtype), t)]
        kept = json.loads((folder / "config.json").read_text())
    fields = {
        "block_size": (stored.spec.block_size, model.config.block_size),
        "mask_token_id": (stored.spec.mask_token_id, model.config.mask_token_id),
        "aux_hidden_state_layer_ids": ([i + 1 for i in stored.spec.target_layer_ids], list(model.target_layer_ids)),
        "sample_from_anchor": (stored.spec.sample_from_anchor, model.config.sample_from_anchor),
    }
    wrong += [f"{name}: {a} became {b}" for name, (a, b) in fields.items() if a != b]
    return {"identical": not wrong, "differing": wrong, "architecture": kept["architectures"][0]}
