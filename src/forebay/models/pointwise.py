"""The drafter's norm and feed-forward as single autograd steps that keep little and pass over memory seldom.

Guarantees: the same values and first-order gradients as the plain formulas (a test compares them in fp64). Kept for
backward: a norm's input and one number per row; a feed-forward's two inner products, its activation being computed
again. Called by `models.drafter`.

Legend: n rows, H hidden size, F inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.models.matmul import times_transposed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
        size = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        inverse = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (exact * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse  # fp32 at least, as `inverse` is
        along = slope * normed
        of_weight = along.flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        mean = (along @ weight.to(along.dtype)).unsqueeze(-1).div_(x.shape[-1])
        of_x = torch.mul(slope, weight).to(normed.dtype).sub_(normed.mul_(mean)).mul_(inverse)
        return of_x.to(x.dtype), of_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 at least."""
    return _RMSNorm.apply(x, weight.to(x.dtype), eps)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inner, lifted = times_transposed(x, gate), times_transposed(x, up)
        ctx.save_for_backward(x, gate, up, down, inner, lifted)
        return times_transposed(F.silu(inner).mul_(lifted), down)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, inner, lifted = ctx.saved_tensors
        active = F.silu(inner)
        of_down = times_transposed(slope.T, (active * lifted).T)
        of_product = times_transposed(slope, down.T)
        of_lifted = active.mul_(of_product)
        of_inner = torch.ops.aten.silu_backward(of_product.mul_(lifted), inner)
        of_x = times_transposed(of_lifted, up.T).add_(times_transposed(of_inner, gate.T))
        return of_x, times_transposed(of_inner.T, x.T), times_transposed(of_lifted.T, x.T), of_down


def feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)): x [n, H], gate and up [F, H], down [H, F] -> [n, H]."""
    return _FeedForward.apply(x, *(w.to(x.dtype) for w in (gate, up, down)))
