"""Trackers: each real library gets the numbers, offline; one that fails is said once and stops nothing."""

import json
import re
import urllib.request
from pathlib import Path

import pytest

from forebay import config
from forebay.errors import ConfigError
from forebay.observe.metrics import MetricsLog
from forebay.observe.trackers import TRACKERS, Trackers, check_installed, numbers

LINE = {
    "loss": 2.5,
    "finite": True,
    "jobs": [3, 4],
    "accuracy_by_slot": [0.5, 0.25],
    "loss_by_bucket": {0: 2.0, 1: 3.0},
    "workers": {"target 0": {"busy_s": 1.5, "wait_s": {"jobs": 0.5}}},
}
FLAT = {
    "loss": 2.5,
    "finite": 1.0,
    "accuracy_by_slot/0": 0.5,
    "accuracy_by_slot/1": 0.25,
    "loss_by_bucket/0": 2.0,
    "loss_by_bucket/1": 3.0,
    "workers/target 0/busy_s": 1.5,
    "workers/target 0/wait_s/jobs": 0.5,
}


def logged(name, folder, **options):
    """Two steps and an evaluation through one tracker; returns what was said."""
    said = []
    log = MetricsLog(folder / "metrics.jsonl", Trackers((name,), folder, {"seed": 3, **options}, said.append))
    for step in (1, 2):
        log.write("step", step, {**LINE, "loss": 2.5 / step})
    log.write("eval", 2, {"accept_length": 1.5})
    log.close()
    return said


def package(name):
    return pytest.importorskip(TRACKERS[name][1], reason=f"the package {TRACKERS[name][1]} is not installed")


def test_a_lines_numbers_are_named_by_field_place_and_key():
    assert dict(numbers({**LINE, "when": "end", "differing": [{"a": "b"}]})) == FLAT


def test_tensorboard_gets_every_number(tmp_path):
    package("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert logged("tensorboard", tmp_path) == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {name: [e.tensor_proto.float_val[0] for e in events.Tensors(name)] for name in events.Tags()["tensors"]}
    assert found == {f"step/{n}": [v, v] for n, v in FLAT.items()} | {
        "step/loss": [2.5, 1.25],
        "eval/accept_length": [1.5],
    }


def test_prometheus_serves_the_latest_numbers_on_loopback_alone(tmp_path):
    package("prometheus")
    said = []
    trackers = Trackers(("prometheus",), tmp_path, {"prometheus_port": 0}, said.append)
    trackers.write("step", 7, LINE)
    trackers.drain()
    [line] = said
    url = re.search(r"http://127\.0\.0\.1:\d+/metrics", line)[0]
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    assert "forebay_step_loss 2.5" in text and "forebay_step_step 7.0" in text
    assert 'forebay_step_accuracy_by_slot{of="1"} 0.25' in text
    assert 'forebay_step_workers{of="target 0/wait_s/jobs"} 0.5' in text
    assert "# HELP forebay_step_loss weighted loss of the window [nats]" in text
    taken = []
    port = int(url.split(":")[2].split("/")[0])
    other = Trackers(("prometheus",), tmp_path, {"prometheus_port": port}, taken.append)
    other.write("step", 1, LINE)
    other.close()
    trackers.close()
    [line] = taken
    assert f"port {port} cannot be listened on" in line and "set prometheus_port" in line


def test_mlflow_gets_every_number_offline(tmp_path, monkeypatch):
    package("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert logged("mlflow", tmp_path) == []
    client = MlflowClient((tmp_path / "mlflow").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("forebay").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["seed"] == "3"
    assert {k: v for k, v in run.data.metrics.items() if k != "step/loss"} == {
        **{f"step/{n}": v for n, v in FLAT.items() if n != "loss"},
        "eval/accept_length": 1.5,
    }
    assert [m.value for m in client.get_metric_history(run.info.run_id, "step/loss")] == [2.5, 1.25]


def test_trackio_gets_every_number_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    package("trackio")
    assert logged("trackio", tmp_path) == []
    [database] = Path(tmp_path / "trackio").glob("*.db")
    import sqlite3

    rows = [json.loads(row[0]) for row in sqlite3.connect(database).execute("SELECT metrics FROM metrics ORDER BY id")]
    assert [row.get("step/loss") for row in rows] == [2.5, 1.25, None] and rows[2]["eval/accept_length"] == 1.5
    assert rows[0]["step/workers/target 0/busy_s"] == 1.5


def test_wandb_keeps_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    package("wandb")
    assert logged("wandb", tmp_path) == []
    [file] = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert all(f"{name}".encode() in content for name in ("step/loss", "step/accuracy_by_slot/1", "eval/accept_length"))


def test_a_logger_that_fails_is_said_once_and_the_others_and_the_log_go_on(tmp_path, monkeypatch):
    class Failing:
        def __init__(self, folder, config, say):
            self.lines = 0

        def write(self, kind, step, numbers):
            self.lines += 1
            if self.lines == 2:
                raise ConnectionError("the server is gone\nfor good")

        def close(self):
            raise AssertionError("it was left out")

    kept = []

    class Working(Failing):
        def write(self, kind, step, numbers):
            kept.append((kind, step, numbers["loss"]))

        def close(self):
            kept.append("closed")

    monkeypatch.setitem(TRACKERS, "wandb", (Failing, "json"))
    monkeypatch.setitem(TRACKERS, "trackio", (Working, "json"))
    said = []
    log = MetricsLog(tmp_path / "m.jsonl", Trackers(("wandb", "trackio"), tmp_path, {}, said.append))
    for step in range(1, 5):
        log.write("step", step, {"loss": step})
    log.close()
    assert said == ["logger wandb is left out from here on: ConnectionError: the server is gone"]
    assert kept == [*(("step", step, step) for step in range(1, 5)), "closed"]
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 4


def test_a_logger_that_hangs_never_makes_the_training_wait(tmp_path, monkeypatch):
    import threading

    go = threading.Event()

    class Hanging:
        def __init__(self, folder, config, say):
            pass

        def write(self, kind, step, numbers):
            go.wait()

        def close(self):
            pass

    monkeypatch.setitem(TRACKERS, "wandb", (Hanging, "json"))
    monkeypatch.setattr("forebay.observe.trackers.WAITING_LINES", 5)
    monkeypatch.setattr("forebay.observe.trackers.CLOSE_S", 0.05)
    said = []
    trackers = Trackers(("wandb",), tmp_path, {}, said.append)
    for step in range(100):
        trackers.write("step", step, LINE)
    trackers.close()
    go.set()
    assert len(said) == 2 and "are behind" in said[0] and "did not end within" in said[1]


def test_a_logger_that_is_not_installed_names_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in TRACKERS:
        with pytest.raises(
            ConfigError, match=rf"loggers: {name} needs the package \w+: pip install 'forebay\[{name}\]'"
        ):
            check_installed((name,))


def test_loggers_are_a_list_in_the_configuration_and_an_older_run_keeps_its_tensorboard():
    values = {"run_dir": "r", "target": {"model": "m"}, "data": {"store": "s"}}
    assert config.from_dict({**values, "loggers": ["wandb", "prometheus"]}).loggers == ("wandb", "prometheus")
    assert config.from_dict({**values, "runtime": {"tensorboard": True}}).loggers == ("tensorboard",)
    assert config.from_dict({**values, "runtime": {"tensorboard": False}}).loggers == ()
    with pytest.raises(ConfigError, match="loggers"):
        config.from_dict({**values, "loggers": ["tensorbord"]})
