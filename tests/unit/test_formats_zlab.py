"""The z-lab layout: golden keys and configuration, strict both ways, nothing guessed (C91-C94)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import zlab_config, zlab_tensors
from forebay.decode.drafter import ServedDrafter
from forebay.errors import ContractError, ForebayError, UsageError
from forebay.io.formats.folder import StoredDrafter
from forebay.io.formats.zlab import read_zlab, write_zlab, zlab_spec
from forebay.io.formats.zlab import zlab_config as written_config
from forebay.models.drafter import rope_table
from forebay.models.spec import DrafterSpec, drafter_rope

GOLDEN_KEYS = sorted(
    ["fc.weight", "hidden_norm.weight", "norm.weight"]
    + [
        f"layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    ]
)

#: The whole configuration of D0 beside T0, field by field.
GOLDEN_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 310, "target_layer_ids": [0, 2, 4], "causal": False, "trained_max_length": 128},
    "dtype": "float32",
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 320,
}

#: As released checkpoints of the format look, with fields that say nothing about the mathematics.
RELEASED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 4,
    "bos_token_id": 1,
    "dflash_config": {"mask_token_id": 310, "target_layer_ids": [0, 2, 4]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 320,
}


def put(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(zlab_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def stored(**overrides: Any) -> StoredDrafter:
    config = zlab_config(**overrides)
    return StoredDrafter(zlab_spec(config, config["dtype"]), zlab_tensors(config))


def test_exported_keys_and_configuration_are_the_golden_ones(tmp_path: Path) -> None:
    """C91, C92."""
    folder = write_zlab(tmp_path / "out", stored(trained_max_length=128))
    assert sorted(load_file(folder / "model.safetensors")) == GOLDEN_KEYS
    assert json.loads((folder / "config.json").read_text()) == GOLDEN_CONFIG


def test_the_configuration_reads_back_as_the_same_drafter_in_every_variant() -> None:
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
    variants: list[dict[str, Any]] = [
        {},
        {"sample_from_anchor": True, "causal": True},
        sliding,
        {**sliding, "window_from": "anchor", "sliding_causal": False},
        {**sliding, "causal": True},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
        {"draft_vocab_size": 10, "target_hidden_size": 64},
        {"trained_max_length": 100},
    ]
    for variant in variants:
        spec = zlab_spec(zlab_config(**variant), "float32")
        again = written_config(spec, {"input_embedding_scale": 8.0, "target_name": "some/target"})
        assert zlab_spec(again, "float32") == spec
        assert again["dflash_config"]["input_embedding_scale"] == 8.0
    assert "is_causal" not in written_config(zlab_spec(zlab_config(**sliding), "float32"))
    assert written_config(zlab_spec(zlab_config(causal=True), "float32"))["is_causal"] is True


@pytest.mark.parametrize("config", [RELEASED, GOLDEN_CONFIG, zlab_config()])
def test_importing_and_exporting_again_changes_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    """C94: tensors bit-identical, configuration equal."""
    tensors = {k: v.to(getattr(torch, config["dtype"])) for k, v in zlab_tensors(config).items()}
    before = put(tmp_path / "in", config, tensors)
    after = write_zlab(tmp_path / "out", read_zlab(before))
    assert json.loads((after / "config.json").read_text()) == config
    found = load_file(after / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_a_reduced_vocabulary_travels_with_its_map_or_not_at_all(tmp_path: Path) -> None:
    """C30, C34, C91: d2t and t2d inside model.safetensors; without them an error, never ids 0..N-1."""
    drafter = stored(draft_vocab_size=10)
    with pytest.raises(ContractError, match="map is missing"):
        write_zlab(tmp_path / "none", drafter)
    drafter.vocabulary = torch.arange(5, 305, 30)
    folder = write_zlab(tmp_path / "out", drafter)
    kept = load_file(folder / "model.safetensors")
    assert sorted(kept) == sorted([*GOLDEN_KEYS, "d2t", "t2d"])
    assert kept["t2d"].nonzero()[:, 0].tolist() == drafter.vocabulary.tolist()
    back = read_zlab(folder)
    assert back.vocabulary is not None and torch.equal(back.vocabulary, drafter.vocabulary)
    del kept["d2t"]
    with pytest.raises(ContractError, match="no d2t/t2d map"):
        read_zlab(put(tmp_path / "lost", written_config(drafter.spec), kept))
    kept["d2t"] = torch.zeros(10, dtype=torch.long)
    with pytest.raises(ContractError, match="do not name the same tokens"):
        read_zlab(put(tmp_path / "other", written_config(drafter.spec), kept))


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    out = json.loads(json.dumps(config))
    for name in names:
        (out["dflash_config"] if name in out["dflash_config"] else out).pop(name)
    return out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without(GOLDEN_CONFIG, "target_layer_ids"), r"no dflash_config\.target_layer_ids: it is never derived"),
        (without(GOLDEN_CONFIG, "mask_token_id"), r"no dflash_config\.mask_token_id"),
        (without(GOLDEN_CONFIG, "block_size"), "no block_size"),
        (without(GOLDEN_CONFIG, "rope_theta", "rope_parameters"), "no rope_theta: it is never guessed"),
        (GOLDEN_CONFIG | {"rope_theta": 5.0}, "disagree"),
        (GOLDEN_CONFIG | {"atention_bias": True}, r"unknown field 'atention_bias' \(nearest: 'attention_"),
        (GOLDEN_CONFIG | {"attention_bias": True}, "attention_bias is True, the drafter computes False only"),
        (GOLDEN_CONFIG | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (GOLDEN_CONFIG | {"model_type": "llama"}, "model_type 'llama'"),
        (GOLDEN_CONFIG | {"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        (
            GOLDEN_CONFIG | {"dflash_config": {**GOLDEN_CONFIG["dflash_config"], "conv_kernel_size": 3}},
            r"unknown field 'dflash_config\.conv_kernel_size'",
        ),
        (
            GOLDEN_CONFIG | {"dflash_config": {**GOLDEN_CONFIG["dflash_config"], "target_layer_ids": [1, 3, 6]}},
            r"valid 0\.\.5",
        ),
        (GOLDEN_CONFIG | {"layer_types": ["sliding_attention", "full_attention"]}, "engines would ignore the window"),
        (GOLDEN_CONFIG | {"is_causal": True}, "is_causal is True but dflash_config says causal False"),
        (
            GOLDEN_CONFIG | {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
            "no rope of type 'yarn' is computed",
        ),
        (
            GOLDEN_CONFIG | {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope field 'partial_rotary_factor'",
        ),
    ],
)
def test_a_configuration_that_leaves_something_open_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    """C39 and its kind: a field that is missing, unknown, unsupported or contradictory."""
    with pytest.raises(ContractError, match=message):
        read_zlab(put(tmp_path / "bad", config, zlab_tensors(GOLDEN_CONFIG)))


def test_missing_extra_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    tensors = zlab_tensors(GOLDEN_CONFIG)
    cases = {
        "1 tensors are missing, first 'fc.weight'": {k: v for k, v in tensors.items() if k != "fc.weight"},
        "1 tensors are unknown, first 'lm_head.weight'": tensors | {"lm_head.weight": torch.zeros(320, 32)},
        r"'norm.weight' has shape \[33\].*asks for \[32\]": tensors | {"norm.weight": torch.zeros(33)},
        "vocabulary map": tensors | {"d2t": torch.zeros(10, dtype=torch.long)},
        "weights of dtype": tensors | {"norm.weight": torch.zeros(32, dtype=torch.bfloat16)},
    }
    for number, (message, changed) in enumerate(cases.items()):
        with pytest.raises(ContractError, match=message):
            read_zlab(put(tmp_path / str(number), GOLDEN_CONFIG, changed))


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOLDEN_CONFIG))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ContractError, match="pickled weights"):
        read_zlab(tmp_path)


def test_folders_that_are_no_drafter_say_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no drafter folder"):
        read_zlab(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_zlab(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ContractError, match="found a list"):
        read_zlab(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ContractError, match="not valid JSON"):
        read_zlab(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GOLDEN_CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ContractError, match="cannot be read as safetensors"):
        read_zlab(tmp_path)


def test_an_export_is_written_whole_and_never_over_something_else(tmp_path: Path) -> None:
    drafter = stored()
    folder = write_zlab(tmp_path / "out", drafter, card="card")
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    with pytest.raises(UsageError, match="exists and is not empty"):
        write_zlab(folder, drafter)
    write_zlab(folder, drafter, overwrite=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not overwritten"):
        write_zlab(other, drafter, overwrite=True)
    drafter.tensors.pop("fc.weight")
    with pytest.raises(ContractError, match="missing"):
        write_zlab(tmp_path / "broken", drafter)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]


@pytest.mark.parametrize(
    "target",
    [
        {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
)
def test_the_served_rope_is_the_trained_one_to_the_bit(tmp_path: Path, target: dict[str, Any]) -> None:
    """C20: cos and sin of the drafter read back from disk equal training's; no field of the target's own remains."""
    drafter = stored()
    drafter.spec = replace(drafter.spec, rope=drafter_rope(target))
    folder = write_zlab(tmp_path / "out", drafter)
    assert "mrope" not in (folder / "config.json").read_text() and "partial" not in (folder / "config.json").read_text()
    positions = torch.arange(0, 500)
    cos, sin = rope_table(positions, drafter.spec, torch.float32)
    served_cos, served_sin = ServedDrafter.from_folder(folder).rope(torch.zeros(1), positions[None])
    half = drafter.spec.head_dim // 2
    assert torch.equal(served_cos[0, :, :half], cos[:, 0]) and torch.equal(served_sin[0, :, :half], sin[:, 0])


def leaves(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field of a configuration, nested ones too."""
    found = []
    for name, value in config.items():
        found.append((*path, name))
        if isinstance(value, dict):
            found += leaves(value, (*path, name))
    return found


ODD: list[Any] = [None, "x", "4", -1, 0, 1.5, True, [], [None], ["x"], {}, {"x": 1}, float("nan"), float("inf"), 10**6]


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_any_odd_value_in_any_field_is_refused_or_understood_but_never_breaks(layout: str) -> None:
    """What a person edits by hand: each field of both layouts with each odd value gives a spec or a ForebayError."""
    from test_formats_speculators import GOLDEN_CONFIG as SPECULATORS

    from forebay.io.formats.speculators import speculators_spec, verifier_of

    golden, read = (GOLDEN_CONFIG, zlab_spec) if layout == "zlab" else (SPECULATORS, speculators_spec)
    refused = 0
    for path in leaves(golden):
        for odd in ODD:
            config = json.loads(json.dumps(golden))
            place = config
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = odd
            try:
                assert isinstance(read(config, "float32"), DrafterSpec)
                verifier_of(config)
            except ForebayError:
                refused += 1
    assert refused > 200
