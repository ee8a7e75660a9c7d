"""Transactions kept open across each other, judged by the rows themselves: a shadow memory holds what was written.

Whatever order they are staged, copied, written, published or rolled back in, every request reads exactly its own
rows and every cached identity still stands for the rows it was given for. All of a successor shows, or none of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvlab.contract import Json, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.transaction import AllocatorTxn
from tests.memory.worlds import (
    CHOICES,
    KINDS,
    ODD,
    QUICK,
    TIGHT,
    first_bundles,
    layout_of,
    lengths,
    picture,
    propose,
    queues_are_sound,
)

Rows = list[int | None]
UNFINISHED = {"publish_before_copy_complete", "publish_before_append_write", "half_bundle_publication"}
OVERTAKEN = {"request_exists", "unknown_request", "stale_request_generation", "stale_table_version",
             "stale_block_generation", "touch_without_identity", "block_reserved", "in_place_shared_tail_write"}


@dataclass
class Open:
    """An open transaction and what publishing it would mean: rows per request and group, identities per handle."""

    txn: AllocatorTxn
    op: Json
    requests: dict[str, list[Rows] | None]
    writes: list[list[tuple[int, int, int]]]
    identities: dict[tuple[int, str], Rows | None] = field(default_factory=dict)
    wrote: set[int] = field(default_factory=set)


class Shadow:
    """An allocator, the rows that were really written, and what every request and identity ought to read."""

    def __init__(self, world, audit: str, seed: int | None) -> None:
        self.real = Allocator(layout_of(world), audit=audit, queue_seed=seed, mover=self.move)
        self.memory = [[[None] * size for _ in range(blocks)] for size, blocks in world]
        self.rows: dict[str, list[Rows]] = {}
        self.cached: dict[tuple[int, str], Rows] = {}
        self.bundles: list[list[str]] = []
        self.open: list[Open] = []
        self.stamp = count()
        self.complete({"op": "allocate", "request": "A", "tokens": 6})
        self.bundles += first_bundles(self.real, "A", [0])

    def move(self, group: int, src: int, dst: int, rows: int) -> int:
        self.memory[group][dst][:rows] = self.memory[group][src][:rows]
        return rows

    # ------------------------------------------------------------------ one transaction
    def stage(self, op: Json) -> Open | None:
        before = picture(self.real)
        try:
            txn = self.real.stage(op)
        except Rejected:
            txn = None
        assert picture(self.real) == before
        if txn is None:
            return None
        staged = Open(txn, op, {}, [[] for _ in self.memory])
        self.foresee(staged)
        self.open.append(staged)
        return staged

    def foresee(self, staged: Open) -> None:
        """What the caller means by the operation, worked out while it stages."""
        op, groups = staged.op, range(len(self.memory))
        for view in staged.txn.view():
            old = self.rows.get(op["request"] if op["op"] == "fork" else view.request_id, [[] for _ in groups])
            if op["op"] == "touch":
                old = [[row for b in op["blocks"] for row in self.cached[g, b[g]]] for g in groups]
            new = [next(self.stamp) for _ in range(view.start, view.context)]
            staged.requests[view.request_id] = [old[g][: view.start] + new for g in groups]
            for g, writes in enumerate(staged.writes):
                size = len(self.memory[g][0])
                writes += [(view.tables[g][t // size], t % size, row) for t, row in enumerate(new, view.start)]
        if op["op"] in ("release", "cancel"):
            staged.requests[op["request"]] = None
        for g in groups:
            size = len(self.memory[g][0])
            if op["op"] == "cache_full":
                table = self.real.requests[op["request"]].tables[g]
                staged.identities |= {(g, self.real.pools[g].text(table[j])):
                                      self.rows[op["request"]][g][j * size : (j + 1) * size] for j in op["blocks"]}
            if op["op"] == "evict":
                staged.identities |= {(g, b[g]): None for b in op["blocks"]}

    def write(self, staged: Open, g: int) -> None:
        for block, offset, row in staged.writes[g]:
            self.memory[g][block][offset] = row
        staged.wrote.add(g)
        staged.txn.wrote(f"g{g}")

    def publish(self, staged: Open) -> None:
        before = picture(self.real)
        try:
            tables = {v.request_id: v.tables for v in staged.txn.view()}
        except Rejected as no:
            assert no.reason in OVERTAKEN
        try:
            receipt = staged.txn.publish()
        except Rejected as no:
            assert picture(self.real) == before
            assert no.reason in UNFINISHED | OVERTAKEN
            if no.reason in OVERTAKEN:
                self.close(staged, "ROLLED_BACK")
            return
        assert (receipt.predecessor_digest, receipt.successor_digest) == (before["digest"], self.real.digest)
        assert self.real.epoch == before["epoch"] + 1
        self.whole_successor(staged, before, tables)
        self.close(staged, "PUBLISHED")

    def whole_successor(self, staged: Open, before: dict, tables: dict) -> None:
        after = picture(self.real)
        for name in before["requests"] | after["requests"]:
            if name not in staged.requests:
                assert after["requests"][name] == before["requests"][name]
            elif staged.requests[name] is None:
                assert name not in after["requests"]
                del self.rows[name]
            else:
                shown = [[w & 0xFFFFFFFF for w in table] for table in after["requests"][name][3]]
                assert shown == list(tables[name])
                self.rows[name] = staged.requests[name]
        for at, rows in staged.identities.items():
            if rows is None:
                del self.cached[at]
            else:
                self.cached[at] = rows
        if staged.op["op"] == "cache_full":
            self.bundles += first_bundles(self.real, staged.op["request"], staged.op["blocks"])

    def close(self, staged: Open, phase: str) -> None:
        """It is over: whoever still holds its handles is turned away."""
        assert staged.txn.phase == phase
        self.open.remove(staged)
        for late in (lambda: staged.txn.wrote("g0"), staged.txn.publish):
            try:
                late()
            except Rejected as no:
                assert no.reason == "transaction_closed"
            else:
                raise AssertionError("a late writer got through")

    def complete(self, op: Json) -> None:
        staged = self.stage(op)
        if staged is None:
            return
        staged.txn.copy()
        for g in range(len(self.memory)):
            self.write(staged, g)
        self.publish(staged)

    # ------------------------------------------------------------------ steps
    def operate(self, choice: tuple[str, int, int, int], how: str) -> None:
        """Done at once, or staged and left open, perhaps with the rows of its first group written."""
        op = propose(choice, lengths(self.real), sorted(self.bundles, key=self.findable), "ABC")
        if how == "at once" or len(self.open) > 3:
            self.complete(op)
        elif (staged := self.stage(op)) is not None and how == "written":
            staged.txn.copy()
            self.write(staged, 0)

    def findable(self, bundle: list[str]) -> bool:
        words = [(pool, pool.word(text)) for pool, text in zip(self.real.pools, bundle, strict=True)]
        return all(pool.current(word) and word & 0xFFFFFFFF in pool.keys for pool, word in words)

    def finish(self, pick: int, groups: int) -> None:
        """Published, mostly with all its rows written: where a group lacks them it is refused and stays open."""
        if not self.open:
            return
        staged = self.open[pick % len(self.open)]
        if not staged.txn.copies or groups:
            staged.txn.copy()
            for g in range(min(groups, len(self.memory))):
                if g not in staged.wrote:
                    self.write(staged, g)
        self.publish(staged)

    def roll_back(self, pick: int) -> None:
        if not self.open:
            return
        staged, before = self.open[pick % len(self.open)], picture(self.real)
        staged.txn.copy()
        self.write(staged, 0)
        staged.txn.rollback()
        assert picture(self.real) == before
        self.close(staged, "ROLLED_BACK")

    # ------------------------------------------------------------------ after every step
    def verify(self) -> None:
        self.real.check()
        assert queues_are_sound(self.real)
        self.everybody_reads_their_own_rows()
        self.every_identity_stands_for_its_rows()
        self.only_open_transactions_hold_anything()

    def everybody_reads_their_own_rows(self) -> None:
        assert self.real.requests.keys() == self.rows.keys()
        for name, request in self.real.requests.items():
            for g, table in enumerate(request.tables):
                seen = [row for word in table for row in self.memory[g][word & 0xFFFFFFFF]]
                assert seen[: request.context] == self.rows[name][g]

    def every_identity_stands_for_its_rows(self) -> None:
        for g, pool in enumerate(self.real.pools):
            for index in pool.keys.keys() - pool.reserved.keys() - pool.spoiled:
                text = f"{pool.first_block_id + index}@{pool.generations()[index]}"
                assert self.memory[g][index] == self.cached[g, text]

    def only_open_transactions_hold_anything(self) -> None:
        shown = [o.txn.staged() for o in self.open]
        for pool in self.real.pools:
            reserved = [r["handle"] for s in shown for r in s["reserved"][pool.group]]
            assert sorted(pool.first_block_id + i for i in pool.reserved) == sorted(
                int(text.partition("@")[0]) for text in reserved)
            assert len(set(reserved)) == len(reserved)
            assert sum(pool.leases.values()) == sum(len(s["leases"][pool.group]) for s in shown)


HOW = ("at once", "open", "written")


class ManyOpen(RuleBasedStateMachine):
    @initialize(world=st.sampled_from(TIGHT), audit=st.sampled_from(["state", "chain"]), seed=st.integers(0, 9))
    def start(self, world, audit, seed):
        self.shadow = Shadow(world, audit, seed or None)

    @rule(choice=CHOICES, how=st.sampled_from(HOW))
    def operate(self, choice, how):
        self.shadow.operate(choice, how)
        self.shadow.verify()

    @precondition(lambda self: self.shadow.open)
    @rule(pick=st.integers(0, 3), groups=st.integers(0, 9))
    def finish(self, pick, groups):
        self.shadow.finish(pick, groups)
        self.shadow.verify()

    @precondition(lambda self: self.shadow.open)
    @rule(pick=st.integers(0, 3))
    def roll_back(self, pick):
        self.shadow.roll_back(pick)
        self.shadow.verify()


TestManyOpen = ManyOpen.TestCase
TestManyOpen.settings = settings(QUICK, max_examples=40, stateful_step_count=40)


@pytest.mark.parametrize("seed", range(32))
def test_a_long_walk(seed):
    """The same steps, many more of them and nothing to shrink: for what needs three things to come together."""
    draw = random.Random(seed)
    shadow = Shadow(TIGHT[seed % 3], ("chain", "state")[seed % 4 == 3], seed or None)
    for _ in range(200):
        move = draw.random()
        if move < 0.3:
            shadow.finish(draw.randrange(4), draw.choice([0, 1, 3, 3, 3, 3, 3, 3]))
        elif move < 0.36:
            shadow.roll_back(draw.randrange(4))
        else:
            choice = (draw.choice(KINDS), *(draw.randrange(ODD + (draw.random() < 0.1)) for _ in range(3)))
            shadow.operate(choice, draw.choice(HOW))
        shadow.verify()
