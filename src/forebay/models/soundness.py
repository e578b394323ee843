"""Are these weights such as training leaves them? Told by the numbers alone, before anybody serves them.

Guarantees: `broken` names every tensor that cannot be right (a value that is not finite, nothing but zeros); `unmoved`
every one that is exactly where `models.init` starts it: a norm of ones, a matrix as drawn from the seed, a copy of a
layer of the target, `fc` as the last captured layer. A weight that moved by less than its dtype shows counts as
unmoved: as served, it is. Changes nothing. Called by `io.drafters` (exports) and `decode.check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from forebay.models.init import passes_last_features, random_weights


def broken(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What is wrong with each tensor that no training leaves so, by name."""
    found = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        wrong = int((~tensor.isfinite()).sum())
        if wrong:
            found[name] = f"not finite in {wrong:,} of {tensor.numel():,} values"
        elif not tensor.any():
            found[name] = "all zero"
    return found


@torch.no_grad()
def unmoved(
    tensors: Mapping[str, Tensor], layers: Iterable[nn.Module], final_norm: nn.Module, seed: int
) -> dict[str, str]:
    """Where each tensor that never moved still is, by name. `layers`, `final_norm`: the target's. `seed`: the run's.

    Tensors have their stored dtype; first weights are rounded to it.
    """
    found = {name: "ones, as before training" for name, t in tensors.items() if t.ndim == 1 and bool((t == 1).all())}
    for name, first in random_weights({n: t.shape for n, t in tensors.items() if t.ndim > 1}, seed):
        if torch.equal(first.to(tensors[name].dtype), tensors[name].cpu()):
            found[name] = f"as drawn from seed {seed} before training"
    fc = tensors.get("fc.weight")
    if fc is not None and passes_last_features(fc):
        found["fc.weight"] = "the last captured layer, as before training"
    copies = {n: t for n, t in tensors.items() if n.startswith("layers.") and n not in found}
    for number, layer in enumerate(layers):
        given = dict(layer.named_parameters())
        for name, tensor in copies.items():
            theirs = given.get(name.split(".", 2)[2])
            if theirs is not None and theirs.shape == tensor.shape and _equal(tensor, theirs):
                found[name] = f"a copy of the target's layer {number}, as before training"
    if "norm.weight" in tensors and "norm.weight" not in found and _equal(tensors["norm.weight"], final_norm.weight):
        found["norm.weight"] = "a copy of the target's final norm, as before training"
    return found


def _equal(tensor: Tensor, theirs: Tensor) -> bool:
    """Equal after rounding, the offset of norms that multiply by 1 + weight included."""
    offsets = (0.0, 1.0) if tensor.ndim == 1 else (0.0,)
    first = theirs.detach().cpu().float()
    return any(torch.equal((first + offset).to(tensor.dtype), tensor.cpu()) for offset in offsets)
