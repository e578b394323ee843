"""Which token id stands for "to be drafted", and whether the data's ids fit the target.

Guarantees: the mask id has an embedding row, is no pad, eos or bos, and does not occur in the data; the first of
configuration, draft config, tokenizer and spare embedding row that names one decides, and a bad one is refused rather
than passed over. Numpy only: all is found on the host. Called when a run starts, by `data.prepare` and `models.target`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from forebay.errors import ConfigError, DataError

LISTED = 24  # unused special tokens that fit a message; the rest is counted


class Rows(Protocol):
    """What is asked of a token store."""

    @property
    def ids(self) -> Sequence[str]: ...
    def __len__(self) -> int: ...
    def tokens(self, row: int) -> np.ndarray: ...


@dataclass(frozen=True)
class MaskToken:
    """The chosen id and where it comes from: `configuration`, `draft config`, `tokenizer` or `spare row`."""

    id: int
    source: str

    def __str__(self) -> str:
        return f"mask token {self.id} (from the {self.source})"


def check_token_ids(tokens: np.ndarray, embedding_rows: int, row: str | None = None) -> None:
    """Raise DataError where an id has no embedding row: on the host, before a device can assert."""
    if len(tokens) and (int(tokens.max()) >= embedding_rows or int(tokens.min()) < 0):
        bad = next(int(t) for t in tokens if not 0 <= t < embedding_rows)
        relation = f"{bad} >= {embedding_rows} embedding rows" if bad >= 0 else f"{bad} is negative"
        raise DataError(
            f"{f'row {row!r} ' if row is not None else ''}token {relation}: the data was tokenised for "
            "another target, run `forebay prepare` with this one"
        )


def token_counts(store: Rows, embedding_rows: int) -> np.ndarray:
    """How often each id occurs, int64 [embedding_rows]. Raises DataError for an id without an embedding row."""
    counts = np.zeros(embedding_rows, np.int64)
    for row in range(len(store)):
        tokens = np.asarray(store.tokens(row))
        check_token_ids(tokens, embedding_rows, store.ids[row])
        np.add.at(counts, tokens, 1)
    return counts


def choose_mask_token(
    tokenizer: Any,
    *,
    embedding_rows: int,
    requested: int | None = None,
    draft: int | None = None,
    eos_token_ids: Iterable[int] = (),
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
    counts: np.ndarray | None = None,
    store: Rows | None = None,
) -> MaskToken:
    """Choose and check the mask id; the model's own eos, pad and bos count beside the tokenizer's.

    requested: drafter.mask_token_id. draft: the id of a drafter that is continued. counts: `token_counts` of the data.
    store: the same data, to name a row where the id occurs.
    Raises ConfigError: no id can be found (three ways out are listed), or the named one cannot be used.
    """
    roles = _roles(tokenizer, eos_token_ids, pad_token_id, bos_token_id)
    for source, candidate in (
        ("configuration", requested),
        ("draft config", draft),
        ("tokenizer", getattr(tokenizer, "mask_token_id", None)),
    ):
        if candidate is not None:
            _check(candidate, source, roles, embedding_rows, counts, store)
            return MaskToken(int(candidate), source)
    named = set(tokenizer.get_vocab().values())
    for spare in range(embedding_rows):
        if spare not in named and spare not in roles and (counts is None or counts[spare] == 0):
            return MaskToken(spare, "spare row")
    unused = _unused_special(tokenizer, roles, counts, embedding_rows)
    shown = ", ".join(f"{i} {name!r}" for i, name in unused[:LISTED]) or "none"
    more = f" and {len(unused) - LISTED} more" if len(unused) > LISTED else ""
    raise ConfigError(
        f"no mask token: the tokenizer names none and all {embedding_rows} embedding rows are taken. Either "
        "(1) choose a reserved id that the data never uses: drafter.mask_token_id=ID; or "
        "(2) ship a mask embedding: add a mask token to the tokenizer and a row for it to the target's embedding; or "
        f"(3) take one of the unused special tokens: {shown}{more}"
    )


def _roles(tokenizer: Any, eos: Iterable[int], pad: int | None, bos: int | None) -> dict[int, str]:
    roles: dict[int, str] = {}
    named = [(pad, "pad"), (bos, "bos"), *((i, "eos") for i in eos)]
    named += [(getattr(tokenizer, f"{role}_token_id", None), role) for role in ("pad", "bos", "eos")]
    for token, role in named:
        if token is not None:
            roles[int(token)] = role
    return roles


def _check(
    token: int, source: str, roles: dict[int, str], rows: int, counts: np.ndarray | None, store: Rows | None
) -> None:
    if not 0 <= token < rows:
        raise ConfigError(
            f"mask token {token} (from the {source}) has no embedding row, valid 0..{rows - 1}: "
            "set drafter.mask_token_id to an unused id below that"
        )
    if token in roles:
        raise ConfigError(
            f"mask token {token} (from the {source}) is the {roles[token]} token: a drafter could not tell them apart, "
            "set drafter.mask_token_id to an unused id"
        )
    if counts is not None and token < len(counts) and counts[token] > 0:
        where = ""
        if store is not None:
            found = [i for i in range(len(store)) if (np.asarray(store.tokens(i)) == token).any()]
            where = f" in {len(found)} rows (first: row {store.ids[found[0]]!r})" if found else ""
        raise ConfigError(
            f"mask token {token} (from the {source}) occurs {int(counts[token])} times in the data{where}: "
            "set drafter.mask_token_id to an id that does not occur, or drop these rows"
        )


def _unused_special(
    tokenizer: Any, roles: dict[int, str], counts: np.ndarray | None, rows: int
) -> list[tuple[int, str]]:
    """(id, text) of special tokens that have a row, no role and do not occur in the data."""
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return [
        (i, text)
        for i, text in sorted(special.items())
        if i < rows and i not in roles and (counts is None or counts[i] == 0)
    ]
