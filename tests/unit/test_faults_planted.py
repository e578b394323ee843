"""Planted faults strike where and as often as they say; states spoilt by one never pass the reader's check."""

import errno
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forebay import config
from forebay.config import Fault
from forebay.errors import ConfigError, TargetError
from forebay.io import checkpoint
from forebay.io.checkpoint import Checkpoints, Snapshot
from forebay.models.checks import check_states
from forebay.observe import metrics
from forebay.observe.metrics import MetricsLog
from forebay.runtime.faults import OF_STATES, Faults, Moment, PlantedError, strikes, struck

WIDTH = 8


def batch(job, lengths=(12, 20)):
    """A host batch's part that the target and the reader see."""
    tokens = np.random.default_rng(job).integers(0, 300, sum(lengths)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return SimpleNamespace(job=SimpleNamespace(epoch=0, id=job, splits=lengths), tokens=tokens, doc_offsets=offsets)


def states(host, features, last=None):
    """Stands for a target: states that depend on the tokens."""
    n = len(host.tokens)
    features[:n] = torch.from_numpy(np.random.default_rng(int(host.tokens[0])).normal(size=(n, WIDTH)))
    return host.tokens.copy()


def planted(tmp_path, *faults, step=0):
    return Faults([Fault(**fault) for fault in faults], tmp_path, lambda: step)


@pytest.mark.parametrize(
    ("fault", "moment", "times_struck", "expected"),
    [
        ({"kind": "raise"}, {}, 0, True),
        ({"kind": "raise"}, {}, 1, False),
        ({"kind": "raise", "times": 3}, {}, 2, True),
        ({"kind": "raise", "times": -1}, {}, 99, True),
        ({"kind": "raise", "times": 0}, {}, 0, False),
        ({"kind": "raise", "where": "train"}, {}, 0, False),
        ({"kind": "raise", "step": 3}, {"step": 2}, 0, False),
        ({"kind": "raise", "step": 3}, {"step": 3}, 0, True),
        ({"kind": "raise", "job": 4}, {"job": 4, "epoch": 1}, 0, True),
        ({"kind": "raise", "job": 4, "epoch": 0}, {"job": 4, "epoch": 1}, 0, False),
        ({"kind": "raise", "worker": 1}, {"worker": 0}, 0, False),
        ({"kind": "disk_full", "file": "DONE"}, {"where": "checkpoint", "file": "state.json"}, 0, False),
        ({"kind": "disk_full"}, {"where": "checkpoint", "file": "state.json"}, 0, True),
    ],
)
def test_a_fault_strikes_where_and_as_often_as_it_says(fault, moment, times_struck, expected):
    assert strikes(Fault(**fault), Moment(**{"where": "extract", "step": 0, **moment}), times_struck) is expected


def test_a_fault_counts_over_all_lives_of_a_run(tmp_path):
    """Otherwise a run killed by its fault is killed by it again after every resume."""
    fault = {"kind": "raise", "times": 2}
    for _ in range(2):
        with pytest.raises(PlantedError):
            planted(tmp_path, fault).at("extract", job=1)
    planted(tmp_path, fault).at("extract", job=1)
    assert [(line["kind"], line["job"]) for line in struck(tmp_path)] == [("raise", 1)] * 2


def test_a_run_without_faults_has_no_hooks_and_writes_nothing(tmp_path):
    none = planted(tmp_path)
    assert not none
    none.at("train")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", "not finite"),
        ("zeros", "all states equal 0"),
        ("short", "31 states came back for 32 tokens"),
        ("swap", "the states belong to other tokens"),
        ("repeat", "a copy of the item before"),
    ],
)
def test_spoilt_states_are_refused_by_name(tmp_path, kind, message):
    """C50 to C56: what a target may give in place of a job's states."""
    capture = planted(tmp_path, {"kind": kind, "job": 2}).capture(states, 0)
    features, previous = torch.zeros(64, WIDTH), None
    for job in (1, 2):
        host = batch(job)
        echo = capture(host, features)
        if job == 1:
            previous = check_states(host, features, echo, width=WIDTH)
    with pytest.raises(TargetError, match=rf"job 2.*{message}"):
        check_states(host, features, echo, width=WIDTH, previous=previous, name="job 2")
    assert len(struck(tmp_path)) == 1


@pytest.mark.parametrize("kind", ["swap", "repeat"])
def test_what_needs_another_jobs_states_waits_until_there_are_some(tmp_path, kind):
    capture = planted(tmp_path, {"kind": kind}).capture(states, 0)
    features = torch.zeros(64, WIDTH)
    check_states(batch(1), features, capture(batch(1), features), width=WIDTH)
    assert struck(tmp_path) == []


def test_every_kind_of_states_is_covered_by_the_test_above():
    assert {"nan", "zeros", "short", "swap", "repeat"} == OF_STATES


def test_a_full_disk_is_the_error_that_the_system_gives(tmp_path):
    with pytest.raises(OSError, match="No space left") as error:
        planted(tmp_path, {"kind": "disk_full", "step": 4}).at("checkpoint", step=4, file="DONE")
    assert error.value.errno == errno.ENOSPC


def test_a_shard_is_cut_in_a_copy_and_never_in_the_users_store(tmp_path):
    store = tmp_path / "store"
    for part in ("train", "heldout"):
        (store / part).mkdir(parents=True)
        for name in ("manifest.json", "00000.tokens", "00001.tokens"):
            (store / part / name).write_bytes(b"12345678")
    run = config.from_dict({"run_dir": "r", "target": {"model": "m"}, "data": {"store": str(store)}})
    faults = planted(tmp_path / "run", {"kind": "truncate_shard", "job": 3})
    copy = faults.store(run).data.store
    faults.at("prefetch", epoch=0, job=2)
    assert os.path.getsize(f"{copy}/train/00000.tokens") == 8
    faults.at("prefetch", epoch=0, job=3)
    assert os.path.getsize(f"{copy}/train/00000.tokens") == 4
    assert {file.stat().st_size for file in store.glob("*/*")} == {8}
    assert planted(tmp_path, {"kind": "raise"}).store(run) is run


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "zeros", "where": "train"}, "a fault of kind 'zeros' strikes in extract, not in train"),
        ({"kind": "disk_full", "where": "extract"}, "strikes in checkpoint, not in extract"),
        ({"kind": "fire"}, "faults.0.kind"),
        ({"kind": "hang", "times": -2}, "greater than or equal to -1"),
    ],
)
def test_a_fault_that_cannot_strike_is_refused(fault, message):
    with pytest.raises(ConfigError, match=message):
        config.from_dict({"run_dir": "r", "target": {"model": "m"}, "data": {"store": "s"}, "faults": [fault]})


def test_a_checkpoint_in_the_background_is_of_its_step_boundary_whatever_training_does_meanwhile(tmp_path):
    """What the writer thread writes later is what was handed over: texts at once, tensors as the snapshot's own."""
    go_on, evals = threading.Event(), [{"accept_length": 2.0}]
    saves = Checkpoints(tmp_path, before_file=lambda name: go_on.wait(20))
    state = {"step": 1, "evals": evals, "flow": {"epochs": [{"attempts": {}}]}}
    saves.save(Snapshot(1, {"w": torch.ones(2)}, {}, state, {"mask_token_id": 3}))
    assert saves.writing == 1
    evals.append({"accept_length": 3.0})
    state["flow"]["epochs"][0]["attempts"]["7"] = 1
    go_on.set()
    saves.finish()
    found = checkpoint.load(saves.latest())
    assert found.state == {"step": 1, "evals": [{"accept_length": 2.0}], "flow": {"epochs": [{"attempts": {}}]}}
    assert saves.writing is None


def test_a_kill_between_the_marker_and_best_json_loses_no_best(tmp_path):
    """The best is found from the checkpoints' own markers; `best.json` is for readers."""
    saves = Checkpoints(tmp_path, keep_last=1, background=False)
    saves.save(Snapshot(1, {"w": torch.ones(2)}, {}, {"step": 1}, {}), 3.5)
    (tmp_path / "best.json").unlink()
    again = Checkpoints(tmp_path, keep_last=1, background=False)
    again.latest()
    assert again.best == (1, 3.5)
    for step in (2, 3):
        again.save(Snapshot(step, {"w": torch.ones(2)}, {}, {"step": step}, {}), 3.0)
    assert [path.name[-1] for path in again.whole()] == ["1", "3"]


def test_metrics_are_cut_to_the_checkpoint_and_what_is_cut_is_kept_elsewhere(tmp_path):
    """No step is in the history of the weights twice; half a line from a kill is dropped."""
    file = tmp_path / "metrics.jsonl"
    log = MetricsLog(file)
    log.write("step", 1, {"loss": 2.0})
    size = log.size
    log.write("step", 2, {"loss": 1.0})
    log.close()
    with open(file, "a") as cut:
        cut.write('{"kind": "st')
    log = MetricsLog(file, size=size)
    log.write("step", 2, {"loss": 1.5})
    log.close()
    assert [(line["step"], line["loss"]) for line in metrics.read(file)] == [(1, 2.0), (2, 1.5)]
    assert [(line["step"], line["loss"]) for line in metrics.read(tmp_path / "metrics-cut.jsonl")] == [(2, 1.0)]
