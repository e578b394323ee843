"""READY means that the copy has ended (F15), and a slot is not written again while a GPU still reads it."""

from __future__ import annotations

import pytest
import torch

from forebay.models.checks import Packed
from forebay.models.target import Target
from forebay.stages.item import SlotPool, beside
from tiny import LAYER_IDS, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TEXTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], list(range(20, 32))]
TOKENS, WIDTH = 24, 3 * 32
DELAY = 500_000_000  # cycles: a quarter of a second or more


def delayed_capture(slot):
    """Capture on a stream of the producer's own that is busy with something else first; returns the true states."""
    batch, expected = Packed.of(TEXTS, (1, 2)), torch.zeros(TOKENS, WIDTH)
    Target(tiny_target(), LAYER_IDS).capture(batch, expected)
    target = Target(tiny_target().cuda(), LAYER_IDS)
    target.capture(batch, torch.zeros(TOKENS, WIDTH, pin_memory=True))  # libraries start up
    with torch.cuda.stream(beside(target.device)):
        torch.cuda._sleep(DELAY)
        target.capture(batch, slot.features)
    return expected[: sum(map(len, TEXTS))]


def consumed(slot):
    """What a consumer on another stream reads, right after the slot was handed over."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return slot.features[: sum(map(len, TEXTS))].to("cuda", non_blocking=True).cpu()


def fresh_slot():
    slot = SlotPool(1, TOKENS, WIDTH, None, torch.float32, pinned=True).acquire()
    slot.features.fill_(7.0)
    return slot


def test_the_states_are_right_when_the_producers_copy_is_late():
    """F15: `capture` returns when its copies have ended."""
    slot = fresh_slot()
    expected = delayed_capture(slot)
    torch.testing.assert_close(consumed(slot), expected, rtol=1e-3, atol=1e-3)


def test_without_the_wait_the_consumer_reads_old_states(monkeypatch):
    """The guard of F15, planted: the delay is long enough to be seen."""
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: None)
    slot = fresh_slot()
    delayed_capture(slot)
    assert (slot.features == 7.0).all()
    torch.cuda.synchronize()


def test_a_slot_is_not_written_while_a_late_copy_still_reads_it():
    """A drafter lets go of an item as soon as its work is enqueued; the next writer waits for the copy out of it."""
    pool = SlotPool(1, TOKENS, WIDTH, None, torch.float32, pinned=True)
    slot = pool.acquire()
    slot.features.fill_(1.0)
    torch.cuda._sleep(DELAY)
    read = slot.features.to("cuda", non_blocking=True)
    slot.read_on(torch.device("cuda"))
    pool.release(slot)
    again = pool.acquire()
    again.features.fill_(2.0)
    assert again is slot and (read.cpu() == 1.0).all()
