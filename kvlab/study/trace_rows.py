"""Trace files as entries: one row of memory at a time, a bad row by its line, bytes read; no format's meaning is here.

A file is read afresh at every iteration. Two layouts: a line an entry (CSV, JSON lines), and one JSON array.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, TypeVar

Row = TypeVar("Row")
Entry = tuple[int, int | None, Any]
"""Line from 1; index in the JSON array from 0, or None; the line's bytes, or the array's element already parsed."""
Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes of the file, every `STEP` bytes and once at the end."""
STEP = 1 << 18
CHUNK = 1 << 20
MOST = 64 << 20
"""Bytes (of a line) or characters (of an array's element) that one row may have: the bound on memory."""


class TraceError(ValueError):
    """A trace, or one row of it, is not in its public form: which file, which line (from 1), what is wrong.

    `entry` is the index (from 0) in the file's JSON array, None for a file of lines.
    """

    def __init__(self, path: Path, line: int, wrong: str, entry: int | None = None) -> None:
        self.path, self.line, self.wrong, self.entry = path, line, wrong, entry
        super().__init__(f"{path}: line {line}{'' if entry is None else f', entry {entry}'}: {wrong}")


class TraceFile(Generic[Row]):
    """A trace that can be read again and again. O(one row) memory.

    With `skip_bad`, rows that are wrong are left out: `skipped` counts those of the last pass, `first_skipped` is the
    first. Without, the first one raises `TraceError`. A missing file, a wrong header and JSON that breaks off in the
    middle of an array raise it either way: behind them nothing can be told apart.
    """

    form: ClassVar[str]
    title: ClassVar[str]
    example: ClassVar[str]
    layout: str = "lines"

    def __init__(self, path: Path | str, *, skip_bad: bool = False, progress: Progress | None = None) -> None:
        self.path, self.skip_bad, self.progress = Path(path).expanduser(), skip_bad, progress
        self.skipped = 0
        self.first_skipped: TraceError | None = None

    def __iter__(self) -> Iterator[Row]:
        self.skipped, self.first_skipped = 0, None
        try:
            with self.path.open("rb") as file:
                yield from self._rows(entries(self.path, file, self.layout), file)
        except OSError as error:
            raise TraceError(self.path, 1, f"a readable file was expected ({error})") from None

    def _rows(self, rows: Iterator[Entry], file: BinaryIO) -> Iterator[Row]:
        parse, told, size = self._begin(rows), 0, os.fstat(file.fileno()).st_size
        for line, entry, raw in rows:
            if self.progress and (at := file.tell()) - told >= STEP:
                told = at
                self.progress(at, size)
            try:
                made = parse(raw)
            except (ValueError, RecursionError) as error:
                self._bad(TraceError(self.path, line, _plain(error), entry))
                continue
            yield from made
        if self.progress:
            self.progress(size, size)

    def _begin(self, rows: Iterator[Entry]) -> Callable[[Any], Iterable[Row]]:
        """What turns one entry into rows, fresh for a pass; ValueError from it is a bad row. May take a header."""
        raise NotImplementedError

    def _bad(self, error: TraceError) -> None:
        if not self.skip_bad:
            raise error
        self.skipped += 1
        self.first_skipped = self.first_skipped or error


def _plain(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"this is no JSON: {error.msg} at character {error.pos + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    return "brackets are nested too deeply" if isinstance(error, RecursionError) else str(error)


def entries(path: Path, file: BinaryIO, layout: str) -> Iterator[Entry]:
    """The entries of an open file. `layout`: "lines", "array", or "whole" (one JSON value on many lines)."""
    if layout == "lines":
        return line_entries(path, file)
    return array_entries(path, file) if layout == "array" else whole_entry(path, file)


def line_entries(path: Path, file: BinaryIO) -> Iterator[Entry]:
    """Every line that is not blank, as bytes. TraceError for one longer than `MOST`."""
    line = 0
    while raw := file.readline(MOST + 1):
        line += 1
        if len(raw) > MOST:
            raise TraceError(path, line, f"the line is longer than {MOST >> 20} MiB")
        if raw.strip():
            yield line, None, raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw


def whole_entry(path: Path, file: BinaryIO) -> Iterator[Entry]:
    raw = file.read(MOST + 1)
    if len(raw) > MOST:
        raise TraceError(path, 1, f"one entry is longer than {MOST >> 20} MiB")
    yield 1, None, raw


class _Window:
    """The part of a text that is in memory: what is consumed is forgotten, what is missing is read on demand."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self.text, self.at, self.line = "", 0, 1

    def more(self, count: int) -> bool:
        """Read `count` bytes more. False at the end of the file."""
        raw = self.file.read(count)
        try:
            fresh = self.decode(raw, not raw)
        except UnicodeDecodeError:
            raise TraceError(self.path, self.line, _broken("text in UTF-8 was expected")) from None
        self.text, self.at = self.text[self.at :] + fresh, 0
        return bool(raw)

    def move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def peek(self) -> str:
        """The next character that is no blank, "" at the end. It stays."""
        while True:
            rest = self.text[self.at : self.at + 64]
            if kept := rest.lstrip(" \t\r\n"):
                self.move(self.at + len(rest) - len(kept))
                return kept[0]
            self.move(self.at + len(rest))
            if not rest and not self.more(CHUNK):
                return ""

    def value(self, entry: int) -> Any:
        """The JSON object or list that begins here, read in chunks that double until it ends."""
        decode, ask = json.JSONDecoder().raw_decode, CHUNK
        while True:
            try:
                found, end = decode(self.text, self.at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - 16
                if len(self.text) - self.at > MOST:
                    raise TraceError(self.path, self.line, f"it has more than {MOST} characters", entry) from None
                if not (cut and self.more(ask)):
                    raise TraceError(self.path, self.line, _broken(_plain(error)), entry) from None
                ask *= 2
            except RecursionError as error:
                raise TraceError(self.path, self.line, _broken(_plain(error)), entry) from None
            else:
                self.move(end)
                return found


def _broken(why: str) -> str:
    return f"{why}; nothing behind it can be read"


def array_entries(path: Path, file: BinaryIO) -> Iterator[Entry]:
    """The objects and lists of one JSON array, parsed one by one. TraceError where the array itself is broken."""
    window, index = _Window(path, file), 0

    def wrong(expected: str) -> TraceError:
        here = window.peek()
        return TraceError(window.path, window.line, _broken(f"{expected} was expected, not "
                                                            f"{repr(here) if here else 'the end of the file'}"), index)

    if window.peek() != "[":
        raise wrong("[")
    window.move(window.at + 1)
    while (here := window.peek()) != "]":
        if index:
            if here != ",":
                raise wrong(", or ]")
            window.move(window.at + 1)
            here = window.peek()
        if here not in ("{", "["):
            raise wrong("an object or a list")
        line = window.line
        yield line, index, window.value(index)
        index += 1
    window.move(window.at + 1)
    if window.peek():
        raise wrong("nothing more")
