"""Random numbers as a function of their keys: the same (seed, epoch, counter) gives the same numbers, always.

Guarantees: raw 64-bit words of Philox-4x64, whose stream is fixed by its definition and not by a library version.
Holds no state that a checkpoint would have to store. Called by the plan and the queues.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt


class CounterRandom:
    """Words keyed by (seed, stream), addressed by a counter."""

    def __init__(self, seed: int, stream: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
        self._state: Any = self._bits.state

    def _seek(self, counter: int) -> None:
        words = self._state["state"]["counter"]
        words[:] = 0
        words[1] = counter  # word 0 counts within one use, so that no two counters overlap
        self._state["buffer_pos"] = 4  # an empty buffer: the next word is computed, not remembered
        self._bits.state = self._state

    def words(self, counter: int, count: int) -> list[int]:
        """`count` 64-bit words of this counter."""
        self._seek(counter)
        return cast(list[int], self._bits.random_raw(count).tolist())

    def permutation(self, counter: int, n: int) -> npt.NDArray[np.int64]:
        """A permutation of 0..n-1: the order of n random words (ties, if ever, by index)."""
        self._seek(counter)
        return np.argsort(self._bits.random_raw(n), kind="stable")

    def sample(self, counter: int, n: int, k: int) -> list[int]:
        """k different numbers of 0..n-1, every k-tuple equally likely (to 2**-64): a partial Fisher-Yates shuffle."""
        moved: dict[int, int] = {}
        out = []
        for i, word in enumerate(self.words(counter, k)):
            j = i + word % (n - i)
            out.append(moved.get(j, j))
            moved[j] = moved.get(i, i)
        return out
