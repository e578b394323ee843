"""The z-lab layout, served by SGLang, vLLM and the package `dflash`: a Qwen3 config.json and the drafter's tensors.

Guarantees: `read_zlab` accepts a folder only if every field is understood (one that could change what the drafter
computes and is not known is an error) and the tensors are exactly those the fields call for; reading and writing again
gives bit-identical tensors and an equal configuration. Nothing is guessed: layer ids, mask token, block size and rope
must be there. Called by `api` and `decode.check`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from forebay.errors import ConfigError, ContractError, nearest
from forebay.io.formats.folder import (
    DTYPES,
    EXTRAS,
    StoredDrafter,
    check_tensors,
    read_config,
    read_tensors,
    stored_dtype,
    take_vocabulary,
    tensor_shapes,
    write_folder,
)
from forebay.models.spec import ROPE_FIELDS, DrafterSpec
from forebay.models.vocabulary import map_tensors

#: Fields that change what is computed, and so are read.
MEANING = {
    *("architectures", "model_type", "num_hidden_layers", "num_target_layers", "hidden_size", "target_hidden_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "vocab_size"),
    *("draft_vocab_size", "block_size", "layer_types", "sliding_window", "use_sliding_window", "is_causal"),
    *("max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling", "dtype", "torch_dtype"),
    "dflash_config",
}
DFLASH_MEANING = {
    *("mask_token_id", "target_layer_ids", "block_size", "causal", "sample_from_anchor", "window_from"),
    *("sliding_causal", "input_embedding_scale", "target_name", "target_fingerprint", "trained_max_length"),
}
#: Fields with one value that the drafter can compute; anything else is refused.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "is_encoder_decoder": False,
}
#: Fields that say nothing about what the drafter computes.
INERT = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "auto_map", "use_cache", "_name_or_path"),
    *("initializer_range", "max_window_layers", "id2label", "label2id", "problem_type", "output_hidden_states"),
    *("output_attentions", "return_dict", "chunk_size_feed_forward", "tokenizer_class"),
}
KNOWN = MEANING | INERT | set(FIXED)

WHOLE = {
    *("num_hidden_layers", "num_target_layers", "hidden_size", "target_hidden_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "draft_vocab_size", "block_size"),
    *("sliding_window", "max_position_embeddings", "trained_max_length"),
}
YES_OR_NO = {"use_sliding_window", "is_causal", "causal", "sample_from_anchor", "sliding_causal"}
POSITIVE = {"rms_norm_eps", "rope_theta", "input_embedding_scale"}
LISTS = {"layer_types": ("full_attention", "sliding_attention"), "target_layer_ids": None}
MAPPINGS = {"dflash_config", "rope_parameters", "rope_scaling"}


def zlab_config(spec: DrafterSpec, extras: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json of `spec`. `extras`: facts of `folder.EXTRAS`; a scale of 1 and unknown facts are left out.

    Rope is written in both spellings, because engines pin transformers on either side of version 5.
    """
    dflash: dict[str, Any] = {
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
        "causal": spec.causal,
    }
    if spec.trained_max_length:
        dflash["trained_max_length"] = spec.trained_max_length
    if spec.sample_from_anchor:
        dflash["sample_from_anchor"] = True
    sliding = "sliding_attention" in spec.layer_types
    if sliding:
        dflash |= {"window_from": spec.window_from, "sliding_causal": spec.sliding_causal}
    for name, value in (extras or {}).items():
        if name not in EXTRAS:
            raise ContractError(f"unknown fact '{name}'{nearest(name, EXTRAS)}")
        if value is not None and (name, value) != ("input_embedding_scale", 1.0):
            dflash[name] = value
    scaling = {k: v for k, v in spec.rope.items() if k != "rope_theta"}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": spec.block_size,
        "dflash_config": dflash,
        "dtype": spec.dtype,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "layer_types": list(spec.layer_types),
        "max_position_embeddings": max(spec.max_positions, spec.trained_max_length),
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "num_target_layers": spec.num_target_layers,
        "rms_norm_eps": spec.rms_eps,
        "rope_parameters": dict(spec.rope),
        "rope_scaling": None if spec.rope["rope_type"] == "default" else scaling,
        "rope_theta": spec.rope["rope_theta"],
        "sliding_window": spec.sliding_window,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding,
        "vocab_size": spec.vocab_size,
    }
    # The package `dflash` and engines: sliding layers are causal and full ones are not unless is_causal says otherwise.
    if spec.causal or (sliding and not spec.sliding_causal):
        config["is_causal"] = spec.causal
    if spec.draft_vocab_size is not None:
        config["draft_vocab_size"] = spec.draft_vocab_size
    if spec.target_hidden_size != spec.hidden_size:
        config["target_hidden_size"] = spec.target_hidden_size
    return config


def zlab_spec(config: Mapping[str, Any], dtype: str, where: str = "config.json") -> DrafterSpec:
    """The spec that a z-lab configuration describes. ContractError: something is missing, unknown or unsupported."""
    _check_kinds(config, where)
    dflash = dict(config.get("dflash_config") or {})
    _check_kinds(dflash, where, "dflash_config.")
    _check_fields(config, dflash, where)
    block_size = dflash.get("block_size", config.get("block_size"))
    needed = {
        "dflash_config.target_layer_ids": dflash.get("target_layer_ids"),
        "dflash_config.mask_token_id": dflash.get("mask_token_id"),
        "block_size": block_size,
        **{
            name: config.get(name)
            for name in (
                *("num_hidden_layers", "num_target_layers", "hidden_size", "num_attention_heads"),
                *("num_key_value_heads", "intermediate_size", "rms_norm_eps", "vocab_size"),
            )
        },
    }
    for name, value in needed.items():
        if value is None:
            raise ContractError(
                f"{where} has no {name}: it is never derived, write the value the drafter was trained with"
            )
    types = list(config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"])
    sliding = "sliding_attention" in types
    window = config.get("sliding_window") if sliding else None
    if sliding and (window is None or config.get("use_sliding_window") is False):
        raise ContractError(
            f"{where}: layer_types has sliding_attention but sliding_window is {config.get('sliding_window')} and "
            f"use_sliding_window {config.get('use_sliding_window')}: engines would ignore the window"
        )
    causal, sliding_causal = _causality(config, dflash, sliding, where)
    trained, positions = lengths(config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if head_dim % 2 or head_dim < 2:
        raise ContractError(f"{where}: head_dim {head_dim} must be even: rope turns pairs of channels")
    try:
        return DrafterSpec(
            hidden_size=config["hidden_size"],
            target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=head_dim,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            block_size=block_size,
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            num_target_layers=config["num_target_layers"],
            rms_eps=config["rms_norm_eps"],
            rope=read_rope(config, where),
            sample_from_anchor=bool(dflash.get("sample_from_anchor", False)),
            causal=causal,
            layer_types=tuple(types),
            sliding_window=window,
            window_from=dflash.get("window_from", "query"),
            sliding_causal=sliding_causal,
            trained_max_length=trained,
            max_positions=positions,
            draft_vocab_size=config.get("draft_vocab_size"),
            dtype=dtype,
        )
    except ConfigError as error:
        raise ContractError(f"{where}: {error}") from None


def lengths(config: Mapping[str, Any]) -> tuple[int, int]:
    """(longest text trained on, positions that engines may use), 0 where not known.

    Forebay's own exports once gave the first under the name of the second, which vLLM takes for the second; they are
    known by the fingerprint that only Forebay writes.
    """
    dflash, positions = config.get("dflash_config") or {}, config.get("max_position_embeddings") or 0
    if dflash.get("trained_max_length") is None and dflash.get("target_fingerprint") is not None:
        return positions, 0
    return dflash.get("trained_max_length") or 0, positions


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_kinds(fields: Mapping[str, Any], where: str, under: str = "") -> None:
    """Every field that is there is of its kind: a string for a number would fail later, and elsewhere."""

    def whole(value: Any, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    for name, value in fields.items():
        if value is None:
            continue
        kind = None
        if name in WHOLE and not whole(value, 1):
            kind = "a positive whole number"
        elif name == "mask_token_id" and not whole(value, 0):
            kind = "a token id"
        elif name in YES_OR_NO and not isinstance(value, bool):
            kind = "true or false"
        elif name in POSITIVE and not _positive(value):
            kind = "a positive number"
        elif name in MAPPINGS and not isinstance(value, Mapping):
            kind = "a mapping"
        elif name in LISTS:
            words = LISTS[name]
            good = isinstance(value, list | tuple) and all(v in words if words else whole(v, 0) for v in value)
            kind = None if good else f"a list of {' or '.join(words)}" if words else "a list of layer numbers"
        elif name == "window_from" and value not in ("query", "anchor"):
            kind = "query or anchor"
        if kind is not None:
            raise ContractError(f"{where}: {under}{name} is {value!r}, it must be {kind}")


def _check_fields(config: Mapping[str, Any], dflash: Mapping[str, Any], where: str) -> None:
    if config.get("model_type") not in (None, "qwen3"):
        raise ContractError(f"{where}: model_type '{config['model_type']}' is no z-lab DFlash drafter (qwen3)")
    architectures = config.get("architectures")
    if architectures not in (None, ["DFlashDraftModel"]):
        raise ContractError(f"{where}: architectures {architectures}, this reads ['DFlashDraftModel'] only")
    for name, value in config.items():
        if name in FIXED:
            if value not in (None, FIXED[name]):
                raise ContractError(f"{where}: {name} is {value!r}, the drafter computes {FIXED[name]!r} only")
        elif name not in KNOWN and value is not None:
            raise ContractError(
                f"{where}: unknown field '{name}'{nearest(name, KNOWN)} may change what the drafter "
                "computes: remove it if it does not"
            )
    for name, value in dflash.items():
        if name not in DFLASH_MEANING and value is not None:
            raise ContractError(
                f"{where}: unknown field 'dflash_config.{name}'{nearest(name, DFLASH_MEANING)} may change what the "
                "drafter computes: remove it if it does not"
            )


def _causality(config: Mapping[str, Any], dflash: Mapping[str, Any], sliding: bool, where: str) -> tuple[bool, bool]:
    """(causal in every layer, causal in sliding layers), from is_causal and dflash_config, which must agree."""
    forced = config.get("is_causal")
    causal = bool(dflash.get("causal", bool(forced)))
    sliding_causal = bool(dflash.get("sliding_causal", True if forced is None else forced))
    if forced is not None and (causal != forced or (sliding and (causal or sliding_causal) != forced)):
        raise ContractError(
            f"{where}: is_causal is {forced} but dflash_config says causal {causal}, sliding_causal {sliding_causal}"
        )
    return causal, sliding_causal if sliding else True


def read_rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rope of a configuration in either spelling; both must agree where both are there."""
    new = config.get("rope_parameters")
    old: dict[str, Any] | None = None
    if config.get("rope_theta") is not None:
        scaling = dict(config.get("rope_scaling") or {})
        kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        scaling.pop("rope_theta", None)
        old = {"rope_type": kind, "rope_theta": config["rope_theta"], **scaling}
    if new is None and old is None:
        raise ContractError(
            f"{where} has no rope_theta: it is never guessed, write the value the drafter was trained with"
        )
    rope = {"rope_type": "default", **new} if new is not None else old
    assert rope is not None
    if not isinstance(rope["rope_type"], str) or rope["rope_type"] not in ROPE_FIELDS:
        raise ContractError(
            f"{where}: no rope of type {rope['rope_type']!r} is computed here, only {', '.join(ROPE_FIELDS)}"
        )
    if new is not None and old is not None and rope != old:
        raise ContractError(f"{where}: rope_parameters {new} and rope_theta/rope_scaling {old} disagree")
    known = ("rope_type", "rope_theta", *ROPE_FIELDS[rope["rope_type"]])
    for name, value in rope.items():
        if name in known and name != "rope_type" and value is not None and not _positive(value):
            raise ContractError(f"{where}: rope field {name} is {value!r}, it must be a positive number")
        if name not in known and value is not None:
            raise ContractError(
                f"{where}: rope field '{name}' of rope_type '{rope['rope_type']}' is not one the drafter computes with"
            )
    for name in known:
        if rope.get(name) is None:
            raise ContractError(f"{where}: rope_type '{rope['rope_type']}' needs the field {name}")
    return {name: float(rope[name]) if name == "rope_theta" else rope[name] for name in known}


def read_zlab(folder: str | Path) -> StoredDrafter:
    """Read a z-lab folder, strictly. UsageError: no such folder. ContractError: it is not what it says it is."""
    path = Path(folder)
    config = read_config(path)
    where = str(path / "config.json")
    spec = zlab_spec(config, "float32", where)  # the fields are judged before any weight is read
    tensors = read_tensors(path)
    spec = replace(spec, dtype=stored_dtype(tensors, str(path)))
    vocabulary = take_vocabulary(tensors, spec, str(path))
    head = tensors.pop("lm_head.weight", None) if vocabulary is not None else None
    if head is not None and tuple(head.shape) != (spec.draft_vocab_size, spec.hidden_size):
        raise ContractError(
            f"{path}: 'lm_head.weight' has shape {list(head.shape)}, its config.json asks for "
            f"{[spec.draft_vocab_size, spec.hidden_size]}"
        )
    check_tensors(tensors, tensor_shapes(spec), str(path))
    return StoredDrafter(spec, tensors, vocabulary, head, config, "zlab")


def zlab_tensors(
    spec: DrafterSpec, tensors: Mapping[str, Tensor], vocabulary: Tensor | None = None, head: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors of model.safetensors, in the spec's dtype: no embedding, a head only beside a reduced vocabulary."""
    check_tensors(tensors, tensor_shapes(spec), "the drafter")
    out = {name: tensor.detach().to(DTYPES[spec.dtype]) for name, tensor in tensors.items()}
    if (spec.draft_vocab_size is None) != (vocabulary is None):
        raise ContractError(
            f"draft_vocab_size is {spec.draft_vocab_size} and a vocabulary map is "
            f"{'missing' if vocabulary is None else 'given'}: a reduced vocabulary travels with its map"
        )
    if vocabulary is not None:
        out |= map_tensors(vocabulary.long(), spec.vocab_size)
        if head is not None:
            out["lm_head.weight"] = head.detach().to(DTYPES[spec.dtype])
    return out


def write_zlab(
    folder: str | Path,
    drafter: StoredDrafter,
    *,
    extras: Mapping[str, Any] | None = None,
    card: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a z-lab folder and read it back strictly. Returns the folder.

    A configuration that the drafter was imported with and that still means its spec is written back as it was.
    """
    path = Path(folder)
    config = zlab_config(drafter.spec, {**drafter.dflash, **(extras or {})})
    as_it_was = drafter.format == "zlab" and bool(drafter.config) and not extras
    if as_it_was and zlab_spec(drafter.config, drafter.spec.dtype) == drafter.spec:
        config = dict(drafter.config)
    tensors = zlab_tensors(drafter.spec, drafter.tensors, drafter.vocabulary, drafter.head)
    write_folder(path, config, tensors, card, overwrite)
    read_zlab(path)
    return path
