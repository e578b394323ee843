"""What a target is: its dimensions, its captured layers, its embedding and head, measured instead of guessed.

Guarantees: `TargetFacts` of a model were confirmed by one short forward: first-layer input = scale x embedding row, and
logits = head(norm(last layer's output)) with the scale and soft-cap found in the config. A model that does anything
else is refused by name. Layer ids are checked against the target. Called by `models.target`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from forebay.config import TargetConfig
from forebay.errors import ConfigError, TargetError
from forebay.models.load import decoder_and_layers, text_config

NORM_NAMES = ("norm", "final_layernorm", "final_norm", "norm_f", "ln_f", "final_layer_norm", "embedding_norm")
PROBE_TOKENS = 8
CAPTURED = 5  # layers, where nothing else is asked for


@dataclass(frozen=True)
class TargetFacts:
    """Facts of a target, all known before training. H hidden, V rows of the head."""

    model_type: str
    architecture: str
    name: str
    fingerprint: str  # of the weights, equal in every dtype
    num_layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int  # active width for mixtures of experts
    rms_eps: float
    rope: dict[str, Any]
    vocab_size: int  # rows of the head: ids below it can be predicted
    embedding_rows: int  # rows of the embedding: ids below it can be read
    tied: bool
    embed_scale: float
    logit_scale: float
    logit_softcap: float | None
    head_bias: bool
    experts: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    config: dict[str, Any] = field(repr=False, compare=False, default_factory=dict)  # the text config, as stored

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint remembers of its target, and a resume compares. A folder may be renamed: no name."""
        return {
            "architecture": self.architecture,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "weights": self.fingerprint,
        }


def default_layer_ids(num_layers: int, count: int | None = None) -> tuple[int, ...]:
    """Evenly spaced from layer 1 to layer L - 3; a single one is L // 2 (DFLASH.md), but never the last.

    `count` None: `CAPTURED`, or as many as there are in a target with fewer.
    Raises ConfigError where `count` different layers do not fit.
    """
    first, last = 1, num_layers - 3
    if count is None:
        count = max(1, min(CAPTURED, last))
    if count == 1:
        return (max(0, min(num_layers // 2, num_layers - 2)),)
    ids = tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))
    if last - first + 1 < count or len(set(ids)) != count:
        raise ConfigError(
            f"captured_layers {count} does not fit between layers 1 and {last} of a target with {num_layers} layers: "
            f"lower target.captured_layers to {max(1, last)} or set target.layer_ids"
        )
    return ids


def layers_notice(config: TargetConfig, ids: Sequence[int], num_layers: int) -> str | None:
    """What to say of layers that nobody chose where the target is too small for the usual number of them."""
    if config.layer_ids is not None or config.captured_layers is not None or len(ids) >= CAPTURED:
        return None
    return (
        f"the target has {num_layers} layers: {len(ids)} of them are captured, {list(ids)}, instead of {CAPTURED} "
        "(target.captured_layers or target.layer_ids choose others)"
    )


def check_layer_ids(layer_ids: Sequence[int], num_layers: int, allow_last: bool = False) -> tuple[int, ...]:
    """The ids as a tuple, if they name layers of this target once each, rising. Raises ConfigError."""
    ids, valid = list(layer_ids), f"valid 0..{num_layers - 1} of {num_layers} layers"
    if not ids:
        raise ConfigError(f"layer_ids is empty: name at least one layer, {valid}")
    bad = [i for i in ids if not 0 <= i < num_layers]
    if bad:
        raise ConfigError(f"layer_ids {ids}: {bad[0]} is no layer of this target, {valid}")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"layer_ids {ids} names a layer twice: name each once, {valid}")
    if ids != sorted(ids):
        raise ConfigError(f"layer_ids {ids} must rise, because engines collect layers in order: {sorted(ids)}")
    if ids[-1] == num_layers - 1 and not allow_last:
        raise ConfigError(
            f"layer_ids {ids}: layer {num_layers - 1} is the last, and engines take the state after it behind the "
            "final norm, here it is before: choose an earlier layer or set target.allow_last_layer=true"
        )
    return tuple(ids)


def final_norm(decoder: Any) -> nn.Module:
    """The norm between the last layer and the head."""
    for name in NORM_NAMES:
        if isinstance(module := getattr(decoder, name, None), nn.Module):
            return module
    raise TargetError(f"{type(decoder).__name__} is not supported: found no final norm among {', '.join(NORM_NAMES)}")


def apply_head(model: Any, facts: TargetFacts, hidden: torch.Tensor) -> torch.Tensor:
    """[..., H] last layer's output, before the final norm -> fp32 logits [..., V]."""
    head, decoder = model.get_output_embeddings(), decoder_and_layers(model)[0]
    logits = head(final_norm(decoder)(hidden.to(head.weight.dtype))).float() * facts.logit_scale
    cap = facts.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def read_facts(model: Any, name: str) -> TargetFacts:
    """Facts of a loaded model, confirmed by a forward of a few tokens.

    Raises TargetError naming what is not supported.
    """
    config, who = text_config(model), type(model).__name__
    decoder_and_layers(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or not hasattr(head, "weight"):
        raise TargetError(f"{who} is not supported: it has no token embedding or no output head")
    heads = config.num_attention_heads
    experts, active = _expert_width(config)
    eos = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
    scale = getattr(embedding, "embed_scale", None)
    facts = TargetFacts(
        model_type=config.model_type,
        architecture=who,
        name=name,
        fingerprint=weights_fingerprint(model),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=active,
        rms_eps=float(getattr(config, "rms_norm_eps", None) or getattr(config, "norm_eps", None) or 1e-6),
        rope=_rope(config),
        vocab_size=head.weight.shape[0],
        embedding_rows=embedding.weight.shape[0],
        tied=head.weight.data_ptr() == embedding.weight.data_ptr(),
        embed_scale=float(getattr(config, "embedding_multiplier", 1.0)) * (1.0 if scale is None else float(scale)),
        logit_scale=float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", 1.0)),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        head_bias=getattr(head, "bias", None) is not None,
        experts=experts,
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,),
        pad_token_id=getattr(config, "pad_token_id", None),
        bos_token_id=getattr(config, "bos_token_id", None),
        config=config.to_dict(),
    )
    _confirm(model, facts)
    return facts


def _rope(config: Any) -> dict[str, Any]:
    """Rope fields of the full-attention layers (some families nest them per kind of layer)."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rope = dict(rope.get("full_attention") or rope)
    rope.setdefault("rope_theta", float(getattr(config, "rope_theta", None) or 10000.0))
    return rope


def _expert_width(config: Any) -> tuple[int, int]:
    """(number of routed experts, width of the feed-forward part that one token passes through)."""

    def first(*names: str) -> int:
        return next((int(v) for n in names if isinstance(v := getattr(config, n, None), int)), 0)

    dense = first("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") or 4 * config.hidden_size
    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    if experts == 0:
        return 0, dense
    width = first("moe_intermediate_size") or dense
    used = first("num_experts_per_tok", "num_experts_per_token", "moe_topk") or 1
    shared = first("shared_expert_intermediate_size") or width * first("n_shared_experts")
    return experts, width * used + shared


def weights_fingerprint(model: nn.Module) -> str:
    """Hash of a few values of every parameter, rounded to bf16: the same for one model in any dtype or file format."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        some = parameter.detach().reshape(-1)[:32].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]


def probe_ids(model: Any, count: int) -> list[int]:
    """Token ids spread over the vocabulary, none of which stands for an image or a sound."""
    rows = min(model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0])
    taken = {v for k, v in vars(model.config).items() if "token" in k and isinstance(v, int)}
    step = max(1, rows // (count + 1))
    ids = [i for i in range(step, rows, step) if i not in taken]
    return (ids * count)[:count]


@torch.inference_mode()
def _confirm(model: Any, facts: TargetFacts) -> None:
    """One forward of a few tokens; refuses a target whose embedding or head does more than the facts say."""
    decoder, layers = decoder_and_layers(model)
    embedding = model.get_input_embeddings()
    ids = torch.tensor([probe_ids(model, PROBE_TOKENS)], device=embedding.weight.device)
    seen: dict[str, torch.Tensor] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen["in"] = args[0] if args else kwargs["hidden_states"]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        seen["out"] = output[0] if isinstance(output, tuple) else output

    hooks = [
        layers[0].register_forward_pre_hook(before, with_kwargs=True),
        layers[facts.num_layers - 1].register_forward_hook(after),
    ]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    shape = (1, ids.shape[1], facts.hidden_size)
    for name in ("in", "out"):
        if tuple(seen[name].shape) != shape:
            raise TargetError(
                f"{facts.architecture} is not supported: its layers pass states of shape {tuple(seen[name].shape)}, "
                f"not {shape}"
            )
    tolerance = 1e-4 if seen["in"].dtype == torch.float32 else 2e-2
    expected = embedding.weight[ids].float() * facts.embed_scale
    if _difference(seen["in"].float(), expected) > tolerance:
        raise TargetError(
            f"{facts.architecture} is not supported: the first layer's input is not {facts.embed_scale:g} x the "
            "token's embedding row, so a drafter that shares the embedding would read something else"
        )
    if _difference(apply_head(model, facts, seen["out"]), logits.float()) > tolerance:
        raise TargetError(
            f"{facts.architecture} is not supported: its logits are not {type(final_norm(decoder)).__name__} and head "
            f"(scale {facts.logit_scale:g}, soft-cap {facts.logit_softcap}) of the last layer's output"
        )


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative difference in the Euclidean norm."""
    expected = expected.to(got.device)
    return float((got - expected).norm() / expected.norm().clamp_min(1e-12))
