"""Files of conversations as a stream of records: JSONL, JSON, Parquet, Arrow, `datasets` folders, directories, globs.

Guarantees: memory does not grow with the size of a file; the order is that of the arguments, then of the names, then
of the rows; every record carries its file and line (row number for Parquet and Arrow); what cannot be read becomes a
record that says why, and reading goes on with the next line, or the next file. JSON lines are passed on as bytes:
parsing them (`parse`) is the workers' part. Called by `data.prepare` and `stages.regenerate`. What a row means is the
matter of `data.conversation`; only where a JSON file keeps its rows in a wrapper is decided by `data.layouts`.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from forebay.data.turns import is_turn
from forebay.data.values import Broken, Values
from forebay.errors import UsageError

MAX_LINE_BYTES = 256 * 2**20  # one record; a longer one is a broken file, and would not fit a model either
LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
TABLES = (".parquet", ".arrow")
#: Files that say something about a data set, and hold no rows of it.
OWN = {"dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json", "report.json", "manifest.json"}


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
        files = [file for path in _named(given) for file in ([path] if path.is_file() else _files_of(path))]
        if not files:
            kind = "folder holds no" if Path(given).is_dir() else "path names no"
            raise UsageError(f"{given}: this {kind} file of conversations ({', '.join((*LINES[:3], *TABLES))})")
        found.update(dict.fromkeys(files))
    if not found:
        raise UsageError("no input: give at least one file, folder or glob of conversations")
    return list(found)


def files_passed_over(inputs: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files of folders among `inputs` that `find_files` leaves out because of their kind."""
    folders = [path for given in inputs for path in _named(given) if path.is_dir()]
    return [entry for folder in folders for entry in _entries(folder) if not _is_known(entry)]


def _named(given: str | os.PathLike[str]) -> list[Path]:
    path = Path(given)
    return [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(given), recursive=True))]


def _is_known(path: Path) -> bool:
    return path.name.lower().endswith((*LINES, *TABLES))


def _entries(folder: Path) -> list[Path]:
    """The files of a folder and of those in it, sorted by name, without hidden ones and those of a library's own."""
    files: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            files += _saved_dataset(entry) or _entries(entry)
        elif entry.is_file() and entry.name not in OWN and not entry.name.startswith("."):
            files.append(entry)
    return files


def _saved_dataset(folder: Path) -> list[Path] | None:
    """The files that a `datasets` folder names, in its order; None for any other folder."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [folder / name for name in names] if all((folder / name).is_file() for name in names) else None


def _files_of(folder: Path) -> list[Path]:
    return _saved_dataset(folder) or [entry for entry in _entries(folder) if _is_known(entry)]


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
    if head.split(b"\n", 1)[0].strip() == b"{" or head[:1] == b"[":
        return "values"
    with opener(path, "rb") as file:
        try:
            return "lines" if Values(file).rows_begin() is None else "values"
        except Broken:
            return "lines"


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
    stream = Values(file)
    try:
        for line, value, done in stream:
            row = value if isinstance(value, dict) else _not_an_object(value)
            yield Record(number, line, row, done)
    except Broken as error:
        yield Record(number, stream.line, Unreadable("parse_error", str(error)), stream.done)


def _table(number: int, path: Path, batches: Any) -> Iterator[Record]:
    import pyarrow

    row = 0
    try:
        for done, batch in batches(path):
            batch.validate(full=True)  # offsets in a damaged file point anywhere, and reading by them ends the process
            for value in batch.to_pylist():
                row += 1
                yield Record(number, row, _without_nulls(value), done)
    except (pyarrow.ArrowException, ValueError, OSError, OverflowError, MemoryError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield Record(number, row, Unreadable("unreadable_file", f"after row {row}: {text}"))


def _without_nulls(value: Any) -> Any:
    """A table gives every struct the fields of all: those that a row does not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


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


def _not_an_object(value: Any) -> dict[str, Any] | Unreadable:
    """A conversation may be its list of turns alone."""
    if isinstance(value, list) and value and is_turn(value[0]):
        return {"messages": value}
    return Unreadable("parse_error", f"a JSON {type(value).__name__} where an object {{...}} was expected")
