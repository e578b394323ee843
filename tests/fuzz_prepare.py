"""Mutated input files through `prepare`: no traceback, no hang, every row kept or counted with its file and line.

    python tests/fuzz_prepare.py 10000          # seeds 0..9999; the short form runs in tests/unit/test_data_fuzz.py

A file's mutation follows from its seed alone, so a failure is reproduced with `--first SEED` and a count of 1.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gzip
import io
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from forebay.data.prepare import prepare
from forebay.data.readers import read
from forebay.errors import ForebayError
from tiny import R0, toy_tokenizer, write_jsonl

HANG_S = 120
ODD: list[Any] = [
    None,
    0,
    -1,
    1.5,
    True,
    "",
    "x",
    "\ud800",
    "\x00",
    [],
    {},
    [[]],
    [None],
    {"a": []},
    "<|im_end|>",
    "[" * 900,
]
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
BASE: list[dict[str, Any]] = [
    R0,
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "one two"}], "finish_reason": "stop"},
    {"prompt": "hi there", "response": "three four five", "system": "be brief"},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b c d"},
        ]
    },
    {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [
            {"role": "user", "content": "call"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "it is four", "reasoning_content": "f says so"},
        ],
    },
    {**R0, "regenerated": {"prompt": "x", "by": {"template_kwargs": {}, "raw": True}}, "finish_reason": "length"},
    {"text": "Q: hi A: one two three"},
    {"instruction": "do it", "input": "now", "output": "one two three", "history": [["a", "b c"]], "system": "x"},
    {"query": "hi", "response": "one two", "history": [{"role": "user", "content": "a"}]},
    {"prompt": "hi", "chosen": "one two", "rejected": "three"},
    {"chosen": R0["messages"], "rejected": R0["messages"]},
    {"chosen": "\n\nHuman: a\n\nAssistant: b c", "rejected": "\n\nHuman: a\n\nAssistant: d"},
    {"prompt": {"text": "a", "role": "prompter", "replies": [{"text": "b c", "role": "assistant", "rank": 0}]}},
    {"row_idx": 0, "row": {"conversation": [{"human": "a", "assistant": "b c"}]}},
    {"conversations": {"from": ["human", "gpt"], "value": ["a", "b c"]}},
    {
        "custom_id": "r1",
        "response": {
            "body": {"choices": [{"message": {"role": "assistant", "content": "b"}, "finish_reason": "stop"}]}
        },
        "error": None,
    },
    {"custom_id": "r1", "body": {"messages": R0["messages"][:1]}},
    {
        "messages": [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
            {"from": "observation", "value": {"a": [1]}},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "m"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "4"}]},
            {"role": "assistant", "content": "it is 4", "reasoning": "so"},
            {"role": "narrator", "content": "the end"},
        ]
    },
]
REQUEST = {"custom_id": "r1", "body": {"messages": R0["messages"][:1], "tools": [{"function": {"name": "f"}}]}}


def wrong_types(value: Any, draw: random.Random) -> Any:
    """The value with one place replaced, removed or repeated."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        action = draw.random()
        if action < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if action < 0.25:
            return {("Ü" if k == key else k): v for k, v in value.items()}
        return {**value, key: wrong_types(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        action = draw.random()
        if action < 0.3:
            return value[:at] + value[at + 1 :] if action < 0.15 else value[: at + 1] + value[at:]
        return [*value[:at], wrong_types(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD)


def flip_bytes(data: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, cut, repeated or inserted."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at, length = draw.randrange(len(out) + 1), draw.choice([1, 1, 2, 8, 64])
        action = draw.randrange(5)
        if action == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif action == 1:
            out[at : at + length] = b""
        elif action == 2:
            out[at:at] = out[at : at + length]
        elif action == 3:
            out[at:at] = draw.choice(
                [b"\n", b"\r\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b"[", b"]", b"{", b'"', b"1e999"]
            )
        elif draw.random() < 0.3:
            out = out[:at]
    return bytes(out)


def make_file(folder: Path, seed: int) -> Path:
    """One mutated file."""
    draw = random.Random(seed)
    rows: list[Any] = [draw.choice(BASE) for _ in range(draw.randint(1, 8))]
    if draw.random() < 0.6:
        at = draw.randrange(len(rows))
        rows[at] = wrong_types(rows[at], draw)
    kind = draw.choice(["jsonl"] * 5 + ["json"] * 3 + ["jsonl.gz", "parquet", "arrow"])
    if kind in ("parquet", "arrow"):
        data = table_bytes(kind)
    else:
        lines = [json.dumps(row) for row in rows]
        text = "[" + ",\n".join(lines) + "]" if kind == "json" and draw.random() < 0.5 else "\n".join(lines) + "\n"
        if kind == "json" and draw.random() < 0.3:
            text = json.dumps(rows, indent=1)
        elif kind == "json" and draw.random() < 0.5:
            wrapper = {
                "version": 1,
                draw.choice(["data", "rows", "conversations", "x"]): rows,
                "more": draw.choice(ODD),
            }
            text = json.dumps(wrapper, indent=draw.choice([None, 1]))
        data = text.encode()
    if kind == "jsonl.gz":
        data = gzip.compress(data, mtime=0)
    if draw.random() < 0.7:
        data = flip_bytes(data, draw)
    path = folder / f"{seed:06d}.{kind}"
    path.write_bytes(data)
    return path


_TABLES: dict[str, bytes] = {}


def table_bytes(kind: str) -> bytes:
    """Rows of one shape as Parquet or as an Arrow stream."""
    if kind not in _TABLES:
        import pyarrow
        import pyarrow.parquet

        table, out = pyarrow.Table.from_pylist([R0, R0]), io.BytesIO()
        if kind == "parquet":
            pyarrow.parquet.write_table(table, out)
        else:
            with pyarrow.ipc.new_stream(out, table.schema) as stream:
                stream.write_table(table)
        _TABLES[kind] = out.getvalue()
    return _TABLES[kind]


def check(files: list[Path], folder: Path, tokenizer: Any) -> tuple[int, int]:
    """Prepare some files; returns rows and kept rows. Raises AssertionError where a row is neither kept nor counted."""
    good = write_jsonl(folder / "000.jsonl", [R0])
    requests = write_jsonl(folder / "requests" / "000.jsonl", [REQUEST])
    with contextlib.suppress(ForebayError):
        prepare(
            [good, *files],
            folder / "out",
            tokenizer=tokenizer,
            heldout_share=0.0,
            template_kwargs={},
            text_separator=" A:",
            requests=[requests],
            max_unsupervised=1.0,
            workers=1,
            progress=False,
        )
    report = json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["stopped"] is None, report["stopped"]
    assert report["rows"] == report["kept"] + sum(report["dropped"].values())
    assert report["rows"] == sum(1 for _ in read([good, *files]))
    for reason, first in report["dropped_first"].items():
        for entry in first:
            assert Path(entry["file"]).is_file() and entry["line"] >= 0 and entry["detail"], (reason, entry)
    for path in files:  # a line that is not blank is a row
        if path.name.endswith(".jsonl"):
            lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
            rows = [record for record in read([path]) if record.line]
            assert len(rows) == sum(1 for line in lines if line.strip()), path
    return report["rows"], report["kept"]


def run(first: int, count: int, at_once: int = 25, say: Any = print) -> None:
    """Check files of the seeds from `first` on, `at_once` per call of `prepare`; a failing batch is narrowed down."""
    tokenizer = toy_tokenizer()
    real_fsync, os.fsync = os.fsync, lambda handle: None  # a thousand stores that nobody keeps
    rows = kept = 0
    started = said = time.monotonic()
    try:
        for start in range(first, first + count, at_once):
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            seeds = range(start, min(start + at_once, first + count))
            with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
                files = [make_file(Path(name), seed) for seed in seeds]
                try:
                    got = check(files, Path(name), tokenizer)
                except BaseException as error:
                    say(f"fails in seeds {seeds.start}..{seeds.stop - 1}: {type(error).__name__}: {error}")
                    raise
            rows, kept = rows + got[0], kept + got[1]
            if time.monotonic() - said > 10:
                said = time.monotonic()
                done = seeds.stop - first
                rate = done / (said - started)
                say(f"{done}/{count} files, {rate:.0f}/s, {(count - done) / rate:.0f} s left")
    finally:
        os.fsync = real_fsync
        faulthandler.cancel_dump_traceback_later()
    say(f"{count} files, {rows} rows: {kept} kept, {rows - kept} counted by reason; {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=25)
    options = parser.parse_args()
    run(options.first, options.count, options.at_once)
