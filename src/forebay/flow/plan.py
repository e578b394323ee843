"""Lengths, anchors, parameters, epoch -> the epoch's ordered jobs, made before the epoch starts.

Guarantees: every row with an anchor is in exactly one job; a job holds rows of one bucket and exceeds none of the three
budgets (tokens, anchors, slots), so that nothing is ever cut; the plan is a function of (lengths, anchors, parameters,
epoch) alone. Does not guarantee that a bucket's last job is full. Called by the runtime and `forebay plan`.
"""

from __future__ import annotations

import numpy as np

from forebay.errors import DataError
from forebay.flow.jobs import EpochPlan, Ints, Job, PlanParams
from forebay.flow.packing import pack
from forebay.flow.queues import simulate_draws
from forebay.flow.random import CounterRandom

__all__ = ["EpochPlan", "Job", "PlanParams", "choose_anchors_per_item", "choose_edges", "plan_epoch"]

#: A sub-batch may hold rows this much shorter than its longest: the largest share that keeps a job's padding low wins.
SPLIT_STEPS = (0.6, 0.45, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.0)
MOST_PADDING = 0.04
FEWEST_JOBS_OF_A_BUCKET = 12


def choose_edges(lengths: Ints, token_budget: int) -> tuple[int, ...]:
    """Upper edges of buckets, halving from the longest row down.

    A bucket of ratio 2 leaves the packer enough choice to fill items, and sub-batches keep the padding low. The top
    bucket reaches down to an eighth of the budget, because jobs of only two or three long rows cannot be filled. A
    bucket that would have few jobs joins the next, since each bucket's last job is short. Where even the longest row
    is short against the budget, filling is easy and narrower buckets leave fewer sub-batches.
    """
    longest = int(lengths.max(initial=1))
    edges = [longest]
    ratio = 2.0 if longest * 8 > token_budget else 1.5
    lower = min(int(longest / ratio), max(token_budget // 8, 1))
    while lower >= 8 and len(edges) < 8:
        edges.append(lower)
        lower = int(lower / ratio)
    kept: list[int] = []
    below = 0
    for edge in reversed(edges):
        tokens = int(lengths[(lengths > below) & (lengths <= edge)].sum())
        if tokens >= FEWEST_JOBS_OF_A_BUCKET * token_budget or edge == longest:
            kept.append(edge)
            below = edge
    return tuple(kept)


def choose_anchors_per_item(lengths: Ints, anchors: Ints, token_budget: int) -> int:
    """Anchors of an item such that anchors and tokens fill together: the data's ratio, and room for the richest row."""
    used = anchors > 0
    tokens = int(lengths[used].sum())
    if tokens == 0:
        return 1
    ratio = int(anchors[used].sum()) / tokens
    return max(int(np.ceil(token_budget * ratio * 1.01)), int(anchors.max()))


def plan_epoch(lengths: Ints, anchors: Ints, params: PlanParams, epoch: int) -> EpochPlan:
    """Plan one epoch.

    Args:
        lengths, anchors: [n] tokens and anchors of each row; rows with 0 anchors are left out and counted.
    Raises DataError for a row above a budget, naming both numbers.
    """
    p = params
    anchor_budget = min(p.anchors_per_item, p.slots_per_item // p.scored_slots)
    _check_rows(lengths, anchors, p, anchor_budget)
    edges = np.asarray(p.bucket_edges)
    random = CounterRandom(p.seed, epoch)
    stream = random.permutation(2**40, len(lengths)).astype(np.int32)
    stream = stream[anchors[stream] > 0]
    bucket_of = np.searchsorted(edges, lengths[stream]).astype(np.uint8)
    job_of = np.empty(len(stream), dtype=np.int32)
    moment: list[Ints] = []
    buckets: list[Ints] = []
    jobs = 0
    for bucket in range(len(edges)):
        at = np.flatnonzero(bucket_of == bucket)
        if len(at) == 0:
            continue
        rows = stream[at]
        found = pack(lengths[rows].astype(np.int64), anchors[rows].astype(np.int64), p.token_budget, anchor_budget)
        count = int(found.max()) + 1
        job_of[at] = jobs + found
        # Job i is emitted when the stream has brought as many rows of the bucket as jobs 0..i hold.
        moment.append(at[np.cumsum(np.bincount(found, minlength=count)) - 1])
        buckets.append(np.full(count, bucket, dtype=np.uint8))
        jobs += count
    if jobs == 0:
        raise DataError(f"none of {len(lengths)} rows has an anchor (two supervised tokens in a row): nothing to plan")
    when, kind = np.concatenate(moment), np.concatenate(buckets)
    if p.order == "filled":
        ranking = np.argsort(when, kind="stable")
    elif p.order == "shuffled":
        ranking = random.permutation(2**40 + 1, jobs)
    else:  # sorted: bucket after bucket, as batching by length without thought of mixing does
        ranking = np.lexsort((when, kind))
    new_id = np.empty(jobs, dtype=np.int32)
    new_id[ranking] = np.arange(jobs)
    plan = _assemble(lengths, anchors, p, epoch, stream, new_id[job_of], kind[ranking])
    if p.draw == "planned":
        plan.draw_order = simulate_draws(jobs, p.window, p.min_fill, p.seed, epoch, p.max_age, p.reuse)
    return plan


def _check_rows(lengths: Ints, anchors: Ints, p: PlanParams, anchor_budget: int) -> None:
    used = np.where(anchors > 0, lengths, 0)
    for what, values, limit, fix in (
        ("tokens", used, p.token_budget, "raise plan.token_budget or lower max_length when preparing"),
        ("tokens", used, p.bucket_edges[-1], "raise the last of plan.bucket_edges, or leave them null"),
        (
            "anchors",
            anchors,
            anchor_budget,
            "raise plan.anchors_per_item (and slots_per_item) or lower anchors_per_row",
        ),
    ):
        over = np.flatnonzero(values > limit)
        if len(over):
            worst = int(over[np.argmax(values[over])])
            raise DataError(
                f"{len(over)} rows exceed {limit} {what}, the most is row {worst} with {int(values[worst])}: {fix}"
            )


def _assemble(
    lengths: Ints, anchors: Ints, p: PlanParams, epoch: int, stream: Ints, job: Ints, kind: Ints
) -> EpochPlan:
    """Arrays of the plan, the rows of each job longest first."""
    jobs = len(kind)
    longest = int(lengths.max())
    order = np.argsort(job.astype(np.int64) * (longest + 1) + (longest - lengths[stream]), kind="stable")
    rows = stream[order]
    job = job[order]
    sorted_lengths = lengths[rows].astype(np.int32)
    offsets = np.zeros(jobs + 1, dtype=np.int64)
    np.cumsum(np.bincount(job, minlength=jobs), out=offsets[1:])
    real = np.add.reduceat(sorted_lengths, offsets[:-1]).astype(np.int32)
    starts, padded = _split(sorted_lengths, offsets, real)
    return EpochPlan(
        p,
        epoch,
        {
            "rows": rows.astype(np.int32),
            "lengths": sorted_lengths,
            "starts": starts,
            "offsets": offsets,
            "buckets": kind.astype(np.uint8),
            "real": real,
            "padded": padded,
            "anchors": np.add.reduceat(anchors[rows], offsets[:-1]).astype(np.int32),
            "nbytes": np.full(jobs, p.item_bytes, dtype=np.int64),
        },
        left_out=len(lengths) - len(rows),
    )


def _split(lengths: Ints, offsets: Ints, real: Ints) -> tuple[Ints, Ints]:
    """Cut each job into as few sub-batches of like lengths as keep its padding under MOST_PADDING.

    Args:
        lengths: [n], longest first inside a job; offsets: [J + 1]; real: [J].
    Returns: starts bool[n], padded tokens int32[J].
    """
    counts = np.diff(offsets)
    starts = np.zeros(len(lengths), dtype=np.bool_)
    padded = np.zeros(len(real), dtype=np.int32)
    todo = np.argsort(-counts, kind="stable")
    for tolerance in SPLIT_STEPS:
        sizes = counts[todo]
        head = np.zeros(len(todo), dtype=np.int32)
        total = np.zeros(len(todo), dtype=np.int32)
        for place in range(int(sizes[0]) if len(todo) else 0):
            active = int(np.searchsorted(-sizes, -place))  # jobs with more than `place` rows come first
            at = offsets[todo[:active]] + place
            length = lengths[at]
            opens = length < head[:active] * (1 - tolerance) if place else np.ones(active, dtype=np.bool_)
            starts[at] = opens
            head[:active] = np.where(opens, length, head[:active])
            total[:active] += head[:active]
        padded[todo] = total
        todo = todo[total - real[todo] > MOST_PADDING * total]
    return starts, padded
