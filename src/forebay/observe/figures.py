"""The figures of a run, as Vega-Lite charts: one definition for the report, the live page and the demo's picture.

Guarantees: a figure whose metrics a run does not have is left out, not drawn empty; every drawn point of a raw curve is
a line of the log; colours are told apart by colour-blind people, and lines by their dashes too. Imports no plotting
library: `picture` alone needs vl-convert-python, which draws Vega-Lite without a browser. Called by `observe.report`,
`observe.watch` and the demo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import UsageError
from forebay.flow.mixing import ALARM_R, TARGET_R
from forebay.observe.clock import WORDS
from forebay.observe.curves import POINTS, rate, smooth, stretches, thin
from forebay.observe.history import History
from forebay.observe.log import Floats

#: series -> columns of its points (`x`, `y`, ...): what the page turns into rows with the series as `s`.
Curves = dict[str, dict[str, list[Any]]]
Build = Callable[[History, int], "Figure | None"]

#: Okabe and Ito's colours, the yellow last because it is faint on white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
THEME: dict[str, Any] = {
    "background": "white",
    "font": "system-ui, sans-serif",
    "range": {"category": COLOURS, "ramp": {"scheme": "cividis"}, "ordinal": {"scheme": "cividis"}},
    "axis": {"gridColor": "#e4e4e4", "labelLimit": 140, "titleFontWeight": "normal", "labelOverlap": True},
    "legend": {"orient": "top", "title": None, "labelLimit": 260, "symbolStrokeWidth": 3},
    "view": {"stroke": None},
    "line": {"strokeWidth": 2},
}
HEIGHT = 220


@dataclass
class Figure:
    """One chart. `spec`: Vega-Lite, naming its data sets; `data`: those; `reading`: what is good, and what to do."""

    key: str
    title: str
    reading: str
    spec: dict[str, Any]
    data: dict[str, Curves]


def curve(x: Floats, y: Floats) -> dict[str, list[Any]]:
    return {"x": np.asarray(x).tolist(), "y": np.asarray(y).tolist()}


def first(run: History, *names: str) -> str | None:
    """The first of these columns that the run has (names change between versions)."""
    return next((name for name in names if name in run.log), None)


# -- the parts of a chart --------------------------------------------------------------------------------------------


def _axis(title: str, zero: bool = False, **more: Any) -> dict[str, Any]:
    return {"type": "quantitative", "title": title, "scale": {"zero": zero, "nice": zero}, **more}


def _lines(data: str, x: str, y: str, *, zero: bool = False, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    """A layer of lines, one per series, told apart by colour and dashes."""
    return {
        "data": {"name": data},
        "mark": {"type": "line", "tooltip": True, **(mark or {})},
        "encoding": {
            "x": {"field": "x", **_axis(x)},
            "y": {"field": "y", **_axis(y, zero)},
            "color": {"field": "s", "sort": None},
            "strokeDash": {"field": "s", "sort": None},
        },
    }


def _faint(data: str, x: str, y: str, zero: bool = False) -> dict[str, Any]:
    """Raw values behind their running mean."""
    layer = _lines(data, x, y, zero=zero, mark={"strokeWidth": 1, "opacity": 0.3, "color": COLOURS[0]})
    del layer["encoding"]["strokeDash"], layer["encoding"]["color"]
    return layer


def _rules(data: str) -> list[dict[str, Any]]:
    """Named levels: dashed lines across the chart with their name at the right."""
    y = {"field": "y", "type": "quantitative"}
    line = {"data": {"name": data}, "mark": {"type": "rule", "strokeDash": [6, 4], "color": "#333"}}
    text = {"type": "text", "align": "right", "baseline": "bottom", "dy": -2, "fontSize": 10, "color": "#333"}
    return [
        {**line, "encoding": {"y": y}},
        {"data": {"name": data}, "mark": text, "encoding": {"y": y, "x": {"value": "width"}, "text": {"field": "s"}}},
    ]


def _bars(data: str, x: str, y: str) -> dict[str, Any]:
    """Grouped bars: `x` is a name, one bar of a group per series."""
    return {
        "data": {"name": data},
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "x": {"field": "x", "type": "nominal", "title": x, "sort": None, "axis": {"labelAngle": 0}},
            "xOffset": {"field": "s", "sort": None},
            "y": {"field": "y", **_axis(y, zero=True)},
            "color": {"field": "s", "sort": None},
        },
    }


def _layers(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"layer": list(layers)} if len(layers) > 1 else layers[0]


def _level(value: float) -> dict[str, list[Any]]:
    return {"y": [value]}


def _smoothed(run: History, name: str, most: int) -> tuple[Curves, Curves]:
    """(raw, running mean) of a column, each as one series."""
    x, y = run.log.column("step"), run.log.column(name)
    return {"each step": curve(*thin(x, y, most))}, {"running mean": curve(*smooth(x, y, most // 4))}


# -- is it learning --------------------------------------------------------------------------------------------------


def loss(run: History, most: int) -> Figure | None:
    if "loss" not in run.log:
        return None
    raw, mean = _smoothed(run, "loss", most)
    spec = _layers(_faint("raw", "step", "loss"), _lines("mean", "step", "loss"))
    reading = "Each step (thin) and the running mean. It should fall, fast at first; a jump up: lower optim.lr."
    return Figure("loss", "Loss", reading, spec, {"raw": raw, "mean": mean})


def accept_length(run: History, most: int) -> Figure | None:
    curves: Curves = {}
    if run.evals:
        curves["held out, by the serving loop"] = {
            "x": [e["step"] for e in run.evals],
            "y": [e["accept_length"] for e in run.evals],
        }
    if name := first(run, "uniform_accept_length"):
        x, y = smooth(run.log.column("step"), run.log.column(name), most // 4)
        curves["in training, uniform anchors (running mean)"] = curve(x, y)
    if not curves:
        return None
    spec = _lines("accept", "step", "tokens a round")
    points = {**spec, "mark": {"type": "point", "filled": True, "size": 45, "tooltip": True, "color": COLOURS[0]}}
    points["encoding"] = {channel: spec["encoding"][channel] for channel in ("x", "y")}
    points["transform"] = [{"filter": "indexof(datum.s, 'held out') == 0"}]
    reading = (
        "What an engine gains: tokens a verification of the target yields. 1 is nothing gained. The two differ (rounds "
        "cluster where text is hard), and should rise together."
    )
    return Figure("accept_length", "Accept length", reading, _layers(spec, points), {"accept": curves})


def by_position(run: History, most: int) -> Figure | None:
    shown = _shown_evals(run, "acceptance_by_position")
    if not shown:
        return None
    curves = {
        name: {"x": [str(j + 1) for j in range(len(e["acceptance_by_position"]))], "y": e["acceptance_by_position"]}
        for name, e in shown.items()
    }
    reading = "Share of rounds in which the first j drafts were all accepted: falls with j, the first should be high."
    return Figure("by_position", "Acceptance by position", reading, _bars("positions", "drafts j", "share"), {
        "positions": curves
    })  # fmt: skip


def by_answer_length(run: History, most: int) -> Figure | None:
    shown = _shown_evals(run, "by_answer_length")
    curves: Curves = {}
    for name, e in shown.items():
        bands = [b for b in e["by_answer_length"] if b.get("rounds")]
        labels = [f"{b['from']} and more" if b["to"] is None else f"{b['from']} to {b['to']}" for b in bands]
        curves[name] = {"x": labels, "y": [b["accept_length"] for b in bands]}
    if not any(c["x"] for c in curves.values()):
        return None
    reading = "Where the drafter pays: a band that stays behind is rare in the training data."
    spec = _bars("bands", "tokens of the answer", "accept length")
    return Figure("by_answer_length", "Accept length by length of the answer", reading, spec, {"bands": curves})


def _shown_evals(run: History, key: str) -> dict[str, dict[str, Any]]:
    """The first, the best and the last measurement that have `key`."""
    evals = [e for e in run.evals if e.get(key)]
    if not evals:
        return {}
    roles = {"first": evals[0], "best": max(evals, key=lambda e: e["accept_length"]), "last": evals[-1]}
    out = {}
    for e in roles.values():
        names = " and ".join(role for role, other in roles.items() if other is e)
        out[f"step {e['step']}" if len(evals) == 1 else f"{names}, step {e['step']}"] = e
    return out


def training_positions(run: History, most: int) -> Figure | None:
    names = [n for n in run.log.names if n.startswith(("accuracy_by_position.", "position_accuracy."))]
    if not names:
        return None
    x = run.log.column("step")
    curves = {f"slot {int(n.rpartition('.')[2]) + 1}": curve(*smooth(x, run.log.column(n), most // 4)) for n in names}
    reading = "Share of drafted tokens that are right, by their place in the block, in training (running mean)."
    spec = _lines("slots", "step", "share right")
    return Figure("training_positions", "Accuracy by position, in training", reading, spec, {"slots": curves})


def loss_by_bucket(run: History, most: int) -> Figure | None:
    names = [n for n in run.log.names if n.startswith("loss_by_bucket.")]
    if not names:
        return None
    x, labels = run.log.column("step"), _bucket_names(run)
    curves = {}
    for name in names:
        mark = name.rpartition(".")[2]
        label = labels[int(mark)] if mark.isdigit() and int(mark) < len(labels) else mark
        curves[label] = curve(*smooth(x, run.log.column(name), most // 4))
    reading = "Running means. All buckets should fall; one that does not is short of data or of anchors."
    spec = _lines("buckets", "step", "loss")
    return Figure("loss_by_bucket", "Loss by length of the sequence", reading, spec, {"buckets": curves})


def optimizer(run: History, most: int) -> Figure | None:
    if "grad_norm" not in run.log:
        return None
    raw, mean = _smoothed(run, "grad_norm", most)
    rules = {"optim.clip": _level(float(clip))} if (clip := run.config.get("optim", {}).get("clip")) else {}
    spec = _layers(_faint("raw", "step", "norm"), _lines("mean", "step", "norm"), *_rules("rules"))
    for layer in spec["layer"]:
        layer["encoding"]["y"]["scale"] = {"type": "log", "nice": False}
    reading = "Before clipping, log scale. Spikes are cut at optim.clip; a rising mean: lower optim.lr."
    return Figure("grad_norm", "Gradient norm", reading, spec, {"raw": raw, "mean": mean, "rules": rules})


def learning_rate(run: History, most: int) -> Figure | None:
    if "lr" not in run.log:
        return None
    curves = {"lr": curve(*thin(run.log.column("step"), run.log.column("lr"), most // 4))}
    return Figure("lr", "Learning rate", "Warm-up, then cosine.", _lines("lr", "step", "lr"), {"lr": curves})


# -- who waits for whom ----------------------------------------------------------------------------------------------


def where_time_goes(run: History, most: int) -> Figure | None:
    shares = stage_shares(run)
    if not shares:
        return None
    curves: Curves = {}
    for stage, (busy, waits) in shares.items():
        parts = {"busy": busy, **{WORDS.get(k, k): v for k, v in waits.items() if v >= 0.005}}
        parts["neither (evaluations, start and end)"] = max(0.0, 1 - busy - sum(waits.values()))
        for name, share in parts.items():
            columns = curves.setdefault(name if name == "busy" or "neither" in name else f"waits: {name}", {})
            columns.setdefault("x", []).append(stage)
            columns.setdefault("y", []).append(share)
    spec = _bars("shares", "", "share of the time")
    encoding = spec["encoding"]
    del encoding["xOffset"]
    encoding["x"], encoding["y"] = {**encoding["y"], "stack": True, "scale": {"domain": [0, 1]}}, encoding["x"]
    encoding["y"]["title"] = None
    encoding["color"]["legend"] = {"columns": 2}
    reading = "Of the whole run. The stage that is busy nearly all the time limits the others."
    return Figure("where_time_goes", "Where the time went", reading, spec, {"shares": curves})


def stage_shares(run: History) -> dict[str, tuple[float, dict[str, float]]]:
    """Per stage (busy share, wait shares by reason) of the whole run, from its summary or its status."""
    if live := run.status.get("shares"):
        return {stage: (s["busy_share"], s.get("waits", {})) for stage, s in live.items()}
    busy, waits = run.summary.get("busy_share", {}), run.summary.get("waits", {})
    return {stage: (share, waits.get(stage, {})) for stage, share in busy.items()}


def timeline(run: History, most: int) -> Figure | None:
    rows = busy_over_time(run)
    curves: Curves = {}
    for name, (times, shares) in rows.items():
        curves[name] = {"x": times[:-1].tolist(), "x2": times[1:].tolist(), "y": shares.tolist()}
    if not curves:
        return None
    spec = {
        "data": {"name": "busy"},
        "mark": {"type": "rect", "tooltip": True, "stroke": None},
        "encoding": {
            "x": {"field": "x", **_axis("minutes")},
            "x2": {"field": "x2"},
            "y": {"field": "s", "type": "nominal", "title": None, "sort": None},
            "color": {
                "field": "y",
                "type": "quantitative",
                "scale": {"domain": [0, 1]},
                "legend": {"title": "share busy", "gradientLength": 120},
            },
        },
    }
    reading = "Who was busy when: yellow is busy, blue is waiting. A blue row waits for the yellow one."
    return Figure("timeline", "Pipeline timeline", reading, spec, {"busy": curves})


def busy_over_time(run: History, most: int = 160) -> dict[str, tuple[Floats, Floats]]:
    """Per stage or worker: (minutes [m + 1], share busy in each stretch [m]), from counters of seconds or shares."""
    seconds = run.seconds
    if len(seconds) < 2:
        return {}
    edges = stretches(len(seconds), most)
    times = np.concatenate([[0.0], seconds])[edges]
    out = {}
    for name, total in busy_seconds(run).items():
        at = np.concatenate([[0.0], total])[edges]
        share = np.diff(at) / np.maximum(np.diff(times), 1e-9)
        out[name] = (times / 60, np.clip(np.nan_to_num(share), 0, 1))
    return out


def busy_seconds(run: History) -> dict[str, Floats]:
    """Per stage or worker: busy seconds since the start, at each line."""
    if "data_wait_share" in run.log:  # an older run: the drafter's waiting for data alone, as a share of the time
        seconds = run.seconds
        return {"drafter (not waiting for data)": seconds * (1 - run.log.column("data_wait_share"))}
    return {}


def rates(run: History, most: int) -> Figure | None:
    curves: Curves = {}
    x = run.log.column("step")
    for name, label in (("tokens", "tokens/s"), ("supervised", "supervised tokens/s")):
        if name in run.log and run.log.length > 1:
            edges, found = rate(run.seconds, run.log.column(name))
            curves[label] = curve(x[edges[1:] - 1], found)
    if not curves:
        return None
    reading = "Of each stretch of the run, evaluations and checkpoints included. A step down: see the timeline."
    return Figure("rates", "Speed", reading, _lines("rates", "step", "tokens/s", zero=True), {"rates": curves})


# -- is the mixing healthy -------------------------------------------------------------------------------------------


def lengths(run: History, most: int) -> Figure | None:
    if not run.plans:
        return None
    plan = run.plans[min(run.plans)]
    edges = np.unique(np.linspace(0, plan.params.bucket_edges[-1], 41).astype(np.int64))
    counts, _ = np.histogram(plan.lengths, bins=edges)
    bars = {"x": edges[:-1].tolist(), "x2": edges[1:].tolist(), "y": counts.tolist()}
    spec = _layers(
        {
            "data": {"name": "lengths"},
            "mark": {"type": "bar", "tooltip": True},
            "encoding": {
                "x": {"field": "x", **_axis("tokens of the sequence")},
                "x2": {"field": "x2"},
                "y": {"field": "y", **_axis("sequences", zero=True)},
                "y2": {"datum": 0},
            },
        },
        {
            "data": {"name": "edges"},
            "mark": {"type": "rule", "strokeDash": [6, 4], "color": "#333"},
            "encoding": {"x": {"field": "x", "type": "quantitative"}},
        },
    )
    marks = {"upper edge": {"x": list(plan.params.bucket_edges)}}
    reading = "Of the sequences that an epoch trains on; dashed: the upper edges of the buckets."
    return Figure("lengths", "Lengths", reading, spec, {"lengths": {"sequences": bars}, "edges": marks})


def _bucket_names(run: History) -> list[str]:
    low, names = 1, []
    for edge in run.bucket_edges:
        names.append(f"{low} to {edge} tokens")
        low = edge + 1
    return names


def bucket_mix(run: History, most: int) -> Figure | None:
    counts, corpus = run.bucket_counts()
    if not counts.sum() or len(corpus) < 2:
        return None
    edges = stretches(len(counts), 60)
    sums = np.add.reduceat(counts, edges[:-1])
    shares = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
    x = run.log.column("step")[edges[1:] - 1]
    names = _bucket_names(run)
    curves = {name: {**curve(x, shares[:, b]), "order": [b] * len(x)} for b, name in enumerate(names)}
    rules = {"": {"y": np.cumsum(corpus)[:-1].tolist()}}
    spec = _layers(
        {
            "data": {"name": "mix"},
            "mark": {"type": "area", "tooltip": True, "interpolate": "step-before"},
            "encoding": {
                "x": {"field": "x", **_axis("step")},
                "y": {"field": "y", "type": "quantitative", "stack": "normalize", "title": "share of the items"},
                "color": {"field": "s", "type": "nominal", "sort": None, "scale": {"scheme": "cividis"}},
                "order": {"field": "order", "type": "quantitative"},
            },
        },
        {
            "data": {"name": "corpus"},
            "mark": {"type": "rule", "strokeDash": [6, 4], "color": "#D55E00", "strokeWidth": 2},
            "encoding": {"y": {"field": "y", "type": "quantitative"}},
        },
    )
    reading = (
        "Items of each stretch of windows by bucket; dashed: the corpus. The borders should stay at the dashed lines: "
        "where they drift the weights see one length after another."
    )
    return Figure("bucket_mix", "Bucket mix of the windows against the corpus", reading, spec, {
        "mix": curves, "corpus": rules
    })  # fmt: skip


def mixing(run: History, most: int) -> Figure | None:
    name = first(run, "mixing_r", "r")
    if name is None:
        return None
    raw, mean = _smoothed(run, name, most)
    rules = {f"good: up to {TARGET_R}": _level(TARGET_R), f"alarm: {ALARM_R}": _level(ALARM_R)}
    spec = _layers(_faint("raw", "step", "r"), _lines("mean", "step", "r"), *_rules("rules"))
    reading = (
        "Excess chance that two items of a window share a bucket: 0 is random, below is better. Judge the mean. Above "
        "the alarm: plan.order: filled, or a larger buffer.min_fill."
    )
    return Figure("mixing_r", "Mixing r", reading, spec, {"raw": raw, "mean": mean, "rules": rules})


def occupancy(run: History, most: int) -> Figure | None:
    name = first(run, "occupancy", "occupancy_items")
    if name is None:
        return None
    x = run.log.column("step")
    curves = {"items at the draw": curve(*thin(x, run.log.column(name), most))}
    if (other := first(run, "buffered_items", "occupancy_items")) and other != name:
        curves["items after the step"] = curve(*thin(x, run.log.column(other), most))
    least = run.config.get("buffer", {}).get("min_fill")
    rules = {"min fill": _level(float(least))} if least else {}
    spec = _layers(
        _lines("items", "step", "items", zero=True, mark={"interpolate": "step-after", "strokeWidth": 1}),
        *_rules("rules"),
    )
    reading = "At min fill the targets limit; near the top the drafters do. Below min fill only at an epoch's end."
    return Figure("occupancy", "Items in the buffer", reading, spec, {"items": curves, "rules": rules})


def held_bytes(run: History, most: int) -> Figure | None:
    name = first(run, "charged_bytes", "buffer_bytes")
    if name is None:
        return None
    mib = 2**20
    curves = {"charged": curve(*thin(run.log.column("step"), run.log.column(name) / mib, most))}
    budget = run.config.get("buffer", {}).get("bytes")
    rules = {"buffer.bytes": _level(budget / mib)} if isinstance(budget, int) else {}
    spec = _layers(_lines("bytes", "step", "MiB", zero=True), *_rules("rules"))
    reading = "Room taken by leased, waiting and drawn items: never above buffer.bytes. Always at it: raise it."
    return Figure("bytes", "Bytes in the buffer", reading, spec, {"bytes": curves, "rules": rules})


def age(run: History, most: int) -> Figure | None:
    x = run.log.column("step")
    known_names = {"age_p50": "median", "age_p99": "99 % below", "age_max": "oldest"}
    curves = {label: curve(*thin(x, run.log.column(n), most // 2)) for n, label in known_names.items() if n in run.log}
    if not curves:
        return None
    reading = "Draws that an item waited, of each window. The mean is near the occupancy; a long tail is normal."
    return Figure(
        "age",
        "Age of the drawn items",
        reading,
        _lines("age", "step", "draws", zero=True, mark={"strokeWidth": 1}),
        {"age": curves},
    )


def memory(run: History, most: int) -> Figure | None:
    names = [n for n in run.log.names if n.rpartition(".")[0] != "jobs" and ("memory" in n or "rss" in n)]
    x = run.log.column("step")
    curves = {n.replace("_bytes", ""): curve(*thin(x, run.log.column(n) / 2**30, most // 4)) for n in names
              if "bytes" in n}  # fmt: skip
    if not curves:
        return None
    reading = "A line that keeps rising is a leak; `forebay plan` says what the run should take at most."
    return Figure("memory", "Memory", reading, _lines("memory", "step", "GiB", zero=True), {"memory": curves})


LEARNING: tuple[Build, ...] = (
    loss, accept_length, by_position, by_answer_length, training_positions, loss_by_bucket, optimizer, learning_rate,
)  # fmt: skip
WAITING: tuple[Build, ...] = (where_time_goes, timeline, rates, occupancy, held_bytes, memory)
MIXING: tuple[Build, ...] = (lengths, bucket_mix, mixing, age)


def figures(run: History, builds: Sequence[Build] = LEARNING + WAITING + MIXING, most: int = POINTS) -> list[Figure]:
    """The figures that the run has metrics for; `most`: points of a curve."""
    return [figure for build in builds if (figure := build(run, most)) is not None]


# -- several runs, and a picture -------------------------------------------------------------------------------------


def compare(runs: Sequence[History], names: Sequence[str]) -> Iterator[Figure]:
    """The runs' curves in one chart each; `names` tell the runs apart."""
    columns = (
        ("loss", "Loss", ("loss",)),
        ("r", "Mixing r", ("mixing_r", "r")),
        ("items", "Items in the buffer", ("occupancy", "occupancy_items")),
        ("tokens/s", "Speed since the start", ("tokens_per_s",)),
    )
    evals = {n: {"x": [e["step"] for e in run.evals], "y": [e["accept_length"] for e in run.evals]}
             for n, run in zip(names, runs, strict=True) if run.evals}  # fmt: skip
    if evals:
        spec = _lines("curves", "step", "tokens a round", mark={"point": True})
        yield Figure("compare_accept_length", "Held-out accept length", "Higher is better.", spec, {"curves": evals})
    for y, title, candidates in columns:
        curves = {}
        for label, run in zip(names, runs, strict=True):
            if name := first(run, *candidates):
                curves[label] = curve(*smooth(run.log.column("step"), run.log.column(name), 500))
        if curves:
            spec = _lines("curves", "step", y)
            yield Figure(f"compare_{candidates[0]}", title, "Running means.", spec, {"curves": curves})


def rows(curves: Curves) -> list[dict[str, Any]]:
    """One mapping per point, with the series as `s`: what Vega reads (the page does the same)."""
    out = []
    for name, columns in curves.items():
        for values in zip(*columns.values(), strict=True):
            out.append({"s": name, **dict(zip(columns, values, strict=True))})
    return out


def plotting() -> Any:
    """The package vl-convert-python. Raises UsageError where it is not installed."""
    try:
        import vl_convert
    except ImportError:
        raise UsageError("figures need the package vl-convert-python: pip install 'forebay[report]'") from None
    return vl_convert


PICTURE: tuple[Build, ...] = (
    lengths, bucket_mix, mixing, occupancy, age, where_time_goes, loss, accept_length, by_position, by_answer_length,
)  # fmt: skip


def picture(run: History | str | os.PathLike[str], out: str | os.PathLike[str], columns: int = 2) -> Path:
    """One PNG of a run's most telling figures, for a README or a notebook; returns its path."""
    history = run if isinstance(run, History) else History.open(run)
    charts, datasets = [], {}
    for figure in figures(history, PICTURE, most=600):
        names = {name: f"{figure.key}_{name}" for name in figure.data}
        datasets |= {names[name]: rows(curves) for name, curves in figure.data.items()}
        charts.append({"title": figure.title, "width": 440, "height": HEIGHT, **_renamed(figure.spec, names)})
    if not charts:
        raise UsageError(f"{history.folder} has no metrics to draw yet: {'; '.join(history.remarks)}")
    resolve = {"scale": dict.fromkeys(("color", "strokeDash", "xOffset"), "independent")}
    spec = {"concat": charts, "columns": columns, "datasets": datasets, "resolve": resolve, "config": THEME}
    path = Path(out)
    path.write_bytes(plotting().vegalite_to_png(spec, scale=1.5))
    return path


def _renamed(spec: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The chart with its data sets under other names, so that charts can stand in one document."""
    out = dict(spec)
    if "data" in out:
        out["data"] = {"name": names[out["data"]["name"]]}
    if "layer" in out:
        out["layer"] = [_renamed(layer, names) for layer in out["layer"]]
    return out
