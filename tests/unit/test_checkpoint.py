"""Checkpoints are whole or ignored; the best is kept by accept length; nothing is unpickled."""

import json
import re
import shlex
import subprocess
from pathlib import Path

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


def cut(file):
    file.write_bytes(file.read_bytes()[:-3])


@pytest.mark.parametrize("damage", [cut, Path.unlink, lambda file: file.write_bytes(b"")], ids=["cut", "gone", "empty"])
@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "state.json", "contract.json"])
def test_a_damaged_checkpoint_names_the_newest_sound_one_and_the_command_that_goes_on(tmp_path, name, damage):
    saves = Checkpoints(tmp_path / "my run" / "checkpoints", background=False, keep_last=9)
    for step in (1, 2, 3, 4):
        saves.save(snapshot(step))
    newest, before = saves.whole()[:1:-1]
    damage(newest / name)
    with pytest.raises(ForebayError, match=r"00004 is damaged .*: the newest sound one is step-00000003"):
        checkpoint.load(newest)
    damage(before / name)
    with pytest.raises(ForebayError) as error:
        checkpoint.load(newest)
    assert "the newest sound one is step-00000002" in str(error.value) and "--step 2" in str(error.value)
    remove, resume = re.search(r"\n  (rm -r .*) && (forebay train --resume .*)\n", str(error.value)).groups()
    assert shlex.split(resume)[3:] == [str(tmp_path / "my run")]
    subprocess.run(remove, shell=True, check=True)
    assert checkpoint.load(saves.latest()).step == 2
    for path in saves.whole():
        damage(path / name)
    with pytest.raises(ForebayError, match="no other checkpoint of the run is sound; start it from the beginning"):
        checkpoint.load(saves.latest())


def test_a_marker_that_was_not_written_whole_marks_nothing(tmp_path):
    said = []
    saves = Checkpoints(tmp_path, background=False, report=said.append)
    saves.save(snapshot(1), 1.5)
    saves.save(snapshot(2), 1.6)
    (tmp_path / "step-00000002" / "DONE").write_bytes(b"")
    assert saves.latest().name == "step-00000001" and saves.best == (1, 1.5)
    assert said[-1] == "ignoring the unfinished checkpoint step-00000002"
