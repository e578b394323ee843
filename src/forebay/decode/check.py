"""Will an engine agree? The drafter's contract with a target, the loop's accept length, and the peers' own code.

Guarantees: `check_contract` compares every stored fact that the two must share before any tensor is multiplied, and
its error names both sides of every difference. `check_drafter` then looks for weights that training cannot have left
so, and runs the serving loop, and where they are installed the packages `dflash` and `speculators` (see `peers`). It
changes nothing. Called by `api` and `generator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from forebay.decode.drafter import ServedDrafter
from forebay.decode.evaluate import eos_ids, evaluate
from forebay.decode.peers import load_in_speculators, run_dflash
from forebay.decode.target_side import text_config
from forebay.errors import ContractError
from forebay.io.drafters import find_drafter
from forebay.io.formats.card import engine_commands
from forebay.models.facts import final_norm, read_facts
from forebay.models.load import decoder_and_layers
from forebay.models.soundness import broken, unmoved


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
    """The whole check: contract, weights, loop, peers. JSON-able; `ok` is False where text or peers differ, or weights
    are broken or (in a drafter of ours, which moves them all) unmoved; those of another trainer are only noted.

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
        "dflash": run_dflash(drafter, model, chosen, max_new_tokens),
        "speculators": load_in_speculators(stored, target_folder),
    }
    wrong = [f"{name}: {why}" for name, why in broken(stored.tensors).items()]
    decoder, layers = decoder_and_layers(model)
    still = [f"{n}: {why}" for n, why in unmoved(stored.tensors, layers, final_norm(decoder), found.seed).items()]
    if stored.spec.trained_max_length:
        wrong += still
    else:
        report.notes += still
    differing = [name for name, said in peers.items() if said.get("identical") is False]
    return {
        "ok": report.identical_to_target is not False and not differing and not wrong,
        "wrong_weights": wrong,
        "contract": [asdict(t) for t in terms],
        "trained_max_length": stored.spec.trained_max_length,
        "engines": engine_commands(
            stored.spec, format=stored.format, drafter=str(folder), target=str(target_folder or "TARGET")
        ),
        **report.to_dict(),
        "peers": peers,
    }
