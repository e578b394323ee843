"""Accept length, acceptance by position, equality with the target's own greedy text, and speed, by the serving loop.

Guarantees: `accept_length = 1 + sum over j of P(first j drafts all accepted)`, over whole rounds of all prompts (see
`serve.Generation`: the round in which a text ends is left out and counted apart; the round in which max_new_tokens is
passed was judged whole and counts whole). Equality is judged in fp32 only and against transformers' own
`generate`; a difference is a near-tie only where every token of ours is within `NEAR_TIE` of the best logit. Called by
the training loop, `api` and `check`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from forebay.decode.drafter import ServedDrafter
from forebay.decode.serve import Generation, Progress, serve
from forebay.decode.target_side import TargetSide
from forebay.errors import DataError
from forebay.models.spec import target_positions

#: Logits of the reference closer than this are a tie within fp32 rounding.
NEAR_TIE = 1e-3
SPEED_TOKENS = 64
#: Upper edges (tokens) of the bands of answer lengths that accept length is told apart by; the last band is open.
ANSWER_BANDS = (64, 128, 256, 512)


@dataclass
class Report:
    """What an evaluation found. `identical_to_target` is None where it was not judged."""

    accept_length: float
    acceptance_by_position: list[float]
    accept_length_by_request: float  # mean over rounds within a prompt, then over prompts
    by_answer_length: list[dict[str, Any]]  # keys: from, to (tokens; None: open), prompts, rounds, accept_length
    rounds: int
    cut_rounds: int
    prompts: int
    tokens: int
    temperature: float
    identical_to_target: bool | None = None
    near_ties: int = 0
    differing: list[dict[str, Any]] = field(default_factory=list)
    target_tokens_per_s: float | None = None
    speculative_tokens_per_s: float | None = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the keys of `forebay eval --json`."""
        return asdict(self)


def eos_ids(model: nn.Module) -> tuple[int, ...]:
    """The tokens that end a text, as the target's generation configuration says."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "eos_token_id", None)
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def evaluate(
    model: nn.Module,
    drafter: ServedDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 16,
    temperature: float = 0.0,
    seed: int = 0,
    reference: bool = True,
    speed_model: nn.Module | None = None,
    speed_prompts: int = 4,
    progress: Progress | None = None,
) -> tuple[Report, list[Generation]]:
    """Run the serving loop over `prompts` (token ids) and report. `model` is the target, in fp32 where equality counts.

    `reference=True` compares with `generate` (greedy and fp32 only, else left out). `speed_model` (the target in the
    faster dtype) times both ways of decoding `speed_prompts` prompts one by one. Raises DataError without prompts.
    """
    if not prompts:
        raise DataError("no held-out prompt to evaluate on: prepare with a held-out part, or give prompts")
    begin = time.perf_counter()
    target = TargetSide(model, drafter.layer_ids)
    eos = eos_ids(model)
    generations = serve(
        target,
        drafter,
        prompts,
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos,
        batch_size=batch_size,
        temperature=temperature,
        seed=seed,
        progress=progress,
    )
    report = summarize(generations, drafter.drafts_per_round, temperature)
    longest = max(len(g.prompt) + len(g.tokens) for g in generations)
    report.notes = length_notes(drafter, target_positions(model.config.get_text_config().to_dict()), longest)
    if reference and temperature == 0 and target.dtype in (torch.float32, torch.float64):
        expected = greedy_reference(model, prompts, max_new_tokens=max_new_tokens, eos=eos, batch_size=batch_size)
        report.differing = compare(target, generations, expected)
        report.near_ties = sum(d["near_tie"] for d in report.differing)
        report.identical_to_target = report.near_ties == len(report.differing)
    if speed_model is not None:
        report.target_tokens_per_s, report.speculative_tokens_per_s = measure_speed(
            speed_model, drafter, prompts[:speed_prompts], max_new_tokens=min(max_new_tokens, SPEED_TOKENS)
        )
    report.seconds = time.perf_counter() - begin
    return report, generations


def length_notes(drafter: ServedDrafter, positions: int, longest: int) -> list[str]:
    """What to know about lengths: texts longer than any that trained the drafter, and a drafter that engines cut short.

    `positions`: the target's. `longest`: of the texts evaluated.
    """
    trained, served = drafter.trained_max_length, drafter.max_positions or drafter.trained_max_length
    notes = []
    if 0 < trained < longest:
        notes.append(f"texts of up to {longest} tokens, but the drafter was trained on at most {trained}")
    if served < positions:
        notes.append(
            f"the drafter's max_position_embeddings is {served}, its target's {positions}: vLLM drafts nothing in "
            f"contexts beyond {served}, without a word; `forebay import` writes the drafter with the target's"
        )
    return notes


def summarize(generations: Sequence[Generation], drafts_per_round: int, temperature: float = 0.0) -> Report:
    """The figures of `generations`; 1.0 and zeros where no whole round was played."""
    accepted = torch.tensor([n for g in generations for n in g.accepted], dtype=torch.long)
    shares = [float((accepted >= j).double().mean()) if len(accepted) else 0.0 for j in range(1, drafts_per_round + 1)]
    means = [1 + sum(g.accepted) / len(g.accepted) for g in generations if g.accepted]
    return Report(
        accept_length=1 + sum(shares),
        acceptance_by_position=shares,
        accept_length_by_request=sum(means) / len(means) if means else 1.0,
        by_answer_length=list(_by_answer_length(generations)),
        rounds=len(accepted),
        cut_rounds=sum(g.cut_rounds for g in generations),
        prompts=len(generations),
        tokens=sum(len(g.tokens) for g in generations),
        temperature=temperature,
    )


def _by_answer_length(generations: Sequence[Generation]) -> Iterator[dict[str, Any]]:
    """Accept length over the whole rounds of the answers of each band of lengths that has any."""
    for low, high in pairwise((0, *ANSWER_BANDS, None)):
        band = [g for g in generations if low < len(g.tokens) and (high is None or len(g.tokens) <= high)]
        rounds = [accepted for g in band for accepted in g.accepted]
        if band:
            yield {
                "from": low + 1,
                "to": high,
                "prompts": len(band),
                "rounds": len(rounds),
                "accept_length": 1 + sum(rounds) / len(rounds) if rounds else 1.0,
            }


@torch.inference_mode()
def greedy_reference(
    model: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, eos: Iterable[int], batch_size: int = 16
) -> list[list[int]]:
    """The target's own greedy continuation of every prompt, by transformers' `generate` in left-padded batches."""
    ends = list(eos)
    pad = ends[0] if ends else 0
    device = model.get_input_embeddings().weight.device
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    with _plain_generation(model, GenerationConfig(eos_token_id=ends or None, pad_token_id=pad)):
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            longest = len(prompts[rows[-1]])
            tokens = torch.full((len(rows), longest), pad, device=device)
            mask = torch.zeros_like(tokens)
            for i, row in enumerate(rows):
                tokens[i, longest - len(prompts[row]) :] = torch.tensor(list(prompts[row]), device=device)
                mask[i, longest - len(prompts[row]) :] = 1
            out = model.generate(input_ids=tokens, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens)
            for row, text in zip(rows, out[:, longest:].tolist(), strict=True):
                stop = next((i for i, t in enumerate(text) if t in ends), len(text) - 1)
                found[row] = text[: stop + 1]
    return [found[i] for i in range(len(prompts))]


@contextmanager
def _plain_generation(model: Any, config: GenerationConfig) -> Iterator[None]:
    """A repetition penalty or the like in the target's own generation configuration is not greedy decoding."""
    before, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = before


def compare(
    target: TargetSide, generations: Sequence[Generation], expected: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """The prompts whose tokens differ from the reference: where first, both tokens, the gap, whether it is a tie."""
    differing = []
    for index, (ours, theirs) in enumerate(zip(generations, expected, strict=True)):
        if ours.tokens == list(theirs):
            continue
        pairs = enumerate(zip(ours.tokens, theirs, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ours.tokens), len(theirs)))
        gaps = _gaps(target, ours.prompt, ours.tokens)
        worst = float(gaps.max())
        differing.append(
            {
                "prompt": index,
                "position": at,
                "ours": ours.tokens[at] if at < len(ours.tokens) else None,
                "reference": theirs[at] if at < len(theirs) else None,
                "gap": float(gaps[at]) if at < len(gaps) else worst,
                # After a tie the two texts differ, so ours is judged whole by the target's own logits along it.
                "near_tie": at < min(len(ours.tokens), len(theirs))
                and worst < NEAR_TIE
                and _tied(target, [*ours.prompt, *ours.tokens[:at]], theirs[at]),
            }
        )
    return differing


@torch.inference_mode()
def _logits_along(target: TargetSide, text: Sequence[int]) -> Tensor:
    tokens = torch.tensor([list(text)], device=target.device)
    target.start()
    logits, _ = target.forward(
        tokens, torch.arange(len(text), device=target.device)[None], torch.ones_like(tokens, dtype=torch.bool)
    )
    return logits[0]


def _gaps(target: TargetSide, prompt: list[int], tokens: list[int]) -> Tensor:
    """By how much each of `tokens` falls short of the best logit of one plain forward over the text."""
    logits = _logits_along(target, prompt + tokens)[len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return logits.max(-1).values - chosen


def _tied(target: TargetSide, text: list[int], token: int) -> bool:
    logits = _logits_along(target, text)[-1]
    return float(logits.max() - logits[token]) < NEAR_TIE


def measure_speed(
    model: nn.Module, drafter: ServedDrafter, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = SPEED_TOKENS
) -> tuple[float, float]:
    """Tokens per second of the target alone and with the drafter, at batch size 1, by the same loop.

    The two alternate prompt by prompt, so that a busy machine slows both. Prefill counts in both.
    """
    target = TargetSide(model, drafter.layer_ids)
    served = ServedDrafter(drafter.config, drafter.tensors, target.dtype, target.device)
    seconds, tokens = [0.0, 0.0], [0, 0]
    for number, prompt in enumerate([prompts[0], *prompts]):
        for i, way in enumerate((None, served)):
            begin = time.perf_counter()
            out = serve(target, way, [prompt], max_new_tokens=max_new_tokens, eos_token_ids=eos_ids(model))
            if number:  # the first run warms up
                seconds[i] += time.perf_counter() - begin
                tokens[i] += len(out[0].tokens)
    return tokens[0] / seconds[0], tokens[1] / seconds[1]
