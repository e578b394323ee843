"""A target worker's work on a job: rows -> host batch -> states in a slot, checked.

Guarantees: states that are wrong never leave here; a slot whose job failed is given back at once; while an evaluation
has the target, its worker waits. Called by the runtimes, which hand it to the stages' loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from forebay.config import RunConfig
from forebay.data.pack import HostBatch, pack_item
from forebay.flow.plan import EpochPlan
from forebay.models.checks import check_states
from forebay.models.target import Target
from forebay.observe.clock import WorkerClock
from forebay.runtime.faults import Faults
from forebay.runtime.preparation import Preparation
from forebay.runtime.turn import Turn
from forebay.stages.flow import Key
from forebay.stages.item import Item, SlotPool, beside


class Extraction:
    """What the target workers of one process share. `faults` are around their work only where some are planted."""

    def __init__(
        self, config: RunConfig, prepared: Preparation, plans: Sequence[EpochPlan], faults: Faults, pool: SlotPool
    ) -> None:
        self.config, self.prepared, self.plans, self.faults, self.pool = config, prepared, plans, faults, pool

    def prepare(self, key: Key) -> HostBatch:
        """The host batch of a job (epoch, job id)."""
        self.faults.at("prefetch", epoch=key[0], job=key[1])
        config, job = self.config, self.plans[key[0]].job(key[1])
        self.prepared.check_intact(job.rows)
        return pack_item(
            self.prepared.train,
            job,
            self.prepared.shape,
            seed=config.seed,
            anchor_rate=config.plan.anchor_rate,
            anchors_per_row=config.plan.anchors_per_row,
            gamma=config.loss.gamma_for(config.drafter.block_size) if config.loss.decay == "exp" else None,
            uses=config.buffer.reuse,
        )

    def compute(self, target: Target, number: int, in_use: Turn) -> Callable[[HostBatch], Item]:
        """Worker `number`'s host batch -> item. Whoever holds `in_use` has the target to itself."""
        capture = self.faults.capture(target.capture, number) if self.faults else target.capture
        unseen = WorkerClock("target", f"target {number}")  # its wait for an evaluation counts as busy
        side = beside(target.device)
        previous: Any = None

        def compute(batch: HostBatch) -> Item:
            nonlocal previous
            slot = self.pool.acquire()
            try:
                with in_use(unseen), torch.cuda.stream(side):
                    echo = capture(batch, slot.features, slot.last_hidden)
                name = f"epoch {batch.job.epoch} job {batch.job.id}"
                width, layers = target.feature_width, len(target.layer_ids)
                previous = check_states(
                    batch, slot.features, echo, width=width, layers=layers, previous=previous, name=name
                )
            except BaseException:
                self.pool.release(slot)
                raise
            return Item(batch, slot)

        return compute


def slot_pool(config: RunConfig, prepared: Preparation, target: Target, capacity: int) -> SlotPool:
    """Slots for this target's states."""
    last = target.facts.hidden_size if config.loss.needs_last_hidden else None
    pinned = target.device.type == "cuda"
    return SlotPool(capacity, prepared.shape.token_budget, target.feature_width, last, target.dtype, pinned=pinned)
