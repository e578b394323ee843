"""Costs known before a job runs: FLOPs as in DFLASH.md, bytes as measured, the ideal split."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from forebay.bench.drafter import whole_blocks
from forebay.config import LossConfig
from forebay.cost.devices import best_split, ideal_targets, shared_rate
from forebay.cost.flops import DrafterShape, TargetShape, drafter_flops, layer_parameters, target_flops_per_token
from forebay.cost.memory import (
    drafter_state_bytes,
    drafter_step_bytes,
    estimate_memory,
    item_bytes,
    state_bytes,
    target_forward_bytes,
    target_weight_bytes,
)
from forebay.errors import UsageError
from forebay.models.checks import Packed
from forebay.models.drafter import Drafter
from forebay.models.init import init_random
from forebay.models.loss import FrozenHead
from forebay.models.spec import DrafterSpec
from forebay.models.step import Borrowed, micro_step
from forebay.models.target import Target
from tiny import D0, LAYER_IDS, MASK_ID, ROWS, tiny_target

QWEN3_8B = TargetShape(34, 4096, 32, 8, 128, 12288, 151936)  # stops after layer 33 of 36
DRAFTER_8B = DrafterShape(5, 4096, 32, 8, 128, 12288, 151936, 5, 16)
D0_SHAPE = DrafterShape(2, 32, 4, 2, 8, 64, ROWS, 3, 4)


def test_the_target_costs_13_gflop_per_token_at_qwen3_8b_shapes():
    assert target_flops_per_token(QWEN3_8B, 0) == pytest.approx(13.1e9, rel=0.01)
    attention = target_flops_per_token(QWEN3_8B, 1000) - target_flops_per_token(QWEN3_8B, 0)
    assert attention == 2 * 34 * 32 * 128 * 1000
    head = target_flops_per_token(QWEN3_8B, 0, head=True) - target_flops_per_token(QWEN3_8B, 0)
    assert head == 2 * 4096 * 151936


def test_one_anchor_of_the_drafter_costs_0_13_tflop_and_the_context_about_two_per_cent():
    one = drafter_flops(DRAFTER_8B, tokens=0, anchors=1, slots=15, visible=0)
    assert one == pytest.approx(0.127e12, rel=0.002)  # 0.13 less what all masks share and unscored slots need not do
    whole = drafter_flops(DRAFTER_8B, tokens=3072, anchors=512, slots=512 * 15)
    context = drafter_flops(DRAFTER_8B, tokens=3072, anchors=0, slots=0)
    assert 0.01 < context / whole < 0.03
    dearer = drafter_flops(DRAFTER_8B, tokens=0, anchors=1, slots=15, visible=0, recompute_logits=True)
    assert dearer - one == 2 * 15 * 4096 * 151936


def test_states_take_40960_bytes_per_token_and_49152_with_the_last_hidden_state():
    assert state_bytes(1, 5, 4096, "bfloat16") == 40_960
    assert state_bytes(1, 5, 4096, "bfloat16", last_hidden=True) == 49_152


def test_an_item_is_its_states_and_its_host_arrays():
    """Equal to what the packer and the slot pool hold (F23's numbers start here)."""
    from forebay.data.pack import ItemShape, host_bytes

    states = 128 * 3 * 32 * 4
    assert item_bytes(128, 16, 48, 3, 32, "float32") == states + host_bytes(ItemShape(128, 16, 48, 4))


def test_the_ideal_split_and_the_best_integer_one():
    assert ideal_targets(8, 1.0, 3.0) == 2.0
    split = best_split(8, 1.0, 3.0, peak=6.0)
    assert (split.targets, split.drafters) == (2, 6)
    assert split.rate == split.ideal_rate == shared_rate(8, 1.0, 3.0, 6.0) == 12.0
    uneven = best_split(2, 1.0, 3.0, peak=6.0)
    assert (uneven.targets, uneven.drafters) == (1, 1) and uneven.share_of_ideal == pytest.approx(2 / 3)
    with pytest.raises(UsageError, match="1 device cannot be split"):
        best_split(1, 1.0, 1.0, 1.0)


def measured_peak(work) -> int:
    """Most bytes that `work` held at once beyond what was there before, by the profiler's allocation events."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    events = [(e.start_ns(), e.nbytes()) for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(events, key=lambda e: e[0]):
        live += change
        peak = max(peak, live)
    return peak


def training_step(tokens: int, anchors: int, vocab: int, dtype: torch.dtype):
    """D0's optimizer step on random data, after a first one, and its drafter."""
    spec = DrafterSpec(
        hidden_size=32,
        target_hidden_size=32,
        layers=D0["layers"],
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        vocab_size=vocab,
        block_size=D0["block_size"],
        mask_token_id=MASK_ID,
        target_layer_ids=LAYER_IDS,
        num_target_layers=6,
        trained_max_length=tokens,
        dtype=str(dtype).removeprefix("torch."),
    )
    drafter = Drafter(spec)
    init_random(drafter, 0)
    weight = torch.randn(vocab, 32)
    borrowed = Borrowed(weight.to(dtype), FrozenHead.build(weight, dtype))
    features = torch.randn(tokens, 96).to(dtype)
    batch = whole_blocks(tokens, anchors, 4, ROWS - 20, 0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        micro_step(drafter, batch, features, borrowed, LossConfig(), 1.0, dtype=dtype)
        optimizer.step()

    step()
    optimizer.zero_grad(set_to_none=True)
    return step, drafter


@pytest.mark.parametrize(
    ("tokens", "anchors", "vocab", "dtype"),
    [
        (128, 16, 320, "float32"),
        (128, 64, 320, "float32"),
        (1024, 16, 320, "float32"),
        (128, 16, 4096, "float32"),
        (128, 16, 320, "bfloat16"),
    ],
)
def test_the_drafter_estimate_is_within_a_quarter_of_the_measured_peak(tokens, anchors, vocab, dtype):
    """C90."""
    step, drafter = training_step(tokens, anchors, vocab, getattr(torch, dtype))
    shape = dataclasses.replace(D0_SHAPE, vocab=vocab)
    assert shape == DrafterShape.of(drafter.spec)
    assert shape.parameters == sum(p.numel() for p in drafter.parameters())
    assert drafter_state_bytes(shape) == 16 * shape.parameters
    estimate = drafter_step_bytes(shape, tokens=tokens, anchors=anchors, slots=anchors * 3, dtype=dtype)
    assert estimate == pytest.approx(measured_peak(step), rel=0.25)


@pytest.mark.parametrize(("rows", "longest"), [(4, 32), (1, 128), (16, 128)])
def test_the_target_estimate_is_within_a_quarter_of_the_measured_peak(rows, longest):
    """C90."""
    target = Target(tiny_target(), LAYER_IDS)
    shape = TargetShape.of(target.facts, layers_run=5)
    batch = Packed.of([[7] * longest] * rows, (rows,))
    out = torch.zeros(rows * longest, target.feature_width)
    target.capture(batch, out)
    estimate = target_forward_bytes(shape, rows, longest, "float32")
    assert estimate == pytest.approx(measured_peak(lambda: target.capture(batch, out)), rel=0.25)
    weights = sum(p.numel() * 4 for p in target.model.parameters())
    assert target_weight_bytes(shape, "float32", tied=False, layers=6) == pytest.approx(weights, rel=0.02)


def test_the_estimate_knows_how_the_drafter_cuts_its_work():
    from forebay.cost import memory
    from forebay.models import attention, loss, step

    assert memory.CPU_QUERIES == step.CPU_QUERIES
    assert memory.CHUNK_SCORES == attention.MAX_CHUNK_SCORES
    assert memory.CHUNK_BYTES == loss.CHUNK_BYTES


def test_every_estimate_grows_with_every_dimension():
    """C90."""
    target = TargetShape.of(Target(tiny_target(), LAYER_IDS).facts, 5)
    sizes = {"tokens": 128, "anchors": 16, "slots": 48, "longest": 64, "buffer_bytes": 10**6}
    shape = dataclasses.replace(D0_SHAPE, vocab=1024)  # so that the head's chunk is the step's widest moment

    def total(target=target, drafter=shape, target_dtype="bfloat16", drafter_dtype="bfloat16", **changes):
        return estimate_memory(
            target, drafter, target_dtype=target_dtype, drafter_dtype=drafter_dtype, **{**sizes, **changes}
        ).total

    base = total()
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
        assert total(target=dataclasses.replace(target, **{name: 2 * getattr(target, name)})) > base, name
    for name in ("layers", "hidden", "kv_heads", "head_dim", "intermediate", "vocab", "block", "captured"):
        assert total(drafter=dataclasses.replace(shape, **{name: 2 * getattr(shape, name)})) > base, name
    for name in ("tokens", "anchors", "slots", "buffer_bytes"):
        assert total(**{name: 2 * sizes[name]}) > base, name
    assert total(drafter_dtype="float32") > base and total(target_dtype="float32") > base
    assert layer_parameters(target) == 32 * (2 * 32 + 2 * 16 + 3 * 64)


def test_an_estimate_says_who_holds_what():
    target = TargetShape.of(Target(tiny_target(), LAYER_IDS).facts, 5)
    estimate = estimate_memory(
        target, D0_SHAPE, tokens=128, anchors=16, slots=48, longest=64, buffer_bytes=2**30,
        target_dtype="float32", drafter_dtype="float32",
    )  # fmt: skip
    assert estimate.describe().startswith("1.00 GiB (target weights 0.00") and "buffer 1.00" in estimate.describe()
