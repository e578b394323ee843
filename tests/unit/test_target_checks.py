"""Planted faults in captured states: each is caught, and the message names what and where."""

from __future__ import annotations

import pytest
import torch

from forebay.errors import TargetError
from forebay.models.checks import Packed, check_states, self_test
from forebay.models.target import Target
from tiny import LAYER_IDS, tiny_target

TEXTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], list(range(20, 32))]
OTHER = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 4], list(range(40, 52))]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(), LAYER_IDS)


def captured(target: Target, texts: list[list[int]]):
    batch = Packed.of(texts, (1, len(texts) - 1))
    out = torch.zeros(len(batch.tokens) + 4, target.feature_width)
    return batch, out, target.capture(batch, out)


def test_right_states_pass_and_a_shared_first_document_is_no_copy(target):
    batch, out, echo = captured(target, TEXTS)
    sample = check_states(batch, out, echo, width=96, layers=3)
    batch, out, echo = captured(target, OTHER)
    check_states(batch, out, echo, width=96, layers=3, previous=sample)


def test_states_of_too_few_tokens_name_the_job_and_both_lengths(target):
    """C48."""
    batch, out, echo = captured(target, TEXTS)
    with pytest.raises(TargetError, match="job 7: 6 states came back for 22 tokens"):
        check_states(batch, out, echo[:6], name="job 7")
    with pytest.raises(TargetError, match="6 states came back for 22 tokens"):
        check_states(batch, out[:6], echo)


def test_swapped_results_are_caught_by_the_echo(target):
    """C49."""
    batch, _, _ = captured(target, TEXTS)
    _, out, echo = captured(target, OTHER)
    with pytest.raises(TargetError, match=r"other tokens \(position 9: ran 4, the job has 3\): results were swapped"):
        check_states(batch, out, echo)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_caught_with_their_position(target, value):
    """C50."""
    batch, out, echo = captured(target, TEXTS)
    out[13, 40] = value
    with pytest.raises(TargetError, match=r"not finite .*position 13"):
        check_states(batch, out, echo)


def test_what_lies_beyond_the_tokens_is_not_judged(target):
    batch, out, echo = captured(target, TEXTS)
    out[22:] = float("nan")
    check_states(batch, out, echo)


def test_constant_states_are_caught_whole_or_for_one_layer(target):
    """C50."""
    batch, out, echo = captured(target, TEXTS)
    with pytest.raises(TargetError, match="all states equal 0"):
        check_states(batch, torch.zeros_like(out), echo)
    out[:, 32:64] = 0
    with pytest.raises(TargetError, match="left part of the job out"):
        check_states(batch, out, echo, layers=3)


def test_a_copy_of_the_item_before_is_caught_also_when_it_is_longer(target):
    """C50: the features are the last item's, the echo is right."""
    batch, out, echo = captured(target, TEXTS)
    sample = check_states(batch, out, echo)
    other, _, other_echo = captured(target, OTHER)
    with pytest.raises(TargetError, match="copy of the item before"):
        check_states(other, out, other_echo, previous=sample)
    shorter, _, shorter_echo = captured(target, [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 33, 34, 35, 36, 37, 38]])
    with pytest.raises(TargetError, match="copy of the item before"):
        check_states(shorter, out, shorter_echo, previous=sample)


def test_features_of_another_width_than_the_drafter_reads_are_refused(target):
    """C41: captured with the last layer, read without."""
    batch, out, echo = captured(target, TEXTS)
    with pytest.raises(TargetError, match="96 wide but the drafter reads 128"):
        check_states(batch, out, echo, width=128)


def test_the_self_test_passes_a_right_target_and_gives_a_cosine_per_layer(target):
    worst = self_test(target)
    assert set(worst) == set(LAYER_IDS) and min(worst.values()) > 0.9999
    last = Target(tiny_target(), (0, 5), allow_last_layer=True)
    assert min(self_test(last).values()) > 0.9999


def faulty(monkeypatch, change) -> Target:
    """A target whose sinks are changed by `change(sink, layer, states) -> (layer, states)`."""
    target = Target(tiny_target(), LAYER_IDS)
    from forebay.models import target as module

    take = module._Sink.take
    monkeypatch.setattr(module._Sink, "take", lambda self, layer, states: take(self, *change(self, layer, states)))
    return target


def test_the_self_test_names_a_layer_whose_states_are_another_layers(monkeypatch):
    before = {}

    def off_by_one(sink, layer, states):
        states, before[layer] = (before.get(2, states) if layer == 4 else states), states
        return layer, states

    with pytest.raises(TargetError, match="captured alone at layer 4 differ"):
        self_test(faulty(monkeypatch, off_by_one))


def test_the_self_test_names_batching_when_only_batches_are_wrong(monkeypatch):
    """Planted: batches padded on the left."""

    def left(sink, layer, states):
        return layer, states if states.shape[0] == 1 or layer != 2 else states.roll(1, dims=1)

    with pytest.raises(TargetError, match="captured batched at layer 2 differ"):
        self_test(faulty(monkeypatch, left))


def test_the_self_test_sees_states_that_leak_from_one_forward_into_the_next(monkeypatch):
    """C53, planted."""
    seen = []

    def leak(sink, layer, states):
        seen.append(layer)
        return layer, states * (1 + 1e-6 * len(seen))

    with pytest.raises(TargetError, match="layer 0 changed when the same prompts were captured again"):
        self_test(faulty(monkeypatch, leak))


def test_the_self_test_takes_prompts_of_the_data():
    assert min(self_test(Target(tiny_target(), LAYER_IDS), TEXTS).values()) > 0.9999
    with pytest.raises(TargetError, match="differ from a plain forward"):
        target = Target(tiny_target(), LAYER_IDS)
        target.layers[2].register_forward_hook(lambda m, a, o: o * float("nan") if o.shape[0] > 1 else o)
        self_test(target, TEXTS)
