"""Conversations -> OUT/train, OUT/heldout (token stores) and OUT/report.json: `forebay prepare`.

Guarantees: the stores' bytes are a function of the input's bytes, the tokenizer and the settings, whatever the number
of workers and interruptions; every row is kept or counted with its reason, file and line; a finished store is used
again only if all of that is the same, and otherwise the differing field is named; a killed or full-disk run goes on
after its last whole shard. A row's split follows from its first prompt's content (`data.split`).
Called by `api` and `cli`. Memory does not grow with the input, but for 16 bytes per held-out prompt token.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.data.build import Build
from forebay.data.chunks import Source, encoded_chunks, find_source
from forebay.data.conversation import Conversation
from forebay.data.encode import EncodeSettings
from forebay.data.overlap import no_overlap
from forebay.data.progress import Progress
from forebay.data.readers import find_files, read
from forebay.data.report import Report, expectations
from forebay.data.requests import index_requests
from forebay.data.rows import RowReader, RowSettings
from forebay.data.split import held_out_below
from forebay.data.store import INDEX
from forebay.errors import DataError, UsageError

CODE_VERSION = 2  # raise it when the same input would give other rows
SHARD_TOKENS = 2**24


def prepare(
    inputs: list[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokenizer: Any,
    max_length: int = 2048,
    heldout_share: float = 0.05,
    heldout: list[str | os.PathLike[str]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    chat_template: str | None = None,
    last_turn_only: bool = False,
    split_turns: bool = False,
    text_separator: str | None = None,
    fields: Mapping[str, str] | None = None,
    requests: list[str | os.PathLike[str]] | None = None,
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
    in the data. `fields`: a layout's name for a field -> the data's. `requests`: those whose answers a batch holds.
    `workers`: None chooses by the size of the input. `notice` gets one-line messages.

    Raises UsageError: no input, impossible settings, an OUT that holds something else. DataError: see
    `Report.reason_to_stop`; the disk is full; data and settings disagree on the template's arguments.
    """
    started = time.monotonic()
    if not 0 <= heldout_share < 1:
        raise UsageError(f"heldout_share {heldout_share} must be at least 0 and below 1")
    if max_length < 8:
        raise UsageError(f"max_length {max_length} is below 8 tokens: nothing would be left of a conversation")
    source = find_source(inputs, heldout)
    if source.passed_over:
        some = ", ".join(str(path) for path in source.passed_over[:3])
        notice(f"{len(source.passed_over)} files are of no kind that is read, and are passed over: {some}")
    loaded = _load(tokenizer)
    with _row_settings(text_separator, fields or {}, requests, notice) as (rows, requests_digest):
        if template_kwargs is None:
            template_kwargs = _recorded_arguments(source.files, rows)
            if template_kwargs:
                notice(f"template arguments recorded in the data: {json.dumps(template_kwargs)}")
        settings = EncodeSettings(
            max_length=max_length,
            template_kwargs=template_kwargs,
            chat_template=chat_template,
            last_turn_only=last_turn_only,
            split_turns=split_turns,
            rows=rows,
        )
        split = heldout_share if heldout is None else "file"
        key = _key(source, loaded, settings, requests=requests_digest, heldout=split, shard_tokens=shard_tokens)
        build = Build(Path(out), key, [str(path) for path in source.files])

        def reason_to_stop(report: Report, final: bool) -> str | None:
            return report.reason_to_stop(max_unsupervised=max_unsupervised, strict=strict, final=final)

        finished = build.finished()
        if finished is not None:
            if reason := reason_to_stop(finished[0], True):
                raise DataError(reason)
            notice(f"{out} was made from the same data with the same settings: used as it is")
            return finished[1]
        if build.differs:
            notice(f"{out} is made anew, because it differs in {build.differs}")
        if build.report.records:
            notice(f"going on after row {build.report.records:,} of an interrupted run")
        below = heldout_share
        if heldout is None and heldout_share:
            below = held_out_below((chunk for chunk, _ in encoded_chunks(source, loaded, settings)), heldout_share)
            if below > heldout_share:
                notice(f"no row falls below --heldout-share {heldout_share}: the rows of one prompt are held out")
        try:
            stopped = None
            with Progress("prepare", source.total_bytes, progress) as shown:
                done_before = build.report.records
                for chunk, last in encoded_chunks(source, loaded, settings, done_before, workers, notice):
                    build.open()  # not before a chunk was encoded: settings that fail at once leave an older store
                    by_file = np.full(len(chunk.splits), last.file >= source.heldout_from)
                    build.add(chunk, chunk.splits < below if heldout is None else by_file)
                    done = source.bytes_before(last)
                    supervised = build.report.total("supervised_tokens")
                    shown.update(done, {"rows": build.report.records, "supervised tokens": supervised})
                    _check_space(build, done, source.total_bytes)
                    stopped = reason_to_stop(build.report, False)
                    if stopped:
                        break
                    if build.open_tokens >= shard_tokens:
                        build.close_shards()
            build.open()
            stopped = stopped or reason_to_stop(build.report, True)
            facts = {"template_kwargs": template_kwargs, "max_length": max_length}
            compared = {"duplicates": 0, "overlap": no_overlap(), "fingerprints": {}}
            if stopped is None:
                compared = build.finish(facts, loaded.decode)
            report = build.report.as_dict(**facts, **compared, stopped=stopped, seconds=time.monotonic() - started)
            report["expect"] = expectations(report)
            build.save_report(report)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(
                f"disk full at {out}: {build.written_bytes():,} bytes are written; free some space and run the same "
                "command again, it goes on where it stopped"
            ) from None
        finally:
            build.close()
    if stopped is not None:
        raise DataError(stopped)
    return report


@contextlib.contextmanager
def _row_settings(
    text_separator: str | None, fields: Mapping[str, str], requests: Any, notice: Callable[[str], None]
) -> Iterator[tuple[RowSettings, str | None]]:
    """How rows are read, with the requests of a batch on disk for as long; and the requests' digest."""
    rows = RowSettings(text_separator, dict(fields))
    if not requests:
        yield rows, None
        return
    files = find_files([requests] if isinstance(requests, str | os.PathLike) else requests)
    with tempfile.TemporaryDirectory(prefix="forebay-requests-") as folder:
        path = Path(folder) / "requests.db"
        notice(f"{index_requests(files, path):,} requests to join by custom_id")
        yield replace(rows, requests=str(path)), _digest(files)


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


def _recorded_arguments(files: list[Path], rows: RowSettings) -> dict[str, Any]:
    """The template arguments in the first usable row, if `regenerate` made it. Later rows are checked against them."""
    reader = RowReader(rows)
    for _, record in zip(range(100), read(files), strict=False):
        conversation = reader.conversation(record)
        if isinstance(conversation, Conversation):
            return conversation.made_with or {}
    return {}


def _key(source: Source, tokenizer: Any, settings: EncodeSettings, **more: Any) -> dict[str, Any]:
    """Everything that decides the stores' bytes."""
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    template = settings.chat_template or tokenizer.chat_template
    options = {k: v for k, v in asdict(settings).items() if k not in ("chat_template", "rows")}
    return {
        "data": _digest(source.files),
        "tokenizer": hashlib.blake2b(backend.encode(), digest_size=16).hexdigest(),
        "chat_template": hashlib.blake2b(str(template).encode(), digest_size=16).hexdigest(),
        **options,
        "text_separator": settings.rows.text_separator,
        "fields": dict(settings.rows.fields),
        "heldout_files": len(source.files) - source.heldout_from,
        **more,
        "code_version": CODE_VERSION,
    }


def _digest(files: list[Path]) -> str:
    """Of the bytes of some files."""
    data = hashlib.blake2b(digest_size=16)
    for path in files:
        data.update(path.stat().st_size.to_bytes(8, "big"))
        try:
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    data.update(block)
        except OSError as error:
            data.update(str(error.errno).encode())  # the reader will report the file
    return data.hexdigest()


def estimate_bytes(written: int, done: int, total: int) -> int:
    """Bytes of the finished stores, from those written for `done` of `total` input bytes."""
    return int(written * total / max(1, done))


def _check_space(build: Build, done: int, total: int) -> None:
    """Refuse before the disk is full: at the first chunk of every shard. `done` is 0 where a reader cannot say."""
    if not done or not build.starts_shard:
        return
    build.starts_shard = False
    tokens, rows = build.report.total("tokens"), build.report.total("rows")
    estimate = estimate_bytes(tokens * 5 + rows * INDEX.itemsize, done, total)
    free = shutil.disk_usage(build.folder).free
    if estimate - build.closed_tokens * 5 > free:
        raise DataError(
            f"{build.folder} needs about {estimate:,} bytes and its disk has {free:,} free: free some space or choose "
            "another folder"
        )
