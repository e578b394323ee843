"""The rows of a JSON file that is not one object a line: an array, objects one after the other, or rows in a wrapper.

Guarantees: one value at a time is held, whatever the file's size; each comes with the line it begins on; where the
text breaks, what comes before the break is given, and then why reading ends. A wrapper is an object in which one list
holds the rows, beside plain values at most: {"version": 1, "data": [{...}, ...]}. Called by `data.readers`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from forebay.data.layouts import is_row

MAX_CHARACTERS = 256 * 2**20  # of one value; a longer one is a broken file
BLOCK_BYTES = 2**20
HEAD_CHARACTERS = 4096  # in which a wrapper's first or next list must begin

_NAME = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_PLAIN = rf"{_NAME}\s*:\s*(?:{_NAME}|[-+.\w]+)\s*"
_HEAD = re.compile(rf"\{{\s*(?:{_PLAIN},\s*)*({_NAME})\s*:\s*\[\s*(?=[\[{{])")
_NEXT_LIST = re.compile(rf"\s*,\s*(?:{_PLAIN},\s*)*({_NAME})\s*:\s*\[")
_TAIL = re.compile(rf"\s*(?:,\s*{_PLAIN})*\}}")
_GAP = re.compile(r"[ \t\r\n,\ufeff]*")


class Broken(Exception):
    """Why no more can be read: the text for people."""


class Values:
    """The values of one open file, from its beginning."""

    def __init__(self, file: IO[bytes]) -> None:
        self.line, self.done = 1, 0
        self._file, self._utf8, self._decoder = file, codecs.getincrementaldecoder("utf-8")(), json.JSONDecoder()
        self._text, self._at, self._ended = "", 0, False

    def __iter__(self) -> Iterator[tuple[int, Any, int]]:
        """(line, value, bytes read so far). Raises Broken where the text breaks; `line` is where."""
        while self._begins():
            if self._text[self._at] == "[":
                self._move(self._at + 1)
                yield from self._members()
                if (self._text[self._at :] + self._file.read(64).decode("utf-8", "replace")).strip():
                    raise Broken("more text after the end of the array")
                return
            if (start := self.rows_begin()) is not None:
                self._move(start)
                yield from self._wrapped()
            else:
                yield self._value()

    def rows_begin(self) -> int | None:
        """Where the rows of a wrapper begin, if the value that comes next is one."""
        self._begins()
        self._hold(HEAD_CHARACTERS)
        head = _HEAD.match(self._text, self._at)
        if head is None:
            return None
        ahead = head.end() - self._at
        try:
            first, _ = self._decoded(ahead)
        except Broken:
            return None
        return self._at + ahead if is_row(first, head[1][1:-1]) else None

    def _wrapped(self) -> Iterator[tuple[int, Any, int]]:
        """The rows of every list of a wrapper, from behind the first one's bracket."""
        while True:
            yield from self._members()
            self._hold(HEAD_CHARACTERS)
            if tail := _TAIL.match(self._text, self._at):
                return self._move(tail.end())
            more = _NEXT_LIST.match(self._text, self._at)
            if more is None:
                raise Broken("something other than rows and plain values follows the rows")
            self._move(more.end())

    def _members(self) -> Iterator[tuple[int, Any, int]]:
        """The members of a list, from behind its bracket to behind its end."""
        while self._begins():
            if self._text[self._at] == "]":
                return self._move(self._at + 1)
            yield self._value()
        raise Broken("cut off")

    def _value(self) -> tuple[int, Any, int]:
        value, end = self._decoded()
        line = self.line
        self._move(end)
        return line, value, self.done

    def _decoded(self, ahead: int = 0) -> tuple[Any, int]:
        """The value that begins here, or so many characters ahead, and where it ends."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at + ahead)
                if end < len(self._text) or self._ended:
                    return value, end
            except RecursionError:
                if self._ended:
                    raise Broken("nested too deeply") from None
            except ValueError as error:
                if self._ended:
                    where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
                    raise Broken(f"not JSON: {getattr(error, 'msg', str(error).splitlines()[0])}{where}") from None
            if len(self._text) - self._at > MAX_CHARACTERS:
                raise Broken("a value that does not end")
            self._more()

    def _begins(self) -> bool:
        """Pass over what separates values; whether there is another."""
        while True:
            gap = _GAP.match(self._text, self._at)
            self._move(gap.end() if gap else self._at)
            if self._at < len(self._text):
                return True
            if self._ended:
                return False
            self._more()

    def _hold(self, characters: int) -> None:
        """Read until so many characters are held, if the file has them."""
        while len(self._text) - self._at < characters and not self._ended:
            self._more()

    def _move(self, to: int) -> None:
        self.line += self._text.count("\n", self._at, to)
        self._at = to

    def _more(self) -> None:
        """Read as much again as is held, so that a long value is not decoded from its start for every block."""
        block = self._file.read(max(BLOCK_BYTES, len(self._text) - self._at))
        self.done, self._ended = self.done + len(block), not block
        try:
            self._text, self._at = self._text[self._at :] + self._utf8.decode(block, final=self._ended), 0
        except UnicodeDecodeError as error:
            raise Broken(f"not UTF-8 after this line: {error.reason}") from None
