"""What a run writes while it goes on: the log has the fields of the schema, and the trackers have the log's numbers."""

import importlib.util

import pytest

from forebay import api, config
from forebay.observe.metrics import read
from forebay.observe.schema import metrics
from forebay.observe.trackers import numbers


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """A run of one epoch, with every tracker that is small and installed."""
    folder = tmp_path_factory.mktemp("metrics")
    loggers = [name for name in ("tensorboard",) if importlib.util.find_spec(name)]
    values = {
        "run_dir": str(folder / "run"),
        "target": {"model": str(world / "target"), "layer_ids": [0, 2, 4], "dtype": "float32", "self_test": False},
        "data": {"store": str(world / "store")},
        "drafter": {"layers": 2, "block_size": 4, "intermediate_size": 64},
        "plan": {"token_budget": 512},
        "buffer": {"min_fill": 4, "bytes": "16 MiB"},
        "optim": {"epochs": 1, "window": 4},
        "eval": {"prompts": 2, "max_new_tokens": 8, "at_start": False},
        "loggers": loggers,
    }
    api.train(config.from_dict(values), quiet=True)
    return folder / "run"


def test_a_runs_log_has_the_fields_of_the_schema_and_no_others(trained):
    lines = read(trained / "metrics.jsonl")
    assert {line["kind"] for line in lines} == {"step", "eval", "guard"}
    for line in lines:
        known = {name: metric for name, metric in metrics(line["kind"]).items() if not metric.where}
        assert set(line) - {"kind"} == set(known), line["kind"]
        for name, metric in known.items():
            kinds = {"list": list, "by name": list | dict}.get(metric.shape, object)
            assert isinstance(line[name], kinds), (name, line[name])


def test_what_is_logged_of_a_step_agrees_with_itself(trained):
    steps = read(trained / "metrics.jsonl", "step")
    for line in steps:
        assert sum(line["bucket_counts"]) == len(line["jobs"]) and 1 <= line["distinct_buckets"] <= 4
        weighed = line["loss_by_bucket"].values()
        assert min(weighed) - 1e-6 <= line["loss"] <= max(weighed) + 1e-6
        assert line["uniform_accept_length"] == pytest.approx(1 + sum(line["acceptance_by_slot"]))
        assert line["tokens"] == pytest.approx((1 - line["item_tail_share"]) * 512 * len(line["jobs"]), abs=1)
        assert 0 < line["slot_fill_share"] <= 1 and 0 < line["anchor_fill_share"] <= 1
        assert sum(line["jobs_by_state"].values()) == len(steps[-1]["jobs"]) + sum(len(s["jobs"]) for s in steps[:-1])
    last = steps[-1]["workers"]
    assert last["target 0"]["jobs"] == sum(len(s["jobs"]) for s in steps) and 0.5 < last["target 0"]["fill"] <= 1
    assert last["drafter 0"]["busy_s"] > 0 and steps[-1]["process_bytes"] > 2**26


def test_tensorboard_has_the_numbers_of_the_log(trained):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    for line in read(trained / "metrics.jsonl"):
        for name, value in numbers({k: v for k, v in line.items() if k not in ("kind", "step", "t")}):
            found = {e.step: e.tensor_proto.float_val[0] for e in events.Tensors(f"{line['kind']}/{name}")}
            assert found[line["step"]] == pytest.approx(value, rel=1e-6), name
