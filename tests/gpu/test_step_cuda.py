"""The drafter's step on a GPU: the CPU's numbers, FlexAttention and a CUDA graph included, compiled once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # for drafter_items

from drafter_items import borrowed, drafter, features, gradients, item

from forebay.config import LossConfig
from forebay.models.graph import FixedStep, compilations
from forebay.models.step import Borrowed, micro_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = {"tokens": 640, "anchors": 40, "slots": 600}
SPECS = {
    "plain": {},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 40},
    "narrow head": {"head_dim": 8},
}
LOSSES = {"ce": LossConfig(decay="none"), "kl": LossConfig(weights={"ce": 1.0, "kl": 0.5}, decay="dpace")}


def padded(lengths, anchors):
    bare = item(lengths, anchors, block=16)
    pad = (640 - sum(lengths), 40 - bare.n_anchors, 600 - bare.n_slots)
    return item(lengths, anchors, block=16, pad=pad)


ITEMS = [
    padded([400, 200], [(0, 9 * i + 3) for i in range(30)] + [(1, 11 * i + 2) for i in range(9)]),
    padded([90], [(0, 5), (0, 60)]),
    padded([300, 20, 310], [(d, 2 + 7 * i) for d, n in enumerate((18, 2, 18)) for i in range(n)]),
]


def on_gpu(lent):
    return Borrowed(lent.embed.cuda(), type(lent.head).build(lent.head.weight.cuda(), norm=lent.head.norm))


def check(change, config, build):
    change = {"block_size": 16, "head_dim": 16, **change}
    reference, lent = drafter(**change), borrowed(norm=torch.nn.Identity())
    module, on = drafter(**change).cuda(), on_gpu(lent)
    step = FixedStep(module, on, config, torch.float32, **SHAPE)
    before = compilations()
    made = step.build() if build else None
    for batch in (*ITEMS, *ITEMS):
        x, last = features(640, seed=batch.n_slots), features(640, seed=9, width=32)
        want = micro_step(reference, batch, x, lent, config, 0.1, last_hidden=last)
        if build:
            module.zero_grad(set_to_none=False)
            sums = step(batch, x.pin_memory(), 0.1, last.pin_memory())
            found = {k: p.grad.cpu().clone() for k, p in module.named_parameters()}
        else:
            sums = micro_step(module, batch, x.cuda(), on, config, 0.1, last_hidden=last.cuda())
            found = {k: v.cpu() for k, v in gradients(module).items()}
        for name in vars(want):
            torch.testing.assert_close(getattr(sums, name).cpu(), getattr(want, name), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(found, gradients(reference), rtol=1e-3, atol=1e-4)
    return made, compilations() - before


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("spec", SPECS)
def test_the_eager_step_on_a_gpu_equals_the_one_on_the_cpu(spec, loss):
    check(SPECS[spec], LOSSES[loss], build=False)


@pytest.mark.parametrize("spec", SPECS)
def test_the_captured_step_equals_the_eager_one_and_is_compiled_once(spec):
    """Six items through one graph: each finds its own states, anchors and masks in it."""
    made, count = check(SPECS[spec], LOSSES["ce"], build=True)
    assert made == "compiled and captured as a CUDA graph" and count == 1


def test_the_captured_step_works_for_losses_that_read_the_target():
    made, count = check({}, LOSSES["kl"], build=True)
    assert made == "compiled and captured as a CUDA graph" and count == 1


def test_a_capture_that_fails_leaves_the_compiled_step(monkeypatch):
    def refuse(*args, **more):
        raise RuntimeError("no capture here")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    made, count = check({}, LOSSES["ce"], build=True)
    assert "not captured" in made and "no capture here" in made and count == 1
