"""Guarantee G8: what is trained is what is served.

Guarantees: the trainer's forward, walked over the rounds of the serving loop's own greedy text, must draft what the
loop drafted and so accept as many drafts per round, in at least `NEEDED` of the rounds, near-ties aside; otherwise a
`GuardError` says what differs, found by trying the usual mistakes on the served drafter until one drafts as the
trainer does, and failing that read from the pattern by position. It checks agreement, not level: an early drafter may
be weak. Drafts that match the text one token too early or too late are an error too, though both sides agree on them.
Called by the training loop at step 100, at evaluations and at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from forebay.decode.drafter import Context, ServedDrafter
from forebay.decode.serve import Generation
from forebay.decode.target_side import TargetSide, text_config
from forebay.errors import GuardError

#: (tokens of one text, rising anchor positions in it) -> draft tokens [anchors, drafts per round], by the trainer.
TrainerForward = Callable[[Sequence[int], Sequence[int]], Tensor]

NEEDED = 0.99
#: A difference at a slot where the loop's two best logits are closer than this is a tie within fp32 rounding.
NEAR_TIE = 1e-3
#: By how much drafts must match the shifted text better than the text itself to be called shifted.
SHIFT_MARGIN = 0.3
#: Texts and rounds on which the usual mistakes are tried.
PROBE_TEXTS, PROBE_ROUNDS = 8, 16


@dataclass
class GuardReport:
    """What the guard compared. Shares are over rounds (`agreement`) and over single slots (`slot_agreement`)."""

    rounds: int
    near_ties: int
    agreement: float
    slot_agreement: float
    loop_acceptance: list[float]
    trainer_acceptance: list[float]
    agreement_by_position: list[float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def guard(
    generations: Sequence[Generation],
    trainer: TrainerForward,
    *,
    target: TargetSide | None = None,
    drafter: ServedDrafter | None = None,
    near_tie: float = NEAR_TIE,
) -> GuardReport:
    """Compare; return the figures, or raise GuardError with a diagnosis.

    `generations`: what the greedy loop gave with the same weights. With `target` and `drafter` (what the loop ran) the
    diagnosis names the setting that differs.
    """
    played = [g for g in generations if g.starts]
    if not played:
        return GuardReport(0, 0, 1.0, 1.0, [], [], [])
    theirs = [trainer(g.prompt + g.verified, g.starts).cpu() for g in played]
    size = len(played[0].drafts[0])
    if theirs[0].shape[1] != size:
        raise GuardError(
            f"the trainer drafts {theirs[0].shape[1]} tokens per block and the loop {size}: the slot convention "
            "differs (sample_from_anchor says whether slot 0 predicts). Train and export with the same one"
        )
    report, slots = _compare(played, theirs, near_tie)
    if min(report.agreement, report.slot_agreement) < NEEDED:
        causes = [] if target is None or drafter is None else explain(target, drafter, played, theirs)
        raise GuardError(_message(report, causes, slots))
    shift = label_shift(played)
    if shift is not None:
        raise GuardError(shift)
    return report


def _compare(played: list[Generation], theirs: list[Tensor], near_tie: float) -> tuple[GuardReport, int]:
    ours = torch.cat([torch.tensor(g.drafts) for g in played])  # [R, J]
    margins = torch.cat([torch.tensor(g.margins) for g in played])
    drafted = torch.cat(theirs)
    truth = torch.cat([_truth(g, ours.shape[1]) for g in played])
    accepted = torch.tensor([n for g in played for n in g.accepted])
    counted = (drafted == truth).long().cumprod(-1).sum(-1)
    same = ours == drafted
    tied = ~same & (margins < near_tie)
    # A round is excused where its count differs because of the first slot that differs, and that one is a tie.
    first = (~same).long().argmax(-1)
    excused = (counted != accepted) & tied[torch.arange(len(ours)), first]
    judged = ~excused
    agreement = float((counted == accepted)[judged].double().mean()) if judged.any() else 1.0
    clear = same | ~tied
    by_position = [
        float((same[:, j][clear[:, j]]).double().mean()) if clear[:, j].any() else 1.0 for j in range(ours.shape[1])
    ]
    report = GuardReport(
        rounds=len(ours),
        near_ties=int(excused.sum()),
        agreement=agreement,
        slot_agreement=float(same[clear].double().mean()),
        loop_acceptance=[float((accepted > j).double().mean()) for j in range(ours.shape[1])],
        trainer_acceptance=[float((counted > j).double().mean()) for j in range(ours.shape[1])],
        agreement_by_position=by_position,
    )
    return report, ours.numel()


def _truth(generation: Generation, size: int, shift: int = 0) -> Tensor:
    """The text's token at each drafted slot `[R, J]`, `shift` later; -1 beyond the text."""
    text = torch.tensor(generation.prompt + generation.verified + [-1])
    where = torch.tensor(generation.starts)[:, None] + 1 + torch.arange(size) + shift
    return text[where.clamp(max=len(text) - 1)]


def label_shift(played: Sequence[Generation]) -> str | None:
    """A message if drafts match the text one token earlier or later far better than where they stand.

    The first slot is left out: an untrained drafter that starts from the target's layers repeats the anchor there.
    """
    size = len(played[0].drafts[0])
    drafts = torch.cat([torch.tensor(g.drafts) for g in played])
    rates = {}
    for shift in (-1, 0, 1):
        truth = torch.cat([_truth(g, size, shift) for g in played])
        hits = (drafts == truth)[:, 1:][truth[:, 1:] >= 0]
        rates[shift] = float(hits.double().mean()) if hits.numel() else 0.0
    worst = max((-1, 1), key=lambda s: rates[s])
    if rates[worst] <= rates[0] + SHIFT_MARGIN:
        return None
    return (
        f"drafts match the text shifted by {worst:+d} token in {rates[worst]:.0%} of the slots and where they stand in "
        f"{rates[0]:.0%}: the labels were off by one in training, or the slot convention (sample_from_anchor) differs "
        "between the training data and the drafter"
    )


# -- diagnosis --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def drafts_along(
    target: TargetSide,
    drafter: ServedDrafter,
    text: Sequence[int],
    anchors: Sequence[int],
    *,
    leak: int = 0,
    moved: int = 0,
    first_slot: int | None = None,
) -> Tensor:
    """What the served drafter drafts at `anchors` of a known text: `[A, drafts]`.

    `leak` context tokens from the anchor on are made visible, block positions `moved`, slots counted from `first_slot`:
    mistakes to be tried.
    """
    side = TargetSide(target.model, drafter.layer_ids)
    device = side.device
    tokens = torch.tensor([list(text)], device=device)
    positions = torch.arange(len(text), device=device)
    side.start()
    _, features = side.forward(tokens, positions[None], torch.ones_like(tokens, dtype=torch.bool), last_only=True)
    context = Context(drafter.layers)
    drafter.extend(context, features, positions[None])
    where = torch.tensor(list(anchors), device=device)
    shared = context.select(torch.zeros(len(where), dtype=torch.long, device=device))
    block = torch.full((len(where), drafter.block_size), drafter.mask_token_id, device=device)
    block[:, 0] = tokens[0, where]
    at = where[:, None] + torch.arange(drafter.block_size, device=device) + moved
    hidden = drafter.forward(side.embed(block), at, shared, positions[None] < where[:, None] + leak)
    if first_slot is not None:
        hidden = hidden[:, first_slot : first_slot + drafter.drafts_per_round]
    return drafter.draft_logits(hidden, side.head).argmax(-1).cpu()


def explain(
    target: TargetSide, drafter: ServedDrafter, played: Sequence[Generation], theirs: Sequence[Tensor]
) -> list[tuple[str, float]]:
    """The usual mistakes, each with the share of the trainer's drafts it reproduces; the best first."""
    found = []
    rows = [
        (g.prompt + g.verified, g.starts[:PROBE_ROUNDS], t[:PROBE_ROUNDS]) for g, t in zip(played, theirs, strict=True)
    ]
    for name, variant, options in _mistakes(target, drafter):
        same = [
            drafts_along(target, variant, text, anchors, **options) == expected
            for text, anchors, expected in rows[:PROBE_TEXTS]
        ]
        found.append((name, float(torch.cat(same).double().mean())))
    return sorted(found, key=lambda item: -item[1])


def _mistakes(target: TargetSide, drafter: ServedDrafter) -> Iterator[tuple[str, ServedDrafter, dict[str, int]]]:
    """(what the trainer would do, a served drafter that does it, options of `drafts_along`)."""

    def with_(dflash: dict[str, Any] | None = None, **fields: Any) -> ServedDrafter:
        config = copy.deepcopy(drafter.config) | fields
        config["dflash_config"] = {**config["dflash_config"], **(dflash or {})}
        return ServedDrafter(config, drafter.tensors, drafter.dtype, drafter.device)

    ids, config = drafter.layer_ids, text_config(target.model)
    layers = config.num_hidden_layers
    for step in (-1, 1):
        moved = [i + step for i in ids]
        if min(moved) >= 0 and max(moved) < layers:
            yield f"layer ids {moved}, the drafter says {list(ids)}: off by one", with_({"target_layer_ids": moved}), {}
    slot = 0 if not drafter.sample_from_anchor else 1
    yield f"slot convention swapped: drafts read from slot {slot} on", drafter, {"first_slot": slot}
    for name in ("pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id"):
        token = getattr(config, name, None)
        for value in token if isinstance(token, list) else [token]:
            if isinstance(value, int) and value not in (-1, drafter.mask_token_id):
                stated = f"mask token {value} ({name}), the drafter says {drafter.mask_token_id}"
                yield stated, with_({"mask_token_id": value}), {}
    theta = drafter.theta
    for value in sorted({1e4, 1e5, 5e5, 1e6, 5e6, 1e7, *_thetas(config)} - {theta}):
        rope = {"rope_theta": value, "rope_type": "default"}
        yield f"rope theta {value:g}, the drafter says {theta:g}", with_(rope_parameters=rope), {}
    if drafter.config.get("rope_parameters", {}).get("rope_type", "default") != "default":
        plain = {"rope_theta": theta, "rope_type": "default"}
        yield "rope without the drafter's rope scaling", with_(rope_parameters=plain), {}
    for step in (-1, 1):
        yield f"positions of the block off by {step:+d}", drafter, {"moved": step}
    for leak in sorted({1, drafter.block_size - 1, drafter.block_size}):
        yield f"a leaking mask: {leak} context positions from the anchor on are visible", drafter, {"leak": leak}
    causal = bool(drafter.config["dflash_config"].get("causal", False))
    yield f"causal={not causal} inside the block, the drafter says {causal}", with_({"causal": not causal}), {}
    if "sliding_attention" in (drafter.config.get("layer_types") or []):
        yield "sliding layers see everything: the window is ignored", with_(sliding_window=1 << 30), {}
        dflash = drafter.config["dflash_config"]
        other = "anchor" if dflash.get("window_from", "query") == "query" else "query"
        yield f"window measured from the {other}", with_({"window_from": other}), {}
        inside = not dflash.get("sliding_causal", True)
        yield f"sliding_causal={inside}", with_({"sliding_causal": inside}), {}


def _thetas(config: Any) -> list[float]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [r for r in rope.values() if isinstance(r, dict)] or [rope]
    return [float(r["rope_theta"]) for r in nested if r.get("rope_theta")]


def _message(report: GuardReport, causes: list[tuple[str, float]], slots: int) -> str:
    shown = ", ".join(
        f"{j + 1}: {a:.2f}/{b:.2f}"
        for j, (a, b) in enumerate(zip(report.loop_acceptance, report.trainer_acceptance, strict=True))
    )
    text = (
        f"the trainer's forward and the serving loop disagree: the same accepted count in {report.agreement:.1%} of "
        f"{report.rounds} rounds, the same token in {report.slot_agreement:.1%} of {slots} slots (at least "
        f"{NEEDED:.0%} of each needed). Acceptance by position, loop/trainer: {shown}. "
    )
    known = [c for c in causes if c[1] >= NEEDED] or [c for c in causes[:1] if c[1] > report.slot_agreement + 0.2]
    if known:
        return text + "The trainer drafts as with " + "; or with ".join(f"{n} ({s:.0%})" for n, s in known[:3])
    return text + _pattern(report)


def _pattern(report: GuardReport) -> str:
    """What the shape of the difference points to."""
    loop, trainer, same = report.loop_acceptance, report.trainer_acceptance, report.agreement_by_position
    higher, lower = (trainer, loop) if sum(trainer) >= sum(loop) else (loop, trainer)
    if higher[0] > 0.1 and 0.02 < lower[0] < 0.5 * higher[0] and sum(lower[1:]) < 0.05 * max(sum(higher[1:]), 1e-9):
        return "Position 1 is low and the rest near zero on one side: look at rope (theta, scaling) or positions"
    drop = max(range(1, len(same)), key=lambda j: same[j - 1] - same[j], default=0)
    if drop and same[drop - 1] >= NEEDED and same[drop] < 0.9:
        return (
            f"Agreement breaks off at position {drop + 1}: look at the sliding window, causality, or the block's mask"
        )
    if max(same) < 0.5:
        return "Every position differs: look at labels, layer ids, the mask token or the embedding scale"
    return "No usual mistake reproduces it: compare features, embedding scale and weights of both sides"
