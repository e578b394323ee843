"""Whole training runs on a tiny target: exactly once, resumable, reproducible, and the same gradient however split."""

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from forebay import api, config
from forebay.errors import ContractError, ForebayError
from forebay.flow.plan import EpochPlan
from forebay.io.checkpoint import Checkpoints
from forebay.observe import metrics
from forebay.runtime.local import LocalRuntime


def weights(run_dir):
    return load_file(Path(run_dir) / "drafter" / "model.safetensors")


def masters(run_dir):
    return load_file(Checkpoints(Path(run_dir) / "checkpoints").latest() / "drafter.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def trained_rows(run_dir):
    """How often each row was in a committed step of each epoch, of the steps that the weights hold."""
    plans = [EpochPlan.load(p) for p in sorted(Path(run_dir, "plans").glob("*.plan"))]
    last = {}
    for line in metrics.read(Path(run_dir, "metrics.jsonl"), "step"):
        last[line["step"]] = line  # a step that a killed run had taken is taken again: the later line counts
    counts = Counter()
    for line in last.values():
        for job in line["jobs"]:
            counts.update((line["epoch"], row) for row in plans[line["epoch"]].job(job).rows)
    return counts


def stop_after(run, steps):
    """Ask for a stop once `steps` optimizer steps are taken, as a first SIGINT would."""
    after = run.training.after_step

    def hook(window, outcome):
        after(window, outcome)
        if run.training.step.taken == steps:
            run.shell.request_stop()

    run.training.after_step = hook
    return run


def test_every_sequence_of_every_epoch_is_trained_exactly_once(configuration):
    """G1, read from the ledger's commits."""
    run = configuration()
    summary = api.train(run, quiet=True)
    counts = trained_rows(run.run_dir)
    assert counts == {(epoch, row): 1 for epoch in range(2) for row in range(72)}
    assert summary["jobs_committed"] == summary["jobs_planned"]
    assert summary["steps"] == summary["total_steps"] == summary["mixing"]["windows"]
    plan, mixing = EpochPlan.load(Path(run.run_dir, "plans", "epoch-000.plan")), summary["mixing"]
    assert [b["up_to_tokens"] for b in mixing["buckets"]] == list(plan.params.bucket_edges)
    assert sum(b["items_per_window"] for b in mixing["buckets"]) * mixing["windows"] == summary["jobs_committed"]
    assert 1 <= mixing["distinct_buckets"] <= 4 and [e["epoch"] for e in mixing["epochs"]] == [0, 1]
    assert summary["peak_bytes"] <= run.buffer.bytes


def test_the_items_of_a_run_with_reuse_are_computed_once_and_used_twice_with_other_anchors(configuration):
    """Half of the target's work for the same steps; the buffer's bytes are kept, and every slot comes back."""
    run = configuration(buffer={"reuse": 2, "draw": "planned", "min_fill": 8}, optim={"epochs": 1})
    local, used = LocalRuntime(run, quiet=True), []
    replica = local.models.replicas[0]
    micro_step = replica.micro_step

    def noted(item, scale):
        used.append((item.batch.job.id, item.batch.anchors.tobytes(), item.slot.features.data_ptr()))
        return micro_step(item, scale)

    replica.micro_step = noted
    summary = local.train()
    jobs = len(local.run.plans[0])
    assert local.shell.stats()["leases"] == jobs and Counter(job for job, _, _ in used) == dict.fromkeys(range(jobs), 2)
    assert len({(job, anchors) for job, anchors, _ in used}) == 2 * jobs
    assert len({(job, memory) for job, _, memory in used}) == jobs
    assert summary["steps"] == summary["total_steps"] == -(-2 * jobs // 4) and summary["jobs_committed"] == jobs
    assert summary["peak_bytes"] <= run.buffer.bytes and local.pool.made == local.pool.free


def test_training_lowers_the_loss_and_moves_every_parameter(configuration):
    """C43: every trainable tensor differs from its start, norms included."""
    run = configuration(optim={"epochs": 4, "lr": 6e-3})
    training = LocalRuntime(run, quiet=True)
    before = {k: v.clone() for k, v in training.models.replicas[0].module.state_dict().items()}
    training.train()
    losses = [line["loss"] for line in metrics.read(Path(run.run_dir, "metrics.jsonl"), "step")]
    assert losses[-1] < 0.9 * losses[0]
    assert [k for k, v in training.models.replicas[0].module.state_dict().items() if torch.equal(v, before[k])] == []


@pytest.mark.parametrize(("draw", "reuse"), [("planned", 1), ("live", 1), ("planned", 2)])
def test_a_run_stopped_and_resumed_trains_the_same_set_and_planned_the_same_weights(configuration, draw, reuse):
    """C78, F06, G7: planned draws on a CPU in fp32 give bit-identical weights."""
    buffer, optim = {"draw": draw, "reuse": reuse}, {"epochs": 2 // reuse}
    straight = configuration("straight", buffer=buffer, optim=optim)
    api.train(straight, quiet=True)
    broken = configuration("broken", buffer=buffer, optim=optim)
    for steps in (2, 5):
        life = LocalRuntime(broken, resume=steps > 2, quiet=True)
        life.run.started -= 1000
        summary = stop_after(life, steps).train()
        assert not summary["finished"] and summary["steps"] == steps
    summary = api.resume(broken.run_dir, quiet=True)
    assert summary["finished"] and summary["jobs_committed"] == summary["jobs_planned"]
    assert 2000 < summary["wall_s"] < 3000  # of all three lives
    assert trained_rows(broken.run_dir) == {(epoch, row): reuse for epoch in range(2 // reuse) for row in range(72)}
    if draw == "planned":
        assert equal(masters(straight.run_dir), masters(broken.run_dir))
        lines = [
            {n: line[n] for n in ("step", "loss", "lr", "jobs", "grad_norm")}
            for run in (straight, broken)
            for line in metrics.read(Path(run.run_dir, "metrics.jsonl"), "step")
        ]
        assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def test_planned_draws_give_the_same_weights_with_one_and_three_targets(configuration):
    """G7."""
    one = configuration("one", buffer={"draw": "planned"})
    three = configuration("three", buffer={"draw": "planned"}, runtime={"targets": ["cpu"] * 3})
    for run in (one, three):
        api.train(run, quiet=True)
    assert equal(masters(one.run_dir), masters(three.run_dir))


def test_two_drafters_take_the_steps_of_one(configuration):
    """G6, F17: the same windows dealt to two replicas give the same weights up to the order of additions."""
    one = configuration("one", buffer={"draw": "planned"})
    two = configuration("two", buffer={"draw": "planned"}, runtime={"drafters": ["cpu", "cpu"]})
    for run in (one, two):
        summary = api.train(run, quiet=True)
        assert summary["jobs_committed"] == summary["jobs_planned"]
    a, b = masters(one.run_dir), masters(two.run_dir)
    assert max(float((a[k] - b[k]).abs().max()) for k in a) < 1e-4


@pytest.mark.parametrize(
    "buffer",
    [{"queue": "bucketed"}, {"queue": "per_drafter", "reuse": 2}, {"dispatch": "per_target"}, {"reuse": 3}],
    ids=lambda b: "-".join(map(str, b.values())),
)
def test_every_queue_and_dispatch_runs_the_whole_pipeline(configuration, buffer):
    run = configuration(buffer=buffer, runtime={"targets": ["cpu", "cpu"]}, optim={"epochs": 1})
    summary = api.train(run, quiet=True)
    assert summary["jobs_committed"] == summary["jobs_planned"]


def test_a_run_killed_with_sigkill_resumes_to_the_same_set(configuration, tmp_path):
    """G1: kill -9 of a real process in mid-run, twice; every item is used twice."""
    buffer = {"draw": "planned", "reuse": 2}
    run = configuration(buffer=buffer, checkpoint={"every_steps": 2})
    file = tmp_path / "run.yaml"
    file.write_text(config.dump(run))
    command = [sys.executable, "-m", "forebay.cli", "train"]
    log = Path(run.run_dir, "metrics.jsonl")
    for number, steps in enumerate((3, 8)):
        process = subprocess.Popen(
            [*command, *(["--resume", run.run_dir] if number else [str(file)])],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
            if log.exists() and any(line["step"] >= steps for line in metrics.read(log, "step")):
                process.kill()
                process.wait()
    summary = api.resume(run.run_dir, quiet=True)
    assert summary["finished"] and summary["jobs_committed"] == summary["jobs_planned"]
    assert trained_rows(run.run_dir) == {(epoch, row): 2 for epoch in range(2) for row in range(72)}
    undisturbed = configuration("undisturbed", buffer=buffer)
    api.train(undisturbed, quiet=True)
    assert equal(masters(run.run_dir), masters(undisturbed.run_dir))


def test_resuming_with_what_trains_another_drafter_lists_the_fields(configuration):
    """C82."""
    run = configuration()
    stop_after(LocalRuntime(run, quiet=True), 3).train()
    file = Path(run.run_dir, "config.yaml")
    values = yaml.safe_load(file.read_text())
    with pytest.raises(ContractError, match=r"optim.lr: saved 0.001, now 0.5"):
        api.resume(run.run_dir, ["optim.lr=0.5"], quiet=True)
    with pytest.raises(ContractError, match=r"buffer.reuse: saved 1, now 2"):
        api.resume(run.run_dir, ["buffer.reuse=2"], quiet=True)
    assert yaml.safe_load(file.read_text()) == values  # nothing was written
    with pytest.raises(ForebayError, match="target_layer_ids"):
        api.resume(run.run_dir, ["target.layer_ids=[0, 1, 4]"], quiet=True)
    with pytest.raises(ForebayError, match="already holds a run"):
        api.train(run, quiet=True)
    assert api.resume(run.run_dir, ["optim.lr=0.002"], allow_change=["optim.lr"], quiet=True)["finished"]


def test_resuming_with_another_target_is_refused(configuration, tmp_path):
    """C82: same shape, other weights."""
    import tiny

    run = configuration()
    stop_after(LocalRuntime(run, quiet=True), 3).train()
    tiny.save_tiny_target(tmp_path / "other", seed=7)
    with pytest.raises(ContractError, match=r"target\.weights"):
        api.resume(run.run_dir, [f"target.model={json.dumps(str(tmp_path / 'other'))}"], quiet=True)


def test_a_step_that_is_not_finite_is_skipped_and_its_jobs_are_trained_later(configuration):
    """C44, F30: a NaN in the gradient of one window; weights stay finite, the epoch still ends whole."""
    run = configuration()
    training = LocalRuntime(run, quiet=True)
    replica = training.models.replicas[0]
    micro_step, calls = replica.micro_step, []

    def poisoned(item, scale):
        calls.append(item.batch.job.id)
        return micro_step(item, float("nan") if len(calls) == 6 else scale)

    replica.micro_step = poisoned
    summary = training.train()
    assert summary["jobs_committed"] == summary["jobs_planned"]
    assert any("skipped" in line for line in summary["failures"])
    assert all(torch.isfinite(v).all() for v in weights(run.run_dir).values())


def test_a_target_that_gives_nan_states_stops_the_run_naming_the_job(configuration):
    """C44, C50: the item never reaches the drafter."""
    run = configuration()
    training = LocalRuntime(run, quiet=True)
    capture = training.models.target.capture

    def broken(batch, out, last=None):
        echo = capture(batch, out, last)
        if batch.job.id == 5:
            out[3] = float("nan")
        return echo

    training.models.target.capture = broken
    with pytest.raises(ForebayError, match=r"job 5 of epoch 0 failed 3 times.*not finite"):
        training.train()


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("buffer", {"bytes": "200 KiB"}, r"exceeds\s+buffer.bytes"),
        ("plan", {"token_budget": 32}, "token_budget 32 is below the longest sequence"),
        ("data", {"store": "/nowhere"}, "not a token store"),
        ("target", {"model": "/nowhere"}, "no model folder"),
        ("target", {"layer_ids": [0, 9]}, "valid 0..5"),
        ("drafter", {"mask_token_id": 1}, "is the eos token"),
    ],
)
def test_what_cannot_work_is_one_message_and_leaves_nothing_behind(configuration, section, values, message):
    run = configuration(**{section: values})
    with pytest.raises(ForebayError, match=message):
        api.train(run, quiet=True)
    assert not Path(run.run_dir, "checkpoints").exists() and not Path(run.run_dir, "metrics.jsonl").exists()


def test_resuming_with_another_shape_lists_the_fields_before_any_weight_is_loaded(configuration, tmp_path):
    """C82: another hidden size, another number of layers."""
    import tiny

    run = configuration()
    stop_after(LocalRuntime(run, quiet=True), 3).train()
    with pytest.raises(ContractError, match=r"drafter\.layers: saved 2, now 3"):
        api.resume(run.run_dir, ["drafter.layers=3"], quiet=True)
    tiny.save_tiny_target(tmp_path / "wide", hidden_size=64)
    with pytest.raises(ContractError, match=r"target\.hidden_size: saved 32, now 64"):
        api.resume(run.run_dir, [f"target.model={json.dumps(str(tmp_path / 'wide'))}"], quiet=True)


def test_a_finished_run_goes_on_for_more_epochs_where_that_is_meant(configuration):
    run = configuration(optim={"epochs": 1})
    first = api.train(run, quiet=True)
    more = api.resume(run.run_dir, ["optim.epochs=2"], allow_change=["optim.epochs"], quiet=True)
    assert more["steps"] > first["steps"] and more["jobs_committed"] == more["jobs_planned"]
    assert trained_rows(run.run_dir) == {(epoch, row): 1 for epoch in range(2) for row in range(72)}
    with pytest.raises(ForebayError, match="below the 2 epochs"):
        api.resume(run.run_dir, ["optim.epochs=1"], allow_change=["optim.epochs"], quiet=True)


def test_a_plan_cannot_change_under_a_run_and_nothing_is_written(configuration):
    run = configuration()
    stop_after(LocalRuntime(run, quiet=True), 3).train()
    before = Path(run.run_dir, "config.yaml").read_text()
    with pytest.raises(ContractError, match="the plan of a run that has begun cannot change"):
        api.resume(run.run_dir, ["seed=5"], allow_change=["seed", "plan.seed"], quiet=True)
    assert Path(run.run_dir, "config.yaml").read_text() == before


def test_a_second_process_in_the_folder_of_a_run_is_refused(configuration):
    run = configuration()
    first = LocalRuntime(run, quiet=True)
    with pytest.raises(ForebayError, match="another process is training"):
        LocalRuntime(run, quiet=True)
    assert first.train()["finished"]


def test_a_store_without_held_out_prompts_is_refused_at_the_start(configuration, world, tmp_path, monkeypatch):
    """Not at step 100, and before the target's weights are loaded."""
    api.prepare(
        [world / "train.jsonl"],
        tmp_path / "all",
        target=world / "target",
        heldout_share=0.0,
        max_length=256,
        progress=False,
    )
    run = configuration(data={"store": str(tmp_path / "all")})
    with monkeypatch.context() as patch, pytest.raises(ForebayError, match="no held-out part"):
        patch.setattr("forebay.models.target.Target.load", lambda *args: pytest.fail("weights were loaded first"))
        api.train(run, quiet=True)
    with pytest.raises(ForebayError, match="no held-out part"):
        api.plan(run)
    assert api.train(configuration(data={"store": str(tmp_path / "all")}, eval={"guard": False}), quiet=True)[
        "finished"
    ]
