"""DFlash attention over one packed item: each block of slots sees its document before its anchor, and itself.

Guarantees: `attend` equals `attend_dense` (the definition, kept for tests) to rounding, while no mask over all queries
and all keys ever exists: anchors are taken in sorted chunks and the context is sliced to what a chunk can see.
The visibility rule lives in `visible`, once. What a chunk sees is worked out on the host from numpy arrays
(`block_view`), so the forward pass never asks a device for a number. Called by `models.drafter`.

Legend: T context tokens, A anchors, B slots of a block, N query heads, G key-value heads, D head width.
Keys are context first, then blocks: row T + a * B + j is slot j of block a.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.models.spec import DrafterSpec

#: Most anchors of a chunk, and what one more chunk costs in query-key pairs (its Python and kernel overhead).
MAX_CHUNK_ANCHORS = 16
CHUNK_OVERHEAD_PAIRS = 20_000


@dataclass(frozen=True)
class Chunk:
    """Anchors `first:last`, which together see context rows `lo:hi`; `mask` is what each may add to its scores."""

    first: int
    last: int
    lo: int
    hi: int
    mask: Tensor  # [last-first x B, hi-lo + last-first x B], 0 or -inf


@dataclass(frozen=True)
class BlockView:
    """What the blocks of one item see, in every layer: one list of chunks per kind of layer."""

    context: int  # T
    anchors: int  # A
    block: int  # B
    layers: tuple[tuple[Chunk, ...], ...]


def visible(
    anchors: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], spec: DrafterSpec, layer: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The rule. First context row each slot sees [A, B], and which slots of its own block it sees [B, B].

    A slot sees context rows first..anchor - 1. Anchors and starts are packed rows; inside a document rows and positions
    differ by a constant, so a window counts rows.
    """
    slots = np.arange(spec.block_size)
    first = np.broadcast_to(starts[:, None], (len(anchors), spec.block_size))
    if spec.is_sliding(layer):
        window = spec.sliding_window or 0
        reach = slots - window + 1 if spec.window_from == "query" else np.full(spec.block_size, -window)
        first = np.maximum(first, anchors[:, None] + reach)
    own = np.ones((spec.block_size, spec.block_size), bool)
    return first, np.tril(own) if spec.is_causal(layer) else own


def block_view(
    anchors: np.ndarray[Any, Any],
    starts: np.ndarray[Any, Any],
    context: int,
    spec: DrafterSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> BlockView:
    """Plan the attention of one item. `anchors` [A] rise; `starts` [A] are their documents' first rows.

    A padding anchor has start = anchor and sees no context.
    """
    plans: dict[tuple[bool, bool], tuple[Chunk, ...]] = {}
    for layer in range(spec.layers):
        kind = (spec.is_sliding(layer), spec.is_causal(layer))
        if kind not in plans:
            first, own = visible(anchors, starts, spec, layer)
            plans[kind] = tuple(
                _chunk(a, b, anchors, first, own, dtype, device) for a, b in _chunk_bounds(anchors, first[:, 0])
            )
    kinds = [(spec.is_sliding(i), spec.is_causal(i)) for i in range(spec.layers)]
    return BlockView(context, len(anchors), spec.block_size, tuple(plans[k] for k in kinds))


def _chunk_bounds(anchors: np.ndarray[Any, Any], first: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Cut the sorted anchors where one more chunk is cheaper than a wider context slice for all of the chunk."""
    lows, highs = first.tolist(), anchors.tolist()
    bounds: list[tuple[int, int]] = []
    begin = 0
    for i in range(1, len(highs) + 1):
        if i < len(highs) and i - begin < MAX_CHUNK_ANCHORS:
            low, high = min(lows[begin:i]), max(highs[begin:i])
            joined = max(high, highs[i]) - min(low, lows[i])
            grown = (i - begin) * (joined - (high - low)) + joined - (highs[i] - lows[i])
            if grown * 16 <= CHUNK_OVERHEAD_PAIRS:
                continue
        bounds.append((begin, i))
        begin = i
    return bounds if highs else []


def _chunk(
    a: int,
    b: int,
    anchors: np.ndarray[Any, Any],
    first: np.ndarray[Any, Any],
    own: np.ndarray[Any, Any],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Chunk:
    lo, hi = int(min(first[a:b].min(), anchors[a:b].min())), int(anchors[a:b].max())
    rows = np.arange(lo, hi)
    context = (rows >= first[a:b].reshape(-1, 1)) & (rows < np.repeat(anchors[a:b], len(own))[:, None])
    sees = np.concatenate([context, np.kron(np.eye(b - a, dtype=bool), own)], axis=1)
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(torch.from_numpy(~sees), float("-inf"))
    return Chunk(a, b, lo, hi, mask.to(device))


def attend(q: Tensor, k: Tensor, v: Tensor, view: BlockView, layer: int) -> Tensor:
    """Attention of every block: q [A*B, N, D], k and v [T + A*B, G, D] -> [A*B, N*D].

    Heads that share keys are laid out as more query rows, so keys are never repeated.
    """
    _, heads, width = q.shape
    groups = k.shape[1]
    shared, block, blocks_at = heads // groups, view.block, view.context
    outs = []
    for c in view.layers[layer]:
        rows = slice(c.first * block, c.last * block)
        own = slice(blocks_at + rows.start, blocks_at + rows.stop)
        n = rows.stop - rows.start
        queries = q[rows].view(n, groups, shared, width).permute(1, 2, 0, 3).reshape(1, groups, shared * n, width)
        keys = torch.cat([k[c.lo : c.hi], k[own]]).transpose(0, 1)[None]
        values = torch.cat([v[c.lo : c.hi], v[own]]).transpose(0, 1)[None]
        mask = c.mask.repeat(shared, 1)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        outs.append(out.view(groups, shared, n, width).permute(2, 0, 1, 3).reshape(n, heads * width))
    return torch.cat(outs)


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, anchors: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], spec: DrafterSpec,
    layer: int,
) -> Tensor:  # fmt: skip
    """The definition, with a full [A*B, T + A*B] mask and a plain softmax: for tests. Same shapes as `attend`."""
    blocks, size = len(anchors), spec.block_size
    context = k.shape[0] - blocks * size
    first, own = visible(anchors, starts, spec, layer)
    sees = np.zeros((blocks * size, k.shape[0]), bool)
    for a in range(blocks):
        for j in range(size):
            sees[a * size + j, first[a, j] : anchors[a]] = True
            sees[a * size + j, context + a * size : context + (a + 1) * size] = own[j]
    share = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(share, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[2] ** 0.5
    scores = scores.masked_fill(~torch.from_numpy(sees).to(q.device), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
