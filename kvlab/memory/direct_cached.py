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
from kvlab.memory.chain import CODES, chained, head, many, moved
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


def touch(self: Allocator, request: str, rows: Sequence[Sequence[int]], tokens: int) -> AllocationReceipt:
    """A new request of `tokens` tokens over cached blocks, `rows` of packed handles a group; the rest is fresh.

    O(blocks). `Rejected` as the operation "touch" (article 0x04C).
    """
    with self.lock:
        if (type(tokens) is int and type(request) is str and request and request not in self.requests and quiet(self)
                and (indices := _touchable(self, rows, tokens)) is not None):
            return _touch_now(self, request, rows, indices, tokens)
    texts = [[pool.text(word) for pool, word in zip(self.pools, bundle, strict=True)]
             for bundle in zip(*rows, strict=True)]
    return self.apply({"op": "touch", "request": request, "blocks": texts, "tokens": tokens})


def _touchable(self: Allocator, rows: Sequence[Sequence[int]], tokens: int) -> list[list[int]] | None:
    """Block indices a group where every rule of a hit holds and there is room for the rest; else None."""
    if len(rows) != len(self.pools) or not rows[0] or len({len(words) for words in rows}) > 1:
        return None
    out, names = [], None
    for pool, words in zip(self.pools, rows, strict=True):
        row = np.array(words, np.int64)
        indices = (row & INDEX_MASK).tolist()
        if not _sound(pool, row, indices) or len(indices) * pool.block_size > tokens:
            return None
        keys = [pool.keys[i] for i in indices]
        if names not in (None, keys) or pool.block_size != self.pools[0].block_size:
            return None
        names = keys
        free = sum([i in pool.place for i in indices])
        if -(-tokens // pool.block_size) - len(indices) > pool.spare - free:
            return None
        out.append(indices)
    return out


def _sound(pool: BlockPool, row: np.ndarray, indices: list[int]) -> bool:
    inside = int((row & INDEX_MASK).max()) < pool.num_blocks and int(row.min()) >= 0
    return bool(inside and len(set(indices)) == len(indices) and all(map(pool.keys.__contains__, indices))
                and (not pool.rows or pool.rows.keys().isdisjoint(indices))
                and (pool.generations()[row & INDEX_MASK] == row >> GENERATION_SHIFT).all())


def _touch_now(self: Allocator, request: str, rows: Sequence[Sequence[int]], indices: list[list[int]],
               tokens: int) -> AllocationReceipt:
    before, name, tables, runs, fresh, evicted = self._chain, request.encode(), [], [], [], []
    epoch = self.epoch = self.epoch + 1
    serial = self.serial = self.serial + 1
    for g, (pool, words, row) in enumerate(zip(self.pools, rows, indices, strict=True)):
        hold_all(pool, row)
        count = -(-tokens // pool.block_size) - len(row)
        table = array("q", words)
        if count:
            taken = array("q", pool.take(count, evicted).tobytes())
            runs.append((g, 1, list(taken)))
            table += taken
        runs.append((g, 1, tuple(words)))
        tables.append(table)
        fresh.append(count)
    self.requests[request] = Request(request, tables, epoch, 1, tokens, False)
    new = tokens - len(indices[0]) * self.pools[0].block_size
    self.requests[request].own_tail = new > 0
    after = self._chain = chained([before, head(epoch, TOUCH, 1, tokens, len(name)),
                                   *[moved(0, len(table)) for table in tables], name, *tables])
    return AllocationReceipt(serial, before, after, epoch, "touch", "", self.layout, (request,), new, ("",),
                             tuple(fresh), tuple(runs), (), (), tuple(evicted), (1,))


def cache_full(self: Allocator, request: str, blocks: Sequence[int], keys: Sequence[str]) -> AllocationReceipt:
    """Give logical blocks of a request cached identities: one key a block, the same in every group.

    O(blocks). `Rejected` as the operation "cache_full".
    """
    with self.lock:
        live = self.requests.get(request)
        last = max(blocks, default=0)
        if (live is not None and blocks and len(blocks) == len(keys) and min(blocks) >= 0 and quiet(self)
                and all([(last + 1) * pool.block_size <= live.context for pool in self.pools])):  # noqa: C419
            return _cache_now(self, live, blocks, keys)
    return self.apply({"op": "cache_full", "request": request, "blocks": blocks, "keys": keys})


def _cache_now(self: Allocator, live: Request, blocks: Sequence[int], keys: Sequence[str]) -> AllocationReceipt:
    before, record = self._chain, []
    epoch = self.epoch = self.epoch + 1
    serial = self.serial = self.serial + 1
    columns = []
    for g, (pool, table) in enumerate(zip(self.pools, live.tables, strict=True)):
        words = [table[j] for j in blocks]
        pool.keys.update(zip([word & INDEX_MASK for word in words], keys, strict=True))
        columns.append([b"%d %d %b\0" % (g, word, key.encode()) for word, key in zip(words, keys, strict=True)])
    live.share(tail=False)
    for row in zip(*columns, strict=True):
        record += row
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
