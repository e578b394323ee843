"""The drafter worker: draw a window -> forward and backward per item -> one step -> commit.

Guarantees: the gradient of a step is that of one big batch of the window's items, however they are dealt to replicas
(G6): every item's loss is divided by the window's weight sum, known before the first backward; replicas accumulate
without talking and their gradients are summed once, in replica order. A step whose gradient is not finite is not
taken (the device itself leaves the weights alone) and its window is skipped. An item's room is freed after its own
micro-step. Of a step one thing reaches the host, once: whether it was finite. The ledger commits no window that is not
in the weights, so that cannot be put off; the loss and the norm wait on the device until they are asked for. Called by
`runtime.training`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from forebay.config import LossConfig, OptimConfig
from forebay.errors import ForebayError
from forebay.models.drafter import Drafter
from forebay.models.graph import FixedStep
from forebay.models.loss import BlockSums
from forebay.models.step import Borrowed, micro_step
from forebay.observe.clock import WorkerClock
from forebay.stages.flow import DrafterFlow
from forebay.stages.item import Item


def learning_rate(step: int, total: int, optim: OptimConfig) -> float:
    """Rate of optimizer step `step` (0-based) of `total`: linear warm-up, then cosine, at its minimum on the last step.

    Source: DFlash (arXiv 2602.06036): cosine with 4 % warm-up.
    """
    warmup = round(optim.warmup_share * total)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    low = optim.lr * optim.min_lr_share
    return low + (optim.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))


class Replica(Protocol):
    """One drafter on one device."""

    module: torch.nn.Module

    def micro_step(self, item: Any, scale: float) -> BlockSums:
        """Forward and backward of one item, its loss sum multiplied by `scale`; returns its sums."""
        ...


class DrafterReplica:
    """A drafter, what it borrows of the target on its device, and the loss."""

    def __init__(self, module: Drafter, borrowed: Borrowed, loss: LossConfig, dtype: torch.dtype) -> None:
        self.module, self.borrowed, self._loss, self._dtype = module, borrowed, loss, dtype
        self._device = borrowed.embed.device
        self._fixed: FixedStep | None = None

    def compile(self, tokens: int, anchors: int, slots: int) -> str:
        """Take every micro-step from now on over buffers of this shape; says what was made. See `models.graph`."""
        step = FixedStep(
            self.module, self.borrowed, self._loss, self._dtype, tokens=tokens, anchors=anchors, slots=slots
        )
        made = step.build()
        self._fixed = step
        return made

    def micro_step(self, item: Item, scale: float) -> BlockSums:
        slot = item.slot
        if self._fixed is not None:
            sums = self._fixed(item.batch, slot.features, scale, slot.last_hidden)
        else:
            sums = micro_step(
                self.module,
                item.batch,
                slot.features.to(self._device, non_blocking=True),
                self.borrowed,
                self._loss,
                scale,
                last_hidden=None if slot.last_hidden is None else slot.last_hidden.to(self._device, non_blocking=True),
                dtype=self._dtype,
            )
        slot.read_on(self._device)
        return sums


@dataclass
class Outcome:
    """What one window gave. Reading `loss` or `grad_norm` waits for the device."""

    finite: bool
    lr: float
    weight_sum: float
    norm: torch.Tensor  # []
    sums: BlockSums
    tokens: int = 0
    slots: int = 0
    items: tuple[tuple[int, float, torch.Tensor], ...] = ()  # of this process: bucket, weight sum, loss sum []

    @property
    def loss(self) -> float:
        return float(self.sums.loss) / max(self.weight_sum, 1e-30)

    @property
    def grad_norm(self) -> float:
        return float(self.norm)

    @property
    def loss_by_bucket(self) -> dict[int, float]:
        """Mean loss of the items of each bucket."""
        weights: dict[int, float] = {}
        losses: dict[int, float] = {}
        for bucket, weight, loss in self.items:
            weights[bucket] = weights.get(bucket, 0.0) + weight
            losses[bucket] = losses.get(bucket, 0.0) + float(loss)
        return {bucket: losses[bucket] / max(weights[bucket], 1e-30) for bucket in sorted(weights)}


def _moved(sums: BlockSums, device: torch.device) -> BlockSums:
    return BlockSums(*(getattr(sums, f.name).to(device, non_blocking=True) for f in fields(sums)))


class DrafterStep:
    """Turns windows into optimizer steps, over one or several replicas with equal weights."""

    def __init__(self, replicas: Sequence[Replica], optim: OptimConfig, total_steps: int) -> None:
        self.replicas = list(replicas)
        self.optim, self.total_steps = optim, total_steps
        self.taken = 0  # optimizer steps in the weights
        self.bad_in_a_row = 0
        self._items: list[tuple[int, float, torch.Tensor]] = []
        lead = self.replicas[0].module
        self.parameters = [p for p in lead.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
        )
        self._pool = ThreadPoolExecutor(len(self.replicas), "drafter") if len(self.replicas) > 1 else None
        self._compiled = False
        self.clocks: list[WorkerClock] = []  # of the replicas after the first

    def compile(self, tokens: int, anchors: int, slots: int) -> str:
        """Compile each replica's step for items of this one shape. Raises where that is not possible."""
        self._compiled = True
        made = {replica.compile(tokens, anchors, slots) for replica in self.replicas}
        return "; ".join(sorted(made))

    def accumulate(
        self, parts: list[list[Any]], turn: Callable[..., Any], clock: WorkerClock, release: Callable[[Any], None]
    ) -> tuple[float, BlockSums]:
        """Gradients of the whole window on the lead replica; returns (weight sum, sums)."""
        weight_sum = sum(item.batch.weight_sum for part in parts for item in part)
        scale = 1.0 / weight_sum if weight_sum > 0 else 0.0

        def run(replica: Replica, part: list[Any], own: WorkerClock) -> list[BlockSums]:
            sums = []
            while part:
                batch = part[0].batch
                with turn(own), own.busy():
                    sums.append(replica.micro_step(part[0], scale))
                self._items.append((batch.job.bucket, batch.weight_sum, sums[-1].loss))
                release(part.pop(0))
            return sums

        if self._pool is None:
            per_item = run(self.replicas[0], parts[0], clock)
        else:
            clocks = [clock, *(self.clocks or [clock] * (len(parts) - 1))]
            futures = [self._pool.submit(run, *each) for each in zip(self.replicas, parts, clocks, strict=True)]
            device = self.parameters[0].device
            per_item = [_moved(sums, device) for future in futures for sums in future.result()]
            self._sum_gradients()
        return weight_sum, functools.reduce(operator.add, per_item)

    def _sum_gradients(self) -> None:
        others = [[p for p in r.module.parameters() if p.requires_grad] for r in self.replicas[1:]]
        for index, lead in enumerate(self.parameters):
            for replica in others:
                gradient = replica[index].grad
                if gradient is not None:
                    moved = gradient.to(lead.device)
                    lead.grad = moved.clone() if lead.grad is None else lead.grad.add_(moved)

    def step(
        self, parts: list[list[Any]], turn: Callable[..., Any], clock: WorkerClock, release: Callable[[Any], None]
    ) -> Outcome:
        """Train one window. A step with a non-finite gradient is not taken (`finite` False)."""
        tokens = sum(item.batch.job.real_tokens for part in parts for item in part)
        slots = sum(item.batch.n_slots for part in parts for item in part)
        self._items = []
        weight_sum, sums = self.accumulate(parts, turn, clock, release)
        with turn(clock), clock.busy():
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.optim.clip, foreach=True)
            sound = torch.isfinite(norm) & torch.isfinite(sums.loss)
            rate = learning_rate(self.taken, self.total_steps, self.optim)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.found_inf = (~sound).float()  # read by the fused kernel, which then changes nothing
            self.optimizer.step()
            self._broadcast()
            for replica in self.replicas:
                replica.module.zero_grad(set_to_none=not self._compiled)
            finite = bool(sound)
        self.taken += finite
        self.bad_in_a_row = 0 if finite else self.bad_in_a_row + 1
        return Outcome(finite, rate, weight_sum, norm, sums, tokens, slots, tuple(self._items))

    def _broadcast(self) -> None:
        with torch.no_grad():
            for replica in self.replicas[1:]:
                for lead, own in zip(self.replicas[0].module.parameters(), replica.module.parameters(), strict=True):
                    own.copy_(lead)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Optimizer state by parameter name, CPU copies."""
        names = [n for n, p in self.replicas[0].module.named_parameters() if p.requires_grad]
        out = {}
        for name, parameter in zip(names, self.parameters, strict=True):
            state = self.optimizer.state.get(parameter, {})
            for key in ("exp_avg", "exp_avg_sq"):
                if key in state:
                    out[f"{key}.{name}"] = state[key].detach().to("cpu", copy=True)
        return out

    def restore(self, tensors: dict[str, torch.Tensor], taken: int) -> None:
        """Put back what `optimizer_tensors` gave after `taken` steps."""
        self.taken = taken
        names = [n for n, p in self.replicas[0].module.named_parameters() if p.requires_grad]
        for name, parameter in zip(names, self.parameters, strict=True):
            if f"exp_avg.{name}" in tensors:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(taken), device=parameter.device),
                    "exp_avg": tensors[f"exp_avg.{name}"].to(parameter.device, copy=True),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(parameter.device, copy=True),
                }


def train_loop(
    flow: DrafterFlow,
    drafter: DrafterStep,
    turn: Callable[..., Any],
    clock: WorkerClock,
    release: Callable[[Any], None],
    after_step: Callable[[Any, Outcome], None],
) -> None:
    """Until everything is trained or a stop is asked for: draw a window, step, commit (or skip), tell `after_step`."""
    while (drawn := flow.draw(clock)) is not None:
        window, parts = drawn
        # a skipped step's jobs come again, and a short window leaves more of them than was planned
        drafter.total_steps = max(drafter.total_steps, drafter.taken + window.left)
        parts = [[item.of(window) for item in part] for part in parts]
        outcome = drafter.step(parts, turn, clock, release)
        if outcome.finite:
            flow.commit(window)
        else:
            flow.skip(window, f"loss {outcome.loss}, gradient norm {outcome.grad_norm}")
            if drafter.bad_in_a_row >= drafter.optim.max_bad_steps:
                raise ForebayError(
                    f"{drafter.bad_in_a_row} steps in a row were not finite (optim.max_bad_steps "
                    f"{drafter.optim.max_bad_steps}), last at step {window.step}, jobs {sorted(window.jobs)}: "
                    f"lower optim.lr or look at those rows; the last checkpoint is whole"
                )
        after_step(window, outcome)
