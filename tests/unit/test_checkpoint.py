"""Checkpoints are whole or ignored; the best is kept by accept length; nothing is unpickled."""

import json

import pytest
import torch

from forebay.errors import ContractError, ForebayError
from forebay.io import checkpoint
from forebay.io.checkpoint import Checkpoints, Snapshot


def snapshot(step, value=1.0):
    return Snapshot(
        step=step,
        drafter={"fc.weight": torch.full((2, 2), value)},
        optimizer={"exp_avg.fc.weight": torch.zeros(2, 2)},
        state={"step": step},
        contract={"mask_token_id": 3, "layer_ids": [1, 2]},
    )


class Killed(BaseException):
    """Stands for a kill -9: nothing after it is cleaned up by the code under test's OSError handling."""


@pytest.mark.parametrize("file", ["drafter.safetensors", "optimizer.safetensors", "state.json", "rename", "DONE"])
def test_a_kill_at_any_file_leaves_the_previous_checkpoint_and_says_so(tmp_path, file):
    """C84, F18."""
    said = []
    Checkpoints(tmp_path, background=False).save(snapshot(1))

    def die(name):
        if name == file:
            raise Killed

    with pytest.raises(Killed):
        Checkpoints(tmp_path, background=False, before_file=die).save(snapshot(2))
    found = Checkpoints(tmp_path, report=said.append).latest()
    assert checkpoint.load(found).step == 1
    assert any("ignoring the unfinished checkpoint" in line for line in said)
    Checkpoints(tmp_path, background=False).save(snapshot(2))
    assert checkpoint.load(Checkpoints(tmp_path).latest()).step == 2


def test_keep_last_two_and_the_best_by_accept_length_though_later_ones_come(tmp_path):
    """C100."""
    saves = Checkpoints(tmp_path, keep_last=2, background=False)
    for step, accept in enumerate([3.28, 3.34, 3.36, 3.24, 3.18, 3.0], start=1):
        saves.save(snapshot(step), accept)
    assert [p.name[-1] for p in saves.whole()] == ["3", "5", "6"]
    assert saves.best == (3, 3.36)
    again = Checkpoints(tmp_path)
    again.latest()
    assert again.best == (3, 3.36)


def test_a_full_disk_says_so_and_keeps_the_previous(tmp_path):
    Checkpoints(tmp_path, background=False).save(snapshot(1))

    def full(name):
        if name == "optimizer.safetensors":
            raise OSError(28, "No space left on device")

    with pytest.raises(ForebayError, match="disk full"):
        Checkpoints(tmp_path, background=False, before_file=full).save(snapshot(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_the_error_of_a_background_save_is_raised_at_the_next(tmp_path):
    def full(name):
        raise OSError(28, "No space left on device")

    saves = Checkpoints(tmp_path, before_file=full)
    saves.save(snapshot(1))
    with pytest.raises(ForebayError, match="disk full"):
        saves.finish()


def test_the_snapshot_is_written_as_it_was_when_taken(tmp_path):
    saves = Checkpoints(tmp_path)
    saves.save(snapshot(1, value=7.0))
    saves.finish()
    assert checkpoint.load(saves.latest()).drafter["fc.weight"].tolist() == [[7.0, 7.0], [7.0, 7.0]]


def test_every_differing_field_of_the_contract_is_listed():
    """C82."""
    saved = {"mask_token_id": 3, "layer_ids": [1, 2], "data": "x"}
    with pytest.raises(ContractError) as error:
        checkpoint.check_contract(saved, {"mask_token_id": 4, "layer_ids": [1, 3], "data": "y"}, frozenset({"data"}))
    assert "mask_token_id: saved 3, now 4" in str(error.value) and "layer_ids: saved [1, 2], now [1, 3]" in str(
        error.value
    )
    assert "data:" not in str(error.value)
    checkpoint.check_contract(saved, json.loads(json.dumps(saved)))


def test_pickled_files_are_never_loaded(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(ForebayError, match=r"pickled files \(model.pt\), which are never loaded"):
        checkpoint.load(tmp_path)


def test_a_damaged_checkpoint_is_named(tmp_path):
    saves = Checkpoints(tmp_path, background=False)
    saves.save(snapshot(1))
    file = saves.latest() / "drafter.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ForebayError, match="damaged"):
        checkpoint.load(saves.latest())
