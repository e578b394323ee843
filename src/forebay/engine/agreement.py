"""Does the engine that the user has installed agree with what was trained? `forebay check DRAFTER --engine vllm`.

Guarantees: the same prompts go through the engine alone and through the engine with the drafter, greedy and in fp32;
texts are compared token by token, where they differ the target's own logits say whether it is a near-tie; the engine's
own counters give the accept length, which is set beside our loop's. What disagrees is a list of sentences; an empty
list is agreement. It changes nothing and keeps no engine running. Called by `api`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.decode.evaluate import compare, eos_ids
from forebay.decode.serve import Generation
from forebay.decode.target_side import TargetSide, text_config
from forebay.engine.process import Engine, Served
from forebay.io.formats import read_drafter
from forebay.io.formats.card import vllm_config

#: Accept lengths of the engine and of our loop over the same prompts that differ by more do not agree.
TOLERANCE = 0.02
#: Rounds in which the engine may leave out its draft (the last before a limit) without its being called silent.
SILENT_SHARE = 0.1


@dataclass(frozen=True)
class EngineRun:
    """What the engine said alone and with the drafter, over the same prompts."""

    prompts: list[list[int]]
    plain: Served
    drafted: Served
    version: str
    faults: list[str]

    @property
    def rounds(self) -> int:
        """Verifications that the drafted answers took at least: each gave its accepted drafts and one token."""
        return max(self.drafted.count - len(self.prompts) - self.drafted.accepted, 0)

    def differing(self, target: TargetSide) -> list[dict[str, Any]]:
        """Prompts whose text the drafter changed, judged by the target's logits (see `decode.evaluate.compare`)."""
        ours = [Generation(p, tokens=t) for p, t in zip(self.prompts, self.drafted.tokens, strict=True)]
        return compare(target, ours, self.plain.tokens)


def model_length(prompts: Sequence[Sequence[int]], max_new_tokens: int, block_size: int) -> int:
    """The engine's max_model_len for these prompts: it leaves out drafts, of whole batches, that come near it."""
    return max(map(len, prompts)) + max_new_tokens + 4 * block_size


def run_engine(
    drafter: str | Path,
    target: str | Path,
    prompts: Sequence[Sequence[int]],
    *,
    eos: Sequence[int],
    max_new_tokens: int,
    at_once: int = 8,
    plain: Served | None = None,
    **options: Any,
) -> EngineRun:
    """Serve `prompts` by the engine, alone (unless `plain` says what it said) and with the exported `drafter`.

    One engine after the other, in fp32 unless `options` (of `Engine`) say otherwise.
    """
    stored = read_drafter(drafter)
    length = model_length(prompts, max_new_tokens, stored.spec.block_size)
    options = {"dtype": "float32", "max_model_len": length, "max_num_seqs": at_once, **options}
    ask = {"max_new_tokens": max_new_tokens, "at_once": at_once, "eos": eos}
    if plain is None:
        with Engine(target, **options) as engine:
            plain = engine.generate(prompts, **ask)
    with Engine(target, speculative=vllm_config(stored.spec, str(Path(drafter).resolve())), **options) as engine:
        drafted = engine.generate(prompts, **ask)
    return EngineRun([list(p) for p in prompts], plain, drafted, engine.version, engine.faults)


def check_engine(
    drafter: str | Path,
    target: str | Path,
    model: Any,
    prompts: Sequence[Sequence[int]],
    accept_length: float,
    *,
    max_new_tokens: int,
    **options: Any,
) -> dict[str, Any]:
    """The engine's side of `forebay check`. `drafter`: an exported folder; `model`: the target in fp32, loaded here.

    `accept_length`: our loop's over the same prompts. Raises EngineError.
    """
    run = run_engine(drafter, target, prompts, eos=eos_ids(model), max_new_tokens=max_new_tokens, **options)
    differing = run.differing(TargetSide(model, ()))
    disagreements = [*_too_short(drafter, model), *_disagreements(run, differing, accept_length)]
    return {
        "engine": f"vllm {run.version}",
        "agrees": not disagreements,
        "disagreements": disagreements,
        "faults": run.faults,
        "prompts": len(run.prompts),
        "identical_prompts": len(run.prompts) - len(differing),
        "differing": differing,
        "accept_length": run.drafted.accept_length,
        "accept_length_of_our_loop": accept_length,
        "drafts": run.drafted.drafts,
        "acceptance_by_position": [n / max(run.drafted.drafts, 1) for n in run.drafted.by_position],
    }


def _too_short(drafter: str | Path, model: Any) -> Iterator[str]:
    """The engine takes the drafter's positions for its length, and says nothing when a text passes it."""
    config = read_drafter(drafter).config
    layers = config.get("transformer_layer_config") or config
    drafts, answers = layers.get("max_position_embeddings"), text_config(model).max_position_embeddings
    if drafts is not None and drafts < answers:
        yield (
            f"the drafter's max_position_embeddings is {drafts}, the target's {answers}: beyond {drafts} tokens the "
            "engine drafts nothing of use, and in a batch with one such text nothing for any: export it again"
        )


def _disagreements(run: EngineRun, differing: Sequence[dict[str, Any]], expected: float) -> Iterator[str]:
    drafted, found = run.drafted.drafts, run.drafted.accept_length
    if drafted < (1 - SILENT_SHARE) * run.rounds:
        yield f"the engine drafted in {drafted} of {run.rounds} rounds"
    for told in differing:
        if not told["near_tie"]:
            yield (
                f"prompt {told['prompt']}: with the drafter token {told['position']} is {told['ours']}, without it "
                f"{told['reference']} (the logits differ by {told['gap']:.4g}: no tie)"
            )
    if drafted and abs(found / expected - 1) > TOLERANCE:
        yield (
            f"accept length {found:.3f} in the engine, {expected:.3f} in our loop, on the same prompts: more than "
            f"{TOLERANCE:.0%} apart"
        )
