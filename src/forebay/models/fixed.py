"""DFlash attention of one fixed shape: what blocks see is data in buffers, so one graph serves every item.

Guarantees: `FixedView.attend` equals `attention.attend` to rounding for any item of its shape; the rule itself stays in
`attention.visible`. On CUDA it is FlexAttention (`models.flex`) over index buffers that are filled on the host, outside
the graph. Elsewhere SDPA runs over chunks of queries with all of the context: slower than the sliced chunks of
`attention`, so on a CPU compile to test, not for speed. Called by `models.graph`.

Legend: T context tokens, A anchors, B slots of a block, N query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from forebay.models.attention import KeysValues, visible
from forebay.models.flex import TILE, tiles
from forebay.models.spec import DrafterSpec

CHUNK = 512  # queries of one SDPA call
SMALLEST_HEAD = 16  # the narrowest that FlexAttention takes on CUDA

Array = np.ndarray[Any, Any]


def kinds_of(spec: DrafterSpec) -> list[int]:
    """One layer for each way of seeing (sliding or not, causal or not), in order of appearance."""
    kinds: dict[tuple[bool, bool], int] = {}
    for layer in range(spec.layers):
        kinds.setdefault((spec.is_sliding(layer), spec.is_causal(layer)), layer)
    return list(kinds.values())


def kind_of(spec: DrafterSpec, layer: int) -> int:
    """Index in `kinds_of` of the way in which `layer` sees."""
    ways = [(spec.is_sliding(i), spec.is_causal(i)) for i in kinds_of(spec)]
    return ways.index((spec.is_sliding(layer), spec.is_causal(layer)))


def first_rows(anchors: Array, starts: Array, spec: DrafterSpec) -> Array:
    """First context row that each slot sees, by kind: int64 [kinds, A, B]."""
    return np.stack([visible(anchors, starts, spec, layer)[0] for layer in kinds_of(spec)]).astype(np.int64)


@dataclass(frozen=True)
class FixedView:
    """What the blocks of an item see, in buffers that are filled anew for each item."""

    spec: DrafterSpec
    anchors: Tensor  # [A] packed rows
    first: Tensor  # [kinds, A, B]
    masks: tuple[BlockMask, ...] = ()  # by kind, where FlexAttention runs

    def attend(self, q: Tensor, context: KeysValues, own: KeysValues, layer: int) -> Tensor:
        """q [A*B, N, D], context keys, values [T, G, D], own ones [A*B, G, D] -> [A*B, N*D]."""
        kind = kind_of(self.spec, layer)
        if not self.masks:
            return self._chunked(q, context, own, kind, self.spec.is_causal(layer))
        keys, values = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(context, own, strict=True))
        out = flex_attention(q.transpose(0, 1)[None], keys, values, block_mask=self.masks[kind], enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    def _chunked(self, q: Tensor, context: KeysValues, own: KeysValues, kind: int, causal: bool) -> Tensor:
        block, parts = self.spec.block_size, []
        size = max(1, CHUNK // block)
        for a in range(0, len(self.anchors), size):
            anchors, first = self.anchors[a : a + size], self.first[kind, a : a + size]
            slots = slice(a * block, (a + len(anchors)) * block)
            sees = _sees(anchors, first, len(context[0]), causal)
            mask = torch.zeros_like(sees, dtype=q.dtype).masked_fill(~sees, float("-inf"))
            keys, values = (
                torch.cat([seen, mine[slots]]).transpose(0, 1)[None] for seen, mine in zip(context, own, strict=True)
            )
            queries = q[slots].transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts).flatten(1)


def _sees(anchors: Tensor, first: Tensor, tokens: int, causal: bool) -> Tensor:
    """Which of T context rows and n*B own slots each slot sees: anchors [n], first [n, B] -> bool [n*B, T + n*B]."""
    count, block = first.shape
    rows = torch.arange(tokens, device=first.device)
    slot = torch.arange(count * block, device=first.device)
    context = (rows >= first.reshape(-1, 1)) & (rows < anchors.repeat_interleave(block, output_size=len(slot))[:, None])
    own = slot[:, None] // block == slot // block
    return torch.cat([context, own & (slot <= slot[:, None]) if causal else own], dim=1)


def mask_rule(anchors: Tensor, first: Tensor, tokens: int, causal: bool) -> Callable[..., Tensor]:
    """The same rule for FlexAttention: anchors [A], first [A, B]; keys are T context rows, then own slots."""
    block = first.shape[1]

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor, slot = query // block, key - tokens
        context = (key < tokens) & (key >= first[anchor, query % block]) & (key < anchors[anchor])
        own = (slot >= 0) & (slot // block == anchor)
        return context | (own & (slot <= query) if causal else own)

    return sees


def tile_arrays(anchors: Array, first: Array, tokens: int) -> dict[str, Array]:
    """`BlockMask`'s index tensors of one kind, int32 [1, 1, ...]: anchors [A], first [A, B]."""
    block, out = first.shape[1], {}
    part, whole = tiles(first.ravel(), np.repeat(anchors, block), tokens, block)
    for name, seen in (("kv", part), ("full_kv", whole), ("q", part.T), ("full_q", whole.T)):
        columns = np.argsort(~seen, axis=1, kind="stable").astype(np.int32)  # those that are read come first
        out[f"{name}_num_blocks"] = seen.sum(1, dtype=np.int32)[None, None]
        out[f"{name}_indices"] = np.ascontiguousarray(columns)[None, None]
    return out


def block_mask(arrays: dict[str, Tensor], anchors: Tensor, first: Tensor, tokens: int, causal: bool) -> BlockMask:
    """The mask of one kind over the buffers that `tile_arrays` fills: anchors [A], first [A, B]."""
    rule, queries = mask_rule(anchors, first, tokens, causal), first.numel()
    return BlockMask((queries, tokens + queries), **arrays, BLOCK_SIZE=(TILE, TILE), mask_mod=rule)
