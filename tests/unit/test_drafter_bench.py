"""`forebay bench drafter`: its figures exist, its items are whole and its counted work is the step's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from drafter_items import CE, borrowed, drafter, features
from torch.utils.flop_counter import FlopCounterMode

from forebay.bench import drafter as bench
from forebay.cost.flops import DrafterShape, drafter_flops
from forebay.errors import UsageError
from forebay.models import drafter as drafter_module
from forebay.models import matmul
from forebay.models.step import micro_step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_figures_are_printed_as_one_json_object(dtype, capsys, monkeypatch):
    monkeypatch.setattr(bench, "matmul_flops_per_s", lambda *_: 1e9)
    small = [
        "--hidden",
        "64",
        "--layers",
        "1",
        "--block",
        "4",
        "--tokens",
        "40",
        "--anchors",
        "6",
        "--vocab",
        "100",
        "--steps",
        "2",
        "--json",
    ]
    bench.main([*small, "--dtype", dtype, "--threads", "1"])
    figures = json.loads(capsys.readouterr().out)
    for key in ("context_tokens_per_s", "slots_per_s", "share_of_peak"):
        assert figures[key] > 0
    assert figures["slots_per_s"] / figures["context_tokens_per_s"] == pytest.approx(18 / 40)
    assert figures["peak_memory_growth_bytes"] >= 0


def test_impossible_sizes_are_usage_errors():
    for wrong in (["--block", "1"], ["--block", "600"], ["--anchors", "0"]):
        with pytest.raises(UsageError, match=wrong[0]):
            bench.main(wrong)


def test_every_slot_of_the_measured_item_is_supervised_inside_its_document():
    batch = bench.whole_blocks(40, 8, 4, 100, 0)
    assert batch.n_slots == 24 and batch.anchors.max() <= 36 and (np.diff(batch.anchors) > 0).all()
    slots = batch.slot_index % 4
    assert np.array_equal(batch.slot_label, batch.tokens[batch.anchors[batch.slot_index // 4] + slots])


def test_the_counted_work_is_what_the_step_does(monkeypatch):
    """Products apart from attention's, against torch's own counter."""
    monkeypatch.setattr(matmul, "ONEDNN", False)
    monkeypatch.setattr("forebay.models.step.CPU_MULTIPLE", 1)  # no rounding up of slots

    def no_products(q, context, own, view, layer):
        return q.flatten(1) + sum(x.sum() for x in (*context, *own))

    monkeypatch.setattr(drafter_module, "attend", no_products)
    made, batch = drafter(), bench.whole_blocks(40, 8, 4, 300, 0)
    monkeypatch.setattr(bench, "CAPTURED", 3)
    with FlopCounterMode(display=False) as counter:
        micro_step(made, batch, features(40), borrowed(), CE, 1.0)
    counts = counter.get_flop_counts()["Global"]
    attention = 14 * 2 * 32 * (40 / 2 + 4) * 32
    # fc's input gradient is not needed, and is not counted; norms add a few percent of small products.
    flops = drafter_flops(DrafterShape.of(made.spec), tokens=40, anchors=8, slots=batch.n_slots)
    assert sum(counts.values()) == pytest.approx(flops - attention, rel=0.03)
    assert torch.is_grad_enabled()
