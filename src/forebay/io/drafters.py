"""Find the drafter behind a path: an exported folder in either layout, a checkpoint, or a run's best checkpoint.

Guarantees: what is found is read strictly (see `formats`, `checkpoint`) and comes with what is known of it, ready to be
written for an engine by `export_drafter`. Finding reads only; nothing is guessed for facts that were not stored. What
is written says as many positions as its target has, because engines draft nothing beyond them. Called by `api`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from forebay.config import TargetConfig
from forebay.errors import ContractError, UsageError
from forebay.io import checkpoint
from forebay.io.formats import StoredDrafter, read_drafter, write_drafter
from forebay.io.formats.speculators import verifier_of
from forebay.models.load import load_config
from forebay.models.soundness import broken
from forebay.models.spec import DrafterSpec, target_positions
from forebay.models.vocabulary import kept_of


@dataclass
class FoundDrafter:
    """A drafter and what is known of it. `about` goes on the model card, `extras` into the configuration."""

    drafter: StoredDrafter
    source: Path
    target: str | None = None  # name or folder of the target
    architecture: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # of its random first weights; the default's where not stored


def find_drafter(source: str | Path, *, step: str = "best", num_target_layers: int | None = None) -> FoundDrafter:
    """The drafter at `source`. `step` chooses a run's checkpoint: "best" (by accept length), "last", or a number.

    Raises UsageError where there is none, and what reading it raises.
    """
    path = Path(source)
    if (path / checkpoint.MARKER).is_file():
        return _of_checkpoint(path)
    if (path / "config.json").is_file():
        stored = read_drafter(path, num_target_layers)
        named, architecture = verifier_of(stored.config)
        return FoundDrafter(stored, path, stored.dflash.get("target_name") or named, architecture)
    if (path / "checkpoints").is_dir():
        return _of_checkpoint(_chosen(path / "checkpoints", step))
    raise UsageError(f"{path} is no exported drafter, no checkpoint and no run with one: give one of these folders")


def _chosen(folder: Path, step: str) -> Path:
    whole = checkpoint.Checkpoints(folder).whole()
    steps = {int(p.name.removeprefix("step-")): p for p in whole}
    if not whole:
        raise UsageError(f"{folder} holds no finished checkpoint: let the run reach its first one")
    if step == "last":
        return whole[-1]
    if step == "best":
        best = folder / "best.json"
        return steps.get(json.loads(best.read_text())["step"], whole[-1]) if best.is_file() else whole[-1]
    if not step.isdigit() or int(step) not in steps:
        raise UsageError(f"no checkpoint at step '{step}': there are {', '.join(map(str, steps))}; or best, last")
    return steps[int(step)]


def _of_checkpoint(path: Path) -> FoundDrafter:
    saved = checkpoint.load(path)
    spec = DrafterSpec.from_dict(saved.state["spec"])
    tensors = dict(saved.drafter)
    maps = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
    vocabulary: Tensor | None = None
    if spec.draft_vocab_size is not None:
        vocabulary = kept_of(maps, spec.draft_vocab_size, spec.vocab_size)
    contract = saved.contract
    extras = {"target_name": contract.get("target.name"), "target_fingerprint": contract.get("target.weights")}
    extras |= saved.state.get("extras") or {}
    about: dict[str, Any] = {"steps": saved.step}
    if contract.get("data"):
        about["data"] = f"token store with fingerprint {contract['data']}"
    measured = [e for e in saved.state.get("evals", ()) if e.get("step") == saved.step]
    if measured:
        about |= {k: measured[-1][k] for k in ("accept_length", "acceptance_by_position") if k in measured[-1]}
        about["eval_prompts"] = measured[-1].get("prompts")
    return FoundDrafter(
        StoredDrafter(spec, tensors, vocabulary),
        path,
        contract.get("target.name"),
        contract.get("target.architecture"),
        about,
        extras,
        int(contract.get("seed") or 0),
    )


def export_drafter(
    source: str | Path,
    out: str | Path,
    *,
    format: str = "zlab",
    step: str = "best",
    target: str | None = None,
    gguf_file: str | None = None,
    head: Tensor | None = None,
    about: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the drafter at `source` for an engine and read it back strictly. Returns the folder.

    `target`: how engines find the target (default: the name that training knew it by). `head` `[V, H]`: the target's
    head, whose rows travel with a reduced vocabulary. `about`: more for the model card.
    Raises UsageError where the drafter does not say how many positions its target has, and the target is not here;
    ContractError where a weight is not finite or a tensor all zero.
    """
    found = find_drafter(source, step=step)
    drafter = presentable(found, _positions_at(target or found.target, gguf_file))
    if drafter.vocabulary is not None and drafter.head is None and head is not None:
        if tuple(head.shape) != (drafter.spec.vocab_size, drafter.spec.hidden_size):
            raise ContractError(
                f"the target's head is {list(head.shape)}, the drafter expects "
                f"{[drafter.spec.vocab_size, drafter.spec.hidden_size]}"
            )
        drafter.head = head.detach()[drafter.vocabulary]
    return write_drafter(
        out,
        drafter,
        format,
        target=target or found.target,
        target_architecture=found.architecture,
        extras=found.extras,
        about={**found.about, **(about or {})},
        overwrite=overwrite,
    )


def import_drafter(
    source: str | Path, out: str | Path, *, num_target_layers: int | None = None, max_positions: int = 0
) -> Path:
    """Read a drafter of another trainer, strictly, and write it as a z-lab folder: what `drafter.init_from` takes.

    `num_target_layers`: the target's, for a speculators folder that does not say it. `max_positions`: the target's.
    Tensors stay bit-identical, and so does the configuration of a z-lab folder that says at least these positions.
    """
    found = find_drafter(source, num_target_layers=num_target_layers)
    return write_drafter(out, presentable(found, max_positions), "zlab", target=found.target)


def presentable(found: FoundDrafter, positions: int) -> StoredDrafter:
    """The drafter found, for contexts of at least `positions` tokens, if an engine can do something with its weights.

    Raises UsageError (neither it nor the caller knows the positions) or ContractError (broken weights, by name).
    """
    spec, wrong = found.drafter.spec, broken(found.drafter.tensors)
    if wrong:
        first = next(iter(wrong))
        raise ContractError(
            f"{found.source} holds {len(wrong)} broken tensors, first '{first}': {wrong[first]}; an engine would draft "
            "noise: take another checkpoint of its run (--step N)"
        )
    if not (positions or spec.max_positions):
        raise UsageError(
            f"{found.source} says that it was trained on at most {spec.trained_max_length} tokens, but not how many "
            "positions its target has, beyond which engines draft nothing: give the target (--target DIR)"
        )
    return replace(found.drafter, spec=replace(spec, max_positions=max(positions, spec.max_positions)))


def _positions_at(target: str | None, gguf_file: str | None) -> int:
    """Positions of the target whose folder `target` is; 0 where it is only a name here."""
    if target is None or not Path(target).expanduser().exists():
        return 0
    return target_positions(load_config(TargetConfig(model=target, gguf_file=gguf_file)).to_dict())
