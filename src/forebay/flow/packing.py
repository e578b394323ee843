"""Pack rows into jobs under two budgets at once, for millions of rows, with numpy only.

Guarantees: every row is in exactly one job, no job exceeds a budget, and the result is a function of the input alone.
Does not guarantee an optimum. Called by `plan`, once per bucket, with the rows in the epoch's random order.

How: the rows are cut into *lanes* of consecutive rows, and all lanes fill their jobs in lock-step. Each step adds to a
lane's open job the row that best leaves room for whole average rows; while much room is left the oldest row wins, when
one row is left to choose the best fit does. Jobs that came out poorly filled (the ends of lanes) return their
rows, which are packed again among themselves, until one lane is left.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

GOOD_FILL = 0.985
ROWS_OF_A_JOB = 16  # more and smaller rows than this are tied into units: a finer choice gains nothing
AGE = 4  # what being the oldest of a lane is worth, in average rows: more spoils the fit under two budgets
CHUNK = 2**15  # elements of one lock-step block: stays in the processor's cache


def _lanes(tokens: Floats, weights: Floats, width: int, mean: tuple[float, float], budget: tuple[float, float]) -> Ints:
    """Fill jobs lane by lane.

    Args:
        tokens, weights: [lanes, width]; entries above the budget never fit and mark the lane's end.
    Returns: job number inside its lane [lanes, width], -1 where no row is.
    """
    lanes = tokens.shape[0]
    every = np.arange(lanes)
    tokens = tokens.copy()
    jobs = np.full((lanes, width), -1, dtype=np.int64)
    job = np.zeros(lanes, dtype=np.int64)
    open_rows = np.zeros(lanes, dtype=np.int64)
    room_t = np.full((lanes, 1), budget[0], dtype=np.float32)
    room_w = np.full((lanes, 1), budget[1], dtype=np.float32)
    mean_t, mean_w = np.float32(mean[0]), np.float32(mean[1])
    scale = np.float32(budget[0] / budget[1])
    gone = np.float32(np.inf)
    left = np.isfinite(tokens).sum(axis=1)
    place = np.broadcast_to(np.arange(width), (lanes, width))
    age = np.arange(width, dtype=np.float32) * (AGE * mean_t / width)
    score, other = np.empty_like(tokens), np.empty_like(tokens)
    over, over_w = np.empty(tokens.shape, dtype=np.bool_), np.empty(tokens.shape, dtype=np.bool_)
    while left.any():
        if int(left.max()) <= tokens.shape[1] // 2:  # forget the places of rows that are in jobs already
            keep = np.argsort(np.isinf(tokens), axis=1, kind="stable")[:, : int(left.max())]
            place = np.take_along_axis(place, keep, axis=1)
            tokens, weights = np.take_along_axis(tokens, keep, axis=1), np.take_along_axis(weights, keep, axis=1)
            age = place.astype(np.float32) * (AGE * mean_t / width)
            score, other = np.empty_like(tokens), np.empty_like(tokens)
            over, over_w = np.empty(tokens.shape, dtype=np.bool_), np.empty(tokens.shape, dtype=np.bool_)
        others = np.maximum(np.minimum(np.rint(room_t / mean_t), np.rint(room_w / mean_w)), 1) - 1
        np.abs(np.subtract(room_t - others * mean_t, tokens, out=score), out=score)
        np.abs(np.subtract(room_w - others * mean_w, weights, out=other), out=other)
        np.multiply(other, scale, out=other)
        np.add(score, other, out=score)
        np.multiply(age, np.minimum(others, 3), out=other)
        np.add(score, other, out=score)
        np.greater(tokens, room_t, out=over)
        np.greater(weights, room_w, out=over_w)
        np.copyto(score, gone, where=np.logical_or(over, over_w, out=over))
        best = np.argmin(score, axis=1)
        fits = score[every, best] < gone
        rows, at = every[fits], best[fits]
        jobs[rows, place[rows, at]] = job[rows]
        room_t[rows, 0] -= tokens[rows, at]
        room_w[rows, 0] -= weights[rows, at]
        tokens[rows, at] = gone
        left[rows] -= 1
        open_rows[rows] += 1
        full = ~fits & (open_rows > 0)
        job[full] += 1
        open_rows[full] = 0
        room_t[full] = budget[0]
        room_w[full] = budget[1]
    return jobs


def _one_pass(tokens: Ints, weights: Ints, width: int, budget: tuple[int, int]) -> Ints:
    """Pack rows [n] in lanes of `width`. Returns job numbers [n], rising with the lanes."""
    n = len(tokens)
    lanes = -(-n // width)
    padded_t = np.full(lanes * width, np.inf, dtype=np.float32)
    padded_w = np.zeros(lanes * width, dtype=np.float32)
    padded_t[:n] = tokens
    padded_w[:n] = weights
    mean = (float(tokens.mean()), float(max(weights.mean(), 1e-6)))
    limit = (float(budget[0]), float(budget[1]))
    jobs = np.empty((lanes, width), dtype=np.int64)
    step = max(CHUNK // width, 1)
    shape = (lanes, width)
    for first in range(0, lanes, step):
        part = slice(first, first + step)
        jobs[part] = _lanes(padded_t.reshape(shape)[part], padded_w.reshape(shape)[part], width, mean, limit)
    jobs += np.arange(lanes, dtype=np.int64)[:, None] * (width + 1)
    return jobs.reshape(-1)[:n]


def _number(jobs: Ints) -> Ints:
    """Rename job numbers to 0, 1, ... in the order of each job's first row."""
    first = np.full(int(jobs.max()) + 1, len(jobs), dtype=np.int64)
    np.minimum.at(first, jobs, np.arange(len(jobs)))
    used = np.flatnonzero(first < len(jobs))
    names = np.empty(len(first), dtype=np.int64)
    names[used[np.argsort(first[used], kind="stable")]] = np.arange(len(used))
    return names[jobs]


def pack(tokens: Ints, weights: Ints, token_budget: int, weight_budget: int) -> Ints:
    """Job number of each row: tokens and weights (anchors) of no job exceed their budgets.

    Args:
        tokens, weights: [n] of the rows of one bucket, in the order of their use; none above its budget.
    Returns: [n] job numbers 0.., in the order of each job's oldest row.
    """
    n = len(tokens)
    if n == 0:
        return np.zeros(0, dtype=np.int64)
    per_job = min(token_budget / tokens.mean(), weight_budget / max(weights.mean(), 1e-6))
    tie = max(int(per_job // ROWS_OF_A_JOB), 1)
    heads = np.arange(0, n, tie)
    unit_t = np.add.reduceat(tokens, heads)
    unit_w = np.add.reduceat(weights, heads)
    if unit_t.max() > token_budget or unit_w.max() > weight_budget:  # a few rows far above the mean: tie none
        tie, unit_t, unit_w = 1, tokens, weights
    units = len(unit_t)
    width = int(np.clip(12 * min(per_job / tie, ROWS_OF_A_JOB), 48, 192))
    if units * width > 1.5e8:
        width = 64
    jobs = np.full(units, -1, dtype=np.int64)
    left = np.arange(units)
    base = 0
    while len(left):
        found = _one_pass(unit_t[left], unit_w[left], width, (token_budget, weight_budget))
        count = int(found.max()) + 1
        fill = np.maximum(
            np.bincount(found, unit_t[left], count) / token_budget,
            np.bincount(found, unit_w[left], count) / weight_budget,
        )
        # Accepting the better half at least makes every pass smaller than the last by half.
        enough = min(GOOD_FILL, float(np.median(fill[fill > 0]))) if len(left) > width else 0.0
        accept = fill[found] >= enough
        jobs[left[accept]] = base + found[accept]
        base += count
        left = left[~accept]
    return _number(np.repeat(jobs, tie)[:n])
