"""The plan: what is packed, in which order, and that a stored plan is whole or refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import ContractError, DataError
from forebay.flow.packing import pack
from forebay.flow.plan import EpochPlan, PlanParams, choose_anchors_per_item, choose_edges, plan_epoch


def rows(n: int, seed: int = 0, low: int = 16, high: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(low), np.log(high), n)).astype(np.int32)
    anchors = np.ceil(lengths * rng.uniform(0.05, 0.2, n)).astype(np.int32)
    return lengths, anchors


def params_of(lengths: np.ndarray, anchors: np.ndarray, budget: int = 2048, **more: object) -> PlanParams:
    most = choose_anchors_per_item(lengths, anchors, budget)
    base = PlanParams(budget, most, most * 3, 3, choose_edges(lengths, budget), item_bytes=100)
    return replace(base, **more)


def same(a: EpochPlan, b: EpochPlan) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in EpochPlan.ARRAYS)


@pytest.mark.parametrize("order", ["filled", "shuffled", "sorted"])
def test_every_row_is_in_one_job_and_no_job_exceeds_a_budget(order: str) -> None:
    """C88: lengths at random; every job within its budgets and of one bucket."""
    lengths, anchors = rows(3000)
    anchors[::50] = 0
    params = params_of(lengths, anchors, order=order)
    plan = plan_epoch(lengths, anchors, params, 0)
    assert sorted(plan.rows.tolist()) == np.flatnonzero(anchors).tolist()
    assert plan.left_out == 60
    edges = np.asarray(params.bucket_edges)
    for i in range(len(plan)):
        job = plan.job(i)
        assert job.lengths == tuple(lengths[list(job.rows)]) == tuple(sorted(job.lengths, reverse=True))
        assert job.real_tokens == sum(job.lengths) <= params.token_budget
        assert job.anchors == anchors[list(job.rows)].sum() <= params.anchors_per_item
        assert job.anchors * params.scored_slots <= params.slots_per_item
        assert set(np.searchsorted(edges, job.lengths)) == {job.bucket}
        assert sum(job.splits) == len(job.rows)
        heads = np.cumsum((0, *job.splits[:-1]))
        assert job.padded_tokens == sum(job.lengths[h] * n for h, n in zip(heads, job.splits, strict=True))


def test_the_plan_is_a_function_of_its_arguments_and_reshuffles_each_epoch() -> None:
    """G7: same arguments, same plan; another epoch or seed, another plan."""
    lengths, anchors = rows(500)
    params = params_of(lengths, anchors, draw="planned")
    first = plan_epoch(lengths, anchors, params, 3)
    again = plan_epoch(lengths, anchors, params, 3)
    assert same(first, again)
    assert np.array_equal(first.draw_order, again.draw_order)
    assert not same(first, plan_epoch(lengths, anchors, params, 4))
    assert not same(first, plan_epoch(lengths, anchors, replace(params, seed=1), 3))


def test_items_fill_on_a_long_tailed_mix() -> None:
    """Target padding and item tail at most 5 %, anchors and slots at least 95 % full, half of the tokens supervised."""
    rng = np.random.default_rng(5)
    lengths = np.clip(rng.lognormal(np.log(1400) - 0.32, 0.8, 6000), 64, 4096).astype(np.int32)
    anchors = np.ceil(lengths * 0.5 * 0.25).astype(np.int32)
    most = choose_anchors_per_item(lengths, anchors, 16384)
    params = PlanParams(16384, most, most * 15, 15, choose_edges(lengths, 16384))
    figures = plan_epoch(lengths, anchors, params, 0).describe()
    assert figures["target_padding_share"] <= 0.05
    assert figures["item_tail_share"] <= 0.05
    assert figures["anchor_fill_share"] >= 0.95
    assert figures["slot_fill_share"] >= 0.95
    assert figures["mixing_r"] <= 0.02


def test_filled_mixes_better_than_random_and_sorted_not_at_all() -> None:
    """DESIGN section 5: r is negative in fill order, near 1 when sorted by bucket."""
    lengths, anchors = rows(8000)
    r = {
        order: plan_epoch(lengths, anchors, params_of(lengths, anchors, order=order), 0).describe()["mixing_r"]
        for order in ("filled", "shuffled", "sorted")
    }
    assert r["filled"] < -0.03
    assert abs(r["shuffled"]) < 0.03
    assert r["sorted"] > 0.9


def test_a_row_above_a_budget_is_named_with_both_numbers() -> None:
    lengths, anchors = rows(50)
    params = params_of(lengths, anchors)
    lengths[7] = 5000
    with pytest.raises(DataError, match=r"exceed 2048 tokens.*row 7 with 5000.*token_budget"):
        plan_epoch(lengths, anchors, params, 0)
    lengths[7] = 100
    anchors[9] = 4000
    with pytest.raises(DataError, match=r"anchors.*row 9 with 4000"):
        plan_epoch(lengths, anchors, params, 0)
    with pytest.raises(DataError, match="none of 50 rows has an anchor"):
        plan_epoch(lengths, np.zeros(50, dtype=np.int32), params, 0)


def test_one_row_is_a_plan() -> None:
    plan = plan_epoch(np.array([40]), np.array([3]), PlanParams(64, 8, 24, 3, (64,)), 0)
    assert len(plan) == 1
    assert plan.job(0).rows == (0,)


def test_a_stored_plan_comes_back_equal(tmp_path: Path) -> None:
    lengths, anchors = rows(300)
    params = params_of(lengths, anchors, draw="planned")
    plan = plan_epoch(lengths, anchors, params, 2)
    plan.save(tmp_path / "plan")
    back = EpochPlan.load(tmp_path / "plan", params)
    assert same(plan, back)
    assert np.array_equal(plan.draw_order, back.draw_order)
    assert back.epoch == 2
    assert back.job(1) == plan.job(1)
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_a_plan_that_was_cut_or_edited_is_refused(tmp_path: Path) -> None:
    lengths, anchors = rows(300)
    params = params_of(lengths, anchors)
    file = tmp_path / "plan"
    plan_epoch(lengths, anchors, params, 0).save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(DataError, match="was cut"):
        EpochPlan.load(file)
    file.write_bytes(whole[:-10] + b"0123456789")
    with pytest.raises(DataError, match="was edited or damaged"):
        EpochPlan.load(file)
    file.write_bytes(whole.replace(b'"seed": 0', b'"seed": 1', 1))
    with pytest.raises(DataError, match="was edited or damaged"):
        EpochPlan.load(file)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="is not a forebay-plan"):
        EpochPlan.load(file)
    with pytest.raises(DataError, match="no plan at"):
        EpochPlan.load(tmp_path / "absent")


def test_a_plan_of_other_data_or_parameters_is_refused_field_by_field(tmp_path: Path) -> None:
    lengths, anchors = rows(300)
    params = params_of(lengths, anchors, data_fingerprint="a")
    plan_epoch(lengths, anchors, params, 0).save(tmp_path / "plan")
    with pytest.raises(ContractError, match=r"window: 4 here, 8 there\n  data_fingerprint: b here, a there"):
        EpochPlan.load(tmp_path / "plan", replace(params, window=4, data_fingerprint="b"))


def test_packing_without_a_budget_for_weights_would_exceed_it() -> None:
    """The guard is real: the same rows packed by tokens alone exceed the anchor budget."""
    tokens = np.full(64, 10)
    weights = np.arange(64) % 8
    for limit, exceeds in ((20, False), (10**6, True)):
        jobs = pack(tokens, weights, 100, limit)
        assert np.bincount(jobs, tokens).max() <= 100
        assert (np.bincount(jobs, weights).max() > 20) == exceeds


def test_edges_reach_the_longest_row_and_leave_no_bucket_nearly_empty() -> None:
    lengths, _ = rows(5000)
    edges = choose_edges(lengths, 2048)
    assert edges[-1] == lengths.max()
    assert list(edges) == sorted(set(edges))
    per_bucket = np.bincount(np.searchsorted(edges, lengths), lengths)
    assert per_bucket.min() >= 12 * 2048
    assert choose_edges(np.array([5]), 2048) == (5,)


def test_the_flow_imports_no_torch() -> None:
    code = (
        "import pkgutil, sys, importlib, forebay.flow as f\n"
        "[importlib.import_module('forebay.flow.' + m.name) for m in pkgutil.iter_modules(f.__path__)]\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
