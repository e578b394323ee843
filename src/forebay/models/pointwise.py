"""The drafter's norm, rotation and feed-forward as single autograd steps that keep little and pass over memory seldom.

Guarantees: the same values and first-order gradients as the plain formulas (a test compares them in fp64). Kept for
backward: a norm's input and one number per row; of a rotation nothing but its table; a feed-forward's two inner
products, its activation being computed again. Called by `models.drafter`.

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
        along = slope * x.to(inverse.dtype)  # fp32 at least, as `inverse` is
        of_weight = (along.flatten(0, -2).T @ inverse.flatten()).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        back = (along @ weight.to(along.dtype)).unsqueeze(-1).div_(-x.shape[-1]).mul_(inverse**3)
        of_x = torch.mul(slope, inverse).mul_(weight).addcmul_(x.to(back.dtype), back)
        return of_x.to(x.dtype), of_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 at least."""
    return _RMSNorm.apply(x, weight.to(x.dtype), eps)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return _turned(slope, *ctx.saved_tensors, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([(a * cos).addcmul_(b, sin, value=-way), (b * cos).addcmul_(a, sin, value=way)], dim=-1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate channel i with channel i + D/2: x [P, heads, D], cos and sin [P, 1, D/2]."""
    return _Rotation.apply(x, *rope)


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
