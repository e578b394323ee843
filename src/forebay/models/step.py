"""One micro-step: an item's forward, loss and backward, with the gradients added to the drafter's masters.

Guarantees: the gradient added is that of `scale` x the item's weighted loss sum, whatever else is in the window; with
`scale = 1 / window weight sum` the gradients of all micro-steps and replicas add up to the window's (G6). On a CPU most
of an item's padding is left out of the arithmetic; on other devices every step has the item's full, fixed shapes.
Called by `stages.train`, the guard and `bench.drafter`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forebay.config import LossConfig
from forebay.models.attention import KeysValues, block_view
from forebay.models.drafter import Drafter
from forebay.models.loss import BlockSums, FrozenHead, block_loss

#: Queries (anchors x block) that go forward and backward together on a CPU.
CPU_QUERIES = 1024

#: On a CPU an item's tokens, a part's queries and its slots are rounded up to this: the products' library compiles a
#: kernel for every new shape, which costs as much as using it a few times.
CPU_MULTIPLE = 32

Array = np.ndarray[Any, Any]


class Batch(Protocol):
    """The parts of a `data.pack.HostBatch` that a step reads."""

    tokens: Array
    positions: Array
    doc_offsets: Array
    anchors: Array
    anchor_start: Array
    n_anchors: int
    slot_index: Array
    slot_label: Array
    slot_weight: Array
    slot_source: Array
    n_slots: int


@dataclass(frozen=True)
class Borrowed:
    """What the drafter uses of its target and never owns: the embedding and the head."""

    embed: Tensor  # [rows, H]
    head: FrozenHead
    embed_scale: float = 1.0

    def inputs(self, tokens: Tensor, mask_token_id: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What a block's slots start from: its anchor token's embedding [A, H] for `tokens` [A], and the mask's [H]."""
        embeds, mask = self.embed[tokens].to(dtype), self.embed[mask_token_id].to(dtype)
        if self.embed_scale != 1.0:
            embeds, mask = embeds * self.embed_scale, mask * self.embed_scale
        return embeds, mask

    @classmethod
    def of(
        cls, target: Any, dtype: torch.dtype, kept: Tensor | None = None, device: str | torch.device | None = None
    ) -> Borrowed:
        """From a loaded `models.target.Target`, copied where it is on another device than `device`.

        `kept`: token ids of a shortlist or a reduced draft vocabulary.
        """
        facts, device, bias = target.facts, torch.device(device or target.device), target.head_bias
        same = device == target.device
        head = FrozenHead.build(
            target.head_weight.detach().to(device),
            dtype,
            kept,
            scale=facts.logit_scale,
            softcap=facts.logit_softcap,
            bias=None if bias is None else bias.detach().to(device),
            norm=target.final_norm if same else copy.deepcopy(target.final_norm).to(device),
        )
        return cls(target.embed_weight.detach().to(device), head, facts.embed_scale)


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class _Item:
    """An item's arrays on the device of its features, without most of its padding on a CPU."""

    def __init__(self, drafter: Drafter, batch: Batch, features: Tensor, borrowed: Borrowed, dtype: torch.dtype):
        self.drafter, self.batch, self.borrowed = drafter, batch, borrowed
        self.device, self.dtype = features.device, dtype
        self.bare = self.device.type == "cpu"
        self.tokens, self.anchors = len(batch.tokens), len(batch.anchors)
        self.multiple = max(1, CPU_MULTIPLE // drafter.spec.block_size)  # of anchors
        if self.bare:
            self.tokens = min(len(features), _rounded(int(batch.doc_offsets[-1]), CPU_MULTIPLE))
            self.anchors = min(self.anchors, _rounded(int(batch.n_anchors), self.multiple))
        self.features = features[: self.tokens].to(dtype)

    def put(self, values: Array, kind: type = np.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=kind)).to(self.device, non_blocking=True)

    def context(self) -> list[KeysValues]:
        return self.drafter.context(self.features, self.put(self.batch.positions[: self.tokens]))

    def states(self, context: list[KeysValues], part: slice, wanted: Tensor | None = None) -> Tensor:
        """Hidden states of some anchors' blocks: of the slots `wanted` [S, H], or of all [anchors * B, H]."""
        spec, borrowed = self.drafter.spec, self.borrowed
        anchors = self.batch.anchors[part].astype(np.int64)
        starts = self.batch.anchor_start[part].astype(np.int64)
        flex = self.tokens if self.drafter.flex and self.device.type != "cpu" else None
        view = block_view(anchors, starts, spec, self.dtype, self.device, flex)
        tokens = self.put(self.batch.tokens[anchors])
        embeds, mask = borrowed.inputs(tokens, spec.mask_token_id, self.dtype)
        return self.drafter.blocks(context, self.put(self.batch.positions[anchors]), embeds, mask, view, wanted)

    def parts(self) -> list[slice]:
        """Anchors taken at a time: all where shapes are fixed, few enough to bound memory on a CPU."""
        if not self.bare:
            return [slice(0, self.anchors)]
        block = self.drafter.spec.block_size
        count = -(-self.anchors * block // CPU_QUERIES)
        size = _rounded(-(-self.anchors // count), self.multiple)
        return [slice(a, min(a + size, self.anchors)) for a in range(0, self.anchors, size)]

    def slots(self, part: slice) -> tuple[Array, Array, Array, Array]:
        """Index into the part's flattened blocks, label, weight and source of its slots; padding weighs nothing."""
        batch, block = self.batch, self.drafter.spec.block_size
        if not self.bare:
            return batch.slot_index, batch.slot_label, batch.slot_weight, batch.slot_source
        index = batch.slot_index[: batch.n_slots]
        own = np.flatnonzero((index >= part.start * block) & (index < part.stop * block))
        room = (0, _rounded(len(own), CPU_MULTIPLE) - len(own))
        found = batch.slot_label[own], batch.slot_weight[own], batch.slot_source[own]
        label, weight, source = (np.pad(x, room) for x in found)
        return np.pad(index[own] - part.start * block, room), label, weight, source


def slot_states(
    drafter: Drafter, batch: Batch, features: Tensor, borrowed: Borrowed, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The drafter's hidden states of every slot of an item: [anchors, B, H] (real anchors only on a CPU).

    features [T, K*H] of the item's tokens, in any float dtype; computed in `dtype`.
    """
    item = _Item(drafter, batch, features, borrowed, dtype)
    shown = int(batch.n_anchors) if item.bare else item.anchors
    return item.states(item.context(), slice(0, shown)).unflatten(0, (shown, drafter.spec.block_size))


def micro_step(
    drafter: Drafter,
    batch: Batch,
    features: Tensor,
    borrowed: Borrowed,
    loss: LossConfig,
    scale: float | Tensor,
    *,
    last_hidden: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    backward: bool = True,
) -> BlockSums:
    """Forward, loss and (unless `backward` is False) backward of one item. An item without slots adds nothing.

    `scale` is 1 / the window's weight sum. last_hidden [T, H]: the target's last states, before its final norm, for
    losses that need them (`loss.needs_last_hidden`).

    The context's keys and values are computed once; blocks go forward and backward in parts, whose gradients on the
    context are gathered and sent on at the end, so the memory held does not grow with the anchors of an item.
    """
    sums = BlockSums.zeros(drafter.spec.block_size, features.device)
    if batch.n_slots == 0:
        return sums
    item = _Item(drafter, batch, features, borrowed, dtype)
    with torch.set_grad_enabled(backward):
        context = item.context()
        shared = [(k.detach().requires_grad_(backward), v.detach().requires_grad_(backward)) for k, v in context]
        for part in item.parts():
            index, label, weight, source = item.slots(part)
            if not len(index):
                continue
            slots = item.put(index)
            total, more = block_loss(
                item.states(shared, part, slots),
                slots,
                item.put(label),
                item.put(weight, np.float32),
                borrowed.head,
                loss,
                (part.stop - part.start, drafter.spec.block_size, drafter.spec.first_slot),
                scale,
                None if last_hidden is None else last_hidden[item.put(source)],
            )
            sums = sums + more
            if backward:
                total.backward()
        if backward:
            used = [(x, leaf.grad) for pair, leaves in zip(context, shared, strict=True)
                    for x, leaf in zip(pair, leaves, strict=True) if leaf.grad is not None]  # fmt: skip
            torch.autograd.backward([x for x, _ in used], [grad for _, grad in used])
    return sums
