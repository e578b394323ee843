"""Which rows are held out: those whose prompt's number in [0, 1) is below the share.

Guarantees: a row's side depends on its content, so it does not move when rows are added; at least one prompt is held
out. Where a small input has no number below the share, the prompt with the lowest is held out (and may move to the
training side when rows are added). Called by `data.prepare`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forebay.data.encode import Encoded
from forebay.errors import DataError

ENOUGH = 1000  # rows without one that can be used: what is wrong is not the split


def held_out_below(chunks: Iterable[Encoded], share: float) -> float:
    """`share`; or a little more than the lowest number of any row that is kept, where that is above the share.

    Reads until a row falls below the share. Raises DataError: every row has the same prompt.
    """
    lowest, highest, rows = 1.0, 0.0, 0
    for chunk in chunks:
        rows += chunk.records
        if len(chunk.splits):
            lowest, highest = min(lowest, chunk.splits.min()), max(highest, chunk.splits.max())
        if lowest < share or (lowest == 1.0 and rows >= ENOUGH):
            return share
    if lowest == highest:
        raise DataError(
            f"the {rows} rows have one prompt between them, which cannot be held out and trained on: add rows, give "
            "held-out ones by --heldout FILE, or prepare with --heldout-share 0"
        )
    return share if lowest == 1.0 else float(np.nextafter(lowest, 1.0))
