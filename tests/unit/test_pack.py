"""Packing: labels, weights and boundaries of every slot, from the data alone."""

from dataclasses import dataclass

import numpy as np
import pytest

from forebay.data.pack import USE_ARRAYS, ItemShape, anchor_counts, decay_weights, host_bytes, legal_anchors, pack_item


@dataclass(frozen=True)
class FakeJob:
    epoch: int = 0
    id: int = 0
    rows: tuple = (0,)


class Rows:
    def __init__(self, *rows):
        self._rows = [(np.asarray(t, np.int32), np.asarray(m, bool)) for t, m in rows]

    def tokens(self, i):
        return self._rows[i][0]

    def mask(self, i):
        return self._rows[i][1]


def pack(rows, shape, job=None, **options):
    given = {"seed": 0, "anchor_rate": 1.0, "anchors_per_row": 512, "gamma": 4.0, **options}
    return pack_item(rows, job or FakeJob(), shape, **given)


def test_slot_k_of_anchor_a_is_labelled_a_plus_k_and_slot_0_carries_no_loss():
    """C03."""
    batch = pack(Rows((range(40), [1] * 40)), ItemShape(48, 40, 160, 4))
    anchors = batch.anchors[batch.slot_index[: batch.n_slots] // 4]
    slots = batch.slot_index[: batch.n_slots] % 4
    assert (batch.slot_label[: batch.n_slots] == anchors + slots).all()
    assert slots.min() == 1 and slots.max() == 3
    assert (batch.slot_source[: batch.n_slots] == anchors + slots - 1).all()


def test_with_sample_from_anchor_slot_j_is_labelled_a_plus_j_plus_1_and_all_are_weighted():
    """C03, the DSpark convention."""
    batch = pack(Rows((range(40), [1] * 40)), ItemShape(48, 40, 160, 4, sample_from_anchor=True))
    anchors = batch.anchors[batch.slot_index[: batch.n_slots] // 4]
    slots = batch.slot_index[: batch.n_slots] % 4
    assert (batch.slot_label[: batch.n_slots] == anchors + slots + 1).all()
    assert slots.min() == 0


def test_the_only_legal_anchor_is_drawn():
    """C06."""
    mask = [0] * 10 + [1, 1]
    batch = pack(Rows((range(12), mask)), ItemShape(16, 4, 12, 4), anchor_rate=0.01)
    assert batch.n_anchors == 1 and batch.anchors[0] == 10
    assert batch.n_slots == 1 and batch.slot_label[0] == 11


def test_the_first_supervised_token_is_a_legal_anchor_and_slot_1_has_weight():
    """C17."""
    mask = np.array([0, 0, 0, 1, 1, 1])
    assert legal_anchors(mask).tolist() == [3, 4]
    batch = pack(Rows((range(6), mask)), ItemShape(8, 4, 12, 4))
    first = batch.slot_index[: batch.n_slots] == 1
    assert batch.slot_weight[: batch.n_slots][first] > 0


def test_slot_k_weighs_exp_of_minus_k_minus_1_over_gamma():
    """C07."""
    shape = ItemShape(8, 1, 3, 4)
    assert decay_weights(shape, 4.0) == pytest.approx([0, 1, np.exp(-1 / 4), np.exp(-2 / 4)])


def test_no_block_is_supervised_beyond_its_document_and_positions_restart():
    """C65."""
    rows = Rows((range(9), [1] * 9), (range(100, 105), [1] * 5), (range(200, 213), [1] * 13))
    batch = pack(rows, ItemShape(32, 32, 96, 4), FakeJob(rows=(0, 1, 2)))
    assert batch.positions[:27].tolist() == [*range(9), *range(5), *range(13)]
    assert batch.documents[26] == 2 and batch.documents[27] == -1
    anchors = batch.anchors[batch.slot_index[: batch.n_slots] // 4]
    labels_at = anchors + batch.slot_index[: batch.n_slots] % 4
    assert (batch.documents[labels_at] == batch.documents[anchors]).all()
    assert (
        batch.anchor_start[: batch.n_anchors] == batch.doc_offsets[batch.documents[batch.anchors[: batch.n_anchors]]]
    ).all()


def test_the_same_seed_epoch_and_job_give_the_same_anchors_and_another_epoch_gives_others():
    rows, shape = Rows((range(200), [1] * 200)), ItemShape(256, 64, 192, 4)
    first, again = (pack(rows, shape, anchor_rate=0.2) for _ in range(2))
    other = pack(rows, shape, FakeJob(epoch=1), anchor_rate=0.2)
    assert (first.anchors == again.anchors).all() and (first.anchors != other.anchors).any()
    assert (np.diff(first.anchors[: first.n_anchors]) > 0).all()


def test_anchor_counts_are_known_when_planning_and_kept_when_packing():
    eligible = np.array([0, 1, 10, 5000])
    assert anchor_counts(eligible, 0.25, 512).tolist() == [0, 1, 3, 512]


def test_an_unsupervised_row_gives_an_item_of_weight_zero():
    batch = pack(Rows((range(6), [0] * 6)), ItemShape(8, 4, 12, 4))
    assert batch.n_anchors == batch.n_slots == 0 and batch.weight_sum == 0


def test_the_uses_of_an_item_share_its_text_and_have_anchors_of_their_own():
    """From (seed, epoch, job, use): the first use is that of a run without reuse; counts are those of the plan."""
    rows, shape = Rows((range(200), [1] * 200), (range(100), [1] * 100)), ItemShape(320, 64, 192, 4)
    job = FakeJob(rows=(0, 1))
    once, twice, again = (pack(rows, shape, job, anchor_rate=0.2, uses=uses) for uses in (1, 3, 3))
    for field in USE_ARRAYS:
        assert (getattr(once, field) == getattr(twice.use(0), field)).all()
        assert (getattr(twice.use(2), field) == getattr(again.use(2), field)).all()
    anchors = [twice.use(number).anchors for number in range(3)]
    assert all((anchors[a] != anchors[b]).any() for a, b in ((0, 1), (0, 2), (1, 2)))
    assert {twice.use(number).n_anchors for number in range(3)} == {60}
    assert twice.use(1).tokens is twice.tokens and once.later == ()
    assert (once.nbytes, twice.nbytes) == (host_bytes(shape), host_bytes(shape, 3))
