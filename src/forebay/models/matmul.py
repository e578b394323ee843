"""Matrix products by the faster library: fp32 on a CPU that is not Intel's goes through oneDNN, all else is torch's.

torch sends fp32 products to MKL, which uses half the vector width on other makers' processors: oneDNN, which torch
already uses for bf16, was 2.3 times as fast on one of AMD's. On Intel's MKL is as fast, twice as fast where the left
factor is a transpose (gradients of weights), and needs no kernel per shape. The maker decides and not a measurement, so
that a resumed run computes the same. Guarantees: the same product to fp32 rounding, the same gradients, first order
only; where torch has no oneDNN everything still works. Called by `models.drafter`, `models.loss` and `models.load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def made_by_intel(description: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's processor is Intel's; False where the system does not say."""
    return description.is_file() and "GenuineIntel" in description.read_text(errors="replace")


ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise") and not made_by_intel()


def fast(x: Tensor) -> bool:
    """Whether products of `x` go through oneDNN."""
    return ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and not torch.compiler.is_compiling()


def times_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, k] @ weight [m, k].T -> [n, m], not differentiated."""
    if fast(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return x @ weight.T


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times_transposed(x, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = times_transposed(slope, weight.T) if ctx.needs_input_grad[0] else None
        of_weight = times_transposed(slope.T, x.T) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, k] @ weight [m, k].T -> [n, m] in the dtype of x."""
    return _Linear.apply(x, weight) if fast(x) else F.linear(x, weight.to(x.dtype))
