"""Records -> token rows with masks: what a worker of `prepare` does, in this process or in a spawned one.

Guarantees: the result depends on the record and the settings alone; every record is either in `rows` or in `drops`;
each supervised span is decoded and compared with the text it came from. Called by `data.prepare`.
"""

from __future__ import annotations

import itertools
import os
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.data.conversation import Conversation, Drop
from forebay.data.overlap import prompt_hashes
from forebay.data.readers import Record
from forebay.data.rows import RowReader, RowSettings
from forebay.data.store import INDEX, Rows, eligible_anchors
from forebay.data.template import ChatTemplate, Rendered
from forebay.errors import DataError

MIN_TOKENS = 4


@dataclass(frozen=True)
class EncodeSettings:
    """What decides a row besides its record and the tokenizer. Goes to workers."""

    max_length: int
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    last_turn_only: bool = False
    split_turns: bool = False
    rows: RowSettings = field(default_factory=RowSettings)


@dataclass
class Encoded:
    """The outcome of one chunk, in order. `splits` is a number in [0, 1) per row."""

    rows: Rows
    splits: np.ndarray
    records: int
    drops: list[tuple[int, int, int, str, str]]  # row, file, line, reason, detail
    notes: dict[str, Counter[str]]  # group -> counts
    preview: list[list[list[Any]]]  # the first two rows as [text, supervised] stretches


class Encoder:
    """Holds the tokenizer and its template."""

    def __init__(self, tokenizer: Any, settings: EncodeSettings):
        self.tokenizer, self.settings = tokenizer, settings
        self.reader = RowReader(settings.rows)
        self.template = ChatTemplate(
            tokenizer,
            settings.template_kwargs,
            chat_template=settings.chat_template,
            last_turn_only=settings.last_turn_only,
            split_turns=settings.split_turns,
        )
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    def __call__(self, records: list[Record], first_row: int) -> Encoded:
        """Encode one chunk; `first_row` is the number of its first record."""
        drops: list[tuple[int, int, int, str, str]] = []
        notes: dict[str, Counter[str]] = {
            group: Counter() for group in ("warnings", "finish_reasons", "layouts", "counts")
        }
        ready: list[tuple[int, Record, Conversation, Rendered]] = []
        for row, record in enumerate(records, first_row):
            rendered = self._render(record, row)
            if isinstance(rendered, Drop):
                drops.append((row, record.file, record.line, rendered.reason, rendered.detail))
            else:
                ready += [(row, record, rendered[0], one) for one in rendered[1]]
        tokens, offsets = self._tokenise([item[3].text for item in ready])
        grams = self._grams([item[2].user_text for item in ready])
        out_tokens, out_masks, out_grams, index, splits, preview, lost = [], [], [], [], [], [], []
        for (row, record, conversation, one), ids, offset, gram in zip(ready, tokens, offsets, grams, strict=True):
            made = self._row(one, ids, offset)
            if isinstance(made, Drop):
                lost.append((row, record.file, record.line, made.reason, made.detail))
                continue
            ids, mask, cut = made
            supervised = int(mask.sum())
            index.append((0, row, len(ids), supervised, eligible_anchors(mask), len(gram), conversation.id.encode()))
            out_tokens.append(ids)
            out_masks.append(mask)
            out_grams.append(gram)
            splits.append(conversation.split_key)
            notes["warnings"].update(set(one.notes) | set(conversation.notes))
            notes["layouts"][conversation.layout] += 1
            notes["finish_reasons"][conversation.finish_reason or "unknown"] += 1
            notes["counts"].update(truncated=int(cut), thinking=int(one.thinking))
            if len(preview) < 2:
                preview.append(self._preview(ids, mask))
        kept = {item[1] for item in index}
        # With split_turns a record may give several rows: it is dropped only if all of them are.
        seen: set[int] = set()
        for drop in lost:
            if drop[0] not in kept and drop[0] not in seen:
                drops.append(drop)
                seen.add(drop[0])
        rows = Rows(
            _joined(out_tokens, np.int32),
            _joined(out_masks, np.uint8),
            np.array(index, INDEX),
            _joined(out_grams, np.uint64),
        )
        named = [(*drop[:4], _printable(drop[4])) for drop in sorted(drops)]
        return Encoded(rows, np.array(splits), len(records), named, notes, preview)

    def _render(self, record: Record, number: int) -> tuple[Conversation, list[Rendered]] | Drop:
        conversation = self.reader.conversation(record)
        if isinstance(conversation, Drop):
            return conversation
        made, asked = conversation.made_with, self.settings.template_kwargs
        if made is not None and made != asked:
            raise DataError(
                f"row {number} (line {record.line}) was made by `regenerate` with template arguments {made}, prepare "
                f"was asked for {asked}: give the arguments that the data was made with, or leave them out"
            )
        rendered = self.template.rows(conversation)
        return rendered if isinstance(rendered, Drop) else (conversation, rendered)

    def _tokenise(self, texts: list[str]) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        """Ids int32 [n] and character offsets int32 [n, 2] of each text (none without a fast tokenizer)."""
        if self._backend is None:
            ids = [np.array(self._plain_ids(text), np.int32) for text in texts]
            return ids, [None] * len(texts)
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return (
            [np.array(e.ids, np.int32) for e in encodings],
            [np.array(e.offsets, np.int32).reshape(-1, 2) for e in encodings],
        )

    def _plain_ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _grams(self, texts: list[str]) -> list[np.ndarray]:
        if self._backend is None:
            return [prompt_hashes(np.array(self._plain_ids(text), np.int64)) for text in texts]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [prompt_hashes(np.array(e.ids, np.int64)) for e in encodings]

    def _row(
        self, one: Rendered, ids: np.ndarray, offsets: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, bool] | Drop:
        """Ids, mask uint8 [n], and whether the row was cut; or why it is not used."""
        if offsets is not None:
            ids, offsets = self._cut_at_answers(one, ids, offsets)
        mask = np.zeros(len(ids), np.uint8)
        for start, end in one.spans:
            first, last, end = self._token_range(one.text, start, end, offsets)
            shared = offsets is not None and _straddled(offsets, start)
            if shared:
                one.notes.append("prompt_and_answer_share_a_token")
            if last > first:
                mask[first:last] = 1
                problem = self._differs(ids, first, last, one.text[start:end], shared)
                if problem:
                    return Drop("decode_mismatch", problem)
        if not mask.any():
            return Drop("no_span", "no token lies inside the answer")
        cut = len(ids) > self.settings.max_length
        if cut:
            length = len(ids)
            ids, mask = ids[: self.settings.max_length], mask[: self.settings.max_length]
            if not mask.any():
                return Drop("truncated_away", f"{length} tokens, cut to {len(ids)}, all of them prompt")
        if len(ids) < MIN_TOKENS or not eligible_anchors(mask):
            return Drop("too_short", f"{len(ids)} tokens, {int(mask.sum())} supervised: no place for a block")
        return ids, mask, cut

    def _cut_at_answers(self, one: Rendered, ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where a token lies across the border of prompt and answer, tokenise both alone, as serving does; unless the
        tokenizer adds something to each piece, so that they do not decode to the whole."""
        cuts = [start for start, _ in one.spans if _straddled(offsets, start)]
        if not cuts:
            return ids, offsets
        edges = [0, *cuts, len(one.text)]
        pieces = self._tokenise([one.text[a:b] for a, b in itertools.pairwise(edges)])
        new_ids = np.concatenate(pieces[0])
        if self._text(new_ids) != self._text(ids):
            return ids, offsets
        return new_ids, np.concatenate([o + at for o, at in zip(pieces[1], edges, strict=False)])

    def _token_range(self, text: str, start: int, end: int, offsets: np.ndarray | None) -> tuple[int, int, int]:
        """The tokens of a range of characters, and the end of the characters that they cover: a last token may reach
        into the white space that follows, as it does when the target writes it."""
        if offsets is None:  # no offsets: prefixes must tokenise to prefixes, which `_differs` checks
            return len(self._plain_ids(text[:start])), len(self._plain_ids(text[:end])), end
        begins, ends = offsets[:, 0], offsets[:, 1]
        inside = np.flatnonzero((begins >= start) & (begins < end) & (ends > begins))
        if not len(inside):
            return 0, 0, end
        first, last, reach = int(inside[0]), int(inside[-1]), int(ends[inside].max())
        if reach > end and text[end:reach].strip():
            return first, last, end
        return first, last + 1, max(reach, end)

    def _differs(self, ids: np.ndarray, first: int, last: int, text: str, shared: bool) -> str | None:
        """Decode the tokens `first` to `last` and compare them with their text. `shared`: its first characters belong
        to a token of the prompt."""
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and unknown in ids[first:last]:
            return None  # such a vocabulary cannot spell the text
        decoded, text = self._text(ids[first:last]), unicodedata.normalize("NFKC", text)
        if decoded == text or (shared and decoded and text.endswith(decoded)):
            return None
        # Some decoders drop the space before a first word, so the answer is decoded behind its prompt's last token.
        if first and self._text(ids[first - 1 : last]) == self._text(ids[first - 1 : first]) + text:
            return None
        return f"the tokens decode to {decoded[:40]!r}, the answer is {text[:40]!r}"

    def _text(self, ids: np.ndarray) -> str:
        text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return unicodedata.normalize("NFKC", text)

    def _preview(self, ids: np.ndarray, mask: np.ndarray) -> list[list[Any]]:
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        return [
            [self.tokenizer.decode(ids[a:b].tolist(), clean_up_tokenization_spaces=False), bool(mask[a])]
            for a, b in itertools.pairwise(edges)
        ]


def _joined(parts: list[np.ndarray], kind: Any) -> np.ndarray:
    return np.concatenate(parts).astype(kind, copy=False) if parts else np.empty(0, kind)


def _straddled(offsets: np.ndarray, at: int) -> bool:
    """Whether a token has characters on both sides of `at`."""
    return bool(np.any((offsets[:, 0] < at) & (offsets[:, 1] > at)))


def _printable(text: str) -> str:
    """A detail quotes the row, which may hold anything; some of it cannot be written as UTF-8."""
    return text[:300].encode("utf-8", "backslashreplace").decode("utf-8")


_ENCODER: Encoder | None = None


def start_worker(folder: str, settings: EncodeSettings) -> None:
    """Initialise a spawned process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    from transformers import AutoTokenizer

    global _ENCODER
    _ENCODER = Encoder(AutoTokenizer.from_pretrained(folder), settings)


def encode_in_worker(records: list[Record], first_row: int) -> Encoded:
    """One chunk, in a spawned process."""
    assert _ENCODER is not None
    return _ENCODER(records, first_row)
