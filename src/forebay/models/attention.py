"""DFlash attention over one packed item: each block of slots sees its document before its anchor, and itself.

Guarantees: `attend` equals `attend_dense` (the definition, kept for tests) to rounding, while no mask over all queries
and all keys ever exists: anchors are taken in sorted chunks and the context is sliced to what a chunk can see.
The visibility rule lives in `visible`, once. What a chunk sees is worked out on the host from numpy arrays
(`block_view`), so the forward pass never asks a device for a number. Called by `models.drafter`.

Legend: T context tokens, A anchors, B slots of a block, N query heads, G key-value heads, D head width.
Row a * B + j of a block's tensors is slot j of block a.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.models import flex
from forebay.models.spec import DrafterSpec

#: Most queries of a chunk (its blocks do not see one another, yet share a score matrix), and what one more chunk costs
#: in query-key pairs (its Python and kernel overhead).
MAX_CHUNK_QUERIES = 96
CHUNK_OVERHEAD_PAIRS = 20_000
KEY_MULTIPLE = 64


KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Anchors `first:last`, which together see context rows `lo:hi`; `mask` is what each may add to its scores."""

    first: int
    last: int
    lo: int
    hi: int
    mask: Tensor  # [last-first x B, hi-lo + last-first x B], 0 or -inf

    def slots(self, block: int) -> slice:
        return slice(self.first * block, self.last * block)


@dataclass(frozen=True)
class BlockView:
    """What the blocks of one item see, in every layer: one list of chunks per kind of layer."""

    block: int  # B
    layers: tuple[tuple[Chunk, ...], ...] = ()
    flex: tuple[Any, ...] = ()  # or one FlexAttention mask per layer


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
    spec: DrafterSpec,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    flex_context: int | None = None,
) -> BlockView:
    """Plan the attention of one item. `anchors` [A] rise; `starts` [A] are their documents' first rows.

    A padding anchor has start = anchor and sees no context. `flex_context`: rows of the context, to plan for
    FlexAttention, which wants one shape for all items.
    """
    plans: dict[tuple[bool, bool], Any] = {}
    for layer in range(spec.layers):
        kind = (spec.is_sliding(layer), spec.is_causal(layer))
        if kind not in plans:
            first, own = visible(anchors, starts, spec, layer)
            if flex_context is not None:
                plans[kind] = flex.block_mask(anchors, first, own, flex_context, spec, device)
                continue
            bounds = _chunk_bounds(anchors, first[:, 0], spec.block_size)
            plans[kind] = tuple(_chunk(a, b, anchors, first, own, dtype, device) for a, b in bounds)
    kinds = [(spec.is_sliding(i), spec.is_causal(i)) for i in range(spec.layers)]
    planned = tuple(plans[k] for k in kinds)
    return BlockView(spec.block_size, planned) if flex_context is None else BlockView(spec.block_size, (), planned)


def _chunk_bounds(anchors: np.ndarray[Any, Any], first: np.ndarray[Any, Any], block: int) -> list[tuple[int, int]]:
    """Cut the sorted anchors where one more chunk is cheaper than a wider context slice for all of the chunk."""
    lows, highs = first.tolist(), anchors.tolist()
    bounds: list[tuple[int, int]] = []
    begin = 0
    for i in range(1, len(highs) + 1):
        if i < len(highs) and (i + 1 - begin) * block <= MAX_CHUNK_QUERIES:
            low, high = min(lows[begin:i]), max(highs[begin:i])
            joined = max(high, highs[i]) - min(low, lows[i])
            grown = (i - begin) * (joined - (high - low)) + joined - (highs[i] - lows[i])
            if grown * block <= CHUNK_OVERHEAD_PAIRS:
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
    # A few more masked rows, so that chunks come in few shapes: kernels are made once for each.
    lo = max(0, lo - -(hi - lo + (b - a) * len(own)) % KEY_MULTIPLE)
    rows = np.arange(lo, hi)
    context = (rows >= first[a:b].reshape(-1, 1)) & (rows < np.repeat(anchors[a:b], len(own))[:, None])
    sees = np.concatenate([context, np.kron(np.eye(b - a, dtype=bool), own)], axis=1)
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(torch.from_numpy(~sees), float("-inf"))
    return Chunk(a, b, lo, hi, mask.to(device))


def attend(q: Tensor, context: KeysValues, own: KeysValues, view: BlockView | Any, layer: int) -> Tensor:
    """Attention of every block: q [A*B, N, D], context keys, values [T, G, D], own ones [A*B, G, D] -> [A*B, N*D]."""
    if not isinstance(view, BlockView):  # of fixed shape: models.fixed
        return view.attend(q, context, own, layer)
    if view.flex:
        keys, values = (torch.cat(x) for x in zip(context, own, strict=True))
        return flex.attend_flex(q, keys, values, view.flex[layer])
    chunks = view.layers[layer]
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        return _CpuAttention.apply(q, *context, *own, view.block, chunks)
    parts = []
    for c in chunks:
        queries, keys, values, mask = _gathered(q, context, own, view.block, c)
        parts.append(_rows(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask), q.shape[1]))
    return torch.cat(parts).flatten(1)


class _CpuAttention(torch.autograd.Function):
    """The chunks, one group of heads at a time, as plain products.

    Backward computes the probabilities of a chunk again, so no more than one chunk's are ever held. torch's flash
    kernel for CPUs takes two to four times as long in bf16 (as long in fp32), most with key counts that are not round.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, block: int, chunks: tuple[Chunk, ...]
    ) -> Tensor:
        out = torch.empty_like(q)
        for c, heads, group in _each(chunks, q, k):
            queries, keys, values = _part(q, (ck, cv), (k, v), block, c, heads, group)
            odds = _probabilities(queries, keys, c.mask)
            out[c.slots(block), heads] = _unstacked(odds @ values, c.slots(block))
        ctx.save_for_backward(q, ck, cv, k, v, out)
        ctx.block, ctx.chunks = block, chunks
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        q, ck, cv, k, v, out = ctx.saved_tensors
        block, slope = ctx.block, slope.view(q.shape)
        of_q, of_k, of_v = (torch.empty_like(x) for x in (q, k, v))
        of_ck, of_cv = torch.zeros_like(ck), torch.zeros_like(cv)
        for c, heads, group in _each(ctx.chunks, q, k):
            rows, seen = c.slots(block), c.hi - c.lo
            queries, keys, values = _part(q, (ck, cv), (k, v), block, c, heads, group)
            odds = _probabilities(queries, keys, c.mask)
            of_out = _stacked(slope[rows, heads])
            along = (of_out * _stacked(out[rows, heads])).sum(-1, keepdim=True)
            of_scores = (of_out @ values.T).sub_(along).mul_(odds)
            of_q[rows, heads] = _unstacked(of_scores @ keys, rows).mul_(q.shape[2] ** -0.5)
            by_k = of_scores.T @ queries
            by_v = odds.T @ of_out
            for of_context, of_own, by in ((of_ck, of_k, by_k), (of_cv, of_v, by_v)):
                of_context[c.lo : c.hi, group] += by[:seen]
                of_own[rows, group] = by[seen:]
        return of_q, of_ck, of_cv, of_k, of_v, None, None


def _each(chunks: tuple[Chunk, ...], q: Tensor, k: Tensor) -> Iterator[tuple[Chunk, slice, int]]:
    """Every chunk with every group of query heads that share keys."""
    shared = q.shape[1] // k.shape[1]
    for c in chunks:
        for group in range(k.shape[1]):
            yield c, slice(group * shared, (group + 1) * shared), group


def _part(
    q: Tensor, context: KeysValues, own: KeysValues, block: int, c: Chunk, heads: slice, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled queries [heads * n, D], keys and values [keys, D] of one chunk of n slots and one group."""
    rows = c.slots(block)
    keys, values = (
        torch.cat([seen[c.lo : c.hi, group], mine[rows, group]]) for seen, mine in zip(context, own, strict=True)
    )
    return _stacked(q[rows, heads]) * q.shape[2] ** -0.5, keys, values


def _probabilities(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """[heads * n, keys]"""
    scores = queries @ keys.T
    scores.view(-1, *mask.shape).add_(mask)
    return torch.softmax(scores, -1, out=scores)


def _stacked(x: Tensor) -> Tensor:
    """[n, heads, D] -> [heads * n, D]"""
    return x.transpose(0, 1).flatten(0, 1)


def _unstacked(x: Tensor, rows: slice) -> Tensor:
    """[heads * n, D] -> [n, heads, D]"""
    return x.unflatten(0, (-1, rows.stop - rows.start)).transpose(0, 1)


def _gathered(
    q: Tensor, context: KeysValues, own: KeysValues, block: int, c: Chunk
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [1, G, N/G * n, D], keys and values [1, G, keys, D] and mask [N/G * n, keys] of one chunk of n slots."""
    rows, groups = c.slots(block), own[0].shape[1]
    keys, values = (
        torch.cat([seen[c.lo : c.hi], mine[rows]]).transpose(0, 1)[None]
        for seen, mine in zip(context, own, strict=True)
    )
    return _grouped(q[rows], groups), keys, values, c.mask.repeat(q.shape[1] // groups, 1)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[n, N, D] as [1, G, N/G * n, D]: heads that share keys become more rows, so keys are never repeated."""
    return x.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)[None]


def _rows(x: Tensor, heads: int) -> Tensor:
    """[1, G, N/G * n, D] back to [n, N, D]."""
    return x[0].unflatten(1, (heads // x.shape[1], -1)).permute(2, 0, 1, 3).flatten(1, 2)


def attend_dense(
    q: Tensor,
    context: KeysValues,
    own: KeysValues,
    anchors: np.ndarray[Any, Any],
    starts: np.ndarray[Any, Any],
    spec: DrafterSpec,
    layer: int,
) -> Tensor:
    """The definition, with a full [A*B, T + A*B] mask and a plain softmax: for tests. Same shapes as `attend`."""
    blocks, size, seen = len(anchors), spec.block_size, len(context[0])
    first, inside = visible(anchors, starts, spec, layer)
    sees = np.zeros((blocks * size, seen + blocks * size), bool)
    for a in range(blocks):
        for j in range(size):
            sees[a * size + j, first[a, j] : anchors[a]] = True
            sees[a * size + j, seen + a * size : seen + (a + 1) * size] = inside[j]
    share = q.shape[1] // own[0].shape[1]
    keys, values = (torch.cat(x).repeat_interleave(share, dim=1) for x in zip(context, own, strict=True))
    scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[2] ** 0.5
    scores = scores.masked_fill(~torch.from_numpy(sees).to(q.device), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
