"""The speculators layout: golden keys and configuration, its own conventions translated, strict both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_formats_zlab import GOLDEN_KEYS

from drafters import zlab_config, zlab_tensors
from forebay.errors import ContractError, UsageError
from forebay.io.formats import StoredDrafter, format_of, read_drafter, write_drafter
from forebay.io.formats.speculators import read_speculators, speculators_config, speculators_spec, write_speculators
from forebay.io.formats.zlab import zlab_spec

GOLDEN_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "aux_hidden_state_layer_ids": [1, 3, 5],
    "block_size": 4,
    "draft_vocab_size": 320,
    "dtype": "float32",
    "mask_token_id": 310,
    "num_target_layers": 6,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "some/target"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "trained_max_length": 128,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 512,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 320,
    },
}

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}


def stored(**overrides: Any) -> StoredDrafter:
    config = zlab_config(**overrides)
    return StoredDrafter(zlab_spec(config, config["dtype"]), zlab_tensors(config))


def put(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_exported_keys_and_configuration_are_the_golden_ones(tmp_path: Path) -> None:
    """C91, C92 for this layout: ids one higher, vLLM's number of tokens, embedding and head left to the target."""
    drafter = stored(trained_max_length=128)
    folder = write_speculators(
        tmp_path / "out", drafter, verifier="some/target", verifier_architecture="Qwen3ForCausalLM"
    )
    assert json.loads((folder / "config.json").read_text()) == GOLDEN_CONFIG
    assert sorted(load_file(folder / "model.safetensors")) == GOLDEN_KEYS


def test_the_configuration_reads_back_as_the_same_drafter_in_every_variant() -> None:
    for variant in (
        {},
        {"sample_from_anchor": True},
        SLIDING,
        {**SLIDING, "window_from": "anchor", "sliding_causal": False},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True},
        {"draft_vocab_size": 10},
        {"trained_max_length": 100},
    ):
        spec = zlab_spec(zlab_config(**variant), "float32")
        config = speculators_config(spec, verifier="t", verifier_architecture=None)
        assert speculators_spec(config, "float32") == spec
        drafted = 4 if spec.sample_from_anchor else 3
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == drafted


def test_importing_and_exporting_again_changes_nothing(tmp_path: Path) -> None:
    """A checkpoint as the package saves it: with copies of the target's weights and fields of its own."""
    config = GOLDEN_CONFIG | {"transformers_version": "5.15.0", "auto_map": {"": "config.DFlashSpeculatorConfig"}}
    del config["num_target_layers"]
    tensors = zlab_tensors(zlab_config())
    copies = {"embed_tokens.weight": torch.zeros(320, 32), "lm_head.weight": torch.zeros(320, 32)}
    folder = put(tmp_path / "in", config, tensors | copies)
    with pytest.raises(ContractError, match="how many layers its target has"):
        read_speculators(folder)
    read = read_speculators(folder, num_target_layers=6)
    again = write_speculators(tmp_path / "out", read)
    assert json.loads((again / "config.json").read_text()) == config
    found = load_file(again / "model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[k], v) for k, v in tensors.items())


def test_both_layouts_carry_the_same_drafter(tmp_path: Path) -> None:
    drafter = stored(**SLIDING)
    one = read_drafter(write_drafter(tmp_path / "a", drafter, "speculators", target="some/target"))
    two = read_drafter(write_drafter(tmp_path / "b", one, "zlab"))
    assert one.format == "speculators" and two.format == "zlab" and format_of(tmp_path / "a") == "speculators"
    assert one.spec == two.spec == drafter.spec
    assert all(torch.equal(two.tensors[k], v) for k, v in drafter.tensors.items())
    with pytest.raises(UsageError, match="unknown format 'gguf'"):
        write_drafter(tmp_path / "c", drafter, "gguf")


def test_a_reduced_vocabulary_needs_its_map_and_its_rows_of_the_head(tmp_path: Path) -> None:
    drafter = stored(draft_vocab_size=10)
    drafter.vocabulary = torch.arange(5, 305, 30)
    with pytest.raises(ContractError, match="rows of the target's head"):
        write_speculators(tmp_path / "a", drafter)
    drafter.head = torch.randn(10, 32)
    back = read_speculators(write_speculators(tmp_path / "b", drafter))
    assert back.vocabulary is not None and torch.equal(back.vocabulary, drafter.vocabulary)
    assert back.head is not None and torch.equal(back.head, drafter.head)


def test_what_the_layout_cannot_say_is_refused_not_dropped(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="no causal full-attention layers"):
        write_speculators(tmp_path / "a", stored(causal=True))
    with pytest.raises(ContractError, match="scales its embedding by 12"):
        write_speculators(tmp_path / "b", stored(), extras={"input_embedding_scale": 12.0})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aux_hidden_state_layer_ids": None}, "no aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "includes 0, the embedding"),
        ({"aux_hidden_state_layer_ids": [1, 3, 9]}, r"valid 0\.\.5"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"speculators_model_type": "eagle3"}, "'eagle3', this reads dflash"),
        ({"markov_rank": 8}, "unknown field 'markov_rank'"),
        ({"sample_from_anchor": True}, "speculative_tokens 3 but block_size 4"),
        ({"draft_vocab_size": 100}, "no d2t/t2d map"),
    ],
)
def test_a_configuration_that_leaves_something_open_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        read_speculators(put(tmp_path / "bad", GOLDEN_CONFIG | change, zlab_tensors(zlab_config())))


def test_the_card_tells_each_engine_its_number_of_tokens(tmp_path: Path) -> None:
    """C93: vLLM block_size - 1, SGLang block_size; with sample_from_anchor vLLM block_size."""
    about = {
        "accept_length": 2.345,
        "acceptance_by_position": [0.7, 0.4, 0.245],
        "data": "3,000 chats",
        "eval_prompts": 64,
    }
    folder = write_drafter(tmp_path / "a", stored(trained_max_length=128), target="some/target", about=about)
    card = (folder / "README.md").read_text()
    assert '"num_speculative_tokens": 3' in card and "--speculative-num-draft-tokens 4" in card
    assert "trained_max_length: 128 tokens" in card
    for part in ("some/target", "2.345 on 64 held-out prompts", "3,000 chats", "[0, 2, 4]", "id 310", "forebay check"):
        assert part in card
    other = write_drafter(tmp_path / "b", stored(sample_from_anchor=True), "speculators", target="some/target")
    card = (other / "README.md").read_text()
    assert '"num_speculative_tokens": 4' in card and "sglang" not in card
    assert "not measured" in card and "[1, 3, 5]" in card and "trained_max_length: not recorded" in card
