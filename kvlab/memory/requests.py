"""Live requests and batches of them: the generation, version and length of each, and its block tables.

It owns the numbers of a request. It refuses to know blocks beyond the words in a table.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from kvlab.memory.chain import many

Packed = array | np.ndarray


class Request:
    """A live request: its numbers, and one block table of packed handles per cache group.

    `plain`: no other table and no identity has ever named one of its blocks. `own_tail`: the block that its next row
    goes to is surely its own. While it moves in a batch, version and length grow with the batch's moves.
    """

    __slots__ = ("_context", "_version", "batch", "generation", "own_tail", "packed", "plain", "request_id")

    def __init__(self, request_id: str, packed: list[Packed], generation: int, version: int, context: int,
                 plain: bool) -> None:
        self.request_id, self.packed, self.generation = request_id, packed, generation
        self._version, self._context, self.plain, self.own_tail = version, context, plain, plain
        self.batch: Batch | None = None

    @property
    def tables(self) -> list[array]:
        """The block tables, ready to grow. A table that nobody has looked at is still the array it was taken as."""
        packed = self.packed
        for g, table in enumerate(packed):
            if type(table) is not array:
                packed[g] = array("q", table.tobytes())
        return packed

    @property
    def version(self) -> int:
        return self._version if self.batch is None else self._version + self.batch.moves

    @property
    def context(self) -> int:
        return self._context if self.batch is None else self._context + self.batch.moves

    def move(self, version: int, context: int, own_tail: bool) -> None:
        """What a transaction made of it, outside any batch: it leaves the one that it was in."""
        self.leave()
        self._version, self._context, self.own_tail = version, context, own_tail

    def share(self, tail: bool) -> None:
        """Another table or an identity names its blocks from now on, its tail too if `tail`."""
        self.plain = False
        if tail:
            self.leave()
            self.own_tail = False

    def leave(self) -> None:
        """Leave its batch, which breaks up by it: whoever moves it on looks its members up again."""
        if self.batch is not None:
            self.batch.break_up()


class Batch:
    """Requests that move one token at a time together: looked up once, their moves counted once.

    `opens[g]` says at which moves, modulo the block size, each member opens a block in group g. A member that ends, is
    shared or moves on its own breaks the batch up; the next move looks the members up again.
    """

    __slots__ = ("digest", "live", "moves", "opens", "requests", "tables")

    def __init__(self, requests: Iterable[str]) -> None:
        self.requests = tuple(requests)
        if len(set(self.requests)) < len(self.requests) or not self.requests:
            raise ValueError("a batch names at least one request, and each once")
        self.digest = many([(request, 1) for request in self.requests])
        self.live: Sequence[Request] = ()
        self.tables: list[tuple[array, ...]] = []
        self.opens: list[np.ndarray] = []
        self.moves = 0

    def __len__(self) -> int:
        return len(self.requests)

    def gather(self, requests: dict[str, Request], block_sizes: Sequence[int]) -> bool:
        """Look the members up; False where one is not live or its tail may not be its own. O(batch)."""
        live = [requests.get(request) for request in self.requests]
        if not all(r is not None and r.own_tail for r in live):
            return False
        for request in live:
            request.leave()
        self.opens = [np.array([-r._context % size for r in live]) for size in block_sizes]
        self.moves = 0
        for request in live:
            request.batch, request.packed = self, request.tables
        self.live, self.tables = live, list(zip(*[request.packed for request in live], strict=True))
        return True

    def break_up(self) -> None:
        """Give each member its numbers back. O(batch)."""
        for request in self.live:
            request._version += self.moves
            request._context += self.moves
            request.batch = None
        self.live, self.tables, self.moves = (), [], 0
