"""Many threads on one allocator, copies outside the lock: a serial replay in epoch order explains every outcome.

Linearisability (Herlihy and Wing 1990): publication is the point at which an operation takes effect. So the receipts,
put in order of their epochs, must form one unbroken chain; performed one after another by the plain model, each must
be allowed and do what its receipt says; and each refusal must be what some moment between its call and its return says.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvlab.contract import Event, Json, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.records import COPY_ON_WRITE
from kvlab.memory.requests import Batch
from tests.memory.model import Live, Model
from tests.memory.worlds import KINDS, layout_of, lengths, propose

SIZE, BLOCKS, THREADS = 4, 40, 6
FAULT = "fault_after_partial_reservation"
CONTENTION = {"out_of_memory", "stale_table_version", "stale_request_generation", "unknown_request", "request_exists",
              "in_place_shared_tail_write", "block_reserved", "touch_without_identity", "truncate_beyond_context",
              "cache_partial_block", "stale_block_generation", "cross_group_bundle_mismatch"}
"""What an open neighbour, or one that published in between, may cause: checked against the log, not the model."""


@dataclass
class Done:
    """One call: between which epochs it ran, and its receipt or the reason of its refusal."""

    op: Json
    first: int
    last: int
    receipt: Any = None
    reason: str = ""
    stamps: dict[str, list[int]] = field(default_factory=dict)


class Explained(Model):
    """The plain model, told by each receipt which free blocks were taken and where a tail was copied."""

    def __init__(self, sizes: list[int], queues: list[list[int]], *, written: bool) -> None:
        super().__init__(sizes, queues)
        self.given: list[list[tuple[int, int]]] = []
        self.copied: set[str] = set()
        self.copied_groups: set[int] = set()
        self.rows_of: dict[str, list[int | None]] | None = {} if written else None

    def fresh(self, g: int, rows: int) -> tuple[int, int]:
        block, generation = self.given[g].pop(0)
        assert block in self.free[g] and generation == self.generation[g][block] + 1
        self.free[g].remove(block)
        self.free[g].insert(0, block)
        return super().fresh(g, rows)

    def must_copy(self, g: int, live: Live, refs: Counter, left: set[tuple[int, int]]) -> bool:
        """Where the receipt says so; an identity evicted in one group alone makes the other group copy alone."""
        name = next(n for n, other in self.requests.items() if other is live)
        must = super().must_copy(g, live, refs, left)
        assert not must or g in self.copied_groups, "a shared tail was written in place"
        return must or (name in self.copied and g in self.copied_groups)

    def explain(self, done: Done) -> None:
        receipt, op = done.receipt, dict(done.op)
        before = [self.refs(g) for g in self.groups]
        queues = [list(queue) for queue in self.free]
        new = {h for h, n in receipt.refcount_deltas if n == 1}
        self.given = [[] for _ in self.groups]
        for handle, n in receipt.refcount_deltas:
            block, generation = map(int, handle.split("@"))
            g = block // 1000 - 1
            if n == 1 and self.generation[g][block] < generation:
                self.given[g].append((block, generation))
        self.copied = {name for name, path in receipt.paths if path == COPY_ON_WRITE}
        self.copied_groups = {g for g, _ in receipt.copies}
        assert self.apply(op) is None, (op, receipt)
        assert self.epoch == receipt.allocator_epoch_after
        assert not any(self.given), "the receipt names blocks that nobody needed"
        after = [self.refs(g) for g in self.groups]
        moved = {block: after[g][block] - before[g][block] for g in self.groups for block in after[g] | before[g]}
        said = Counter()
        for handle, n in receipt.refcount_deltas:
            said[int(handle.split("@")[0])] += n
        assert {b: n for b, n in moved.items() if n} == {b: n for b, n in said.items() if n}
        freed = [b for g in self.groups for b in self.free[g] if b not in queues[g]]
        assert sorted(freed) == sorted(int(h.split("@")[0]) for h in receipt.freed if h not in new)
        if self.rows_of is not None:
            self._rows(op, done.stamps)

    def _rows(self, op: Json, stamps: dict[str, list[int]]) -> None:
        match op["op"]:
            case "fork":
                self.rows_of[op["child"]] = list(self.rows_of[op["request"]])
            case "truncate":
                del self.rows_of[op["request"]][op["tokens"] :]
            case "release" | "cancel":
                del self.rows_of[op["request"]]
            case "touch":
                found = [None] * (SIZE * len(op["blocks"]))
                self.rows_of[op["request"]] = found + stamps.get(op["request"], [])
            case _:
                for name, rows in stamps.items():
                    self.rows_of.setdefault(name, []).extend(rows)


class Crowd:
    """Threads that each perform random operations on one allocator, and what came of every call."""

    def __init__(self, calls: int, seed: int, *, written: bool) -> None:
        self.machine = Allocator(layout_of(((SIZE, BLOCKS), (SIZE, BLOCKS))), audit="chain", queue_seed=seed)
        self.queues = list(self.machine.snapshot()["free"].values())
        self.first_digest = self.machine.digest
        self.memory = [[[0] * SIZE for _ in range(BLOCKS)] for _ in range(2)]
        self.machine.mover = self.move
        self.calls, self.written = calls, written
        self.done: list[list[Done]] = [[] for _ in range(THREADS)]
        self.bundles: list[list[str]] = []
        self.errors: list[BaseException] = []

    def move(self, g: int, src: int, dst: int, rows: int) -> int:
        for row in range(rows):
            self.memory[g][dst][row] = self.memory[g][src][row]
        return rows

    def run(self) -> list[Done]:
        threads = [threading.Thread(target=self.work, args=(n,)) for n in range(THREADS)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(2e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        if self.errors:
            raise self.errors[0]
        return [done for rows in self.done for done in rows]

    def work(self, n: int) -> None:
        dice = random.Random(n)
        try:
            for call in range(self.calls // THREADS):
                pick = (dice.choice(KINDS), dice.randrange(10), dice.randrange(10), dice.randrange(10))
                with self.machine.lock:
                    op = propose(pick, lengths(self.machine), self.bundles[-6:])
                if op["op"] == "cache_full":  # one key a bundle: else a mixed bundle could lose it in one group alone
                    op["keys"] = [f"{n}.{call}.{j}" for j in op["blocks"]]
                done = Done(op, self.machine.epoch, 0)
                try:
                    done.receipt = (self.write if self.written else self.quick)(op, done, n * 10_000_000 + call * 64)
                except Rejected as no:
                    done.reason = no.reason
                done.last = self.machine.epoch
                self.done[n].append(done)
        except BaseException as error:
            self.errors.append(error)

    def write(self, op: Json, done: Done, stamp: int) -> Any:
        """Stage, copy, write every new row, publish; the lock is held in none of the gaps."""
        txn = self.machine.stage(op)
        try:
            txn.copy()
            for view in txn.view() if txn.plan.writes else ():
                rows = done.stamps[view.request_id] = list(range(stamp, stamp + view.context - view.start))
                stamp += len(rows)
                for g in range(2):
                    for t, row in zip(range(view.start, view.context), rows, strict=True):
                        self.memory[g][view.tables[g][t // SIZE]][t % SIZE] = row
            for group in self.machine.groups if txn.plan.writes else ():
                txn.wrote(group.group_id)
            if stamp % 11 == 0:
                txn.rollback()
                raise Rejected(FAULT)
            receipt = txn.publish()
        except BaseException:
            if txn.phase != "PUBLISHED":
                txn.rollback()
            raise
        if op["op"] == "cache_full":
            named = txn.plan.identities
            self.bundles += [[self.machine.pools[g].text(w) for g, w, _ in named[i : i + 2]] for i in (0,)]
        return receipt

    def quick(self, op: Json, done: Done, stamp: int) -> Any:
        """The short way where there is one."""
        machine = self.machine
        match op:
            case {"op": "allocate", "request": request, "tokens": tokens}:
                return machine.allocate(request, tokens)
            case {"op": "release" | "cancel" as kind, "request": request}:
                return getattr(machine, kind)(request)
            case {"op": "append", "requests": rows} if len({name for name, _ in rows}) == len(rows) > 1:
                done.op = {"op": "append", "requests": [[name, 1] for name, _ in rows]}
                return machine.append_batch(Batch(name for name, _ in rows))
        return machine.apply(op)


@contextmanager
def watched(crowd: Crowd) -> Any:
    """Count, at each epoch, how many blocks open transactions held or had spoiled at the most."""
    held: dict[int, int] = {}

    def watch(event: Event) -> None:
        if event.kind in ("staged", "refused"):
            most = max(len(p.reserved) + len(p.leases) + len(p.spoiled) for p in crowd.machine.pools)
            held[crowd.machine.epoch] = max(held.get(crowd.machine.epoch, 0), most)

    crowd.machine.observers.append(watch)
    yield held


def replay(crowd: Crowd, outcomes: list[Done], held: dict[int, int] | None) -> Explained:
    """Perform the receipts one after another, check each refusal against the moments it may have seen."""
    model = Explained([SIZE, SIZE], crowd.queues, written=crowd.written)
    committed = sorted((d for d in outcomes if d.receipt), key=lambda d: d.receipt.allocator_epoch_after)
    waiting = sorted((d for d in outcomes if not d.receipt), key=lambda d: d.first)
    open_now: list[Done] = []
    digest = crowd.first_digest
    for done in [*committed, None]:
        while waiting and waiting[0].first <= model.epoch:
            open_now.append(waiting.pop(0))
        open_now = [d for d in open_now if not explained(model, d, held)]
        if done is None:
            break
        assert done.first < done.receipt.allocator_epoch_after <= done.last
        assert done.receipt.predecessor_digest == digest, "the chain is broken"
        digest = done.receipt.successor_digest
        model.explain(done)
    assert digest == crowd.machine.digest
    return model


def refusal_now(model: Model, op: Json) -> str | None:
    """What the plain model says to this operation at this moment, changing nothing."""
    probe = copy.copy(model)
    probe.free, probe.generation = [list(q) for q in model.free], [dict(c) for c in model.generation]
    probe.rows, probe.keys = [dict(c) for c in model.rows], [dict(c) for c in model.keys]
    probe.requests = {name: Live(live.version, live.context, [list(t) for t in live.tables])
                      for name, live in model.requests.items()}
    probe.fresh, probe.must_copy = (functools.partial(f, probe) for f in (Model.fresh, Model.must_copy))
    return getattr(probe, op["op"])(**{k: v for k, v in op.items() if k != "op"})


def explained(model: Model, done: Done, held: dict[int, int] | None) -> bool:
    """Whether the model refuses the call now for the same reason. By the call's last moment something must explain it.

    A thread that broke off explains itself. What an open neighbour may cause needs one: blocks that it held, or a
    transaction that published while the call ran.
    """
    if done.reason == FAULT or refusal_now(model, done.op) == done.reason:
        return True
    if done.last > model.epoch:
        return False
    assert done.reason in CONTENTION, done
    met = done.first < done.last
    assert met or held is None or any(held.get(epoch) for epoch in range(done.first, done.last + 1)), done
    return True


@pytest.mark.parametrize(("calls", "written", "seed"), [(66_000, True, 3), (34_000, False, 4)])
def test_a_serial_replay_explains_what_many_threads_did(calls, written, seed):
    crowd = Crowd(calls, seed, written=written)
    if written:
        with watched(crowd) as held:
            outcomes = crowd.run()
    else:
        outcomes, held = crowd.run(), None
    assert len(outcomes) >= calls - THREADS
    model = replay(crowd, outcomes, held)
    wanted, got = model.picture(), crowd.machine.snapshot()
    requests = {n: {k: v for k, v in row.items() if k != "generation"} for n, row in got["requests"].items()}
    assert wanted == {k: got[k] for k in ("epoch", "blocks", "free")} | {"requests": requests}
    kinds = Counter(d.op["op"] for d in outcomes if d.receipt)
    assert min(kinds[k] for k in ("allocate", "append", "fork", "truncate", "release", "cancel")) > 300
    assert not any(p.reserved or p.leases or p.parked for p in crowd.machine.pools)
    crowd.machine.check()
    if written:
        assert sum(d.last > d.first + 1 for d in outcomes) > 1000, "the threads hardly met"
        assert sum(bool(d.receipt and d.receipt.copied_rows) for d in outcomes) > 300
        everybody_reads_their_own(crowd, model)


def everybody_reads_their_own(crowd: Crowd, model: Explained) -> None:
    """Each row of each live request is what its writer wrote, whoever copied it since; those of a hit are not known."""
    for name, request in crowd.machine.requests.items():
        rows = model.rows_of[name]
        assert len(rows) == request.context
        for g, table in enumerate(request.tables):
            read = [crowd.memory[g][table[t // SIZE] & 0xFFFFFFFF][t % SIZE] for t in range(request.context)]
            assert [r for r, wrote in zip(read, rows, strict=True) if wrote is not None] == [
                r for r in rows if r is not None]
