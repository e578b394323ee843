"""An item: a job's packed tokens and hidden states, in a slot of a preallocated pool.

Guarantees: the pool never holds more slots than the byte budget has room for, every slot has the one fixed shape, a
slot is given back exactly once. Called by the target workers (acquire) and the drafter workers (release).

Shapes: T `token_budget`, F = captured layers x hidden, H hidden.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from forebay.data.pack import HostBatch
from forebay.flow.coordinator import Window


@dataclass(slots=True)
class Slot:
    """The memory of one item."""

    features: torch.Tensor  # [T, F]
    last_hidden: torch.Tensor | None  # [T, H], before the target's final norm; only for losses that need it
    read: Any = None  # event after the last copies out of it that a GPU was told to make

    def read_on(self, device: torch.device) -> None:
        """The copies out of this slot that `device` was told to make so far must end before it is written again."""
        if device.type == "cuda":
            self.read = torch.cuda.current_stream(device).record_event()

    def wait_until_read(self) -> None:
        """Before writing: wait for those copies."""
        if self.read is not None:
            self.read.synchronize()
            self.read = None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.features, self.last_hidden) if t is not None)


def beside(device: torch.device) -> Any:
    """A stream of a GPU for a worker of its own, which sees all that was told to the GPU before; None elsewhere."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


@dataclass(slots=True)
class Item:
    """What waits in the buffer and what a drafter trains on."""

    batch: HostBatch
    slot: Slot
    last: bool = True  # whether its memory is free after this use

    def of(self, window: Window) -> Item:
        """The item as this window uses it: the same memory, anchors of the use."""
        job = self.batch.job.id
        return Item(self.batch.use(window.uses[job]), self.slot, job in window.last)

    @property
    def nbytes(self) -> int:
        return self.slot.nbytes + self.batch.nbytes


class SlotPool:
    """Slots of one shape, allocated when first needed, at most `capacity` of them, reused for ever."""

    def __init__(
        self,
        capacity: int,
        tokens: int,
        features: int,
        hidden: int | None,
        dtype: torch.dtype,
        pinned: bool = False,
    ) -> None:
        """`hidden`: width of the last hidden state, or None where no loss needs it. `pinned`: for copies to a GPU."""
        self._capacity = capacity
        self._shape = (tokens, features, hidden)
        self._dtype, self._pinned = dtype, pinned
        self._free: list[Slot] = []
        self._made = 0
        self._lock = threading.Lock()

    def acquire(self) -> Slot:
        """A slot of zeros or of old values. Its room was leased, so there is always one."""
        with self._lock:
            slot = self._free.pop() if self._free else None
            if slot is None:
                assert self._made < self._capacity, f"more than {self._capacity} slots in use: a lease took no room"
                self._made += 1
        if slot is not None:
            slot.wait_until_read()
            return slot
        tokens, features, hidden = self._shape

        def new(width: int) -> torch.Tensor:
            return torch.zeros(tokens, width, dtype=self._dtype, pin_memory=self._pinned)

        return Slot(new(features), None if hidden is None else new(hidden))

    def release(self, slot: Slot) -> None:
        with self._lock:
            self._free.append(slot)

    @property
    def made(self) -> int:
        return self._made

    @property
    def free(self) -> int:
        """Slots that nobody uses. Equal to `made` when a run has ended."""
        return len(self._free)
