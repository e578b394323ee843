"""Training prompts that repeat held-out ones: copies of a whole prompt, and long passages in common.

Guarantees: what is compared is what users wrote, never what a template or a system turn adds. Exact up to collisions
of 64-bit hashes. A passage is at least 13 consecutive tokens; one that stands in many different prompts is a stock
phrase ("Write a Python function that takes ..."), counted apart, because it tells nothing about the answer. Memory: 16
bytes per held-out prompt token. Numpy only. Called by `data.encode` and `data.build`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

NGRAM = 13
SLICE = 2**20
MANY_PROMPTS, MANY_SHARE = 5, 0.005  # a stock phrase stands in so many prompts, and in this share of them
EXAMPLES = 3
EXCERPT_TOKENS = 60
KINDS = ("copies", "passages", "stock_phrases")


def prompt_hashes(tokens: np.ndarray) -> np.ndarray:
    """uint64: the hash of the whole, then that of every run of NGRAM tokens, each once. Empty for no tokens."""
    values = np.ascontiguousarray(tokens, np.int64)
    if not len(values):
        return np.empty(0, np.uint64)
    whole = int.from_bytes(hashlib.blake2b(values.data, digest_size=8).digest(), "little")
    return np.concatenate([np.array([whole], np.uint64), np.unique(_runs(values))])


def _runs(tokens: np.ndarray) -> np.ndarray:
    """uint64 [len(tokens) - NGRAM + 1]: the hash of the run that begins at each place."""
    values = np.asarray(tokens, np.uint64) + np.uint64(1)
    hashes = np.full(max(0, len(values) - NGRAM + 1), NGRAM, np.uint64)
    for step in range(NGRAM):  # wraps around, as unsigned arithmetic does
        hashes = (hashes ^ values[step : step + len(hashes)]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes


@dataclass
class Shard:
    """One shard of a store while it is prepared."""

    index: np.ndarray  # `store.INDEX` [rows]
    hashes: np.ndarray  # `prompt_hashes` of the rows, one after the other
    tokens: Callable[[int], tuple[np.ndarray, int]]  # a row's token ids, and how many stand before its first answer

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.index["grams"], dtype=np.int64) - self.index["grams"]

    @property
    def wholes(self) -> np.ndarray:
        """uint64 [rows]: the hash of each row's whole prompt; 0 where there is none."""
        has = self.index["grams"] > 0
        out = np.zeros(len(self.index), np.uint64)
        out[has] = self.hashes[self.starts[has]]
        return out

    def of_row(self, row: int) -> np.ndarray:
        return np.asarray(self.hashes[self.starts[row] :][: self.index["grams"][row]])

    def hits(self, wanted: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(offset, bool [n], place in `wanted` [n]) of slices of `hashes`: they may be mapped from disk."""
        for start in range(0, len(self.hashes), SLICE):
            part = np.asarray(self.hashes[start : start + SLICE])
            place = np.minimum(np.searchsorted(wanted, part), max(0, len(wanted) - 1))
            yield start, (wanted[place] == part if len(wanted) else np.zeros(len(part), bool)), place

    def rows_with(self, wanted: np.ndarray) -> np.ndarray:
        """bool [rows]: which have a hash in `wanted` (sorted)."""
        before = np.zeros(len(self.hashes) + 1, np.int32)
        for start, found, _ in self.hits(wanted):
            before[start + 1 : start + 1 + len(found)] = np.cumsum(found) + before[start]
        return before[self.starts + self.index["grams"]] > before[self.starts]


def no_overlap() -> dict[str, Any]:
    """What is reported of stores that were not compared."""
    return {"ngram": NGRAM, **{kind: {"rows": 0, "examples": []} for kind in KINDS}}


def overlap(
    train: Callable[[], Iterable[Shard]], heldout: Callable[[], Iterable[Shard]], decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Training rows by kind of overlap, with some examples of each: row, a held-out row like it, the text in common."""
    wholes = np.unique(np.concatenate([np.empty(0, np.uint64), *(s.wholes for s in heldout())]))
    known = np.unique(np.concatenate([np.empty(0, np.uint64), *(np.asarray(s.hashes) for s in heldout())]))
    runs = np.setdiff1d(known, wholes, assume_unique=True)
    many = _in_many_prompts(runs, [train, heldout])
    out = no_overlap()
    for shard in train():
        copies = np.isin(shard.wholes, wholes[wholes > 0])
        passages = shard.rows_with(runs[~many]) & ~copies
        stock = shard.rows_with(runs[many]) & ~copies & ~passages
        for kind, rows, shared in (
            ("copies", copies, known),
            ("passages", passages, runs[~many]),
            ("stock_phrases", stock, runs[many]),
        ):
            out[kind]["rows"] += int(rows.sum())
            for row in np.flatnonzero(rows)[: EXAMPLES - len(out[kind]["examples"])].tolist():
                out[kind]["examples"].append(_example(shard, row, shared, heldout, decode))
    return out


def _in_many_prompts(runs: np.ndarray, stores: list[Callable[[], Iterable[Shard]]]) -> np.ndarray:
    """bool [runs]: which stand in many different prompts (a prompt's repetitions within a shard count once)."""
    counts, prompts = np.zeros(len(runs), np.int64), 0
    for shard in (shard for store in stores for shard in store()):
        first = np.zeros(len(shard.index), bool)
        first[np.unique(shard.wholes, return_index=True)[1]] = True
        prompts += int(first.sum())
        counted = np.repeat(first, shard.index["grams"])
        for start, found, place in shard.hits(runs):
            counts += np.bincount(place[found & counted[start : start + len(found)]], minlength=len(runs))
    return counts >= max(MANY_PROMPTS, MANY_SHARE * prompts)


def _example(
    shard: Shard,
    row: int,
    shared: np.ndarray,
    heldout: Callable[[], Iterable[Shard]],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    common = np.intersect1d(shard.of_row(row), shared)
    whole = shard.wholes[row : row + 1]
    wanted = whole if whole[0] in common else common
    like = next((int(s.index["row"][r[0]]) for s in heldout() if len(r := np.flatnonzero(s.rows_with(wanted)))), None)
    tokens, prompt = shard.tokens(row)
    places = np.flatnonzero(np.isin(_runs(tokens), common))
    if len(places):
        run = places[: int(np.argmax(np.append(np.diff(places) != 1, True))) + 1]
        tokens = tokens[run[0] : run[-1] + NGRAM][:EXCERPT_TOKENS]
    else:  # a prompt shorter than a run
        tokens = tokens[:prompt][-EXCERPT_TOKENS:]
    return {"row": int(shard.index["row"][row]), "heldout_row": like, "text": decode(tokens.tolist())}
