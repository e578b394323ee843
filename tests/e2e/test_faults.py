"""Faults planted in real runs on a tiny target: each run ends complete, or with one cause and a way to go on."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from test_training import equal, masters, trained_rows

from forebay import api, cli, config
from forebay.errors import ForebayError, PoisonError
from forebay.flow.plan import EpochPlan
from forebay.io.checkpoint import Checkpoints
from forebay.observe import metrics
from forebay.runtime import faults
from forebay.runtime import run as runs
from forebay.runtime.local import LocalRuntime

SMALL = {"bytes": "1800 KiB", "draw": "planned"}  # eight items: extraction keeps close to training


def whole(run_dir, epochs):
    rows = EpochPlan.load(Path(run_dir, "plans", "epoch-000.plan")).describe()["sequences"]
    return trained_rows(run_dir) == {(epoch, row): 1 for epoch in range(epochs) for row in range(rows)}


def steps(run_dir):
    return [line["step"] for line in metrics.read(Path(run_dir, "metrics.jsonl"), "step")]


def handles():
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm")


def test_wrong_states_of_every_kind_are_refused_tried_again_and_nothing_is_lost_or_left(configuration):
    """C50 to C56 in a run; the slots come back, and no thread or file stays."""
    kinds = ("raise", "nan", "zeros", "swap", "repeat", "short")
    planted = [{"kind": kind, "job": number + 2, "epoch": 0} for number, kind in enumerate(kinds)]
    run = configuration(faults=planted, optim={"epochs": 1})
    before = handles()
    one = LocalRuntime(run, quiet=True)
    summary = one.train()
    assert summary["finished"] and summary["jobs_quarantined"] == 0 and whole(run.run_dir, 1)
    assert [line["kind"] for line in faults.struck(run.run_dir)] == list(kinds)
    for number, said in enumerate(
        ("planted error", "not finite", "equal 0", "swapped|came back for", "copy of the item before", "came back for")
    ):
        assert any(re.search(f"job {number + 2} attempt 0.*({said})", line) for line in summary["failures"])
    assert one.pool.made == one.pool.free and summary["peak_bytes"] <= run.buffer.bytes
    del one
    assert handles() == before


def test_a_hung_target_loses_its_job_to_another_and_its_late_answer_is_refused(configuration):
    """F24 with a real hang: the slot of the hung attempt is accounted for, and given back with the late answer."""
    hang = {"kind": "hang", "job": 4, "epoch": 0, "seconds": 2.5}
    run = configuration(faults=[hang], runtime={"targets": ["cpu", "cpu"], "lease_s": 1.0})
    one = LocalRuntime(run, quiet=True)
    summary = one.train()
    assert summary["finished"] and whole(run.run_dir, 2)
    counters = one.run.coordinator.counters
    assert counters["expired"] >= 1 and counters["stale_puts"] >= 1 and one.run.coordinator.hung == []
    assert one.pool.made == one.pool.free and one.run.coordinator.admission.charged == 0
    assert any("silent past its lease" in line for line in summary["failures"])


def test_a_stop_by_signal_in_every_phase_goes_on_to_the_same_weights_also_elsewhere(configuration, world, tmp_path):
    """C78: SIGTERM while preparing, extracting, training, writing a checkpoint and evaluating; then another machine."""
    straight = configuration("straight", buffer=SMALL)
    api.train(straight, quiet=True)
    run = configuration(buffer=SMALL)
    places = [
        {"where": "prefetch", "epoch": 0, "job": 8},
        {"where": "extract", "epoch": 0, "job": 14},
        {"where": "eval"},
        {"where": "train", "step": 6},
        {"where": "checkpoint", "step": 8, "file": "rename"},
    ]
    at, every = [], {**run.model_dump(), "checkpoint": {"every_steps": 2, "background": False}}
    for number, place in enumerate(places):
        planted = [{"kind": "sigterm", **place}]
        if number:
            summary = api.resume(run.run_dir, [f"faults={json.dumps(planted)}"], quiet=True)
        else:
            summary = api.train(config.from_dict({**every, "faults": planted}), quiet=True)
        assert not summary["finished"] and len(faults.struck(run.run_dir)) == number + 1
        at.append(summary["steps"])
    assert at == sorted(at)
    there = tmp_path / "another machine"
    for name in ("target", "store"):
        shutil.copytree(world / name, there / name)
    shutil.move(run.run_dir, there / "run")
    paths = [f"target.model={json.dumps(str(there / 'target'))}", f"data.store={json.dumps(str(there / 'store'))}"]
    assert api.resume(there / "run", ["faults=[]", *paths], quiet=True)["finished"]
    assert whole(there / "run", 2) and equal(masters(there / "run"), masters(straight.run_dir))
    assert steps(there / "run") == steps(straight.run_dir)


def test_a_full_disk_stops_the_run_and_a_resume_takes_the_lost_steps_again(configuration):
    """C84: the previous checkpoint is whole; the history of the weights has every step once."""
    run = configuration(faults=[{"kind": "disk_full", "step": 6, "file": "optimizer.safetensors"}])
    with pytest.raises(
        ForebayError, match=r"disk full at .*free space.*\nresume with: forebay train --resume"
    ) as error:
        api.train(run, quiet=True)
    assert str(error.value).endswith(run.run_dir)
    last = int(Checkpoints(Path(run.run_dir, "checkpoints")).latest().name[-2:])
    assert last < 6
    api.resume(run.run_dir, quiet=True)
    assert whole(run.run_dir, 2)
    taken = steps(run.run_dir)
    assert taken == list(range(1, len(taken) + 1))
    cut = [line["step"] for line in metrics.read(Path(run.run_dir, "metrics-cut.jsonl"), "step")]
    assert 6 in cut and cut == list(range(last + 1, last + 1 + len(cut)))


def test_a_shard_cut_under_a_running_run_is_named_and_not_a_bus_error(configuration):
    run = configuration(faults=[{"kind": "truncate_shard", "job": 10}], optim={"epochs": 1})
    with pytest.raises(
        PoisonError, match=r"damaged while the run read it: 00000.tokens has \d+ bytes, the manifest says"
    ):
        api.train(run, quiet=True)
    assert api.resume(run.run_dir, quiet=True)["finished"] and whole(run.run_dir, 1)


def test_a_poison_job_ends_the_command_with_the_cause_and_the_resume_command_last(configuration, tmp_path, capfd):
    """G10."""
    run = configuration(faults=[{"kind": "raise", "job": 5, "epoch": 0, "times": -1}])
    (tmp_path / "run.yaml").write_text(config.dump(run))
    assert cli.main(["train", str(tmp_path / "run.yaml")]) == 1
    *_, cause, resume = capfd.readouterr().err.strip().splitlines()
    assert cause.startswith("forebay train: job 5 of epoch 0 failed 3 times") and "PlantedError" in cause
    assert resume == f"resume with: forebay train --resume {run.run_dir}"
    summary = api.resume(run.run_dir, ["runtime.on_poison=continue"], quiet=True)
    assert summary["finished"] and summary["jobs_quarantined"] == 1
    assert summary["jobs_committed"] == summary["jobs_planned"] - 1


def test_a_bug_in_training_is_shown_as_it_is_with_the_resume_command(configuration):
    run = configuration(faults=[{"kind": "raise", "where": "train", "step": 4}], optim={"epochs": 1})
    with pytest.raises(RuntimeError, match="PlantedError") as error:
        api.train(run, quiet=True)
    assert isinstance(error.value.__cause__, faults.PlantedError)
    assert error.value.__notes__ == [f"resume with: forebay train --resume {run.run_dir}"]


def test_a_stall_is_seen_from_outside_with_who_waits_for_what(configuration, monkeypatch):
    """`forebay status` while the run stands still, and all stacks in the run's folder."""
    monkeypatch.setattr(runs, "STATUS_S", 0.0)
    hang = {"kind": "hang", "where": "extract", "job": 6, "epoch": 0, "seconds": 1.5}
    run = configuration(faults=[hang], runtime={"stall_s": 0.4, "device_sharing": "split"}, optim={"epochs": 1})
    one, seen = LocalRuntime(run, quiet=True), []

    def say(text):
        if "nothing has moved" in text:
            seen.append((text, api.status_text(api.status(run.run_dir))))

    one.run.say = say
    assert one.train()["finished"]
    fill = "drafter 0 for the buffer to reach its min fill (consumer_wait_fill)"
    status = next(status for text, status in seen if fill in text)
    assert ": training (" in status and "drafter: busy" in status
    assert "in _act" in Path(run.run_dir, "stacks.txt").read_text()  # where the planted hang is
    assert api.status(run.run_dir)["doing"] == "finished"


def test_resuming_a_finished_run_changes_nothing(configuration):
    """Killed while exporting: the run is finished, evaluated once, exported again."""
    run = configuration(optim={"epochs": 1})
    api.train(run, quiet=True)
    weights, log = masters(run.run_dir), Path(run.run_dir, "metrics.jsonl").read_text()
    (Path(run.run_dir) / "drafter" / "model.safetensors").unlink()
    assert api.resume(run.run_dir, quiet=True)["finished"]
    assert equal(weights, masters(run.run_dir)) and Path(run.run_dir, "metrics.jsonl").read_text() == log
    assert (Path(run.run_dir) / "drafter" / "model.safetensors").is_file()


def test_a_snapshot_shares_no_memory_with_what_is_trained(configuration):
    """The writer in the background never sees a weight or a moment that a later step has changed."""
    one = LocalRuntime(configuration(optim={"epochs": 1}), quiet=True)
    taken, save = [], one.training.checkpoint

    def checkpoint():
        save()
        taken.append(one.training.snapshot())
        taken.append({k: v.clone() for part in (taken[-1].drafter, taken[-1].optimizer) for k, v in part.items()})

    one.training.checkpoint = checkpoint
    one.train()
    first, copy = taken[:2]
    assert first.optimizer and all(torch.equal(v, copy[k]) for k, v in {**first.drafter, **first.optimizer}.items())
    assert not all(torch.equal(first.drafter[k], v) for k, v in taken[-1].items() if k in first.drafter)


def test_kills_at_random_instants_and_random_faults_lose_nothing():
    """G1, the short form of `make soak`."""
    command = [sys.executable, str(Path(__file__).parent.parent / "soak.py"), "--kills", "4", "--faults", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] == 4 and report["faulted_runs"] == 2 and report["weights_identical"]
    assert [report[key] for key in ("jobs_lost", "jobs_twice", "hung", "budget_exceeded")] == [0, 0, 0, 0]
