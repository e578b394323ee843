"""A drafter's folder on disk: configuration and tensors in, configuration, tensors and card out.

Guarantees: only safetensors are read (a pickle can run code and is refused); tensors are checked by name and shape,
both ways, before anybody multiplies one; a folder is written under a temporary name and renamed, so it is there whole
or not at all. What the configuration means is the business of `zlab` and `speculators`, which call this.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forebay.errors import ContractError, UsageError, nearest
from forebay.models.spec import DrafterSpec
from forebay.models.vocabulary import kept_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass
class StoredDrafter:
    """A drafter as a folder holds it.

    `tensors` carry the z-lab names (also where the folder's own differ), `vocabulary` the target's token id of each
    draft token `[Vd]` and `head` the reduced head `[Vd, H]` where the draft vocabulary is reduced, `config` the
    configuration as it was read.
    """

    spec: DrafterSpec
    tensors: dict[str, Tensor]
    vocabulary: Tensor | None = None
    head: Tensor | None = None
    config: dict[str, Any] = field(default_factory=dict)
    format: str = "zlab"

    @property
    def dflash(self) -> dict[str, Any]:
        """Facts beside the spec: input_embedding_scale, target_name, target_fingerprint, where the folder has them."""
        given = self.config.get("dflash_config") or {}
        return {name: given[name] for name in EXTRAS if given.get(name) is not None}


#: Facts about the target that travel with a drafter but are not part of its mathematics as a spec.
EXTRAS = ("input_embedding_scale", "target_name", "target_fingerprint")


def tensor_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter, z-lab names, without a reduced vocabulary's."""
    width, d = spec.hidden_size, spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, spec.feature_size),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for layer in range(spec.layers):
        name = f"layers.{layer}."
        shapes |= {
            name + "input_layernorm.weight": (width,),
            name + "post_attention_layernorm.weight": (width,),
            name + "self_attn.q_proj.weight": (spec.heads * d, width),
            name + "self_attn.k_proj.weight": (spec.kv_heads * d, width),
            name + "self_attn.v_proj.weight": (spec.kv_heads * d, width),
            name + "self_attn.o_proj.weight": (width, spec.heads * d),
            name + "self_attn.q_norm.weight": (d,),
            name + "self_attn.k_norm.weight": (d,),
            name + "mlp.gate_proj.weight": (spec.intermediate_size, width),
            name + "mlp.up_proj.weight": (spec.intermediate_size, width),
            name + "mlp.down_proj.weight": (width, spec.intermediate_size),
        }
    return shapes


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise ContractError unless `found` has exactly the tensors `expected`, in those shapes."""
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing:
        raise ContractError(f"{where}: {len(missing)} tensors are missing, first '{missing[0]}'")
    if extra:
        raise ContractError(
            f"{where}: {len(extra)} tensors are unknown, first '{extra[0]}'{nearest(extra[0], expected)}: "
            "they would be ignored, so the folder holds another kind of drafter"
        )
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            raise ContractError(
                f"{where}: '{name}' has shape {list(found[name].shape)}, its config.json asks for {list(shape)}"
            )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises UsageError where there is none, ContractError where it is no mapping."""
    if not folder.is_dir():
        raise UsageError(f"no drafter folder at {folder}: give a folder with config.json and model.safetensors")
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{folder} has no config.json: give the folder of an exported drafter")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ContractError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ContractError(f"{path} must hold a mapping, found a {type(config).__name__}")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors (one file, or the shards of its index)."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    elif not files[0].is_file():
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
        if pickled:
            raise ContractError(
                f"{folder} holds pickled weights ({pickled[0]}), which can run code when read and are never loaded: "
                "convert them to model.safetensors with the program that made them"
            )
        raise ContractError(f"{folder} has no model.safetensors")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise ContractError(f"{file} cannot be read as safetensors: {error}") from None
    return tensors


def stored_dtype(tensors: Mapping[str, Tensor], where: str) -> str:
    """The one floating dtype of the weights, by name."""
    kinds = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()}
    if len(kinds) != 1 or not kinds <= set(DTYPES):
        raise ContractError(f"{where}: weights of dtype {sorted(kinds)}, expected one of {', '.join(DTYPES)}")
    return kinds.pop()


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], card: str | None, overwrite: bool = False
) -> None:
    """Write config.json, model.safetensors and README.md, all or nothing.

    Raises UsageError where `folder` exists and holds something, unless `overwrite` and it holds a drafter.
    """
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise UsageError(f"{folder} exists and is not empty: choose another folder or overwrite it")
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} holds something else than a drafter: it is not overwritten")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir()
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in tensors.items()},
            part / "model.safetensors",
            metadata={"format": "pt"},
        )
        if card is not None:
            (part / "README.md").write_text(card, encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def take_vocabulary(tensors: dict[str, Tensor], spec: DrafterSpec, where: str) -> Tensor | None:
    """Remove the maps from `tensors` and return the target id of each draft token; None for a full vocabulary.

    C34: a reduced vocabulary without its map is an error, never ids 0..N-1.
    """
    maps = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
    if spec.draft_vocab_size is not None:
        return kept_of(maps, spec.draft_vocab_size, spec.vocab_size)
    if maps:
        raise ContractError(f"{where}: has a vocabulary map ({', '.join(sorted(maps))}) but no draft_vocab_size")
    return None
