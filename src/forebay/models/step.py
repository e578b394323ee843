"""One micro-step: an item's forward, loss and backward, with the gradients added to the drafter's masters.

Guarantees: the gradient added is that of `scale` x the item's weighted loss sum, whatever else is in the window; with
`scale = 1 / window weight sum` the gradients of all micro-steps and replicas add up to the window's (G6). On a CPU the
padding of an item is left out of the arithmetic; on other devices every step has the item's full, fixed shapes.
Called by `stages.train`, the guard and `bench.drafter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forebay.config import LossConfig
from forebay.models.attention import block_view
from forebay.models.drafter import Drafter
from forebay.models.loss import BlockSums, FrozenHead, block_loss

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

    @classmethod
    def of(cls, target: Any, dtype: torch.dtype, kept: Tensor | None = None) -> Borrowed:
        """From a loaded `models.target.Target`. `kept`: token ids of a shortlist or a reduced draft vocabulary."""
        facts = target.facts
        head = FrozenHead.build(
            target.head_weight,
            dtype,
            kept,
            scale=facts.logit_scale,
            softcap=facts.logit_softcap,
            bias=target.head_bias,
            norm=target.final_norm,
        )
        return cls(target.embed_weight.detach(), head, facts.embed_scale)


def slot_states(
    drafter: Drafter, batch: Batch, features: Tensor, borrowed: Borrowed, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The drafter's hidden states of every slot of an item: [anchors, B, H] (real anchors only on a CPU).

    features [T, K*H] of the item's tokens, in any float dtype; computed in `dtype`.
    """
    spec, device = drafter.spec, features.device
    tokens, blocks = int(batch.doc_offsets[-1]), int(batch.n_anchors)
    if device.type != "cpu":
        tokens, blocks = len(batch.tokens), len(batch.anchors)
    anchors = batch.anchors[:blocks].astype(np.int64)
    view = block_view(anchors, batch.anchor_start[:blocks].astype(np.int64), tokens, spec, dtype, device)

    def on_device(values: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device, non_blocking=True)

    embeds = borrowed.embed[on_device(batch.tokens[anchors])].to(dtype)
    mask = borrowed.embed[spec.mask_token_id].to(dtype)
    if borrowed.embed_scale != 1.0:
        embeds, mask = embeds * borrowed.embed_scale, mask * borrowed.embed_scale
    positions = on_device(batch.positions[:tokens])
    starts = on_device(batch.positions[anchors])
    return drafter(features[:tokens].to(dtype), positions, starts, embeds, mask, view)


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
    """
    if batch.n_slots == 0:
        return BlockSums.zeros(drafter.spec.block_size, features.device)
    device = features.device
    slots = int(batch.n_slots) if device.type == "cpu" else len(batch.slot_index)

    def on_device(values: Array, kind: type) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[:slots], dtype=kind)).to(device, non_blocking=True)

    last = None if last_hidden is None else last_hidden.index_select(0, on_device(batch.slot_source, np.int64))
    with torch.set_grad_enabled(backward):
        hidden = slot_states(drafter, batch, features, borrowed, dtype)
        total, sums = block_loss(
            hidden,
            on_device(batch.slot_index, np.int64),
            on_device(batch.slot_label, np.int64),
            on_device(batch.slot_weight, np.float32),
            borrowed.head,
            loss,
            scale,
            last,
            drafter.spec.first_slot,
        )
        if backward:
            total.backward()
    return sums
