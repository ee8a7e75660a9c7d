"""An operation costs what it touches, whatever the pool holds. Work is counted, never timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import pytest

from kvlab.memory.allocator import Allocator
from tests.memory.worlds import layout_of

COLUMNS = ("generation", "ref_cnt", "valid_rows", "next", "prev")


class Counting(list):
    """A column that counts how many of its cells are read or written; a look at all of them counts them all."""

    work: Counter

    def __getitem__(self, at):
        self.work["cells"] += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
        return super().__getitem__(at)

    def __setitem__(self, at, value):
        self.work["cells"] += 1
        super().__setitem__(at, value)

    def __iter__(self):
        self.work["cells"] += len(self)
        return super().__iter__()

    def tolist(self) -> list:
        return list(iter(self))


def machine_of(blocks: int, audit: str) -> tuple[Allocator, Counter]:
    """Two groups of `blocks` blocks with counting columns, and the counter."""
    machine, work = Allocator(layout_of(((4, blocks), (4, blocks))), audit=audit), Counter()
    for pool in machine.pools:
        for name in COLUMNS:
            column = Counting(getattr(pool, name))
            column.work = work
            setattr(pool, name, column)
    return machine, work


def counted(work: Counter, op: Callable[[], object]) -> dict[str, int]:
    """Lines of ours executed, and cells of the columns looked at, by one operation."""
    def trace(frame, event, _):
        if not frame.f_globals.get("__name__", "").startswith("kvlab."):
            return None
        work["lines"] += event == "line"
        return trace

    work.clear()
    sys.settrace(trace)
    try:
        op()
    finally:
        sys.settrace(None)
    return dict(work)


BUNDLE = [["1000@1", "2000@1"]]
OPERATIONS = [
    {"op": "allocate", "request": "C", "tokens": 8},
    {"op": "allocate", "request": "A", "tokens": 6},
    {"op": "cache_full", "request": "C", "blocks": [0, 1], "keys": ["7be1", "c40d"]},
    {"op": "release", "request": "C"},
    {"op": "fork", "request": "A", "child": "D"},
    {"op": "append", "request": "D", "tokens": 1},
    {"op": "append", "request": "D", "tokens": 1},
    {"op": "append", "request": "D", "tokens": 4},
    {"op": "fork", "request": "A", "child": "E"},
    {"op": "append", "requests": [["E", 1], ["A", 1], ["D", 3]]},
    {"op": "touch", "request": "G", "blocks": BUNDLE},
    {"op": "evict", "blocks": BUNDLE},
    {"op": "truncate", "request": "D", "tokens": 5},
    {"op": "cancel", "request": "E"},
]
SMALL, LARGE = 100, 100_000


@pytest.mark.parametrize("audit", ["state", "chain"])
def test_work_does_not_grow_with_the_pool(audit):
    (small, few), (large, many) = (machine_of(blocks, audit) for blocks in (SMALL, LARGE))
    for op in OPERATIONS:
        assert counted(few, lambda op=op: small.apply(op)) == counted(many, lambda op=op: large.apply(op)), op
    for op in OPERATIONS:
        if op["op"] == "append":
            work = [counted(w, lambda m=m, op=op: m.stage(op | {"requests": [["A", 1]]}).rollback())
                    for m, w in ((small, few), (large, many))]
            assert work[0] == work[1]
    txns = [m.stage({"op": "allocate", "request": "H", "tokens": 40}) for m in (small, large)]
    work = [counted(w, txn.rollback) for txn, w in zip(txns, (few, many), strict=True)]
    assert work[0] == work[1]


def test_the_work_of_a_reservation_is_that_of_its_blocks():
    """Twice the blocks, twice the cells: nothing of it is there anyway."""
    machine, work = machine_of(SMALL, "chain")
    cells = [counted(work, lambda n=n: machine.pools[0].reserve(n))["cells"] for n in (10, 20)]
    assert cells[1] - cells[0] == 10 + 10
    assert len(machine.pools[0].reserved) == 30


def test_whatever_walks_the_pool_is_noticed():
    walks = [counted(work, lambda m=machine: list(m.pools[0].queue()))
             for machine, work in (machine_of(blocks, "chain") for blocks in (SMALL, 2 * SMALL))]
    assert walks[1]["cells"] > walks[0]["cells"] > SMALL
    assert walks[1]["lines"] > walks[0]["lines"] > SMALL
