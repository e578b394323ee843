"""Conversations -> OUT/train, OUT/heldout (token stores) and OUT/report.json: `forebay prepare`.

Guarantees: the stores' bytes are a function of the input's bytes, the tokenizer and the settings, whatever the number
of workers and interruptions; every row is kept or counted with its reason, file and line; a finished store is used
again only if all of that is the same, and otherwise the differing field is named; a killed or full-disk run goes on
after its last whole shard. A row's split follows from its first prompt's content, so it never moves when data is added.
Called by `api` and `cli`. Memory does not grow with the input, but for 16 bytes per held-out prompt token.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from forebay.data.conversation import Conversation, conversation_of
from forebay.data.encode import Encoded, Encoder, EncodeSettings, encode_in_worker, start_worker
from forebay.data.overlap import NGRAM, overlapping
from forebay.data.progress import Progress
from forebay.data.readers import Record, Unreadable, find_files, parse, read
from forebay.data.report import Report, expectations
from forebay.data.store import StoreWriter, damage, read_manifest, write_json
from forebay.errors import DataError, UsageError

CODE_VERSION = 1  # raise it when the same input would give other rows
CHUNK_ROWS, CHUNK_BYTES = 256, 2**22
SHARD_TOKENS = 2**24
ROWS_AT_ONCE = 2**22  # content hashes compared at a time
WORKER_BYTES = 2**25  # of input for each worker beyond the first: starting one costs seconds
SPLITS = ("train", "heldout")


@dataclass
class _Input:
    files: list[Path]
    heldout_from: int  # files from this one on are all held out
    sizes: list[int]

    @property
    def total_bytes(self) -> int:
        return max(1, sum(self.sizes))


def prepare(
    inputs: list[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokenizer: Any,
    max_length: int = 4096,
    heldout_share: float = 0.05,
    heldout: list[str | os.PathLike[str]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    chat_template: str | None = None,
    last_turn_only: bool = False,
    split_turns: bool = False,
    text_separator: str | None = None,
    strict: bool = False,
    max_unsupervised: float = 0.05,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = True,
    notice: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Prepare conversations for training; returns the report, which is also in OUT/report.json.

    `inputs`, `heldout`: files, folders or globs. `tokenizer`: the target's folder, or a loaded one. With `heldout` its
    rows are the held-out ones and `heldout_share` is not used. `template_kwargs`: None takes what `regenerate` recorded
    in the data. `workers`: None chooses by the size of the input. `notice` gets one-line messages.

    Raises UsageError: no input, impossible settings, an OUT that holds something else. DataError: see
    `Report.reason_to_stop`; the disk is full; data and settings disagree on the template's arguments.
    """
    started = time.monotonic()
    if not 0 <= heldout_share < 1:
        raise UsageError(f"heldout_share {heldout_share} must be at least 0 and below 1")
    if max_length < 8:
        raise UsageError(f"max_length {max_length} is below 8 tokens: nothing would be left of a conversation")
    source = _input(inputs, heldout)
    loaded = _load(tokenizer)
    if template_kwargs is None:
        template_kwargs = _recorded_arguments(source.files, text_separator)
        if template_kwargs:
            notice(f"template arguments recorded in the data: {json.dumps(template_kwargs)}")
    settings = EncodeSettings(
        max_length=max_length,
        template_kwargs=template_kwargs,
        chat_template=chat_template,
        last_turn_only=last_turn_only,
        split_turns=split_turns,
        text_separator=text_separator,
    )
    key = _key(source, loaded, settings, heldout_share if heldout is None else "file", shard_tokens)
    folder = Path(out)
    names = [str(path) for path in source.files]
    run = _Run(folder, key, names)
    finished = run.finished()
    if finished is not None:
        notice(f"{folder} was made from the same data with the same settings: used as it is")
        return finished
    if run.differs:
        notice(f"{folder} is made anew, because it differs in {run.differs}")
    if run.report.records:
        notice(f"going on after row {run.report.records:,} of an interrupted run")
    share = None if heldout is not None else heldout_share
    try:
        with Progress("prepare", source.total_bytes, progress) as shown:
            stopped = _fill(
                run, source, loaded, settings, share, workers, shown, notice, shard_tokens, strict, max_unsupervised
            )
            report = run.report.as_dict(
                duplicates=0,
                overlap={"ngram": NGRAM, "train_rows": 0},
                template_kwargs=template_kwargs,
                max_length=max_length,
            )
            if stopped is not None:
                run.abort()
            else:
                run.close_shards()
                report |= run.compare_splits()
                facts = {"template_kwargs": template_kwargs, "max_length": max_length}
                report["fingerprints"] = {n: w.finish(facts) for n, w in run.writers.items()}
            seconds = time.monotonic() - started
            report |= {"stopped": stopped, "seconds": seconds, "expect": expectations(report)}
            write_json(folder / "report.json", report)
            if stopped is None:
                run.progress_file.unlink(missing_ok=True)
    except OSError as error:
        run.abort()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"disk full at {folder}: {run.written_bytes():,} bytes are written; free some space and run the same "
            "command again, it goes on where it stopped"
        ) from None
    except BaseException:
        run.abort()
        raise
    if stopped is not None:
        raise DataError(stopped)
    return report


def _input(inputs: list[Any], heldout: list[Any] | None) -> _Input:
    files = find_files([inputs] if isinstance(inputs, str | os.PathLike) else inputs)
    held = find_files([heldout] if isinstance(heldout, str | os.PathLike) else heldout) if heldout is not None else []
    both = {path.resolve() for path in files} & {path.resolve() for path in held}
    if both:
        raise UsageError(f"{sorted(both)[0]} is given both for training and as held-out data: name it once")
    every = files + held
    return _Input(every, len(files), [path.stat().st_size for path in every])


def _load(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    if not Path(tokenizer).is_dir():
        raise UsageError(f"no target folder at {tokenizer}: give the folder of the target's tokenizer")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{tokenizer} holds no tokenizer that loads: {str(error).splitlines()[0]}") from None


def _recorded_arguments(files: list[Path], text_separator: str | None) -> dict[str, Any]:
    """The template arguments in the first usable row, if `regenerate` made it. Later rows are checked against them."""
    for _, record in zip(range(100), read(files), strict=False):
        row = parse(record.payload)
        if not isinstance(row, Unreadable):
            conversation = conversation_of(row, text_separator=text_separator)
            if isinstance(conversation, Conversation):
                return conversation.made_with or {}
    return {}


def _key(source: _Input, tokenizer: Any, settings: EncodeSettings, share: Any, shard_tokens: int) -> dict[str, Any]:
    """Everything that decides the stores' bytes."""
    data = hashlib.blake2b(digest_size=16)
    for path in source.files:
        data.update(path.stat().st_size.to_bytes(8, "big"))
        try:
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    data.update(block)
        except OSError as error:
            data.update(str(error.errno).encode())  # the reader will report the file
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    template = settings.chat_template or tokenizer.chat_template
    return {
        "data": data.hexdigest(),
        "tokenizer": hashlib.blake2b(backend.encode(), digest_size=16).hexdigest(),
        "chat_template": hashlib.blake2b(str(template).encode(), digest_size=16).hexdigest(),
        **{k: v for k, v in asdict(settings).items() if k != "chat_template"},
        "heldout": share,
        "heldout_files": len(source.files) - source.heldout_from,
        "shard_tokens": shard_tokens,
        "code_version": CODE_VERSION,
    }


class _Run:
    """The two stores while they are written, and how far they are: OUT/progress.json."""

    def __init__(self, folder: Path, key: dict[str, Any], files: list[str]):
        self.folder, self.key = folder, key
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file: give a folder for the store")
        known = {"train", "heldout", "report.json", "progress.json"}
        if folder.is_dir() and (others := sorted({p.name for p in folder.iterdir()} - known)):
            raise UsageError(f"{folder} holds other things ({', '.join(others[:3])}): give an empty or new folder")
        self.progress_file = folder / "progress.json"
        self.differs = ""
        state = self._state()
        self.report = Report(files, state.get("report"))
        self._found = state
        self.writers: dict[str, StoreWriter] = {}

    def _state(self) -> dict[str, Any]:
        """What an interrupted run of the same key left; with another key its differing fields are noted."""
        try:
            state = json.loads(self.progress_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            state = None
        for found in (state, read_manifest(self.folder / "train")):
            if isinstance(found, dict) and isinstance(found.get("key"), dict) and found["key"] != self.key:
                names = [n for n in {**found["key"], **self.key} if found["key"].get(n) != self.key.get(n)]
                self.differs = ", ".join(f"{n} ({found['key'].get(n)} there, {self.key.get(n)} now)" for n in names)
        if not isinstance(state, dict) or state.get("key") != self.key:
            return {}
        for name in SPLITS:
            if damage(self.folder / name, state["shards"][name], verify=True):
                return {}
        return state

    def finished(self) -> dict[str, Any] | None:
        """The report of a finished run of the same key."""
        for name in SPLITS:
            manifest = read_manifest(self.folder / name)
            if not manifest or not manifest.get("complete") or manifest.get("key") != self.key:
                return None
            if damage(self.folder / name, manifest["shards"], verify=True):
                return None
        try:
            report = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return report if report.get("stopped") is None else None

    def open(self) -> None:
        """Open the writers, and say first what is being made."""
        shards = self._found.get("shards", {name: [] for name in SPLITS})
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "report.json").unlink(missing_ok=True)
        for name in SPLITS:
            (self.folder / name / "manifest.json").unlink(missing_ok=True)
            self.writers[name] = StoreWriter(self.folder / name, self.key, shards[name])
        self.save()

    def save(self) -> None:
        shards = {name: writer.shards for name, writer in self.writers.items()}
        write_json(self.progress_file, {"key": self.key, "report": self.report.state(), "shards": shards})

    def close_shards(self) -> None:
        """Make all that was added permanent."""
        for writer in self.writers.values():
            writer.close_shard()
        self.save()

    def add(self, chunk: Encoded, heldout: np.ndarray) -> None:
        self.report.add(chunk)
        for name, chosen in (("train", ~heldout), ("heldout", heldout)):
            rows = chunk.rows.select(chosen)
            self.writers[name].append(rows)
            self.report.add_split(name, rows.index)

    def compare_splits(self) -> dict[str, Any]:
        """Duplicates, and training rows whose prompts overlap with held-out ones. One shard in memory at a time."""
        held = np.unique(
            np.concatenate([np.empty(0, np.uint64), *(grams for _, grams in self.writers["heldout"].grams())])
        )
        like, first = 0, []
        for index, grams in self.writers["train"].grams():
            rows = index["row"][overlapping(grams, index["grams"], held)]
            like += len(rows)
            first = (first + rows[:3].tolist())[:3]
        return {"duplicates": self._duplicates(), "overlap": {"ngram": NGRAM, "train_rows": like, "first": first}}

    def _duplicates(self) -> int:
        """Rows whose content hash occurred before. Passes over a part of the hashes each bound the memory."""
        parts = 1 + self.report.total("rows") // ROWS_AT_ONCE
        count = 0
        for part in range(parts):
            seen = []
            for writer in self.writers.values():
                for index, _ in writer.grams():
                    halves = np.ascontiguousarray(index["id"]).view(np.uint64).reshape(-1, 4)
                    keys = halves[:, 0] ^ (halves[:, 1] * np.uint64(0x9E3779B97F4A7C15))
                    seen.append(keys[keys % np.uint64(parts) == part])
            keys = np.concatenate(seen)
            count += len(keys) - len(np.unique(keys))
        return count

    def abort(self) -> None:
        for writer in self.writers.values():
            writer.abort()

    def written_bytes(self) -> int:
        return sum(p.stat().st_size for name in SPLITS for p in (self.folder / name).glob("*") if p.is_file())


def _fill(
    run: _Run,
    source: _Input,
    tokenizer: Any,
    settings: EncodeSettings,
    share: float | None,
    workers: int | None,
    shown: Progress,
    notice: Callable[[str], None],
    shard_tokens: int,
    strict: bool,
    max_unsupervised: float,
) -> str | None:
    """Encode the input into the open stores. Returns why it stopped early, or must not be finished."""
    run.open()
    known = -1
    checked_space = False
    for chunk, last in _encoded(source, tokenizer, settings, run.report.records, workers, notice):
        heldout = (
            chunk.splits < share if share is not None else np.full(len(chunk.splits), last.file >= source.heldout_from)
        )
        run.add(chunk, heldout)
        done = sum(source.sizes[: last.file]) + last.done_bytes
        known = done if known < 0 else known
        shown.update(done, {"rows": run.report.records, "supervised tokens": run.report.total("supervised_tokens")})
        if not checked_space:
            _check_space(run, done, source.total_bytes)
            checked_space = True
        stopped = run.report.reason_to_stop(max_unsupervised=max_unsupervised, strict=strict, final=False)
        if stopped:
            return stopped
        if any(writer.open_tokens >= shard_tokens for writer in run.writers.values()):
            run.close_shards()
            checked_space = False
    return run.report.reason_to_stop(max_unsupervised=max_unsupervised, strict=strict, final=True)


def estimate_bytes(written: int, done: int, total: int) -> int:
    """Bytes of the finished stores, from those written for `done` of `total` input bytes."""
    return int(written * total / max(1, done))


def _check_space(run: _Run, done: int, total: int) -> None:
    """Refuse before the disk is full. `done` may be 0 for a file whose reader cannot say."""
    if not done:
        return
    tokens, rows = run.report.total("tokens"), run.report.total("rows")
    estimate = estimate_bytes(tokens * 5 + rows * 64, done, total)
    already = tokens * 5 - sum(w.open_tokens for w in run.writers.values()) * 5
    free = shutil.disk_usage(run.folder).free
    if estimate - already > free:
        raise DataError(
            f"{run.folder} needs about {estimate:,} bytes and its disk has {free:,} free: free some space or choose "
            "another folder"
        )


def _chunks(source: _Input, skip: int) -> Iterator[list[Record]]:
    """Records in chunks that do not mix training and held-out files. Boundaries depend on the records alone."""
    chunk: list[Record] = []
    size = seen = 0
    for record in read(source.files):
        crosses = chunk and record.file >= source.heldout_from > chunk[-1].file
        if chunk and (len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES or crosses):
            seen += len(chunk)
            if seen > skip:
                yield chunk
            chunk, size = [], 0
        chunk.append(record)
        size += len(record.payload) if isinstance(record.payload, bytes) else 4096
    if chunk and seen + len(chunk) > skip:
        yield chunk


def _encoded(
    source: _Input,
    tokenizer: Any,
    settings: EncodeSettings,
    skip: int,
    workers: int | None,
    notice: Callable[[str], None],
) -> Iterator[tuple[Encoded, Record]]:
    """Every chunk's outcome with its last record, in order. `skip` records are done already."""
    cores = os.cpu_count() or 1
    count = min(cores, 8, source.total_bytes // WORKER_BYTES) if workers is None else workers
    if count > cores:
        notice(f"{count} workers asked, {cores} cores here: {cores} are used")
        count = cores
    first = skip + 1
    if count <= 1:
        encoder = Encoder(tokenizer, settings)
        for chunk in _chunks(source, skip):
            yield encoder(chunk, first), chunk[-1]
            first += len(chunk)
        return
    with tempfile.TemporaryDirectory(prefix="forebay-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        with ProcessPoolExecutor(count, get_context("spawn"), start_worker, (folder, settings)) as pool:
            waiting: deque[tuple[Future[Encoded], Record]] = deque()
            try:
                for chunk in _chunks(source, skip):
                    waiting.append((pool.submit(encode_in_worker, chunk, first), chunk[-1]))
                    first += len(chunk)
                    if len(waiting) > 2 * count:
                        future, last = waiting.popleft()
                        yield future.result(), last
                while waiting:
                    future, last = waiting.popleft()
                    yield future.result(), last
            except BrokenProcessPool:
                raise DataError(
                    "a data worker was killed (out of memory?): run the same command again with fewer --workers, "
                    "it goes on where it stopped"
                ) from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
