"""`forebay check`: the contract field by field, and the bad input of every kind refused with both sides named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_decode_serve import TINY, prompts
from transformers import GraniteConfig, GraniteForCausalLM

from drafters import zlab_config, zlab_tensors
from forebay.decode.check import check_contract, check_drafter
from forebay.errors import ContractError
from forebay.io.formats import StoredDrafter, write_drafter
from forebay.io.formats.zlab import zlab_spec
from forebay.models.facts import weights_fingerprint
from tiny import tiny_target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size: drafter 64, target 32; target_hidden_size: drafter 64, target 32"),
        ({"vocab_size": 300}, r"vocab_size: drafter 300, target 320 \(rows of the target's head\)"),
        ({"num_target_layers": 8}, "num_target_layers: drafter 8, target 6"),
        ({"target_layer_ids": [0, 2, 6]}, r"target_layer_ids: drafter \[0, 2, 6\], target 0\.\.5"),
        ({"mask_token_id": 320}, "mask_token_id: drafter 320, target 320 embedding rows"),
        ({"mask_token_id": 1}, r"mask_token_id is no end of text: drafter 1, target \[1, 2\]"),
    ],
)
def test_a_drafter_for_another_target_is_refused_naming_both_sides(
    changes: dict[str, Any], message: str, monkeypatch: Any
) -> None:
    model = tiny_target()

    def no_forward(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor was multiplied")

    monkeypatch.setattr(model, "forward", no_forward)
    with pytest.raises(ContractError, match=f"does not belong to T0: .*{message}"):
        check_contract(zlab_config(**changes), model, "T0")


def test_another_target_of_the_same_shape_is_told_by_its_weights() -> None:
    model, other = tiny_target(seed=0), tiny_target(seed=1)
    config = zlab_config()
    config["dflash_config"] |= {"target_fingerprint": weights_fingerprint(model), "target_name": "T0"}
    assert all(t.ok for t in check_contract(config, model))
    with pytest.raises(ContractError, match=r"target_fingerprint.*trained with T0"):
        check_contract(config, other)


def test_an_embedding_scale_that_the_drafter_does_not_know_is_refused() -> None:
    model = GraniteForCausalLM(GraniteConfig(**TINY, embedding_multiplier=12.0)).eval()
    config = zlab_config(target_layer_ids=[0, 1, 2], num_target_layers=4)
    with pytest.raises(ContractError, match=r"input_embedding_scale: drafter 1\.0, target 12"):
        check_contract(config, model)
    config["dflash_config"]["input_embedding_scale"] = 12.0
    assert check_contract(config, model)


@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_the_whole_check_reports_contract_loop_and_peers(tmp_path: Path, format: str) -> None:
    config = zlab_config(trained_max_length=6)
    drafter = StoredDrafter(zlab_spec(config, "float32"), zlab_tensors(config))
    folder = write_drafter(tmp_path / "drafter", drafter, format, target="some/target")
    report = check_drafter(folder, tiny_target(), prompts(3), max_new_tokens=8)
    assert report["ok"] is True and report["identical_to_target"] is True
    assert report["trained_max_length"] == 6 and report["notes"][0].endswith("was trained on at most 6")
    assert {"field", "drafter", "target", "ok", "note"} == set(report["contract"][0])
    assert report["prompts"] == 3 and report["accept_length"] >= 1.0
    assert '"num_speculative_tokens": 3' in report["engines"]["vllm"]
    for name in ("dflash", "speculators"):  # not installed beside Forebay: they pin another transformers
        assert "skipped" in report["peers"][name] or report["peers"][name]["identical"]
