"""Tiny drafters (fixture D0 of the cases) and packed items for the drafter's tests."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from forebay.config import LossConfig
from forebay.models.drafter import Drafter
from forebay.models.init import init_random
from forebay.models.loss import FrozenHead
from forebay.models.spec import DrafterSpec
from forebay.models.step import Borrowed

VOCAB, HIDDEN, MASK = 320, 32, 310


def spec(**change) -> DrafterSpec:
    values = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": (0, 2, 4),
        "num_target_layers": 6,
        "trained_max_length": 512,
    }
    return DrafterSpec(**(values | change))


def drafter(dtype=torch.float32, seed=0, **change) -> Drafter:
    """Random weights large enough that every path matters."""
    made = Drafter(spec(**change))
    init_random(made, seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return made.to(dtype)


def borrowed(dtype=torch.float32, seed=1, kept=None, **head) -> Borrowed:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) / 4).to(dtype)
    return Borrowed(embed, FrozenHead.build(weight, dtype, kept, **head))


def features(tokens: int, dtype=torch.float32, seed=2, width=3 * HIDDEN) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def item(
    lengths, anchors, block=4, first_slot=1, tokens=None, pad=(0, 0, 0), gamma=None, last_supervised=None, seed=3
) -> SimpleNamespace:
    """Documents of `lengths` packed; `anchors` as (document, position); every slot inside its document is supervised.

    `pad`: padding tokens, anchors and slots. `last_supervised`: per document, the last supervised position.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    if tokens is None:
        tokens = np.random.default_rng(seed).integers(0, 300, total)
    rows = sorted((int(offsets[d] + p), d) for d, p in anchors)
    index, labels, weights, sources = [], [], [], []
    for a, (row, d) in enumerate(rows):
        end = offsets[d + 1] if last_supervised is None else offsets[d] + last_supervised[d] + 1
        for j in range(first_slot, block):
            token = row + j + 1 - first_slot
            if token < end:
                index.append(a * block + j)
                labels.append(tokens[token])
                weights.append(1.0 if gamma is None else np.exp(-(j - first_slot) / gamma))
                sources.append(token - 1)
    more_tokens, more_anchors, more_slots = pad

    def padded(values, more, kind=np.int64):
        return np.concatenate([np.asarray(values, kind), np.zeros(more, kind)])

    positions = np.concatenate([np.arange(n) for n in lengths])
    return SimpleNamespace(
        tokens=padded(tokens, more_tokens),
        positions=padded(positions, more_tokens),
        doc_offsets=offsets,
        anchors=padded([r for r, _ in rows], more_anchors),
        anchor_start=padded([offsets[d] for _, d in rows], more_anchors),
        n_anchors=len(rows),
        slot_index=padded(index, more_slots),
        slot_label=padded(labels, more_slots),
        slot_weight=padded(weights, more_slots, np.float32),
        slot_source=padded(sources, more_slots),
        n_slots=len(index),
        weight_sum=float(np.sum(weights)),
    )


def gradients(model: Drafter) -> dict[str, torch.Tensor]:
    found = {k: p.grad.clone() for k, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


CE = LossConfig(decay="none")
