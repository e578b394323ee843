"""A run's folder read as one structure, whatever state it is in, and curves made short."""

import json

import numpy as np
import pytest

from forebay.errors import DataError, UsageError
from forebay.observe import metrics
from forebay.observe.curves import rate, smooth, thin
from forebay.observe.history import FORMAT, History
from forebay.observe.log import Log
from histories import WINDOW, eval_line, step_lines, write_run


def append(run, *lines):
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_column_is_what_the_lines_say(tmp_path):
    run = write_run(tmp_path / "run")
    history = History.open(run)
    lines = metrics.read(run / "metrics.jsonl", "step")
    for name in ("step", "loss", "mixing_r", "occupancy", "finite"):
        assert history.log.column(name).tolist() == [line[name] for line in lines]
    assert history.log.jobs == [line["jobs"] for line in lines]
    assert [e["step"] for e in history.evals] == [0, 60]
    assert history.remarks == []


def test_a_metric_that_came_later_or_nested_is_a_column_with_gaps(tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    append(run, {"kind": "step", "step": 3, "t": 1, "loss_by_bucket": {"0": 1.5}, "accuracy_by_position": [0.5, 0.25]})
    log = History.open(run).log
    assert np.isnan(log.column("loss_by_bucket.0")[:2]).all()
    assert log.column("loss_by_bucket.0")[2] == 1.5
    assert log.column("accuracy_by_position.1")[2] == 0.25
    assert np.isnan(log.column("loss")[2])
    assert np.isnan(log.column("never")).all()


def test_half_a_line_is_left_for_the_next_look(tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    history = History.open(run)
    text = json.dumps({**step_lines(4)[3], "loss": 1.25}) + "\n"
    with open(run / "metrics.jsonl", "a") as file:
        file.write(text[:40])
    history.refresh()
    assert history.log.length == 3
    assert history.log.cut_at_end
    with open(run / "metrics.jsonl", "a") as file:
        file.write(text[40:])
    assert history.refresh()
    assert history.log.column("loss")[-1] == 1.25
    assert not history.log.cut_at_end


def test_a_log_that_was_cut_by_a_resume_is_read_anew(tmp_path):
    """Even where it has grown beyond its old size before anyone looked again."""
    run = write_run(tmp_path / "run", steps=20)
    history = History.open(run)
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    again = [json.dumps({**line, "loss": 9.0}) + "\n" for line in step_lines(40)[10:]]
    path.write_text("".join(lines[:11] + again))
    assert history.refresh()
    assert history.log.column("step").tolist() == list(range(1, 41))
    assert (history.log.column("loss")[10:] == 9.0).all()


def test_a_damaged_line_is_said_and_left_out(tmp_path):
    run = write_run(tmp_path / "run", steps=5)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b"\0\0\0\n" + b'{"kind": "step", "ste')
    history = History.open(run)
    assert history.log.length == 5
    assert "line 8 of metrics.jsonl is damaged and left out" in history.remarks
    assert any("the last line of metrics.jsonl is cut" in remark for remark in history.remarks)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds no run \(no config.yaml\)"):
        History.open(tmp_path)
    (tmp_path / "config.yaml").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        History.open(tmp_path)


def test_a_run_of_a_newer_forebay_is_refused_with_both_numbers(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "run.json").write_text(json.dumps({"format": FORMAT + 1, "forebay": "9.1"}))
    with pytest.raises(DataError, match=rf"format {FORMAT + 1} \(forebay 9.1\) .* reads up to {FORMAT}: update"):
        History.open(run)


def test_a_run_that_has_logged_nothing_says_so(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    history = History.open(run)
    assert history.remarks == ["no step has been logged yet (metrics.jsonl is missing)"]


def test_the_seconds_of_a_resumed_run_go_on(tmp_path):
    run = write_run(tmp_path / "run", steps=4)
    append(run, *({**line, "t": line["t"] - 2.0} for line in step_lines(8)[4:]))
    assert np.diff(History.open(run).seconds).min() > 0


def test_bucket_counts_are_of_the_windows_jobs(tmp_path):
    run = write_run(tmp_path / "run")
    history = History.open(run)
    counts, corpus = history.bucket_counts()
    plan = history.plans[0]
    assert counts.sum(axis=1).tolist() == [WINDOW] * 60
    assert counts.sum(axis=0).tolist() == np.bincount(plan.buckets, minlength=4).tolist()
    assert corpus.tolist() == (np.bincount(plan.buckets) / len(plan)).tolist()
    assert counts[7, 2] == sum(plan.buckets[job] == 2 for job in history.log.jobs[7])


def test_evaluations_without_a_figure_are_no_evaluations(tmp_path):
    run = write_run(tmp_path / "run")
    append(run, {**eval_line(61, 2.0), "accept_length": None})
    assert len(History.open(run).evals) == 2


@pytest.mark.parametrize("n", [1, 7, 2000, 2001, 100_000])
def test_a_thinned_curve_keeps_ends_and_extremes_and_invents_nothing(n):
    rng = np.random.default_rng(n)
    x, y = np.arange(n, dtype=float), rng.standard_normal(n)
    tx, ty = thin(x, y, 2000)
    assert len(tx) <= 2000
    assert (y[tx.astype(int)] == ty).all()
    assert (np.diff(tx) > 0).all()
    assert {tx[0], tx[-1]} == {0, n - 1}
    assert (ty.min(), ty.max()) == (y.min(), y.max())
    if n == 100_000:
        spike = y.copy()
        spike[54_321] = 50.0
        assert 54_321 in thin(x, spike, 2000)[0]


def test_a_running_mean_of_a_line_is_that_line_and_gaps_are_passed_over():
    x = np.arange(1000, dtype=float)
    y = 2 * x
    y[500] = np.nan
    mx, my = smooth(x, y, 100)
    inside = (mx > 20) & (mx < 480)
    assert len(mx) <= 100
    assert np.allclose(my[inside], 2 * mx[inside])


def test_rates_are_amounts_over_the_seconds_of_their_stretch():
    seconds = np.array([1.0, 2.0, 4.0, 8.0])
    edges, found = rate(seconds, np.array([10.0, 10.0, 10.0, 10.0]), most=4)
    assert edges.tolist() == [0, 1, 2, 3, 4]
    assert found.tolist() == [10.0, 10.0, 5.0, 2.5]


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path):
    log = Log(tmp_path / "metrics.jsonl")
    assert not log.read()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step_lines(1)[0]) + "\n")
    assert log.read()
    assert not log.read()
