"""Rows through the encoder, and what of each is supervised."""

import json

import numpy as np

from forebay.data.encode import Encoder, EncodeSettings
from forebay.data.readers import Record
from forebay.data.rows import RowSettings


def talk(*turns: str, system: str | None = None) -> dict:
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return {"messages": [{"role": "system", "content": system}] * (system is not None) + messages}


def encode(
    tokenizer, *rows, template=None, max_length=4096, text_separator=None, fields=None, requests=None, **options
):
    reading = RowSettings(text_separator, fields or {}, requests)
    encoder = Encoder(tokenizer, EncodeSettings(max_length, chat_template=template, rows=reading, **options))
    return encoder([Record(0, n, json.dumps(row).encode()) for n, row in enumerate(rows, 1)], 1)


def texts(tokenizer, out) -> list[list[str]]:
    """For every row its supervised stretches, decoded."""
    rows, start = [], 0
    for length in out.rows.index["length"]:
        ids, mask = out.rows.tokens[start : start + length], out.rows.mask[start : start + length]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        pairs = edges.reshape(-1, 2)
        rows.append([tokenizer.decode(ids[a:b].tolist(), clean_up_tokenization_spaces=False).strip() for a, b in pairs])
        start += length
    return rows
