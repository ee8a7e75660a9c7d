"""The short way for an operation between whose staging and publication nothing happens: checked and done in one pass.

It owns no rule: what it does not recognise as plain it leaves to the planners, whose refusals and effects are the
contract. A caller gets the same receipt either way, digest included. These functions are the allocator's methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvlab.memory.records import BOUNDARY, CODES, IN_PLACE, AllocationReceipt, chained, head, moved
from kvlab.memory.requests import Batch, Request

if TYPE_CHECKING:
    from kvlab.memory.allocator import Allocator

ALLOCATE, APPEND, RELEASE, CANCEL = map(CODES.__getitem__, ("allocate", "append", "release", "cancel"))
OPENED, UNMOVED, FIRST = (BOUNDARY,), ("",), (1,)
new = tuple.__new__
"""A receipt from all its fields in order: the named form costs as much as a whole release."""


def allocate(self: Allocator, request: str, tokens: int) -> AllocationReceipt:
    """A new request of `tokens` tokens: one bundle per `ceil(tokens / block_size)`. O(1) array operations a group."""
    with self.lock:
        if not (self.facts is not None or self.observers or type(tokens) is not int or tokens < 1
                or type(request) is not str or not request or request in self.requests
                or not self.room(tokens)):
            before, name, evicted, tables, runs, fresh = self._chain, request.encode(), [], [], [], []
            epoch = self.epoch = self.epoch + 1
            serial = self.serial = self.serial + 1
            record = [before, head(epoch, ALLOCATE, 1, tokens, len(name)), name]
            for pool in self.pools:
                count = -(-tokens // pool.block_size)
                words = pool.take(count, evicted)
                record += (moved(0, count), words)
                runs.append((len(tables), 1, words))
                tables.append(words)
                fresh.append(count)
            self.requests[request] = Request(request, tables, epoch, 1, tokens, True)
            after = self._chain = chained(record)
            return new(AllocationReceipt, (
                serial, before, after, epoch, "allocate", "", self.layout, (request,), tokens, OPENED, tuple(fresh),
                tuple(runs), (), (), tuple(evicted), FIRST))
    return self.apply({"op": "allocate", "request": request, "tokens": tokens})


def release(self: Allocator, request: str) -> AllocationReceipt:
    """The request has ended: each of its references goes."""
    return _end(self, request, "release", RELEASE)


def cancel(self: Allocator, request: str) -> AllocationReceipt:
    """The request was called off: as `release`, and the receipt says so."""
    return _end(self, request, "cancel", CANCEL)


def _end(self: Allocator, request: str, operation: str, code: int) -> AllocationReceipt:
    with self.lock:
        live = self.requests.get(request)
        if live is not None and live.plain and self.facts is None and not self.observers and not self.leased():
            before, name = self._chain, request.encode()
            epoch = self.epoch = self.epoch + 1
            serial = self.serial = self.serial + 1
            record, runs = [before, head(epoch, code, live.version, live.context, len(name)), name], []
            for pool, table in zip(self.pools, live.packed):  # noqa: B905 - strict costs half of this loop
                pool.drop_all(table)
                record.append(moved(len(table), 0))
                runs.append((len(runs), -1, table))
            live.leave()
            del self.requests[request]
            after = self._chain = chained(record)
            gone = tuple(runs)
            return new(AllocationReceipt, (
                serial, before, after, epoch, operation, operation, self.layout, (request,), 0, UNMOVED,
                (0,) * len(gone), gone, gone, (), (), (live.version,)))
    return self.apply({"op": operation, "request": request})


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
        if (len(batch) > 1 and self.facts is None and not self.observers and not self.leased()
                and (batch.live or batch.gather(self.requests))):
            context = batch.context
            opening = [context % pool.block_size == 0 for pool in self.pools]
            places = [opens.nonzero()[0].tolist() for opens in opening]
            if all(pool.spare >= len(at) for pool, at in zip(self.pools, places, strict=True)):
                return _append_now(self, batch, opening[0], places)
    return self.apply({"op": "append", "requests": dict.fromkeys(batch.requests, 1)})


def _append_now(self: Allocator, batch: Batch, opens: np.ndarray, places: list[list[int]]) -> AllocationReceipt:
    before, live = self._chain, batch.live
    epoch = self.epoch = self.epoch + 1
    serial = self.serial = self.serial + 1
    who = batch.digest
    record, runs, evicted = [before, head(epoch, APPEND, 0, len(batch), len(who)), who], [], []
    for g, (pool, at) in enumerate(zip(self.pools, places, strict=True)):
        record.append(moved(0, len(at)))
        if at:
            words = pool.take(len(at), evicted)
            for i, word in zip(at, words.tolist(), strict=True):
                live[i].packed[g].append(word)
            record.append(words)
            runs.append((g, 1, words))
    batch.context += 1
    batch.version += 1
    after = self._chain = chained(record)
    return new(AllocationReceipt, (
        serial, before, after, epoch, "append", "", self.layout, batch.requests, len(batch), BatchPaths(opens),
        tuple(map(len, places)), tuple(runs), (), (), tuple(evicted), batch.version.copy()))
