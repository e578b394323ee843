"""First weights of a drafter: random, or taken from its target's own layers.

Guarantees: random weights are a function of the seed alone; weights from a target are copied only where name and shape
match, and what could not be copied is said. Called by `stages.train` before the first step; warm starts from exported
drafters go through `io.formats`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from forebay.errors import ConfigError
from forebay.models.drafter import Drafter

#: Standard deviation of random matrices.
INIT_STD = 0.02

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")


@torch.no_grad()
def init_random(drafter: Drafter, seed: int) -> None:
    """Matrices normal with deviation 0.02 in the order of their names; norms one."""
    parameters = dict(drafter.named_parameters())
    for parameter in parameters.values():
        parameter.fill_(1.0)
    for name, first in random_weights({n: p.shape for n, p in parameters.items() if p.ndim > 1}, seed):
        parameters[name].copy_(first)


def random_weights(shapes: Mapping[str, torch.Size], seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, first weights) of each matrix, one at a time: a function of names, shapes and seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in sorted(shapes.items()):
        yield name, torch.randn(shape, generator=generator) * INIT_STD


@torch.no_grad()
def init_from_target(
    drafter: Drafter,
    layers: Mapping[int, Mapping[str, Tensor]],
    ids: tuple[int, ...] | None = None,
    *,
    final_norm: Tensor | None = None,
    norm_offset: float = 0.0,
) -> list[str]:
    """Copy target layers into the draft layers; `fc` starts as the last captured layer. Returns notices.

    `layers` maps a target layer's id to its state dict (names as in a Llama layer). `ids` names one target layer for
    each draft layer; by default the target's last ones. `final_norm` [H] is the target's own, for `norm`.
    `norm_offset` is 1 for targets whose norms multiply by 1 + weight. Call `init_random` first: what is not copied
    keeps its value.

    `hidden_norm` and, where the target has none, `q_norm` and `k_norm` stay at one. Setting them to the size that the
    copied projections expect was tried: it starts at a lower loss and is behind after a hundred steps.
    """
    spec = drafter.spec
    chosen = ids or tuple(range(spec.num_target_layers - spec.layers, spec.num_target_layers))
    if len(chosen) != spec.layers:
        raise ConfigError(f"{len(chosen)} target layers given for {spec.layers} draft layers: name one for each")
    notices = []
    for draft, source in zip(drafter.layers, chosen, strict=True):
        if source not in layers:
            raise ConfigError(f"init_target_layers names {source}: valid 0..{spec.num_target_layers - 1} here")
        state, own = layers[source], dict(draft.named_parameters())
        missed = []
        for name in (*PROJECTIONS, *NORMS, "self_attn.q_norm", "self_attn.k_norm"):
            given, mine = state.get(f"{name}.weight"), own[f"{name}.weight"]
            if given is not None and given.shape == mine.shape:
                mine.copy_(given.float() + (norm_offset if given.ndim == 1 else 0.0))
            elif not name.endswith(("q_norm", "k_norm")):
                missed.append(name)
        if missed:
            notices.append(f"target layer {source} gives no {', '.join(missed)} of the drafter's shape: left random")
    if spec.target_hidden_size == spec.hidden_size:
        drafter.fc.weight.copy_(_last_features(drafter.fc.weight))
    if final_norm is not None:
        drafter.norm.weight.copy_(final_norm.float() + norm_offset)
    return notices


def _last_features(fc: Tensor) -> Tensor:
    """Weights `[H, K*H]` that pass on the last captured layer's features, in the dtype of `fc`."""
    last = torch.zeros_like(fc)
    last[:, -fc.shape[0] :] = torch.eye(fc.shape[0])
    return last


def passes_last_features(fc: Tensor) -> bool:
    """Whether `fc` `[H, K*Ht]` still is what `init_from_target` starts it as."""
    return fc.shape[1] % fc.shape[0] == 0 and torch.equal(fc, _last_features(fc))
