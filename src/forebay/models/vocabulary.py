"""Which token ids a drafter's head may be narrowed to: a training shortlist, or a reduced draft vocabulary.

Guarantees: both choices are functions of the data's counts alone, rising and without repeats. A reduced vocabulary is
stored with the drafter as `d2t` and `t2d` and read back from there: it is never chosen again for a drafter that has
one, and never assumed to be the first ids. A shortlist narrows the training softmax only; serving uses the full head.
Called by `stages.train` through `models.drafter`, and by `io.formats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forebay.errors import ConfigError, ContractError

Counts = np.ndarray[Any, Any]


def shortlist(counts: Counts, below: int, vocab_size: int) -> Tensor:
    """Token ids seen in the data (`counts` [ids] > 0) and all ids below `below`, rising: int64 [n]."""
    seen = np.flatnonzero(np.asarray(counts)[:vocab_size])
    return torch.from_numpy(np.union1d(seen, np.arange(min(below, vocab_size))).astype(np.int64))


def draft_vocabulary(counts: Counts, size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent token ids (`counts` of supervised tokens), lower ids first where equal: int64 [size].

    Where fewer ids than `size` were seen, the lowest unseen ones fill the rest (C31).
    """
    if not isinstance(size, int) or not 1 <= size <= vocab_size:
        raise ConfigError(f"draft_vocab_size {size} must be a whole number from 1 to the head's {vocab_size} rows")
    full = np.zeros(vocab_size, np.int64)
    given = np.asarray(counts)[:vocab_size]
    full[: len(given)] = given
    chosen = np.argsort(-full, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen).astype(np.int64))


def map_tensors(kept: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """As stored: `d2t` [n], the offset from a draft id to its token id, and `t2d` [vocabulary], which ids are kept."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[kept] = True
    return {"d2t": kept - torch.arange(len(kept)), "t2d": t2d}


def kept_of(tensors: Mapping[str, Tensor], size: int, vocab_size: int) -> Tensor:
    """The token ids of a stored map [n]. Raises ContractError where it is missing or contradicts itself (C34)."""
    if "d2t" not in tensors or "t2d" not in tensors:
        raise ContractError(
            f"this drafter has a reduced vocabulary of {size} but no d2t/t2d map: which tokens its head predicts is "
            "never guessed, so export it again with its map"
        )
    kept = tensors["d2t"].to(torch.int64) + torch.arange(len(tensors["d2t"]))
    t2d = tensors["t2d"].to(torch.bool)
    if len(kept) != size or len(t2d) != vocab_size or not torch.equal(kept, t2d.nonzero()[:, 0]):
        raise ContractError(
            f"the drafter's d2t ({len(kept)} of {size} ids) and t2d ({int(t2d.sum())} of {len(t2d)} marked, head of "
            f"{vocab_size}) do not name the same tokens: the checkpoint is damaged"
        )
    return kept


def require_same(stored: Tensor, given: Tensor) -> None:
    """C33: refuse another map, also one of equal size."""
    if not torch.equal(stored, given):
        differing = len(set(stored.tolist()) ^ set(given.tolist()))
        raise ContractError(
            f"the draft vocabulary differs from the checkpoint's in {differing} token ids (sizes {len(stored)} and "
            f"{len(given)}): keep the checkpoint's map, a reduced vocabulary is never rebuilt"
        )
