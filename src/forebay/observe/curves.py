"""Long columns made short enough to draw: the extremes stay, the means are told apart from them.

Guarantees: a thinned curve has the first, the last, the least and the greatest point of what it was made from, and no
point that was not there; it has at most as many points as asked for. Pure numpy. Called by `observe.figures`.
"""

from __future__ import annotations

import numpy as np

from forebay.observe.log import Floats

POINTS = 2000  # of one curve in a report


def known(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The points whose both values are finite numbers."""
    there = np.isfinite(x) & np.isfinite(y)
    return x[there], y[there]


def thin(x: Floats, y: Floats, most: int = POINTS) -> tuple[Floats, Floats]:
    """At most `most` points (4 or more) of a curve, in order: ends, and each stretch's least and greatest y."""
    x, y = known(x, y)
    n = len(x)
    if n <= most:
        return x, y
    edges = np.linspace(0, n, (most - 2) // 2 + 1).astype(np.int64)
    kept = {0, n - 1}
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        kept |= {low + int(y[low:high].argmin()), low + int(y[low:high].argmax())}
    at = np.array(sorted(kept))
    return x[at], y[at]


def smooth(x: Floats, y: Floats, most: int = POINTS) -> tuple[Floats, Floats]:
    """Running mean over a fiftieth of the curve (centred, shorter at the ends), at no more than `most` points."""
    x, y = known(x, y)
    n = len(x)
    if n == 0:
        return x, y
    half = n // 100
    total = np.concatenate([[0.0], np.cumsum(y)])
    at = np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, n)
    return x[at], (total[high] - total[low]) / (high - low)


def stretches(n: int, most: int) -> np.ndarray:
    """Edges [m + 1] that cut n things into m <= `most` stretches of like length."""
    return np.unique(np.linspace(0, n, min(n, most) + 1).astype(np.int64))


def rate(seconds: Floats, amount: Floats, most: int = 200) -> tuple[np.ndarray, Floats]:
    """(edges [m + 1] into the lines, amount per second of each stretch): `amount` was done by each line's time."""
    edges = stretches(len(seconds), most)
    times = np.concatenate([[0.0], seconds])[edges]
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(amount))])[edges]
    return edges, np.diff(sums) / np.maximum(np.diff(times), 1e-9)
