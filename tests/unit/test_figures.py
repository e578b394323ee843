"""Figures: what is drawn is what was logged; what was not logged is not drawn."""

import json

import numpy as np
import pytest

from forebay.errors import UsageError
from forebay.observe import metrics
from forebay.observe.figures import compare, figures, picture, rows
from forebay.observe.history import History
from histories import write_run

pytest.importorskip("vl_convert")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("figures") / "run", steps=60)


def by_key(history, **options):
    return {figure.key: figure for figure in figures(history, **options)}


def test_every_raw_point_is_a_line_of_the_log(run):
    found = by_key(History.open(run))
    lines = metrics.read(run / "metrics.jsonl", "step")
    for key, dataset, name in (
        ("loss", "raw", "loss"),
        ("mixing_r", "raw", "mixing_r"),
        ("occupancy", "items", "occupancy"),
    ):
        (curve,) = found[key].data[dataset].values()
        assert curve == {"x": [line["step"] for line in lines], "y": [line[name] for line in lines]}
    measured = found["accept_length"].data["accept"]["held out, by the serving loop"]
    assert measured == {"x": [0, 60], "y": [1.0, 2.0]}


def test_a_long_run_has_at_most_the_points_asked_for(tmp_path):
    found = by_key(History.open(write_run(tmp_path / "run", steps=5000)), most=400)
    for figure in found.values():
        for curves in figure.data.values():
            assert all(len(curve["y" if "y" in curve else "x"]) <= 400 for curve in curves.values())


def test_the_first_the_best_and_the_last_measurement_are_told_apart(run):
    found = by_key(History.open(run))["by_position"].data["positions"]
    assert list(found) == ["first, step 0", "best and last, step 60"]
    assert found["best and last, step 60"] == {"x": ["1", "2", "3"], "y": [0.5, 0.3, 0.2]}


def test_the_bucket_mix_is_stacked_shares_beside_the_corpus(run):
    history = History.open(run)
    figure = by_key(history)["bucket_mix"]
    counts, corpus = history.bucket_counts()
    shares = np.array([curve["y"] for curve in figure.data["mix"].values()])
    assert np.allclose(shares.sum(axis=0), 1)
    assert np.allclose(shares.T, counts / counts.sum(axis=1, keepdims=True))
    assert np.allclose(figure.data["corpus"][""]["y"], np.cumsum(corpus)[:-1])


def test_a_run_without_metrics_has_only_what_its_plan_says(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    (run / "status.json").unlink()
    assert list(by_key(History.open(run))) == ["lengths"]
    for file in (run / "plans").iterdir():
        file.unlink()
    with pytest.raises(UsageError, match="no metrics to draw yet: no step has been logged yet"):
        picture(run, tmp_path / "x.png")


def test_a_picture_of_a_run_is_a_png(run, tmp_path):
    """Every figure's chart compiles and draws: the library raises where a field or a data set does not exist."""
    content = picture(run, tmp_path / "run.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 50_000


def test_runs_are_compared_in_one_chart_each(run):
    history = History.open(run)
    found = {figure.key: figure for figure in compare([history, history], ["a", "b"])}
    assert set(found["compare_loss"].data["curves"]) == {"a", "b"}
    assert found["compare_accept_length"].data["curves"]["b"]["y"] == [1.0, 2.0]


def test_rows_are_points_with_their_series(run):
    assert rows({"a": {"x": [1, 2], "y": [3, 4]}}) == [{"s": "a", "x": 1, "y": 3}, {"s": "a", "x": 2, "y": 4}]
    for figure in figures(History.open(run)):
        json.dumps(figure.spec, allow_nan=False)
        json.dumps(figure.data, allow_nan=False)
