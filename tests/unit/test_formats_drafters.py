"""Finding a drafter behind a path, exporting it from a checkpoint, importing another trainer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_formats_speculators import GOLDEN_CONFIG as SPECULATORS
from test_formats_speculators import put

from drafters import zlab_config, zlab_tensors
from forebay import api
from forebay.errors import ContractError, UsageError
from forebay.io.checkpoint import Checkpoints, Snapshot
from forebay.io.drafters import export_drafter, find_drafter, import_drafter
from forebay.io.formats import read_drafter
from forebay.io.formats.zlab import zlab_spec
from forebay.models.vocabulary import map_tensors
from tiny import tiny_target

CONTRACT = {
    "target.name": "T0",
    "target.weights": "0123456789abcdef",
    "target.architecture": "Qwen3ForCausalLM",
    "data": "fedc",
}


def run_with(folder: Path, lengths: dict[int, float | None], **overrides: Any) -> Path:
    """A run folder with a checkpoint at each step, of that accept length."""
    config = zlab_config(**overrides)
    spec = zlab_spec(config, "bfloat16")
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=9, background=False)
    for step, length in lengths.items():
        tensors = zlab_tensors(config, seed=step)
        if spec.draft_vocab_size is not None:
            tensors |= map_tensors(torch.arange(5, 305, 30), spec.vocab_size)
        evals = [{"step": step, "accept_length": length, "acceptance_by_position": [0.5, 0.2, 0.1]}]
        state = {"step": step, "spec": spec.to_dict(), "evals": evals if length is not None else []}
        checkpoints.save(Snapshot(step, tensors, {}, state, CONTRACT), length)
    return folder


def test_the_best_checkpoint_is_exported_unless_another_is_asked_for(tmp_path: Path) -> None:
    """C100: the best by accept length, not the last."""
    run = run_with(tmp_path / "run", {10: 1.4, 20: 1.9, 30: 1.7})
    folder = export_drafter(run, tmp_path / "best")
    first = load_file(folder / "model.safetensors")["fc.weight"]
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, zlab_tensors(zlab_config(), seed=20)["fc.weight"].bfloat16())
    card = (folder / "README.md").read_text()
    assert "1.900" in card and "optimizer steps: 20" in card and "T0" in card and "fedc" in card
    dflash = json.loads((folder / "config.json").read_text())["dflash_config"]
    assert (dflash["target_name"], dflash["target_fingerprint"]) == ("T0", "0123456789abcdef")
    assert find_drafter(run, step="last").about["accept_length"] == 1.7
    assert find_drafter(run, step="10").about["accept_length"] == 1.4
    assert find_drafter(run / "checkpoints" / "step-00000010").about["steps"] == 10
    with pytest.raises(UsageError, match="no checkpoint at step '11': there are 10, 20, 30"):
        find_drafter(run, step="11")


def test_an_unmeasured_run_gives_its_last_checkpoint(tmp_path: Path) -> None:
    found = find_drafter(run_with(tmp_path / "run", {10: None, 20: None}))
    assert found.about["steps"] == 20 and "accept_length" not in found.about


def test_a_reduced_vocabulary_is_exported_with_its_rows_of_the_head(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", {10: 1.5}, draft_vocab_size=10)
    head = torch.randn(320, 32)
    folder = export_drafter(run, tmp_path / "out", format="speculators", head=head, target="some/target")
    back = read_drafter(folder)
    assert back.head is not None and torch.equal(back.head, head[5:305:30].bfloat16())
    with pytest.raises(ContractError, match=r"head is \[7, 32\], the drafter expects \[320, 32\]"):
        export_drafter(run, tmp_path / "other", head=torch.zeros(7, 32))


def test_importing_a_speculators_drafter_gives_a_zlab_one_with_the_same_tensors(tmp_path: Path) -> None:
    theirs = {k: v for k, v in SPECULATORS.items() if k != "num_target_layers"}
    tensors = zlab_tensors(zlab_config())
    source = put(tmp_path / "in", theirs, tensors)
    with pytest.raises(ContractError, match="how many layers"):
        import_drafter(source, tmp_path / "out")
    folder = import_drafter(source, tmp_path / "out", num_target_layers=6)
    back = read_drafter(folder)
    assert back.format == "zlab" and back.spec.target_layer_ids == (0, 2, 4)
    assert all(torch.equal(back.tensors[k], v) for k, v in tensors.items())
    assert find_drafter(folder).drafter.spec == back.spec


def positions_of(folder: Path) -> tuple[int, int]:
    """(positions, trained length) as an export's config.json says them."""
    config = json.loads((folder / "config.json").read_text())
    if "transformer_layer_config" in config:
        return config["transformer_layer_config"]["max_position_embeddings"], config["trained_max_length"]
    return config["max_position_embeddings"], config["dflash_config"]["trained_max_length"]


@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_every_export_reaches_as_far_as_its_target_and_keeps_its_trained_length(tmp_path: Path, format: str) -> None:
    """C24: the trained length is a field of its own, because engines draft nothing beyond max_position_embeddings."""
    run = run_with(tmp_path / "run", {10: 1.5}, trained_max_length=37, max_position_embeddings=512)
    assert positions_of(export_drafter(run, tmp_path / "out", format=format)) == (512, 37)
    assert "trained_max_length: 37 tokens" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("format", ["zlab", "speculators"])
def test_an_older_export_of_ours_is_known_and_written_again_with_its_targets_positions(
    tmp_path: Path, format: str
) -> None:
    """They gave the trained length, 37 tokens, as max_position_embeddings."""
    if format == "zlab":
        config = zlab_config(max_position_embeddings=37, target_fingerprint="0123456789abcdef")
    else:
        config = {k: v for k, v in SPECULATORS.items() if k != "trained_max_length"}
        config["transformer_layer_config"] = {**config["transformer_layer_config"], "max_position_embeddings": 37}
    old = put(tmp_path / "old", config, zlab_tensors(zlab_config()))
    assert (read_drafter(old).spec.trained_max_length, read_drafter(old).spec.max_positions) == (37, 0)
    target = tmp_path / "target"
    tiny_target().config.save_pretrained(target)
    assert positions_of(Path(api.import_drafter(old, tmp_path / "new", target=target))) == (512, 37)
    assert positions_of(Path(api.export(old, tmp_path / "out", format=format, target=target))) == (512, 37)
    with pytest.raises(UsageError, match=r"at most 37 tokens, but not how many positions.*--target DIR"):
        export_drafter(old, tmp_path / "never", format=format)
    assert not (tmp_path / "never").exists()


def test_a_drafter_of_another_trainer_is_lifted_to_its_targets_positions(tmp_path: Path) -> None:
    theirs = put(tmp_path / "in", zlab_config(max_position_embeddings=128), zlab_tensors(zlab_config()))
    folder = import_drafter(theirs, tmp_path / "out", max_positions=512)
    assert read_drafter(folder).spec.max_positions == 512 and read_drafter(folder).spec.trained_max_length == 0


def test_a_path_without_a_drafter_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no exported drafter, no checkpoint and no run"):
        find_drafter(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="no finished checkpoint"):
        find_drafter(tmp_path)
