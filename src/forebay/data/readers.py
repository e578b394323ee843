"""Files of conversations as a stream of records: JSONL, JSON, Parquet, Arrow, `datasets` folders, directories, globs.

Guarantees: memory does not grow with the size of a file; the order is that of the arguments, then of the names, then
of the rows; every record carries its file and line (row number for Parquet and Arrow); what cannot be read becomes a
record that says why, and reading goes on with the next line, or the next file. JSON lines are passed on as bytes:
parsing them (`parse`) is the workers' part. Called by `data.prepare` and `stages.regenerate`. Knows no conversations.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from forebay.errors import UsageError

MAX_LINE_BYTES = 256 * 2**20  # one record; a longer one is a broken file, and would not fit a model either
BLOCK_BYTES = 2**20
LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
TABLES = (".parquet", ".arrow")


@dataclass(slots=True)
class Unreadable:
    """Why a record or the rest of a file could not be read. `reason` is a key of the report's `dropped`."""

    reason: str
    detail: str


@dataclass(slots=True)
class Record:
    """One row: raw JSON bytes, a decoded row, or why there is none. `line` counts from 1; 0 is the file as a whole."""

    file: int
    line: int
    payload: bytes | dict[str, Any] | Unreadable
    done_bytes: int = 0  # of the file, for progress


def find_files(inputs: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files behind paths, directories and globs, each once. Raises UsageError for one that names nothing."""
    found: dict[Path, None] = {}
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            files = _files_of(path)
        elif path.is_file():
            files = [path]
        else:
            files = [p for name in sorted(glob.glob(str(given), recursive=True)) for p in _expand(Path(name))]
        if not files:
            kind = "folder holds no" if path.is_dir() else "path names no"
            raise UsageError(f"{given}: this {kind} file of conversations ({', '.join((*LINES[:3], *TABLES))})")
        found.update(dict.fromkeys(files))
    if not found:
        raise UsageError("no input: give at least one file, folder or glob of conversations")
    return list(found)


def _expand(path: Path) -> list[Path]:
    return _files_of(path) if path.is_dir() else [path]


def _files_of(folder: Path) -> list[Path]:
    """A `datasets` folder names its files in order; in any other folder they are sorted by name."""
    state = folder / "state.json"
    if state.is_file():
        try:
            names = [entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
            if all((folder / name).is_file() for name in names):
                return [folder / name for name in names]
        except (ValueError, KeyError, TypeError):
            pass  # not that kind of state.json: an ordinary folder
    own = {"dataset_info.json", "dataset_dict.json", "state.json", "report.json", "manifest.json"}
    files: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            files += _files_of(entry)
        elif entry.is_file() and entry.name not in own and entry.name.lower().endswith((*LINES, *TABLES)):
            files.append(entry)
    return files


def read(files: list[Path]) -> Iterator[Record]:
    """Every record of every file, in order."""
    for number, path in enumerate(files):
        try:
            yield from _read_file(number, path)
        except (OSError, EOFError, zlib.error) as error:
            if getattr(error, "errno", None) in (12, 24):  # out of memory or of file handles: not the file's fault
                raise
            yield Record(number, 0, Unreadable("unreadable_file", f"{type(error).__name__}: {error}"))


def _read_file(number: int, path: Path) -> Iterator[Record]:
    name = path.name.lower()
    if name.endswith(".parquet") or _starts_with(path, b"PAR1"):
        yield from _table(number, path, _parquet_batches)
    elif name.endswith(".arrow"):
        yield from _table(number, path, _arrow_batches)
    else:
        opener = gzip.open if _starts_with(path, b"\x1f\x8b") else open
        with opener(path, "rb") as file:
            shape = _shape(path, opener)
            if shape == "empty":
                yield Record(number, 0, Unreadable("unreadable_file", "the file is empty"))
            elif shape == "lines":
                yield from _lines(number, file)
            else:
                yield from _values(number, file)


def _starts_with(path: Path, magic: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(magic)) == magic


def _shape(path: Path, opener: Any) -> str:
    """`lines`, `values` (an array, or objects over several lines), or `empty`."""
    with opener(path, "rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head:
        return "empty"
    if path.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        return "lines"
    first = head.split(b"\n", 1)[0].strip()
    return "values" if first == b"{" or head[:1] == b"[" else "lines"


def _lines(number: int, file: IO[bytes]) -> Iterator[Record]:
    done = line = 0
    while raw := file.readline(MAX_LINE_BYTES):
        line += 1
        done += len(raw)
        if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(MAX_LINE_BYTES)
                done += len(raw)
            yield Record(number, line, Unreadable("parse_error", f"a line over {MAX_LINE_BYTES} bytes"), done)
            continue
        if line == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        raw = raw.strip()
        if raw:
            yield Record(number, line, raw, done)
    if line and not done:
        yield Record(number, 0, Unreadable("unreadable_file", "the file is empty"))


def _values(number: int, file: IO[bytes]) -> Iterator[Record]:
    """The objects of a JSON array, or objects one after the other, decoded from a buffer that holds one at a time."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")()
    text, line, done, ended, depth = "", 1, 0, False, 0

    def problem(detail: str) -> Record:
        return Record(number, line, Unreadable("parse_error", detail), done)

    while True:
        rest = text.lstrip(" \t\r\n,\ufeff")
        if not depth and rest[:1] == "[":
            depth, rest = 1, rest[1:].lstrip()
        line += text.count("\n", 0, len(text) - len(rest))
        text = rest
        if depth and text[:1] == "]":
            if (text + file.read(64).decode("utf-8", "replace"))[1:].strip():
                yield problem("more text after the end of the array")
            return
        fault = "cut off"
        if text:
            try:
                value, end = decoder.raw_decode(text)
                if end < len(text) or ended:
                    yield Record(number, line, value if isinstance(value, dict) else _not_an_object(value), done)
                    line += text.count("\n", 0, end)
                    text = text[end:]
                    continue
            except (ValueError, RecursionError) as error:
                fault = _parse_error(error).detail
        if ended:
            if text or depth:
                yield problem(fault)
            return
        if len(text) > MAX_LINE_BYTES:
            yield problem("a value that does not end")
            return
        # Read as much again as is held, so that a long value is not decoded from its start for every block.
        block = file.read(max(BLOCK_BYTES, len(text)))
        done, ended = done + len(block), not block
        try:
            text += utf8.decode(block, final=ended)
        except UnicodeDecodeError as error:
            yield problem(f"not UTF-8 after this line: {error.reason}")
            return


def _table(number: int, path: Path, batches: Any) -> Iterator[Record]:
    import pyarrow

    row = 0
    try:
        for done, batch in batches(path):
            batch.validate(full=True)  # offsets in a damaged file point anywhere, and reading by them ends the process
            for value in batch.to_pylist():
                row += 1
                yield Record(number, row, value, done)
    except (pyarrow.ArrowException, ValueError, OSError, OverflowError, MemoryError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield Record(number, row, Unreadable("unreadable_file", f"after row {row}: {text}"))


def _parquet_batches(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        size, total, seen = path.stat().st_size, max(1, file.metadata.num_rows), 0
        for batch in file.iter_batches(batch_size=256):
            seen += batch.num_rows
            yield size * seen // total, batch


def _arrow_batches(path: Path) -> Iterator[tuple[int, Any]]:
    """A `datasets` file is an Arrow stream; others write the Arrow file format."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            stream: Any = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            file = pyarrow.ipc.open_file(source)
            stream = (file.get_batch(i) for i in range(file.num_record_batches))
        for batch in stream:
            for start in range(0, batch.num_rows, 256):
                yield source.tell(), batch.slice(start, 256)


def parse(payload: bytes | dict[str, Any] | Unreadable) -> dict[str, Any] | Unreadable:
    """A record's row, or why there is none. Nothing is guessed: a byte that is not UTF-8 drops the row."""
    if not isinstance(payload, bytes):
        return payload
    try:
        value = json.loads(payload.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Unreadable("parse_error", f"not UTF-8: byte 0x{payload[error.start]:02x} at column {error.start + 1}")
    except (ValueError, RecursionError) as error:
        return _parse_error(error)
    return value if isinstance(value, dict) else _not_an_object(value)


def _parse_error(error: Exception) -> Unreadable:
    if isinstance(error, json.JSONDecodeError):
        return Unreadable("parse_error", f"not JSON: {error.msg} at column {error.colno}")
    if isinstance(error, RecursionError):
        return Unreadable("parse_error", "nested too deeply")
    return Unreadable("parse_error", f"not JSON: {str(error).splitlines()[0]}")


def _not_an_object(value: Any) -> Unreadable:
    return Unreadable("parse_error", f"a JSON {type(value).__name__} where an object {{...}} was expected")
