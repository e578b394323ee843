"""The drafter's attention through FlexAttention, for devices where its kernel has a backward (CUDA).

Guarantees: the same visibility as `attention.visible`, as a block-sparse mask whose lists of tiles are worked out on
the host in numpy, without a mask of all queries and all keys; one shape per item shape, so one compilation. Not
guaranteed: that the compiled kernel was ever run, it needs a GPU; on a CPU the mask is tested against the definition,
forward only. Off unless `Drafter.flex` is set. Called by `models.attention`.

Keys are context first, then blocks: row T + a * B + j is slot j of block a.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from forebay.models.spec import DrafterSpec

TILE = 128
Array = np.ndarray[Any, Any]


def block_mask(
    anchors: Array, first: Array, own: Array, context: int, spec: DrafterSpec, device: torch.device | str
) -> BlockMask:
    """The mask of one kind of layer. `first` [A, B] and `own` [B, B] come from `attention.visible`."""
    block, queries = spec.block_size, anchors.size * spec.block_size
    lowest, ends = first.ravel(), np.repeat(anchors, block)
    some, whole = tiles(lowest, ends, context, block)
    low, end = (torch.from_numpy(np.ascontiguousarray(x)).to(device, torch.int32) for x in (lowest, ends))
    causal = not own.all()

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        slot = key - context
        mine = (slot >= 0) & (slot // block == query // block)
        if causal:
            mine = mine & (slot <= query)
        return mine | ((key < context) & (key >= low[query]) & (key < end[query]))

    return BlockMask.from_kv_blocks(
        *_lists(some, device),
        *_lists(whole, device),
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(queries, context + queries),
    )


def tiles(lowest: Array, ends: Array, context: int, block: int) -> tuple[Array, Array]:
    """Which TILE x TILE tiles are seen in part, and which wholly: two bool [query tiles, key tiles].

    Tiles that are cut by the end of the context or of the queries count as seen in part.
    """
    queries = len(ends)
    rows, columns = -(-queries // TILE), -(-(context + queries) // TILE)
    some, whole = np.zeros((rows, columns), bool), np.zeros((rows, columns), bool)
    starts = np.arange(columns) * TILE
    for i in range(rows):
        mine = slice(i * TILE, min((i + 1) * TILE, queries))
        seeing = lowest[mine] < ends[mine]
        if seeing.any():
            low, high = lowest[mine][seeing].min(), ends[mine].max()
            some[i] = (starts < min(high, context)) & (starts + TILE > low)
        if seeing.all() and mine.stop - mine.start == TILE:
            whole[i] = (starts >= lowest[mine].max()) & (starts + TILE <= min(ends[mine].min(), context))
        a = context + mine.start // block * block
        b = context + -(-mine.stop // block) * block
        some[i] |= (starts < b) & (starts + TILE > a)
    return some & ~whole, whole


def _lists(marked: Array, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Number of marked columns [1, 1, rows], and their indices first [1, 1, rows, columns]."""
    order = np.argsort(~marked, axis=1, kind="stable")
    counts = marked.sum(1)
    return tuple(torch.from_numpy(x)[None, None].to(device, torch.int32) for x in (counts, order))  # type: ignore[return-value]


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def attend_flex(
    q: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, kernel: Callable[..., Tensor] | None = None
) -> Tensor:
    """q [A*B, N, D], keys and values [T + A*B, G, D] -> [A*B, N*D]."""
    out = (kernel or _kernel())(
        *(x.transpose(0, 1)[None] for x in (q, keys, values)), block_mask=mask, enable_gqa=q.shape[1] != keys.shape[1]
    )
    return out[0].transpose(0, 1).flatten(1)
