"""Input files -> chunks of records -> encoded chunks, in order, by this process or by spawned ones.

Guarantees: the chunks depend on the input alone, never on the number of workers, and at most a few are in memory; a
worker that dies ends the run with one message. Called by `data.prepare`.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from forebay.data.encode import Encoded, Encoder, EncodeSettings, encode_in_worker, start_worker
from forebay.data.readers import Record, files_passed_over, find_files, read
from forebay.errors import DataError, UsageError

CHUNK_ROWS, CHUNK_BYTES = 256, 2**22
WORKER_BYTES = 2**25  # of input for each worker beyond the first: starting one costs seconds


@dataclass
class Source:
    """What to read. Files from number `heldout_from` on are held out."""

    files: list[Path]
    heldout_from: int
    sizes: list[int]
    passed_over: list[Path]  # files of a folder that are of no known kind

    @property
    def total_bytes(self) -> int:
        return max(1, sum(self.sizes))

    def bytes_before(self, record: Record) -> int:
        """How much of the input is read when this record is."""
        return sum(self.sizes[: record.file]) + record.done_bytes


def find_source(inputs: Any, heldout: Any) -> Source:
    """The files of `inputs` and then those of `heldout`; each is a path, or a list of paths, folders and globs."""
    files = find_files(_listed(inputs))
    held = find_files(_listed(heldout)) if heldout is not None else []
    both = {path.resolve() for path in files} & {path.resolve() for path in held}
    if both:
        raise UsageError(f"{sorted(both)[0]} is given both for training and as held-out data: name it once")
    every = files + held
    others = files_passed_over([*_listed(inputs), *(_listed(heldout) if heldout is not None else [])])
    return Source(every, len(files), [path.stat().st_size for path in every], others)


def _listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, str | os.PathLike) else list(given)


def _chunks(source: Source, skip: int) -> Iterator[list[Record]]:
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


def encoded_chunks(
    source: Source,
    tokenizer: Any,
    settings: EncodeSettings,
    skip: int = 0,
    workers: int | None = 1,
    notice: Callable[[str], None] = lambda text: None,
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
            except BaseException:  # the consumer stopped, or a chunk failed: what is queued is not wanted any more
                pool.shutdown(wait=False, cancel_futures=True)
                raise
