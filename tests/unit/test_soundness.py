"""Weights that training cannot have left so are named; exports of broken ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import zlab_config, zlab_tensors
from forebay.decode.check import check_drafter
from forebay.errors import ContractError
from forebay.io.drafters import export_drafter, import_drafter
from forebay.io.formats import StoredDrafter, write_drafter
from forebay.io.formats.zlab import zlab_spec
from forebay.models.drafter import Drafter
from forebay.models.init import init_from_target, init_random
from forebay.models.soundness import broken, unmoved
from tiny import tiny_target

NAN = {"fc.weight": "not finite in 1 of 3,072 values"}
ZERO = {"layers.1.mlp.up_proj.weight": "all zero"}
ONES = {"layers.0.self_attn.k_norm.weight": "ones, as before training"}


def planted(kind: dict[str, str]) -> dict[str, Tensor]:
    """Trained-looking weights with one tensor spoiled."""
    tensors = zlab_tensors(zlab_config())
    (name,) = kind
    if kind is NAN:
        tensors[name][3, 5] = torch.nan
    else:
        tensors[name].fill_(0.0 if kind is ZERO else 1.0)
    return tensors


def folder_of(path: Path, tensors: dict[str, Tensor], **overrides: Any) -> Path:
    return write_drafter(path, StoredDrafter(zlab_spec(zlab_config(**overrides), "float32"), tensors))


@pytest.mark.parametrize("kind", [NAN, ZERO, ONES], ids=["nan", "zero", "ones"])
def test_a_check_names_the_wrong_weight_and_fails(tmp_path: Path, kind: dict[str, str]) -> None:
    folder = folder_of(tmp_path / "drafter", planted(kind), trained_max_length=100)
    report = check_drafter(folder, tiny_target(), [[5, 6, 7]], max_new_tokens=4)
    assert report["wrong_weights"] == [f"{name}: {why}" for name, why in kind.items()] and report["ok"] is False


@pytest.mark.parametrize("kind", [NAN, ZERO], ids=["nan", "zero"])
def test_no_export_and_no_import_writes_broken_weights(tmp_path: Path, kind: dict[str, str]) -> None:
    folder = folder_of(tmp_path / "drafter", planted(kind))
    (name,) = kind
    for write in (export_drafter, import_drafter):
        with pytest.raises(ContractError, match=f"1 broken tensors, first '{name}': {kind[name]}"):
            write(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ones_of_another_trainer_are_noted_only(tmp_path: Path) -> None:
    """Some of them keep norms in bf16, where they never leave one: the drafter serves all the same."""
    folder = folder_of(tmp_path / "drafter", planted(ONES))
    report = check_drafter(folder, tiny_target(), [[5, 6, 7]], max_new_tokens=4)
    assert report["ok"] is True and "layers.0.self_attn.k_norm.weight: ones, as before training" in report["notes"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("init", ["random", "target"])
def test_every_first_weight_is_known_until_it_moves(init: str, dtype: torch.dtype) -> None:
    model, drafter = tiny_target(), Drafter(zlab_spec(zlab_config(), "float32"))
    layers = model.model.layers
    init_random(drafter, seed=7)
    if init == "target":
        states = {i: layer.state_dict() for i, layer in enumerate(layers)}
        init_from_target(drafter, states, norm_offset=1.0, final_norm=model.model.norm.weight)
    tensors = {k: v.detach().to(dtype) for k, v in drafter.named_parameters()}
    found = unmoved(tensors, layers, model.model.norm, seed=7)
    assert set(found) == set(tensors)
    kinds = {
        "drawn" if "seed 7" in why else "copied" if "copy of the target's" in why else "other" for why in found.values()
    }
    assert kinds == ({"drawn", "other"} if init == "random" else {"copied", "other"})
    assert unmoved({k: v * 1.01 for k, v in tensors.items()}, layers, model.model.norm, seed=7) == {}
    assert broken(tensors) == {}
