"""A crowd of threads on one allocator with real rows behind it, and whether one order of events explains all they did.

It owns the threads and a small memory of stamped rows. What is allowed is the allocator's business, and the lock is the
allocator's own: rows are copied and written outside it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvlab.contract import Json, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.block_pool import index_of
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.memory.records import AllocationReceipt
from kvlab.memory.transaction import AllocatorTxn

SIZE, BLOCKS, CROWDED = 4, 48, 12
WISHES = ("allocate", "append", "append", "append", "fork", "fork", "truncate", "release", "cancel")


@dataclass(slots=True)
class Call:
    """One call of one thread: between which epochs it ran, its receipt or the reason of its refusal, its stamps."""

    op: Json
    first: int
    last: int = 0
    receipt: AllocationReceipt | None = None
    reason: str = ""
    stamps: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Crowded:
    """What a crowd did, in counts, and the three things that must hold however the threads met.

    `unbroken`: in epoch order each receipt begins at the digest where the one before ended, without a gap up to the
    machine's own. `in_time`: each took effect between its call and its return. `own` of `rows` rows of the requests
    that still live read back as what that order says; `met` calls saw somebody else publish while they ran.
    """

    calls: int
    receipts: dict[str, int]
    refusals: dict[str, int]
    copied: int
    met: int
    unbroken: bool
    in_time: bool
    rows: int
    own: int


class Crowd:
    """`threads` threads that share `calls` random operations on one allocator; every new row gets its own stamp."""

    def __init__(self, calls: int = 2000, threads: int = 6, seed: int = 0) -> None:
        groups = tuple(CacheGroup(f"g{n}", n, n + 1, 1, 1, 8, SIZE, BLOCKS, 1000 * (n + 1)) for n in range(2))
        self.machine = Allocator(CacheLayoutManifest(groups), audit="chain", mover=self.move, queue_seed=seed)
        self.first_digest = self.machine.digest
        self.memory = np.zeros((len(groups), BLOCKS, SIZE), np.int64)
        self.shares = [len(range(n, calls, threads)) for n in range(threads)]
        self.seed = seed
        self.done: list[list[Call]] = [[] for _ in range(threads)]
        self.errors: list[BaseException] = []

    def move(self, group: int, src: int, dst: int, rows: int) -> int:
        """Copy the first rows of one block into another; called without the lock, others may run in between."""
        for row in range(rows):
            self.memory[group, dst, row] = self.memory[group, src, row]
            time.sleep(0)
        return rows

    def run(self) -> list[Call]:
        """Let them all go, wait for the last one; every call in no particular order. Raises what a thread raised."""
        threads = [threading.Thread(target=self._work, args=(n,)) for n in range(len(self.shares))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return [call for calls in self.done for call in calls]

    def _work(self, n: int) -> None:
        dice = random.Random(f"{self.seed} {n}")
        try:
            for count in range(self.shares[n]):
                with self.machine.lock:
                    op = self._wish(dice, f"{n}.{count}")
                    call = Call(op, self.machine.epoch)
                try:
                    call.receipt = self._perform(call, (n * 1_000_000 + count) * 64 + 1)
                except Rejected as no:
                    call.reason = no.reason
                call.last = self.machine.epoch
                self.done[n].append(call)
        except BaseException as error:
            self.errors.append(error)

    def _wish(self, dice: random.Random, fresh: str) -> Json:
        names = sorted(self.machine.requests)
        wish, name = dice.choice(WISHES), dice.choice(names or ["nobody"])
        if len(names) > CROWDED and wish in ("allocate", "fork"):
            wish = "release"
        length = self.machine.requests[name].context if names else 1
        arguments: dict[str, Json] = {
            "allocate": {"request": fresh, "tokens": dice.randint(1, 10)}, "fork": {"request": name, "child": fresh},
            "append": {"request": name, "tokens": dice.randint(1, 5)},
            "truncate": {"request": name, "tokens": dice.randint(1, length)}}
        return {"op": wish} | arguments.get(wish, {"request": name})

    def _perform(self, call: Call, stamp: int) -> AllocationReceipt:
        """Stage, copy, write every new row, publish. Between these steps anybody may come and publish first."""
        txn = self.machine.stage(call.op)
        try:
            txn.copy()
            if txn.plan.writes:
                self._write(txn, call, stamp)
            time.sleep(0)
            return txn.publish()
        except BaseException:
            if txn.phase != "PUBLISHED":
                txn.rollback()
            raise

    def _write(self, txn: AllocatorTxn, call: Call, stamp: int) -> None:
        (view,) = txn.view()
        call.stamps = list(range(stamp, stamp + view.context - view.start))
        for g, group in enumerate(self.machine.groups):
            for t, row in zip(range(view.start, view.context), call.stamps, strict=True):
                self.memory[g, view.tables[g][t // SIZE], t % SIZE] = row
            time.sleep(0)
            txn.wrote(group.group_id)

    # ------------------------------------------------------------------ one order that explains it
    def rows_of(self, request: str) -> list[list[int]]:
        """What a live request's table leads to, stamp by stamp, in each group."""
        live = self.machine.requests[request]
        return [[int(self.memory[g, index_of(table[t // SIZE]), t % SIZE]) for t in range(live.context)]
                for g, table in enumerate(live.tables)]


def in_order(calls: Iterable[Call]) -> list[Call]:
    """The calls that were published, in the order of their epochs."""
    return sorted((c for c in calls if c.receipt), key=lambda c: c.receipt.allocator_epoch_after)


def told_again(published: Iterable[Call]) -> dict[str, list[int]]:
    """The rows of each request after these calls, performed one after another on plain lists."""
    rows: dict[str, list[int]] = {}
    for call in published:
        op = call.op
        match op["op"]:
            case "fork":
                rows[op["child"]] = list(rows[op["request"]])
            case "truncate":
                del rows[op["request"]][op["tokens"] :]
            case "release" | "cancel":
                del rows[op["request"]]
            case _:
                rows.setdefault(op["request"], []).extend(call.stamps)
    return rows


def judge(crowd: Crowd, calls: list[Call]) -> Crowded:
    """Whether the receipts, in epoch order, explain the machine and the memory; a broken chain vouches for no row.

    O(calls + rows).
    """
    published, digest, unbroken, in_time = in_order(calls), crowd.first_digest, True, True
    for epoch, call in enumerate(published, 1):
        receipt = call.receipt
        unbroken &= receipt.predecessor_digest == digest and receipt.allocator_epoch_after == epoch
        in_time &= call.first < epoch <= call.last
        digest = receipt.successor_digest
    unbroken = unbroken and digest == crowd.machine.digest
    told, own, rows = told_again(published) if unbroken else {}, 0, 0
    for request in crowd.machine.requests:
        for read in crowd.rows_of(request):
            said = told.get(request, [])
            rows += len(read)
            own += sum(a == b for a, b in zip(read, said, strict=False)) if len(read) == len(said) else 0
    return Crowded(
        len(calls), dict(Counter(c.op["op"] for c in published).most_common()),
        dict(Counter(c.reason for c in calls if c.reason).most_common()), sum(c.receipt.copied_rows for c in published),
        sum(c.last - c.first > bool(c.receipt) for c in calls), unbroken, in_time, rows, own)


def let_them_write(calls: int = 2000, threads: int = 6, seed: int = 0) -> Crowded:
    """A short burst of many writers on one allocator (article 0x05C), judged.

    Linearisable (Herlihy and Wing 1990): each operation takes effect at one moment between its call and its return,
    so doing them one after another, in the order of these moments, gives the same. Here the moment is publication.
    """
    crowd = Crowd(calls, threads, seed)
    outcome = judge(crowd, crowd.run())
    crowd.machine.check()
    return outcome
