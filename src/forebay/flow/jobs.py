"""The jobs of an epoch as arrays, what they were planned with, and their file.

Guarantees: a stored plan is whole or absent, and one that was cut, edited, or made for other data or parameters is
refused, saying which. Made by `plan.plan_epoch`; read by the coordinator, the prefetch stage and `forebay plan`.
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
from forebay.flow.uses import windows_of

Ints = npt.NDArray[Any]

MAGIC = "forebay-plan-1"


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
    reuse: int = 1
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
    buckets uint8[J]; real, padded, anchors int32[J]; nbytes int64[J]; draw_order (`draw: planned`, else None): int32[D]
    of `simulate_draws`; left_out: rows without an anchor.
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
        if self.draw_order is not None:
            return -(-len(self.draw_order) // self.params.window)
        return windows_of(len(self), self.params.reuse, self.params.window)

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
        """The planned order of draws (whole windows), or the order of the jobs where draws are live."""
        if self.draw_order is None:
            return np.arange(len(self))
        return mixing.whole_windows(self.draw_order, self.params.window)

    def describe(self) -> dict[str, Any]:
        """The figures of `forebay plan --json`."""
        p, jobs = self.params, max(len(self), 1)
        counts = np.bincount(self.buckets, minlength=len(p.bucket_edges))
        room = max(p.min_fill, p.window)
        largest = int(self.nbytes.max(initial=0))
        return {
            "epoch": self.epoch,
            "jobs": len(self),
            "reuse": p.reuse,
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
