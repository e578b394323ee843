"""What a run does to be fast, and what it shows: one compilation, one read per step, speeds in every line."""

import math
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from forebay.models import graph
from forebay.observe import metrics
from forebay.runtime.local import LocalRuntime


def lines(run):
    return metrics.read(Path(run.run_dir, "metrics.jsonl"), "step")


def test_a_compiled_run_compiles_once_and_gives_the_losses_of_the_eager_one(configuration, monkeypatch):
    """The graph is caught but no C++ made of it, which takes minutes; `test_graph` does that, marked slow."""
    monkeypatch.setattr(graph, "BACKEND", "eager")
    planned, short = {"draw": "planned"}, {"epochs": 1}
    eager = configuration("eager", buffer=planned, optim=short)
    compiled = configuration("compiled", buffer=planned, optim=short, runtime={"compile": True})
    assert LocalRuntime(eager, quiet=True).train()["compilations"] == 0
    assert LocalRuntime(compiled, quiet=True).train()["compilations"] == 1
    a, b = lines(eager), lines(compiled)
    assert [x["jobs"] for x in a] == [x["jobs"] for x in b]
    assert [x["loss"] for x in b] == pytest.approx([x["loss"] for x in a], rel=1e-5)


def test_a_run_says_what_memory_it_will_take(configuration, capsys):
    """C90, C88: before its first step, which has the shape of the largest."""
    LocalRuntime(configuration())
    said = capsys.readouterr().err
    assert "memory, at most:" in said and "GiB" in said and "buffer 0.02" in said


def test_a_run_without_a_compiler_goes_on_eagerly_and_says_why(configuration, monkeypatch):
    monkeypatch.setattr(graph.shutil, "which", lambda name: None)
    said = []
    run = LocalRuntime(configuration(optim={"epochs": 1}, runtime={"compile": True}), quiet=True)
    run.run.say = said.append
    assert run.train()["finished"]
    assert any("taken eagerly" in line and "no C++ compiler" in line for line in said)


def test_between_log_steps_one_number_a_step_reaches_the_host(configuration, monkeypatch):
    """C115: whether the step was finite, and nothing else: the ledger must not commit a window before it knows."""
    calls, per_step, me = Counter(), [], threading.get_ident()
    for name in ("item", "tolist", "nonzero", "__bool__", "__float__", "__int__", "__index__"):
        plain = getattr(torch.Tensor, name)

        def counted(tensor, *args, plain=plain, name=name):
            calls[name] += threading.get_ident() == me  # the drafter's thread, not the target's
            return plain(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    optim, seldom = {"epochs": 1, "window": 1}, {"every_steps": 1000}
    run = LocalRuntime(configuration(optim=optim, checkpoint=seldom, runtime={"log_every": 5}), quiet=True)
    add = run.training.steps.add

    def adding(*step):
        before = sum(calls.values())
        add(*step)
        if run.training.steps._waiting:
            assert sum(calls.values()) == before, "a line that waits has read something"
        per_step.append({k: v for k, v in calls.items() if v} if run.training.steps._waiting else None)
        calls.clear()

    run.training.steps.add = adding
    run.train()
    between = per_step[5:]  # the first steps also build what is kept
    assert between.count(None) >= 2 and all(step in (None, {"__bool__": 1}) for step in between)


def test_every_step_line_carries_speeds_waits_and_time_left_from_the_first_on(configuration):
    """C117."""
    run = configuration(optim={"epochs": 1}, runtime={"log_every": 3})
    LocalRuntime(run, quiet=True).train()
    for number, line in enumerate(lines(run), 1):
        assert line["step"] == number
        for name in ("loss", "grad_norm", "tokens_per_s", "supervised_tokens_per_s", "data_wait_share", "eta_s", "t"):
            assert math.isfinite(line[name]), (name, line)
        assert 0 < line["supervised_tokens_per_s"] < line["tokens_per_s"] and 0 <= line["data_wait_share"] <= 1
    assert line["eta_s"] == 0
