"""DFlash attention over one packed item: each block of slots sees its document before its anchor, and itself.

Guarantees: `attend` equals `attend_dense` (the definition, kept for tests) to rounding, while no mask over all queries
and all keys ever exists: anchors are taken in sorted chunks and the context is sliced to what a chunk can see.
The visibility rule lives in `visible`, once. What a chunk sees is worked out on the host from numpy arrays
(`block_view`), so the forward pass never asks a device for a number. Called by `models.drafter`.

Legend: T context tokens, A anchors, B slots of a block, N query heads, G key-value heads, R = N / G, D head width; of
one chunk n blocks and m context rows. Row a * B + j of a block's tensors is slot j of block a.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forebay.models import flex
from forebay.models.spec import DrafterSpec

#: Most scores (query heads x queries x keys) of a chunk, so that they stay in a core's cache, and how many scores one
#: more chunk costs (its calls), forward and backward. A GPU wants few launches (estimated, not measured).
MAX_CHUNK_SCORES = 2**18
CHUNK_OVERHEAD_SCORES = 12_000
GPU_MAX_CHUNK_SCORES = 2**25
GPU_CHUNK_OVERHEAD_SCORES = 2**24

#: Context rows of a chunk are rounded up to this; low-precision products are compiled for every new shape.
KEY_MULTIPLE = 16
LOW_PRECISION_KEY_MULTIPLE = 64

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Chunk:
    """Anchors `first:last`, which together see context rows `lo:hi`; every block of them sees all of `lo:cut`."""

    first: int
    last: int
    lo: int
    hi: int
    cut: int
    mask: Tensor  # [n, 1, 1 or B, hi - cut], 0 or -inf: what each slot may add to its scores of rows cut:hi


@dataclass(frozen=True)
class Seen:
    """What blocks see in one kind of layer: chunks of the context, and their own slots."""

    chunks: tuple[Chunk, ...]
    own: Tensor | None  # [B, B], 0 or -inf; None where a block sees all of itself


@dataclass(frozen=True)
class BlockView:
    """What the blocks of one item see, in every layer."""

    block: int  # B
    layers: tuple[Seen, ...] = ()
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
            bounds = _chunk_bounds(
                anchors, first[:, 0], spec.block_size * spec.heads, torch.device(device).type == "cpu"
            )
            chunks = tuple(_chunk(a, b, anchors, first, dtype, device) for a, b in bounds)
            plans[kind] = Seen(chunks, None if own.all() else _added(own, dtype, device))
    kinds = [(spec.is_sliding(i), spec.is_causal(i)) for i in range(spec.layers)]
    planned = tuple(plans[k] for k in kinds)
    return BlockView(spec.block_size, planned) if flex_context is None else BlockView(spec.block_size, (), planned)


def _chunk_bounds(
    anchors: np.ndarray[Any, Any], first: np.ndarray[Any, Any], rows: int, on_cpu: bool
) -> list[tuple[int, int]]:
    """Cut the sorted anchors where one more chunk is cheaper than a wider context slice for all of the chunk.

    rows: queries of a block, of all heads.
    """
    most = MAX_CHUNK_SCORES if on_cpu else GPU_MAX_CHUNK_SCORES
    overhead = CHUNK_OVERHEAD_SCORES if on_cpu else GPU_CHUNK_OVERHEAD_SCORES
    lows, highs = first.tolist(), anchors.tolist()
    begins: list[int] = []
    low = high = 0  # what the chunk so far sees
    for i, (its_low, its_high) in enumerate(zip(lows, highs, strict=True)):
        if begins:
            count = i - begins[-1]
            joined = max(high, its_high) - min(low, its_low)
            grown = count * (joined - (high - low)) + joined - (its_high - its_low)
            if (count + 1) * joined * rows <= most and grown * rows <= overhead:
                low, high = min(low, its_low), max(high, its_high)
                continue
        begins.append(i)
        low, high = its_low, its_high
    return list(itertools.pairwise([*begins, len(highs)]))


def _chunk(
    a: int,
    b: int,
    anchors: np.ndarray[Any, Any],
    first: np.ndarray[Any, Any],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Chunk:
    lo, hi = int(min(first[a:b].min(), anchors[a:b].min())), int(anchors[a:b].max())
    multiple = KEY_MULTIPLE if dtype in (torch.float32, torch.float64) else LOW_PRECISION_KEY_MULTIPLE
    lo = max(0, lo - (lo - hi) % multiple)
    rows, starts = np.arange(lo, hi), first[a:b, :, None]
    starts = starts[:, :1] if (starts == starts[:, :1]).all() else starts
    sees = (rows >= starts) & (rows < anchors[a:b, None, None])
    partly = np.flatnonzero(~sees.all((0, 1)))
    cut = lo + int(partly[0]) if len(partly) else hi
    return Chunk(a, b, lo, hi, cut, _added(sees[:, None, :, cut - lo :], dtype, device))


def _added(sees: np.ndarray[Any, Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """0 where a slot sees, -inf where it does not."""
    hidden = torch.from_numpy(~sees)
    return torch.zeros(sees.shape, dtype=dtype).masked_fill_(hidden, float("-inf")).to(device)


def attend(q: Tensor, context: KeysValues, own: KeysValues, view: BlockView | Any, layer: int) -> Tensor:
    """Attention of every block: q [A*B, N, D], context keys, values [T, G, D], own ones [A*B, G, D] -> [A*B, N*D]."""
    if not isinstance(view, BlockView):  # of fixed shape: models.fixed
        return view.attend(q, context, own, layer)
    if view.flex:
        keys, values = (torch.cat(x) for x in zip(context, own, strict=True))
        return flex.attend_flex(q, keys, values, view.flex[layer])
    return _ChunkedAttention.apply(q, *context, *own, view.block, view.layers[layer])


class _ChunkedAttention(torch.autograd.Function):
    """A block's softmax over its context and itself, joined from two parts; chunks are plain batched products.

    Scores are in base 2, whose power is cheap also far below zero. Backward computes them again from the sums that the
    forward pass kept (as FlashAttention does, arXiv 2205.14135), so no more than one chunk's are ever held.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, block: int, seen: Seen) -> Tensor:
        groups, exact = k.shape[1], torch.promote_types(q.dtype, torch.float32)
        queries = _grouped(q, block, groups).mul_(q.shape[2] ** -0.5 * math.log2(math.e))  # [G, A, R*B, D]
        own_k, own_v = _grouped(k, block, groups), _grouped(v, block, groups)  # [G, A, B, D]
        ck, cv = ck.transpose(0, 1), cv.transpose(0, 1)
        own = _own_scores(queries, own_k, seen, exact)
        top = own.amax(-1, keepdim=True)  # [G, A, R*B, 1], as `total`
        total, out = torch.zeros_like(top), torch.zeros_like(queries)
        for c in seen.chunks:
            if c.lo < c.hi:
                here = slice(c.first, c.last)
                scores = _scores(queries[:, here], ck[:, c.lo : c.hi], c, block, exact)
                torch.maximum(top[:, here], scores.amax(-1, keepdim=True), out=top[:, here])
                scores.sub_(top[:, here]).exp2_()
                total[:, here] = scores.sum(-1, keepdim=True)
                out[:, here] = _by(scores.to(q.dtype), cv[:, c.lo : c.hi])
        own.sub_(top).exp2_()
        total += own.sum(-1, keepdim=True)
        result = _rows(out.add_(own.to(q.dtype) @ own_v).div_(total), block).flatten(1)
        ctx.save_for_backward(queries, ck, cv, own_k, own_v, result, total.log2_().add_(top))
        ctx.block, ctx.seen = block, seen
        return result

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        queries, ck, cv, own_k, own_v, result, log_total = ctx.saved_tensors
        block, seen, width, dtype = ctx.block, ctx.seen, queries.shape[-1], queries.dtype
        along = (slope * result).unflatten(-1, (-1, width)).sum(-1, keepdim=True, dtype=log_total.dtype)
        of_out, along = (_grouped(x, block, len(ck)) for x in (slope.unflatten(-1, (-1, width)), along))
        odds = _own_scores(queries, own_k, seen, log_total.dtype).sub_(log_total).exp2_()
        of_scores = (of_out @ own_v.mT).sub(along).mul_(odds).to(dtype)
        of_q = of_scores @ own_k
        of_k, of_v = of_scores.mT @ queries, odds.to(dtype).mT @ of_out
        of_ck, of_cv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (ck, cv))
        for c in seen.chunks:
            if c.lo < c.hi:
                here, there = slice(c.first, c.last), slice(c.lo, c.hi)
                odds = _scores(queries[:, here], ck[:, there], c, block, along.dtype).sub_(log_total[:, here]).exp2_()
                of_scores = _by(of_out[:, here], cv[:, there].mT).sub(along[:, here]).mul_(odds).to(dtype)
                of_q[:, here] += _by(of_scores, ck[:, there])
                of_ck[:, there] += of_scores.flatten(1, 2).mT @ queries[:, here].flatten(1, 2)
                of_cv[:, there] += odds.to(dtype).flatten(1, 2).mT @ of_out[:, here].flatten(1, 2)
        of_q = _rows(of_q.mul_(width**-0.5), block)
        of_ck, of_k = of_ck.mul_(math.log(2)), of_k.mul_(math.log(2))  # queries carry log2(e)
        return of_q, of_ck.transpose(0, 1), of_cv.transpose(0, 1), _rows(of_k, block), _rows(of_v, block), None, None


def _grouped(x: Tensor, block: int, groups: int) -> Tensor:
    """[A*B, G*R, D] -> [G, A, R*B, D], a copy: heads that share keys become more rows, so keys are not repeated."""
    parts = x.unflatten(0, (-1, block)).unflatten(2, (groups, -1)).permute(2, 0, 3, 1, 4)  # [G, A, R, B, D]
    return parts.clone(memory_format=torch.contiguous_format).flatten(2, 3)


def _rows(x: Tensor, block: int) -> Tensor:
    """[G, A, R*B, D] -> [A*B, G*R, D]"""
    return x.unflatten(2, (-1, block)).permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)


def _by(x: Tensor, y: Tensor) -> Tensor:
    """x [G, n, r, p] @ y [G, p, w] -> [G, n, r, w], as one product per group."""
    return torch.bmm(x.flatten(1, 2), y).unflatten(1, x.shape[1:3])


def _scores(queries: Tensor, keys: Tensor, c: Chunk, block: int, exact: torch.dtype) -> Tensor:
    """[G, n, R*B, m] of the chunk's queries [G, n, R*B, D] and context keys [G, m, D]."""
    scores = _by(queries, keys.mT).to(exact)
    if c.cut < c.hi:
        scores.unflatten(2, (-1, block))[..., c.cut - c.lo :].add_(c.mask)
    return scores


def _own_scores(queries: Tensor, keys: Tensor, seen: Seen, exact: torch.dtype) -> Tensor:
    """[G, A, R*B, B] of every block's queries [G, A, R*B, D] and its own keys [G, A, B, D]."""
    scores = (queries @ keys.mT).to(exact)
    if seen.own is not None:
        scores.unflatten(2, (-1, seen.own.shape[0])).add_(seen.own)
    return scores


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
