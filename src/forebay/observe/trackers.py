"""The metrics for trackers of others: TensorBoard, Weights & Biases, MLflow, Trackio, Prometheus.

Guarantees: each is its library's own client, imported only when it is asked for; a library that is missing is named
before anything else happens (`check_installed`). They write in a thread of their own: one that fails is said once and
left out, and none can slow or stop the training (where they fall behind, lines are left out, which is said once). Who
may be reached is up to the libraries' own settings (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR); Prometheus is served
on loopback alone. Called by `runtime.run` and `observe.metrics`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from forebay.errors import ConfigError
from forebay.observe.schema import metrics

WAITING_LINES = 1000
CLOSE_S = 30.0


Say = Callable[[str], None]


class Tracker(Protocol):
    """What each of them is asked for."""

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """`numbers` by `name`, `name/index` or `name/key`."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, config: Mapping[str, Any], say: Say) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder / "tensorboard"))

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of the project `forebay` (WANDB_PROJECT), named like the run's folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any], say: Say) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "forebay")
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(config))

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()} | {"optimizer_step": step})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment `forebay`, at MLFLOW_TRACKING_URI or in RUN/mlflow."""

    def __init__(self, folder: Path, config: Mapping[str, Any], say: Say) -> None:
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than the small client
            uri = (folder / "mlflow").resolve().as_uri()
        self._client = MlflowClient(uri)
        known = self._client.get_experiment_by_name("forebay")
        experiment = known.experiment_id if known else self._client.create_experiment("forebay")
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        for section, value in config.items():
            self._client.log_param(self._run, section, str(value)[:500])

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [Metric(f"{kind}/{name}".replace(":", "_"), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=batch)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Trackio:
    """A run of the project `forebay`, in the folder of the library's own settings."""

    def __init__(self, folder: Path, config: Mapping[str, Any], say: Say) -> None:
        import trackio

        self._run = trackio.init(project="forebay", name=folder.name, config=dict(config), resume="allow")

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """The latest value of each field on http://127.0.0.1:PORT/metrics; lists and fields by name have the label `of`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], say: Say) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry, self._gauges = CollectorRegistry(), {}  # type: ignore[var-annotated]
        port = int(config.get("prometheus_port") or 0)
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", self._registry)
        except OSError as error:
            raise OSError(f"port {port} cannot be listened on ({error.strerror}): set prometheus_port") from None
        self.port = self._server.server_port
        say(f"metrics for Prometheus: http://127.0.0.1:{self.port}/metrics")

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        from prometheus_client import Gauge

        for name, value in {**numbers, "step": step}.items():
            name, _, of = name.partition("/")
            gauge = self._gauges.get((kind, name))
            if gauge is None:
                known = metrics(kind).get(name)
                about = f"{known.meaning} [{known.unit}]" if known else name
                labels = ["of"] if known and known.shape != "number" else []
                gauge = Gauge(f"forebay_{kind}_{name}", about, labels, registry=self._registry)
                self._gauges[kind, name] = gauge
            (gauge.labels(of) if of else gauge).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()


TRACKERS: dict[str, tuple[Callable[[Path, Mapping[str, Any], Say], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WandB, "wandb"),
    "mlflow": (MLflow, "mlflow"),
    "trackio": (Trackio, "trackio"),
    "prometheus": (Prometheus, "prometheus_client"),
}


def check_installed(names: tuple[str, ...]) -> None:
    """Raise ConfigError for a tracker whose package is missing."""
    for name in names:
        package = TRACKERS[name][1]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"loggers: {name} needs the package {package}: pip install 'forebay[{name}]'")


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line: `name`, `name/0` of a list, `name/key` of what is by name."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, bool | int | float):
            yield name, float(value)
        elif isinstance(value, Mapping):
            yield from numbers(value, f"{name}/")
        elif isinstance(value, list) and key != "jobs":
            yield from numbers({str(place): v for place, v in enumerate(value)}, f"{name}/")


class Trackers:
    """Those that a run asks for, in a thread."""

    def __init__(self, names: tuple[str, ...], folder: Path, config: Mapping[str, Any], say: Say):
        self._say, self._live = say, dict.fromkeys(names)
        self._lines: queue.Queue[tuple[str, int, dict[str, float]] | None] = queue.Queue(WAITING_LINES)
        self._behind = False
        self._thread = threading.Thread(target=self._work, args=(folder, config), name="trackers", daemon=True)
        self._thread.start()

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Hand a line over; never waits."""
        try:
            self._lines.put_nowait((kind, step, dict(numbers(values))))
        except queue.Full:
            if not self._behind:
                self._behind = True
                self._say("the loggers are behind: some lines are left out there (metrics.jsonl has them all)")

    def drain(self) -> None:
        """Wait until what was handed over is written."""
        self._lines.join()

    def close(self) -> None:
        """Wait for what was handed over, but not for ever."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._say(f"the loggers did not end within {CLOSE_S:.0f} s: what they had not written is lost there")

    def _work(self, folder: Path, config: Mapping[str, Any]) -> None:
        for name in self._live:
            self._try(name, lambda name=name: TRACKERS[name][0](folder, config, self._say))
        while (line := self._lines.get()) is not None:
            for name, tracker in self._live.items():
                if tracker is not None:
                    self._try(name, lambda tracker=tracker, line=line: tracker.write(*line) or tracker)
            self._lines.task_done()
        for name, tracker in self._live.items():
            if tracker is not None:
                self._try(name, tracker.close)

    def _try(self, name: str, act: Callable[[], Any]) -> None:
        """What a library raises is its own affair: it is said, and the tracker left out."""
        try:
            self._live[name] = act()
        except Exception as error:  # noqa: BLE001 - any library, any fault; the training goes on
            self._live[name] = None
            reason = str(error).splitlines()[0] if str(error) else ""
            self._say(f"logger {name} is left out from here on: {type(error).__name__}: {reason}")
