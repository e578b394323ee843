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
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from forebay.data.build import Build
from forebay.data.chunks import Source, encoded_chunks, find_source
from forebay.data.conversation import Conversation, conversation_of
from forebay.data.encode import EncodeSettings
from forebay.data.overlap import NGRAM
from forebay.data.progress import Progress
from forebay.data.readers import Unreadable, parse, read
from forebay.data.report import Report, expectations
from forebay.data.store import INDEX
from forebay.errors import DataError, UsageError

CODE_VERSION = 1  # raise it when the same input would give other rows
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
    source = find_source(inputs, heldout)
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
    try:
        stopped = None
        with Progress("prepare", source.total_bytes, progress) as shown:
            for chunk, last in encoded_chunks(source, loaded, settings, build.report.records, workers, notice):
                build.open()  # not before a chunk was encoded: settings that fail at once leave an older store alone
                by_file = np.full(len(chunk.splits), last.file >= source.heldout_from)
                build.add(chunk, chunk.splits < heldout_share if heldout is None else by_file)
                done = source.bytes_before(last)
                counts = {"rows": build.report.records, "supervised tokens": build.report.total("supervised_tokens")}
                shown.update(done, counts)
                _check_space(build, done, source.total_bytes)
                stopped = reason_to_stop(build.report, False)
                if stopped:
                    break
                if build.open_tokens >= shard_tokens:
                    build.close_shards()
        build.open()
        stopped = stopped or reason_to_stop(build.report, True)
        facts = {"template_kwargs": template_kwargs, "max_length": max_length}
        compared = {"duplicates": 0, "overlap": {"ngram": NGRAM, "train_rows": 0, "first": []}, "fingerprints": {}}
        if stopped is None:
            compared = build.finish(facts)
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


def _key(source: Source, tokenizer: Any, settings: EncodeSettings, share: Any, shard_tokens: int) -> dict[str, Any]:
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
