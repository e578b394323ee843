"""The trainer's own forward along one text, for the guard: features by `capture`, slots by `step`, argmax of the head.

Guarantees: the path is the trainer's from token ids to logits (capture, packing of blocks, drafter, head), so what it
drafts is what training optimises. Never used to serve. Called by `stages`/`runtime` as the guard's `TrainerForward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from forebay.models.drafter import Drafter
from forebay.models.step import Borrowed, slot_states
from forebay.models.target import Target

#: Blocks of one forward.
CHUNK = 64


@dataclass(frozen=True)
class Walk:
    """A drafter and its target, as training uses them. `walk(tokens, anchors)` gives draft tokens `[A, drafts]`.

    `borrowed` must hold the whole head (a training shortlist is no part of what is served) in `dtype`.
    """

    target: Target
    drafter: Drafter
    borrowed: Borrowed
    dtype: torch.dtype = torch.float32

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], anchors: Sequence[int]) -> Tensor:
        """`tokens`: one text; `anchors`: rising positions in it. Row i drafts the tokens after `anchors[i]`."""
        spec = self.drafter.spec
        row = np.asarray(tokens, np.int32)
        offsets = np.array([0, len(row)], np.int32)
        features = torch.empty(len(row), spec.feature_size, dtype=self.target.dtype, device=self.target.device)
        self.target.capture(
            SimpleNamespace(job=SimpleNamespace(splits=(1,)), tokens=row, doc_offsets=offsets), features
        )
        features = features.to(next(self.drafter.parameters()).device)
        drafts = []
        for first in range(0, len(anchors), CHUNK):
            chosen = np.asarray(anchors[first : first + CHUNK], np.int32)
            batch = SimpleNamespace(
                tokens=row,
                positions=np.arange(len(row), dtype=np.int32),
                doc_offsets=offsets,
                anchors=chosen,
                anchor_start=np.zeros_like(chosen),
                n_anchors=len(chosen),
                slot_index=np.zeros(0, np.int32),  # no slot carries loss: this walk only drafts
                n_slots=0,
            )
            hidden = slot_states(self.drafter, batch, features, self.borrowed, self.dtype)[:, spec.first_slot :]
            best = self.borrowed.head.logits(hidden.flatten(0, 1)).argmax(-1).view(hidden.shape[:2])
            drafts.append(best if self.borrowed.head.kept is None else self.borrowed.head.kept[best])
        return torch.cat(drafts)
