"""Packs a job's rows into one fixed-shape row on the host: tokens, documents, anchors, supervised slots.

Guarantees: the same (store, job, use, seed, shape) gives the same arrays, whoever asks and how often; every row keeps
its own document id and positions from 0; a block is never supervised beyond its document; nothing is truncated (the
plan packed under all three budgets). Where an item is used several times, its uses share the text and differ in anchors
and slots. Numpy only. Called by `stages.prefetch`.

Shapes: T `token_budget`, A `anchors`, S `slots`, B `block_size`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from forebay.flow.plan import Job


class Rows(Protocol):
    """What packing needs of a token store."""

    def tokens(self, row: int) -> np.ndarray: ...

    def mask(self, row: int) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class ItemShape:
    """The one shape that every item of a run has."""

    token_budget: int
    anchors: int
    slots: int
    block_size: int
    sample_from_anchor: bool = False

    @property
    def first_slot(self) -> int:
        """The first slot that carries loss: 1, or 0 when slot j predicts a + j + 1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def scored_slots(self) -> int:
        return self.block_size - self.first_slot


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One job, packed. Padding: token 0, position 0, document -1, anchor 0 with start 0 (sees nothing), weight 0.

    `later`: the batches of the item's later uses (`buffer.reuse`), the same but for anchors and slots.
    """

    job: Job
    tokens: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T], restart per document
    documents: np.ndarray  # int32 [T]
    doc_offsets: np.ndarray  # int32 [documents + 1]
    anchors: np.ndarray  # int32 [A], packed indices, rising
    anchor_start: np.ndarray  # int32 [A], first packed index of the anchor's document
    n_anchors: int
    slot_index: np.ndarray  # int32 [S], into the flattened [A * B]
    slot_label: np.ndarray  # int32 [S], the data's token
    slot_weight: np.ndarray  # float32 [S], decay; 0 on padding
    slot_source: np.ndarray  # int32 [S], packed index whose last hidden state predicts the label
    n_slots: int
    weight_sum: float
    later: tuple[HostBatch, ...] = ()

    def use(self, number: int) -> HostBatch:
        """The batch of use `number`, 0-based."""
        return self.later[number - 1] if number else self

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, those of later uses included."""
        own = sum(getattr(self, f).nbytes for f in TEXT_ARRAYS + USE_ARRAYS)
        return own + sum(getattr(batch, f).nbytes for batch in self.later for f in USE_ARRAYS)


TEXT_ARRAYS = ("tokens", "positions", "documents")
USE_ARRAYS = ("anchors", "anchor_start", "slot_index", "slot_label", "slot_weight", "slot_source")


def host_bytes(shape: ItemShape, uses: int = 1) -> int:
    """Bytes of a host batch's fixed-shape arrays (all int32 or float32)."""
    return 4 * (3 * shape.token_budget + uses * (2 * shape.anchors + 4 * shape.slots))


def legal_anchors(mask: np.ndarray) -> np.ndarray:
    """Positions a with a and a + 1 supervised, int64 [n] (Source: DFlash, arXiv 2602.06036)."""
    supervised = mask.astype(bool)
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def anchor_counts(eligible: np.ndarray, rate: float, most: int) -> np.ndarray:
    """Anchors of each row, known when planning: min(most, ceil(rate * eligible)); 0 only where none is legal."""
    return np.minimum(most, np.ceil(np.asarray(eligible) * rate - 1e-9)).astype(np.int64)


def decay_weights(shape: ItemShape, gamma: float | None) -> np.ndarray:
    """Weight of each slot of a block, float64 [B]: exp(-k / gamma) for the k-th scored slot, 1 if gamma is null."""
    weights = np.zeros(shape.block_size)
    rank = np.arange(shape.scored_slots)
    weights[shape.first_slot :] = 1.0 if gamma is None else np.exp(-rank / gamma)
    return weights


def pack_item(
    rows: Rows,
    job: Job,
    shape: ItemShape,
    *,
    seed: int,
    anchor_rate: float,
    anchors_per_row: int,
    gamma: float | None,
    uses: int = 1,
) -> HostBatch:
    """Pack `job`'s rows; draw the anchors of each use from (seed, epoch, job id, use).

    Raises AssertionError if the rows do not fit the shape: the plan's budgets exclude it.
    """
    text, masks, supervised = _text(rows, job, shape)
    legal = [legal_anchors(mask) for mask in masks]
    counts = anchor_counts(np.array([len(found) for found in legal]), anchor_rate, anchors_per_row)
    assert counts.sum() <= shape.anchors, f"job {job.id}: anchors exceed anchors_per_item {shape.anchors}"
    weights = decay_weights(shape, gamma)
    key = np.array([seed, job.epoch << 40 | job.id], dtype=np.uint64)
    batches = []
    for use in range(uses):
        rng = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, use]))
        chosen = [
            np.sort(rng.choice(found, size=count, replace=False)) if count else found[:0]
            for found, count in zip(legal, counts.tolist(), strict=True)
        ]
        batches.append(_one_use(job, shape, text, supervised, chosen, weights))
    return replace(batches[0], later=tuple(batches[1:]))


def _text(rows: Rows, job: Job, shape: ItemShape) -> tuple[dict[str, np.ndarray], list[np.ndarray], np.ndarray]:
    """The arrays of a batch that its uses share; each row's mask; what is supervised, bool [T]."""
    tokens = np.zeros(shape.token_budget, np.int32)
    positions = np.zeros(shape.token_budget, np.int32)
    documents = np.full(shape.token_budget, -1, np.int32)
    supervised = np.zeros(shape.token_budget, bool)
    offsets, masks = [0], []
    for number, row in enumerate(job.rows):
        row_tokens, row_mask = rows.tokens(row), rows.mask(row)
        start, end = offsets[-1], offsets[-1] + len(row_tokens)
        assert end <= shape.token_budget, f"job {job.id}: {end} tokens exceed token_budget {shape.token_budget}"
        tokens[start:end] = row_tokens
        positions[start:end] = np.arange(end - start)
        documents[start:end] = number
        supervised[start:end] = row_mask
        masks.append(row_mask)
        offsets.append(end)
    arrays = {"tokens": tokens, "positions": positions, "documents": documents}
    return arrays | {"doc_offsets": np.array(offsets, np.int32)}, masks, supervised


def _one_use(
    job: Job,
    shape: ItemShape,
    text: dict[str, np.ndarray],
    supervised: np.ndarray,
    chosen: list[np.ndarray],
    weights: np.ndarray,
) -> HostBatch:
    """The batch with the `chosen` anchors of each row (rising, counted from the row's start) and their slots."""
    anchors = np.zeros(shape.anchors, np.int32)
    anchor_start = np.zeros(shape.anchors, np.int32)
    per_row = [len(found) for found in chosen]
    n_anchors, offsets = sum(per_row), text["doc_offsets"]
    anchor_start[:n_anchors] = np.repeat(offsets[:-1], per_row)
    anchors[:n_anchors] = np.concatenate(chosen) + anchor_start[:n_anchors]
    anchor_end = np.repeat(offsets[1:], per_row)

    slot = np.arange(shape.first_slot, shape.block_size)
    shift = 1 if shape.sample_from_anchor else 0
    where = anchors[:n_anchors, None] + slot[None, :] + shift  # packed index of the label, [n, scored]
    inside = where < anchor_end[:, None]
    scored = inside & supervised[np.minimum(where, shape.token_budget - 1)]
    block, column = np.nonzero(scored)
    n_slots = len(block)
    assert n_slots <= shape.slots, f"job {job.id}: {n_slots} slots exceed slots_per_item {shape.slots}"
    label_at = where[block, column]
    slot_index = np.zeros(shape.slots, np.int32)
    slot_label = np.zeros(shape.slots, np.int32)
    slot_weight = np.zeros(shape.slots, np.float32)
    slot_source = np.zeros(shape.slots, np.int32)
    slot_index[:n_slots] = block * shape.block_size + slot[column]
    slot_label[:n_slots] = text["tokens"][label_at]
    slot_weight[:n_slots] = weights[slot[column]]
    slot_source[:n_slots] = label_at - 1
    return HostBatch(
        job=job,
        **text,
        anchors=anchors,
        anchor_start=anchor_start,
        n_anchors=n_anchors,
        slot_index=slot_index,
        slot_label=slot_label,
        slot_weight=slot_weight,
        slot_source=slot_source,
        n_slots=n_slots,
        weight_sum=float(slot_weight.astype(np.float64).sum()),
    )
