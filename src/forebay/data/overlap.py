"""Training prompts that repeat held-out ones: 13 consecutive tokens of what the user wrote in common.

Guarantees: exact up to collisions of 64-bit hashes; a text shorter than 13 tokens only overlaps with its equal. What
the template or a system turn adds is no overlap, so it is not looked at. Numpy only. Called by `data.encode` and
`data.prepare`.
"""

from __future__ import annotations

import numpy as np

NGRAM = 13
SLICE = 2**20


def gram_hashes(tokens: np.ndarray) -> np.ndarray:
    """uint64 hash of every run of NGRAM tokens (of the whole, if it is shorter), each once."""
    values = np.asarray(tokens, np.uint64) + np.uint64(1)
    if not len(values):
        return np.empty(0, np.uint64)
    width = min(NGRAM, len(values))
    hashes = np.full(len(values) - width + 1, width, np.uint64)
    for step in range(width):  # wraps around, as unsigned arithmetic does
        hashes = (hashes ^ values[step : step + len(hashes)]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


def overlapping(grams: np.ndarray, counts: np.ndarray, other: np.ndarray) -> np.ndarray:
    """bool [rows]: which rows have a gram in `other` (sorted). `counts` says how many of `grams` are each row's."""
    ends = np.cumsum(counts, dtype=np.int64)
    hits_before = np.zeros(len(grams) + 1, np.int32)
    for start in range(0, len(grams), SLICE):  # `grams` may be mapped from disk: keep little of it in memory
        part = np.asarray(grams[start : start + SLICE])
        found = np.searchsorted(other, part)
        hits = (found < len(other)) & (other[np.minimum(found, len(other) - 1)] == part) if len(other) else found > 0
        hits_before[start + 1 : start + 1 + len(part)] = np.cumsum(hits) + hits_before[start]
    return hits_before[ends] > hits_before[ends - counts]
