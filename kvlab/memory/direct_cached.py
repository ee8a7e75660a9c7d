"""The short way for blocks with identities: a hit with its fresh rest, new identities, the end of a request over them.

As `kvlab.memory.direct`: no rule of its own, the same receipt and digest as the planners', and whatever is not plain
is left to them. These functions are the allocator's methods.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvlab.memory.block_pool import GENERATION_SHIFT, INDEX_MASK, BlockPool
from kvlab.memory.chain import CODES, chained, given, given_packed, head, many, moved
from kvlab.memory.identities import Names, texts_of
from kvlab.memory.pool_bulk import drop_cached, hold_all
from kvlab.memory.records import AllocationReceipt
from kvlab.memory.requests import Request

if TYPE_CHECKING:
    from kvlab.memory.allocator import Allocator

TOUCH, CACHE_FULL = CODES["touch"], CODES["cache_full"]
NOBODY = many([])


def quiet(self: Allocator) -> bool:
    """Whether nothing is open, leased or watched, so that checking and doing need not be two steps."""
    return self.facts is None and not self.observers and not any(
        [pool.reserved or pool.leases or pool.spoiled or pool.written for pool in self.pools])  # noqa: C419


def touch(self: Allocator, request: str, rows: Sequence[Sequence[int] | np.ndarray], tokens: int) -> AllocationReceipt:
    """A new request of `tokens` tokens over cached blocks, `rows` of packed handles a group; the rest is fresh.

    O(blocks). `Rejected` as the operation "touch" (article 0x04C).
    """
    rows = [np.array(words, np.int64) for words in rows]
    with self.lock:
        if (type(tokens) is int and type(request) is str and request and request not in self.requests and quiet(self)
                and (indices := _touchable(self, rows, tokens)) is not None):
            return _touch_now(self, request, rows, indices, tokens)
    texts = [[pool.text(word) for pool, word in zip(self.pools, bundle, strict=True)]
             for bundle in zip(*[words.tolist() for words in rows], strict=True)]
    return self.apply({"op": "touch", "request": request, "blocks": texts, "tokens": tokens})


def _touchable(self: Allocator, rows: list[np.ndarray], tokens: int) -> list[list[int]] | None:
    """Block indices a group where every rule of a hit holds and there is room for the rest; else None."""
    if len(rows) != len(self.pools) or not len(rows[0]) or len({len(words) for words in rows}) > 1:
        return None
    out, names = [], None
    for pool, row in zip(self.pools, rows, strict=True):
        blocks = row & INDEX_MASK
        indices = blocks.tolist()
        if not _sound(pool, row, blocks, indices) or len(indices) * pool.block_size > tokens:
            return None
        if len(rows) > 1:
            keys = pool.keys.of(blocks)
            if names not in (None, keys) or pool.block_size != self.pools[0].block_size:
                return None
            names = keys
        free = int(np.count_nonzero(pool.place.column[blocks] >= 0))
        if -(-tokens // pool.block_size) - len(indices) > pool.spare - free:
            return None
        out.append(indices)
    return out


def _sound(pool: BlockPool, row: np.ndarray, blocks: np.ndarray, indices: list[int]) -> bool:
    inside = int(blocks.max()) < pool.num_blocks and int(row.min()) >= 0
    return bool(inside and len(set(indices)) == len(indices) and pool.keys.have(blocks).all()
                and (not pool.rows or pool.rows.keys().isdisjoint(indices))
                and (pool.generations()[blocks] == row >> GENERATION_SHIFT).all())


def _touch_now(self: Allocator, request: str, rows: list[np.ndarray], indices: list[list[int]],
               tokens: int) -> AllocationReceipt:
    before, name, tables, runs, fresh, evicted = self._chain, request.encode(), [], [], [], []
    epoch = self.epoch = self.epoch + 1
    serial = self.serial = self.serial + 1
    for g, (pool, words, row) in enumerate(zip(self.pools, rows, indices, strict=True)):
        hold_all(pool, row)
        count = -(-tokens // pool.block_size) - len(row)
        table = array("q", words.tobytes())
        if count:
            taken = pool.take(count, evicted)
            runs.append((g, 1, taken))
            table.frombytes(taken.tobytes())
        runs.append((g, 1, words))
        tables.append(table)
        fresh.append(count)
    self.requests[request] = Request(request, tables, epoch, 1, tokens, False)
    new = tokens - len(indices[0]) * self.pools[0].block_size
    self.requests[request].own_tail = new > 0
    after = self._chain = chained([before, head(epoch, TOUCH, 1, tokens, len(name)),
                                   *[moved(0, len(table)) for table in tables], name, *tables])
    return AllocationReceipt(serial, before, after, epoch, "touch", "", self.layout, (request,), new, ("",),
                             tuple(fresh), tuple(runs), (), (), tuple(evicted), (1,))


def cache_full(self: Allocator, request: str, blocks: Sequence[int], keys: Names) -> AllocationReceipt:
    """Give logical blocks of a request cached identities: one key a block, the same in every group.

    O(blocks). `Rejected` as the operation "cache_full".
    """
    with self.lock:
        live, last = self.requests.get(request), max(blocks, default=0)
        if (live is not None and blocks and len({*blocks}) == len(keys) == len(blocks) and min(blocks) >= 0
                and quiet(self) and all([(last + 1) * p.block_size <= live.context for p in self.pools])):  # noqa: C419
            return _cache_now(self, live, blocks, keys)
    return self.apply({"op": "cache_full", "request": request, "blocks": blocks, "keys": texts_of(keys)})


def _cache_now(self: Allocator, live: Request, blocks: Sequence[int], keys: Names) -> AllocationReceipt:
    before, at = self._chain, np.array(blocks)
    epoch = self.epoch = self.epoch + 1
    serial = self.serial = self.serial + 1
    columns = [np.array(table, np.int64)[at] for table in live.tables]
    for pool, words in zip(self.pools, columns, strict=True):
        pool.keys.give(words & INDEX_MASK, keys)
    if isinstance(keys, np.ndarray):
        rows = [given_packed(g, words, keys) for g, words in enumerate(columns)]
        record = rows if len(rows) == 1 else [np.stack(rows, 1)]
    else:
        record = [given(g, word, name) for name, *row in zip(keys, *[c.tolist() for c in columns], strict=True)
                  for g, word in enumerate(row)]
    live.share(tail=False)
    after = self._chain = chained([before, head(epoch, CACHE_FULL, 0, 0, len(NOBODY)), NOBODY, *record])
    return AllocationReceipt(serial, before, after, epoch, "cache_full", "", self.layout, (), 0, (),
                             (0,) * len(self.pools), (), (), (), (), ())


def end_shared(self: Allocator, live: Request, operation: str, tail_first: bool = False) -> AllocationReceipt:
    """Release or cancel a request whose blocks carry identities or have other owners, where `quiet` holds."""
    live.leave()
    before, name = self._chain, live.request_id.encode()
    epoch = self.epoch = self.epoch + 1
    serial = self.serial = self.serial + 1
    tables = [tuple(reversed(table)) if tail_first else tuple(table) for table in live.tables]
    freed = []
    for g, (pool, words) in enumerate(zip(self.pools, tables, strict=True)):
        gone = drop_cached(pool, words)
        if len(gone):
            freed.append((g, 0, gone.tolist()))
    del self.requests[live.request_id]
    after = self._chain = chained([before, head(epoch, CODES[operation], live.version, live.context, len(name)),
                                   *[moved(len(words), 0) for words in tables], name, *[array("q")] * len(tables)])
    return AllocationReceipt(serial, before, after, epoch, operation, operation, self.layout, (live.request_id,), 0,
                             ("",), (0,) * len(tables), tuple((g, -1, words) for g, words in enumerate(tables)),
                             tuple(freed), (), (), (live.version,))
