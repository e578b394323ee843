"""The speculators layout, served by vLLM and read by the PyPI package `speculators` (0.9): config.json and the tensors.

Guarantees: as `zlab`: every field is understood, tensors are exact, reading and writing again changes nothing. What
the layout cannot say (full layers that are causal, an embedding scale) is refused at export, never dropped. Three
conventions differ and are translated here and nowhere else: layer ids are indices into HF `hidden_states` (ours + 1);
`sliding_window_non_causal` is the opposite of `sliding_causal`; the number of target layers, where a window is
measured from and the trained length are not part of the layout, so they travel as fields of their own, which the
package keeps.
Called by `api` and `decode.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from forebay.errors import ContractError, nearest
from forebay.io.formats.folder import (
    StoredDrafter,
    check_tensors,
    read_config,
    read_tensors,
    stored_dtype,
    take_vocabulary,
    tensor_shapes,
    write_folder,
)
from forebay.io.formats.zlab import zlab_spec, zlab_tensors
from forebay.models.spec import DrafterSpec

KNOWN = {
    *("architectures", "auto_map", "aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "dtype"),
    *("mask_token_id", "num_target_layers", "sample_from_anchor", "sliding_window_non_causal", "speculators_config"),
    *("speculators_model_type", "speculators_version", "target_hidden_size", "torch_dtype", "transformer_layer_config"),
    *("transformers_version", "window_from", "return_dict", "output_hidden_states", "output_attentions", "id2label"),
    *("label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder", "_name_or_path", "name_or_path"),
    "trained_max_length",
    "tie_word_embeddings",  # of the package's own module, which takes embedding and head from the target
}
ARCHITECTURES = (["DFlashDraftModel"], ["DFlashSpeculator"], None)
VERSION = "0.9.0"


def speculators_config(
    spec: DrafterSpec,
    *,
    verifier: str | None,
    verifier_architecture: str | None,
    extras: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """config.json of `spec` for the target `verifier` (name or folder). ContractError: the layout cannot say it."""
    sliding = "sliding_attention" in spec.layer_types
    if spec.causal and "full_attention" in spec.layer_types:
        raise ContractError(
            "the speculators layout has no causal full-attention layers: export as zlab, or train with causal=false"
        )
    scale = (extras or {}).get("input_embedding_scale") or 1.0
    if scale != 1.0:
        raise ContractError(
            f"this target scales its embedding by {scale:g}, which the speculators layout cannot say: export as zlab"
        )
    layer = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "layer_types": list(spec.layer_types),
        "max_position_embeddings": max(spec.max_positions, spec.trained_max_length),
        "model_type": "qwen3",
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.rms_eps,
        "rope_parameters": dict(spec.rope),
        "sliding_window": spec.sliding_window,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding,
        "vocab_size": spec.vocab_size,
    }
    drafted = spec.block_size if spec.sample_from_anchor else spec.block_size - 1
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in spec.target_layer_ids],
        "block_size": spec.block_size,
        "draft_vocab_size": spec.draft_vocab_size or spec.vocab_size,
        "dtype": spec.dtype,
        "mask_token_id": spec.mask_token_id,
        "num_target_layers": spec.num_target_layers,
        "sample_from_anchor": spec.sample_from_anchor,
        "sliding_window_non_causal": sliding and not (spec.causal or spec.sliding_causal),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": drafted,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "architectures": [verifier_architecture] if verifier_architecture else [],
                "name_or_path": verifier,
            },
        },
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "target_hidden_size": spec.target_hidden_size if spec.target_hidden_size != spec.hidden_size else None,
        "trained_max_length": spec.trained_max_length or None,
        "transformer_layer_config": layer,
    }
    if sliding:
        config["window_from"] = spec.window_from
    return config


def speculators_spec(
    config: Mapping[str, Any], dtype: str, *, num_target_layers: int | None = None, where: str = "config.json"
) -> DrafterSpec:
    """The spec that a speculators configuration describes.

    `num_target_layers`: the target's, where the folder (one that Forebay did not write) does not say it.
    """
    if config.get("speculators_model_type") != "dflash":
        raise ContractError(
            f"{where}: speculators_model_type '{config.get('speculators_model_type')}', this reads dflash"
        )
    if config.get("architectures") not in ARCHITECTURES:
        raise ContractError(f"{where}: architectures {config['architectures']}, this reads DFlashDraftModel only")
    for name, value in config.items():
        if name not in KNOWN and value is not None:
            raise ContractError(
                f"{where}: unknown field '{name}'{nearest(name, KNOWN)} may change what the drafter computes: "
                "remove it if it does not"
            )
    ids, layer = config.get("aux_hidden_state_layer_ids"), config.get("transformer_layer_config")
    if not ids:
        raise ContractError(f"{where} has no aux_hidden_state_layer_ids: write the values the drafter was trained with")
    if not isinstance(layer, Mapping):
        raise ContractError(f"{where} has no transformer_layer_config")
    if not isinstance(ids, list | tuple) or not all(isinstance(i, int) for i in ids):
        raise ContractError(f"{where}: aux_hidden_state_layer_ids is {ids!r}, it must be a list of layer numbers")
    if min(ids) < 1:
        raise ContractError(
            f"{where}: aux_hidden_state_layer_ids {list(ids)} includes 0, the embedding: a drafter captures layers, 1.."
        )
    layers = config.get("num_target_layers") or num_target_layers
    if layers is None:
        raise ContractError(
            f"{where} does not say how many layers its target has: give the target (--target DIR), whose layer ids "
            "are then checked"
        )
    vocabulary, non_causal = config.get("draft_vocab_size"), config.get("sliding_window_non_causal") or False
    if not isinstance(non_causal, bool):
        raise ContractError(f"{where}: sliding_window_non_causal is {non_causal!r}, it must be true or false")
    dflash: dict[str, Any] = {
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": [i - 1 for i in ids],
        "causal": False,
        "sample_from_anchor": config.get("sample_from_anchor") or False,
        "sliding_causal": not non_causal,
        # The package's own trainer measures windows from the anchor and does not store it.
        "window_from": config.get("window_from", "anchor"),
        "trained_max_length": config.get("trained_max_length"),
    }
    like_zlab = {name: value for name, value in layer.items() if name not in ("architectures", "dtype", "torch_dtype")}
    like_zlab |= {
        "block_size": config.get("block_size"),
        "num_target_layers": layers,
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": None if vocabulary in (None, layer.get("vocab_size")) else vocabulary,
        "dflash_config": dflash,
    }
    if "num_target_layers" in config and "trained_max_length" not in config:  # an older export of ours: see `lengths`
        dflash["trained_max_length"] = like_zlab.pop("max_position_embeddings", None)
    spec = zlab_spec(like_zlab, dtype, where)
    _check_method(config, spec, where)
    return spec if "sliding_attention" in spec.layer_types else replace(spec, window_from="query", sliding_causal=True)


def _check_method(config: Mapping[str, Any], spec: DrafterSpec, where: str) -> None:
    """The number of tokens that the folder tells engines must follow from its block size and slot convention (C93)."""
    given = config.get("speculators_config") or {}
    methods = given.get("proposal_methods") or [] if isinstance(given, Mapping) else None
    if not isinstance(methods, list) or not all(isinstance(m, Mapping) for m in methods):
        raise ContractError(f"{where}: speculators_config is {given!r}, it must name a verifier and proposal methods")
    verifier = given.get("verifier") or {}
    if not isinstance(verifier, Mapping) or not isinstance(verifier.get("architectures") or [], list):
        raise ContractError(f"{where}: speculators_config.verifier is {verifier!r}, it must name the target")
    if given.get("algorithm") not in (None, "dflash"):
        raise ContractError(f"{where}: algorithm '{given['algorithm']}', this reads dflash")
    for method in methods:
        if method.get("speculative_tokens") != spec.scored_slots:
            raise ContractError(
                f"{where}: speculative_tokens {method.get('speculative_tokens')} but block_size {spec.block_size} with "
                f"sample_from_anchor {spec.sample_from_anchor} drafts {spec.scored_slots}"
            )


def read_speculators(folder: str | Path, num_target_layers: int | None = None) -> StoredDrafter:
    """Read a speculators folder, strictly. Copies of the target's embedding and head in it are left out."""
    path = Path(folder)
    config = read_config(path)
    where = str(path / "config.json")
    spec = speculators_spec(config, "float32", num_target_layers=num_target_layers, where=where)
    tensors = read_tensors(path)
    vocabulary = take_vocabulary(tensors, spec, str(path))
    head = tensors.pop("lm_head.weight", None)
    for copied in ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"):
        tensors.pop(copied, None)
    spec = replace(spec, dtype=stored_dtype(tensors, str(path)))
    check_tensors(tensors, tensor_shapes(spec), str(path))
    head = head if vocabulary is not None else None
    if head is not None and tuple(head.shape) != (spec.draft_vocab_size, spec.hidden_size):
        raise ContractError(
            f"{path}: 'lm_head.weight' has shape {list(head.shape)}, its config.json asks for "
            f"{[spec.draft_vocab_size, spec.hidden_size]}"
        )
    return StoredDrafter(spec, tensors, vocabulary, head, config, "speculators")


def verifier_of(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Name and architecture of the target that a speculators configuration names."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path"), next(iter(verifier.get("architectures") or []), None)


def write_speculators(
    folder: str | Path,
    drafter: StoredDrafter,
    *,
    verifier: str | None = None,
    verifier_architecture: str | None = None,
    extras: Mapping[str, Any] | None = None,
    card: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a speculators folder and read it back strictly; returns it. `verifier`: the target's name or folder.

    A configuration that was imported, still means the spec and names the same target is written back as it was.
    """
    path = Path(folder)
    spec = drafter.spec
    named, architecture = verifier_of(drafter.config)
    config = speculators_config(
        spec,
        verifier=verifier or named or drafter.dflash.get("target_name"),
        verifier_architecture=verifier_architecture or architecture,
        extras={**drafter.dflash, **(extras or {})},
    )
    if drafter.format == "speculators" and drafter.config and verifier in (None, named):
        meant = speculators_spec(drafter.config, spec.dtype, num_target_layers=spec.num_target_layers)
        if meant == spec:
            config = dict(drafter.config)
    tensors: dict[str, Tensor] = zlab_tensors(spec, drafter.tensors, drafter.vocabulary, drafter.head)
    if drafter.vocabulary is not None and "lm_head.weight" not in tensors:
        raise ContractError(
            f"a reduced vocabulary of {spec.draft_vocab_size} needs its rows of the target's head beside it: "
            "give the target (--target DIR)"
        )
    write_folder(path, config, tensors, card, overwrite)
    read_speculators(path, spec.num_target_layers)
    return path
