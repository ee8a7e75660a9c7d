"""The short way for an operation between whose staging and publication nothing happens: checked and done in one pass.

It owns no rule: what it does not recognise as plain it leaves to the planners, whose refusals and effects are the
contract. A caller gets the same receipt either way, digest included. These functions are the allocator's methods.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from kvlab.memory.chain import CODES, chained, head, head_of_one, moved
from kvlab.memory.direct_cached import end_shared, quiet
from kvlab.memory.pool_bulk import drop_all
from kvlab.memory.records import BOUNDARY, IN_PLACE, AllocationReceipt
from kvlab.memory.requests import Batch, Request

if TYPE_CHECKING:
    from kvlab.memory.allocator import Allocator

ALLOCATE, APPEND, RELEASE, CANCEL = map(CODES.__getitem__, ("allocate", "append", "release", "cancel"))
OPENED, UNMOVED, FIRST, NONE = (BOUNDARY,), ("",), (1,), (0,)
join = b"".join
new = tuple.__new__
"""A receipt from all its fields in order: the named form costs as much as a whole release."""


def allocate(self: Allocator, request: str, tokens: int) -> AllocationReceipt:
    """A new request of `tokens` tokens: one bundle per `ceil(tokens / block_size)`. O(1) array operations a group."""
    with self.lock:
        if (self.facts is None and not self.observers and type(tokens) is int and tokens > 0
                and type(request) is str and request and request not in self.requests):
            for pool in self.pools:
                if pool.spare * pool.block_size < tokens:
                    break
            else:
                return _allocate_now(self, request, tokens)
    return self.apply({"op": "allocate", "request": request, "tokens": tokens})


def _allocate_now(self: Allocator, request: str, tokens: int) -> AllocationReceipt:
    before, name, pools = self._chain, request.encode(), self.pools
    epoch = self.epoch = self.epoch + 1
    serial = self.serial = self.serial + 1
    evicted = []
    if len(pools) == 1:  # spelled out, for it is the common case: a loop costs a fifth more
        pool = pools[0]
        count = -(-tokens // pool.block_size)
        words = pool.take(count, evicted)
        tables, runs, fresh = [words], ((0, 1, words),), (count,)
        record = (before, head_of_one(epoch, ALLOCATE, 1, tokens, len(name), 0, count), name, words)
    else:
        fresh = tuple([-(-tokens // pool.block_size) for pool in pools])
        tables = [pool.take(count, evicted) for pool, count in zip(pools, fresh, strict=True)]
        runs = tuple([(g, 1, words) for g, words in enumerate(tables)])
        record = [before, head(epoch, ALLOCATE, 1, tokens, len(name)), *[moved(0, count) for count in fresh], name,
                  *tables]
    self.requests[request] = Request(request, tables, epoch, 1, tokens, True)
    after = self._chain = blake2b(join(record)).digest()[:32]
    return new(AllocationReceipt, (serial, before, after, epoch, "allocate", "", self.layout, (request,), tokens,
                                   OPENED, fresh, runs, (), (), tuple(evicted), FIRST))


def release(self: Allocator, request: str, tail_first: bool = False) -> AllocationReceipt:
    """The request has ended: each of its references goes, in table order or the last block first."""
    with self.lock:
        live = self.requests.get(request)
        if live is not None and live.plain and not tail_first and self.facts is None and not self.observers:
            for pool in self.pools:
                if pool.leases:
                    break
            else:
                return _end_now(self, live, "release", RELEASE)
        if live is not None and not live.plain and quiet(self):
            return end_shared(self, live, "release", tail_first)
    return self.apply({"op": "release", "request": request, **({"tail_first": True} if tail_first else {})})


def cancel(self: Allocator, request: str) -> AllocationReceipt:
    """The request was called off: as `release`, and the receipt says so."""
    with self.lock:
        live = self.requests.get(request)
        if live is not None and live.plain and self.facts is None and not self.observers and not self.leased():
            return _end_now(self, live, "cancel", CANCEL)
    return self.apply({"op": "cancel", "request": request})


def _end_now(self: Allocator, live: Request, operation: str, code: int) -> AllocationReceipt:
    if live.batch is not None:
        live.leave()
    before, request, tables, version = self._chain, live.request_id, live.packed, live._version
    name = request.encode()
    epoch = self.epoch = self.epoch + 1
    serial = self.serial = self.serial + 1
    if len(tables) == 1:
        words = tables[0]
        drop_all(self.pools[0], words)
        runs, fresh = ((0, -1, words),), NONE
        record = (before, head_of_one(epoch, code, version, live._context, len(name), len(words), 0), name)
    else:
        for pool, words in zip(self.pools, tables, strict=True):
            drop_all(pool, words)
        runs, fresh = tuple([(g, -1, words) for g, words in enumerate(tables)]), NONE * len(tables)
        record = [before, head(epoch, code, version, live._context, len(name)),
                  *[moved(len(words), 0) for words in tables], name]
    del self.requests[request]
    after = self._chain = blake2b(join(record)).digest()[:32]
    return new(AllocationReceipt, (serial, before, after, epoch, operation, operation, self.layout, (request,), 0,
                                   UNMOVED, fresh, runs, runs, (), (), (version,)))


class BatchPaths:
    """Which path each request of a batch took, worded when asked."""

    __slots__ = ("_opens",)

    def __init__(self, opens: np.ndarray) -> None:
        self._opens = opens

    def __len__(self) -> int:
        return len(self._opens)

    def __getitem__(self, i: int) -> str:
        return (IN_PLACE, BOUNDARY)[bool(self._opens[i])]


def append_batch(self: Allocator, batch: Batch) -> AllocationReceipt:
    """One more token for each request of a batch, in one transaction.

    O(batch) in a handful of array operations, and one table entry for each block that is opened.
    """
    with self.lock:
        if (self.facts is None and not self.observers and not self.leased() and len(batch) > 1
                and (batch.live or batch.gather(self.requests, [pool.block_size for pool in self.pools]))):
            opening = [opens == batch.moves % pool.block_size
                       for opens, pool in zip(batch.opens, self.pools, strict=True)]
            places = [opens.nonzero()[0].tolist() for opens in opening]
            for pool, at in zip(self.pools, places, strict=True):
                if pool.spare < len(at):
                    break
            else:
                return _append_now(self, batch, opening[0], places)
    return self.apply({"op": "append", "requests": dict.fromkeys(batch.requests, 1)})


def _append_now(self: Allocator, batch: Batch, opens: np.ndarray, places: list[list[int]]) -> AllocationReceipt:
    before = self._chain
    epoch = self.epoch = self.epoch + 1
    serial = self.serial = self.serial + 1
    who = batch.digest
    record = [before, head(epoch, APPEND, 0, len(batch), len(who)), *[moved(0, len(at)) for at in places], who]
    runs, evicted = [], []
    for g, (pool, at) in enumerate(zip(self.pools, places, strict=True)):
        if at:
            words, tables = pool.take(len(at), evicted), batch.tables[g]
            for i, word in zip(at, words.tolist(), strict=True):
                tables[i].append(word)
            record.append(words)
            runs.append((g, 1, words))
    batch.moves += 1
    after = self._chain = chained(record)
    return new(AllocationReceipt, (
        serial, before, after, epoch, "append", "", self.layout, batch.requests, len(batch), BatchPaths(opens),
        tuple(map(len, places)), tuple(runs), (), (), tuple(evicted), ()))
