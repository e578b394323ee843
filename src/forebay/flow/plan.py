"""The epoch plan: lengths, anchors, parameters, epoch -> ordered jobs, stored on disk before the epoch starts.

Guarantees: every row with an anchor is in exactly one job; a job holds rows of one bucket and exceeds none of the three
budgets (tokens, anchors, slots), so that nothing is ever cut; the plan is a function of (lengths, anchors, parameters,
epoch) alone; a stored plan is complete or refused, and refused too where data or parameters differ.
Does not guarantee that a bucket's last job is full. Called by `api.plan`, the local runtime and the simulator.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.errors import ContractError, DataError
from forebay.flow import mixing
from forebay.flow.packing import pack
from forebay.flow.queues import simulate_draws
from forebay.flow.random import CounterRandom

Ints = npt.NDArray[Any]

MAGIC = "forebay-plan-1"
#: A sub-batch may hold rows this much shorter than its longest: the largest share that keeps a job's padding low wins.
SPLIT_STEPS = (0.6, 0.45, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.0)
MOST_PADDING = 0.04
FEWEST_JOBS_OF_A_BUCKET = 12


@dataclass(frozen=True, slots=True)
class PlanParams:
    """All that a plan depends on besides the lengths and the epoch."""

    token_budget: int
    anchors_per_item: int
    slots_per_item: int
    scored_slots: int
    bucket_edges: tuple[int, ...]
    order: str = "filled"
    draw: str = "live"
    window: int = 8
    min_fill: int = 10
    max_age: int | None = None
    item_bytes: int = 1
    seed: int = 0
    data_fingerprint: str = ""

    def as_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["bucket_edges"] = list(self.bucket_edges)
        return values

    def differences(self, other: PlanParams) -> list[str]:
        """One line per field that differs."""
        mine, yours = self.as_dict(), other.as_dict()
        return [f"{name}: {mine[name]} here, {yours[name]} there" for name in mine if mine[name] != yours[name]]


@dataclass(frozen=True, slots=True)
class Job:
    """One target batch. `rows` are row numbers of the token store, longest first."""

    epoch: int
    id: int
    bucket: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    splits: tuple[int, ...]
    real_tokens: int
    padded_tokens: int
    anchors: int
    nbytes: int


class EpochPlan:
    """The jobs of one epoch as arrays (J jobs, n planned rows).

    Attributes: rows, lengths int32[n] in job order; starts bool[n] (a row opens a sub-batch); offsets int64[J + 1];
    buckets uint8[J]; real, padded, anchors int32[J]; nbytes int64[J]; draw_order int32[J] or None (`draw: planned`);
    left_out: rows without an anchor.
    """

    ARRAYS = ("rows", "lengths", "starts", "offsets", "buckets", "real", "padded", "anchors", "nbytes")

    def __init__(self, params: PlanParams, epoch: int, arrays: dict[str, Ints], left_out: int = 0) -> None:
        self.params = params
        self.epoch = epoch
        self.left_out = left_out
        self.draw_order: Ints | None = arrays.get("draw_order")
        self.rows, self.lengths, self.starts, self.offsets = (arrays[name] for name in self.ARRAYS[:4])
        self.buckets, self.real, self.padded, self.anchors, self.nbytes = (arrays[name] for name in self.ARRAYS[4:])

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def windows(self) -> int:
        """Optimizer steps of the epoch: the last window may be short."""
        return -(-len(self) // self.params.window)

    def job(self, i: int) -> Job:
        lo, hi = int(self.offsets[i]), int(self.offsets[i + 1])
        heads = [*np.flatnonzero(self.starts[lo:hi]).tolist(), hi - lo]
        return Job(
            epoch=self.epoch,
            id=i,
            bucket=int(self.buckets[i]),
            rows=tuple(self.rows[lo:hi].tolist()),
            lengths=tuple(self.lengths[lo:hi].tolist()),
            splits=tuple(b - a for a, b in pairwise(heads)),
            real_tokens=int(self.real[i]),
            padded_tokens=int(self.padded[i]),
            anchors=int(self.anchors[i]),
            nbytes=int(self.nbytes[i]),
        )

    def drawn_order(self) -> Ints:
        """The planned order of draws, or the order of the jobs where draws are live."""
        return np.arange(len(self)) if self.draw_order is None else self.draw_order

    def describe(self) -> dict[str, Any]:
        """The figures of `forebay plan --json`."""
        p, jobs = self.params, max(len(self), 1)
        counts = np.bincount(self.buckets, minlength=len(p.bucket_edges))
        room = max(p.min_fill, p.window)
        largest = int(self.nbytes.max(initial=0))
        return {
            "epoch": self.epoch,
            "jobs": len(self),
            "windows": self.windows,
            "sequences": len(self.rows),
            "sequences_left_out": self.left_out,
            "real_tokens": int(self.real.sum()),
            "target_padding_share": 1 - float(self.real.sum()) / max(int(self.padded.sum()), 1),
            "item_tail_share": 1 - float(self.real.sum()) / (jobs * p.token_budget),
            "anchor_fill_share": float(self.anchors.sum()) / (jobs * p.anchors_per_item),
            "slot_fill_share": float(self.anchors.sum()) * p.scored_slots / (jobs * p.slots_per_item),
            "sub_batches": int(self.starts.sum()),
            "mixing_r": mixing.excess_of_order(self.buckets[self.drawn_order()], p.window),
            "buckets": [
                {"up_to_tokens": edge, "jobs": int(c), "share": int(c) / jobs}
                for edge, c in zip(p.bucket_edges, counts.tolist(), strict=True)
            ],
            "token_budget": p.token_budget,
            "anchors_per_item": p.anchors_per_item,
            "slots_per_item": p.slots_per_item,
            "largest_item_bytes": largest,
            "buffer_bytes_needed": (room + 1) * largest,
            "states_of_an_epoch_bytes": int(self.nbytes.sum()),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a temporary name, flush, rename: the file is whole or absent."""
        file = Path(path)
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in self.ARRAYS}
        if self.draw_order is not None:
            arrays["draw_order"] = np.ascontiguousarray(self.draw_order)
        digest = hashlib.sha256()
        for array in arrays.values():
            digest.update(array.data)
        header = {
            "format": MAGIC,
            "epoch": self.epoch,
            "left_out": self.left_out,
            "params": self.params.as_dict(),
            "arrays": [[name, array.dtype.str, len(array)] for name, array in arrays.items()],
        }
        text = json.dumps(header, sort_keys=True)
        digest.update(text.encode())
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as out:
                out.write(f"{text}\n{digest.hexdigest()}\n".encode())
                for array in arrays.values():
                    out.write(array.data)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], expect: PlanParams | None = None) -> EpochPlan:
        """Read a stored plan. Raises DataError (missing, cut, edited) and ContractError (other data or parameters)."""
        file = Path(path)
        if not file.is_file():
            raise DataError(f"no plan at {file}: make it with `forebay plan`")
        content = file.read_bytes()
        head, _, rest = content.partition(b"\n")
        stored, _, payload = rest.partition(b"\n")
        try:
            header = json.loads(head)
            if header["format"] != MAGIC:
                raise ValueError
            params = PlanParams(**{**header["params"], "bucket_edges": tuple(header["params"]["bucket_edges"])})
            shapes = [(str(name), np.dtype(kind), int(count)) for name, kind, count in header["arrays"]]
        except (ValueError, KeyError, TypeError, UnicodeDecodeError):
            raise DataError(f"{file} is not a {MAGIC} file: delete it and plan again") from None
        size = sum(kind.itemsize * count for _, kind, count in shapes)
        if size != len(payload):
            raise DataError(f"{file} was cut: {len(payload)} bytes of {size}: delete it and plan again")
        digest = hashlib.sha256(payload)
        digest.update(head)
        if digest.hexdigest() != stored.decode(errors="replace"):
            raise DataError(f"{file} was edited or damaged (its checksum differs): delete it and plan again")
        if expect is not None and (lines := expect.differences(params)):
            raise ContractError(f"{file} was made for another run:\n  " + "\n  ".join(lines))
        arrays, at = {}, 0
        for name, kind, count in shapes:
            arrays[name] = np.frombuffer(payload, dtype=kind, count=count, offset=at)
            at += kind.itemsize * count
        return cls(params, int(header["epoch"]), arrays, int(header["left_out"]))


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
        plan.draw_order = simulate_draws(jobs, p.window, p.min_fill, p.seed, epoch, p.max_age)
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
