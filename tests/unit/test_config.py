"""The configuration refuses what cannot work, naming the key, both numbers and the fix."""

import pytest
import yaml

from forebay import config
from forebay.errors import ConfigError

BASE = {"run_dir": "r", "target": {"model": "m"}, "data": {"store": "s"}}


def with_(**sections):
    return {**BASE, **sections}


def test_the_resolved_configuration_reads_back_equal(tmp_path):
    run = config.from_dict(with_(buffer={"bytes": "1.5 GiB"}, loss={"weights": {"ce": 0.5, "kl": 0.5}}))
    assert run.buffer.bytes == 3 * 2**29
    assert config.from_dict(yaml.safe_load(config.dump(run))) == run


def test_an_unknown_key_names_the_nearest(tmp_path):
    """C109."""
    with pytest.raises(ConfigError, match=r"unknown key 'buffer.minfill' \(nearest: 'buffer.min_fill'\)"):
        config.from_dict(with_(buffer={"minfill": 3}))


def test_overrides_reach_nested_keys_and_keep_the_rest(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(with_(optim={"epochs": 2})))
    run = config.load(file, ["optim.lr=3e-4", "buffer.min_fill=16", "runtime.targets=[cpu, cpu]"])
    assert (run.optim.lr, run.optim.epochs, run.buffer.min_fill) == (3e-4, 2, 16)
    assert run.runtime.targets == ("cpu", "cpu")


@pytest.mark.parametrize("bad", ["optim.lr", "=3", "seed.x=1"])
def test_a_malformed_override_is_refused(tmp_path, bad):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(with_(seed=1)))
    with pytest.raises(ConfigError):
        config.load(file, [bad])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"drafter": {"layer_types": ["full_attention"]}}, "1 layers but layers is 5"),
        ({"drafter": {"sliding_window": 8}}, "would be ignored"),
        ({"drafter": {"layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 4}}, "below block_size 16"),
        ({"drafter": {"draft_vocab_size": 0}}, "draft_vocab_size"),
        ({"drafter": {"draft_vocab_size": 4.5}}, "draft_vocab_size"),
        ({"loss": {"gamma": 3.0, "decay": "dpace"}}, "ignored with decay 'dpace'"),
        ({"loss": {"weights": {"ce": -1.0}}}, "positive weight"),
        ({"buffer": {"draw": "planned", "queue": "bucketed"}}, "needs dispatch: shared and queue: buffered"),
        ({"buffer": {"bytes": "many"}}, "'many' is no size"),
        ({"buffer": {"reuse": 0}}, r"buffer.reuse: Input should be greater than or equal to 1 \(got 0\)"),
        ({"buffer": {"reuse": 100}}, r"less than or equal to 64 \(got 100\)"),
        ({"plan": {"token_budget": 12}}, "block_size 16 exceeds token_budget 12"),
        ({"plan": {"bucket_edges": [64, 32]}}, "must rise"),
        ({"runtime": {"targets": []}}, "at least one device"),
    ],
)
def test_what_cannot_work_is_refused_with_both_numbers(sections, message):
    """C109, C32, sliding window below the block, options that would be ignored."""
    with pytest.raises(ConfigError, match=message):
        config.from_dict(with_(**sections))


def test_a_missing_file_and_a_file_that_is_no_mapping_say_so(tmp_path):
    with pytest.raises(ConfigError, match="no configuration file"):
        config.load(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        config.load(tmp_path / "list.yaml")


def test_gamma_follows_the_paper_at_its_block_sizes():
    loss = config.LossConfig()
    assert [loss.gamma_for(b) for b in (8, 10, 16)] == [4.0, 5.0, 7.0]
