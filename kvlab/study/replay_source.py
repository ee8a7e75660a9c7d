"""What a replay plays: a trace file, its tokenizer, and the order of its sessions; plain data that travels to a worker.

It owns the choice and no format: `kvlab.study.trace_formats` reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvlab.study.geometries import bytes_per_token, find
from kvlab.study.trace_formats import open_trace
from kvlab.study.trace_rows import Progress, TraceFile
from kvlab.study.traced_request import TracedRequest, by_session, in_turn


@dataclass(frozen=True, slots=True)
class Source:
    """`tokenizer`: for traces of text. `waves`: so many sessions at a time, one request of each in turn (else in the
    file's order). `limit`: the first requests only, in the order in which they are played."""

    path: str
    tokenizer: str | None = None
    skip_bad: bool = False
    waves: int | None = None
    limit: int | None = None

    def open(self, progress: Progress | None = None) -> TraceFile[TracedRequest]:
        """The reader; raises as `open_trace` does."""
        return open_trace(self.path, tokenizer=self.tokenizer, skip_bad=self.skip_bad, progress=progress)

    def requests(self, trace: TraceFile[TracedRequest]) -> Iterable[TracedRequest]:
        """The requests of an open trace in the order of play. O(one wave) memory."""
        rows = in_turn(by_session(trace), self.waves) if self.waves is not None else trace
        return islice(rows, self.limit) if self.limit is not None else rows

    @property
    def digest(self) -> str:
        """Of the file's bytes and of how it is played. O(file)."""
        with Path(self.path).expanduser().open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        said = f"{content} {self.tokenizer} {self.skip_bad} {self.waves} {self.limit}"
        return hashlib.sha256(said.encode()).hexdigest()


def row_bytes(model: str, tp: int = 1, dtype_bytes: int = 2) -> int:
    """K/V bytes of one token of a named model on one rank. ModelFileError, ValueError as `geometries` has them."""
    return bytes_per_token(find(model), tp, dtype_bytes)


def blocks_in(gib: float, block_bytes: int) -> int:
    """Whole blocks in so many GiB; ValueError where not one fits."""
    blocks = int(gib * 2**30 // block_bytes)
    if blocks < 1:
        raise ValueError(f"{gib:g} GiB hold not one block of {block_bytes:,} bytes")
    return blocks
