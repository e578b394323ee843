"""The token store: a folder of memory-mapped, checksummed shards, and a manifest that says what made them.

Guarantees: `tokens(i)` and `mask(i)` are views without a copy; a store opens only when it is complete and its shards
have the bytes that the manifest names; a shard is on disk (fsynced) before the manifest names it, so that a killed
writer goes on after its last whole shard. Numpy only. Written by `data.prepare`; read by prefetch, plan and evaluation.

    STORE/manifest.json       key (what decides the content), fingerprint, shards with their checksums
    STORE/00000.tokens        int32, rows one after the other
    STORE/00000.mask          uint8, 1 where the token is supervised
    STORE/00000.index.npy     one record per row (`INDEX`)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from forebay.data.overlap import Shard
from forebay.errors import DataError

FORMAT = 1
INDEX = np.dtype(
    [
        ("start", "<i8"),  # in the shard's tokens
        ("row", "<i8"),  # number of the input row, from 1
        ("length", "<i4"),
        ("supervised", "<i4"),
        ("eligible", "<i4"),  # positions a with a and a + 1 supervised: where an anchor may be
        ("grams", "<i4"),  # hashes of the user's text (`overlap.prompt_hashes`), while preparing
        ("id", "S32"),  # content hash of the conversation
    ]
)
PARTS = {"tokens": np.dtype("<i4"), "mask": np.dtype("u1")}


def eligible_anchors(mask: np.ndarray) -> int:
    """How many positions a have a and a + 1 supervised."""
    return int(np.count_nonzero(mask[:-1] & mask[1:]))


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one act, on disk before this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def digest_file(path: Path) -> str:
    """blake2b of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class TokenStore:
    """A complete store, open for reading. `lengths`, `supervised`, `eligible`: int32 [rows]; `ids`: text [rows]."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.manifest = folder, manifest
        self.fingerprint: str = manifest["fingerprint"]
        shards = manifest["shards"]
        index = [np.load(folder / f"{s['name']}.index.npy") for s in shards]
        self.index = np.concatenate(index) if index else np.empty(0, INDEX)
        self.lengths = np.ascontiguousarray(self.index["length"], np.int32)
        self.supervised = np.ascontiguousarray(self.index["supervised"], np.int32)
        self.eligible = np.ascontiguousarray(self.index["eligible"], np.int32)
        self._starts = np.ascontiguousarray(self.index["start"])
        self._shard = np.repeat(np.arange(len(shards)), [s["rows"] for s in shards])
        self._parts = {
            part: [np.memmap(folder / f"{s['name']}.{part}", kind, "r").view(np.ndarray) for s in shards]
            for part, kind in PARTS.items()
        }

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: bool = False) -> TokenStore:
        """Open a store. `verify` reads every byte and compares the checksums; sizes are always compared.

        Raises DataError: not a store, not complete, of another format, or with damaged shards.
        """
        path = Path(folder)
        manifest = read_manifest(path)
        if manifest is None:
            inside = "; did you mean its train/ or heldout/?" if (path / "train" / "manifest.json").is_file() else ""
            raise DataError(f"{path} is not a token store (no manifest.json){inside}: make one with `forebay prepare`")
        if manifest.get("format") != FORMAT:
            raise DataError(
                f"{path} has format {manifest.get('format')}, this version reads {FORMAT}: run `forebay prepare` again"
            )
        if not manifest.get("complete"):
            raise DataError(
                f"{path} is not complete: run the same `forebay prepare` again, it goes on where it stopped"
            )
        for problem in damage(path, manifest["shards"], verify=verify):
            raise DataError(f"{path} is damaged: {problem}; delete the store and run `forebay prepare` again")
        return cls(path, manifest)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def ids(self) -> np.ndarray:
        """Content hash of each row, as text."""
        return self.index["id"].astype("U32")

    def tokens(self, row: int) -> np.ndarray:
        """int32 [length], a view."""
        return self._view("tokens", row)

    def mask(self, row: int) -> np.ndarray:
        """uint8 [length], a view: 1 where the token is supervised."""
        return self._view("mask", row)

    def prompt(self, row: int) -> np.ndarray:
        """The tokens before the first supervised one, a view."""
        return self.tokens(row)[: int(np.argmax(self.mask(row)))]

    def _view(self, part: str, row: int) -> np.ndarray:
        start = self._starts[row]
        return self._parts[part][self._shard[row]][start : start + self.lengths[row]]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, or nothing where there is none that can be read."""
    try:
        value = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def damage(folder: Path, shards: list[dict[str, Any]], *, verify: bool) -> list[str]:
    """What is wrong with the named shards' files."""
    problems = []
    for shard in shards:
        for name, (size, digest) in shard["files"].items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                problems.append(
                    f"{name} has {'no file' if found is None else f'{found} bytes'}, the manifest says {size}"
                )
            elif verify and digest_file(path) != digest:
                problems.append(f"the bytes of {name} do not have the checksum in the manifest")
    return problems


@dataclass
class Rows:
    """Rows to append. `tokens` and `mask` hold them one after the other; `grams` their user n-grams, likewise."""

    tokens: np.ndarray
    mask: np.ndarray
    index: np.ndarray  # INDEX [rows]; `start` is set when they are written
    grams: np.ndarray  # uint64

    def __len__(self) -> int:
        return len(self.index)

    def select(self, chosen: np.ndarray) -> Rows:
        """The rows where `chosen` (bool [rows]) holds."""
        if chosen.all():
            return self
        by_token, by_gram = np.repeat(chosen, self.index["length"]), np.repeat(chosen, self.index["grams"])
        return Rows(self.tokens[by_token], self.mask[by_token], self.index[chosen], self.grams[by_gram])


class StoreWriter:
    """Appends rows to the open shard; `close_shard` makes them permanent. `shards` are those already permanent."""

    def __init__(self, folder: Path, key: dict[str, Any], shards: list[dict[str, Any]]):
        self.folder, self.key, self.shards = folder, key, shards
        folder.mkdir(parents=True, exist_ok=True)
        keep = {name for shard in shards for name in shard["files"]} | {f"{s['name']}.grams" for s in shards}
        for path in folder.iterdir():
            if path.name not in keep:
                path.unlink()
        self._files: dict[str, Any] = {}
        self._index: list[np.ndarray] = []
        self.open_tokens = 0

    def append(self, rows: Rows) -> None:
        """Write rows behind those of the open shard."""
        if not len(rows):
            return
        if not self._files:
            name = f"{len(self.shards):05d}"
            self._files = {p: open(self.folder / f"{name}.{p}", "wb") for p in (*PARTS, "grams")}  # noqa: SIM115
        index = rows.index.copy()
        index["start"] = self.open_tokens + np.cumsum(index["length"], dtype=np.int64) - index["length"]
        self._index.append(index)
        self.open_tokens += len(rows.tokens)
        for part, values in (("tokens", rows.tokens), ("mask", rows.mask), ("grams", rows.grams)):
            self._files[part].write(np.ascontiguousarray(values).data)

    def close_shard(self) -> None:
        """Put the open shard on disk, with checksums. The caller then saves `shards`."""
        if not self._files:
            return
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        name, index = f"{len(self.shards):05d}", np.concatenate(self._index)
        with open(self.folder / f"{name}.index.npy", "wb") as file:
            np.save(file, index)
            file.flush()
            os.fsync(file.fileno())
        paths = [self.folder / f"{name}.{part}" for part in (*PARTS, "index.npy")]
        files = {path.name: [path.stat().st_size, digest_file(path)] for path in paths}
        self.shards.append({"name": name, "rows": len(index), "tokens": self.open_tokens, "files": files})
        self._files, self._index, self.open_tokens = {}, [], 0

    def abort(self) -> None:
        """Close the files as they are; the next writer removes them."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk: what is buffered cannot be written, and is not needed
                file.close()

    def prompts(self) -> Iterator[Shard]:
        """What is compared of every closed shard, mapped from disk one after the other."""
        for shard in self.shards:
            path = self.folder / f"{shard['name']}.grams"
            hashes = np.memmap(path, np.uint64, "r") if path.stat().st_size else np.empty(0, np.uint64)
            index = np.load(self.folder / f"{shard['name']}.index.npy", mmap_mode="r")
            maps = [np.memmap(self.folder / f"{shard['name']}.{part}", kind, "r") for part, kind in PARTS.items()]
            yield Shard(index, hashes, partial(_prompt, index, *maps))

    def finish(self, facts: dict[str, Any]) -> str:
        """Write the complete manifest, remove what was only needed while preparing, return the fingerprint."""
        digests = [file[1] for shard in self.shards for file in shard["files"].values()]
        text = json.dumps([self.key, digests], sort_keys=True)
        fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        manifest = {
            "format": FORMAT,
            "complete": True,
            "fingerprint": fingerprint,
            "rows": sum(s["rows"] for s in self.shards),
            "tokens": sum(s["tokens"] for s in self.shards),
            "key": self.key,
            **facts,
            "shards": self.shards,
        }
        write_json(self.folder / "manifest.json", manifest)
        for shard in self.shards:
            (self.folder / f"{shard['name']}.grams").unlink(missing_ok=True)
        return fingerprint


def _prompt(index: np.ndarray, tokens: np.ndarray, mask: np.ndarray, row: int) -> tuple[np.ndarray, int]:
    """A row's tokens, and how many there are before the first supervised one."""
    span = slice(index["start"][row], index["start"][row] + index["length"][row])
    return np.asarray(tokens[span]), int(np.argmax(mask[span]))
