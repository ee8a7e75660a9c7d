"""An operation costs what it touches, whatever the pool holds. Work is counted, never timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlab.memory.allocator import Allocator
from kvlab.memory.requests import Batch
from tests.memory.worlds import layout_of

COLUMNS = ("ring", "_generation")
FACT_COLUMNS = ("generation", "ref_cnt", "valid_rows", "next", "prev")


class Counting:
    """A column that counts how many of its cells are read or written; a look at all of them counts them all."""

    def __init__(self, column: Any, work: Counter) -> None:
        self.column, self.work = np.array(column), work

    def _count(self, at: Any) -> None:
        self.work["cells"] += np.size(self.column[at])

    def __getitem__(self, at: Any) -> Any:
        self._count(at)
        cells = self.column[at]
        return cells if isinstance(cells, np.ndarray) else int(cells)

    def __setitem__(self, at: Any, value: Any) -> None:
        self._count(at)
        self.column[at] = value

    def __len__(self) -> int:
        return len(self.column)

    def tolist(self) -> list:
        return self[:].tolist()


def machine_of(blocks: int, audit: str) -> tuple[Allocator, Counter]:
    """Two groups of `blocks` blocks with counting columns, and the counter."""
    machine, work = Allocator(layout_of(((4, blocks), (4, blocks))), audit=audit), Counter()
    for pool in machine.pools:
        for owner, names in ((pool, COLUMNS), (pool.facts, FACT_COLUMNS)):
            for name in names if owner is not None else ():
                setattr(owner, name, Counting(getattr(owner, name), work))
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


def short(machine: Allocator, names: tuple[str, ...]) -> list[Callable[[], object]]:
    """Operations that need no transaction, one after another."""
    batch = Batch(names)
    return [*(lambda n=n: machine.allocate(n, 9) for n in names), *[lambda: machine.append_batch(batch)] * 5,
            *(lambda n=n: machine.release(n) for n in names)]


def test_work_of_the_short_way_does_not_grow_with_the_pool():
    (small, few), (large, many) = (machine_of(blocks, "chain") for blocks in (SMALL, LARGE))
    for near, far in zip(short(small, ("A", "B")), short(large, ("A", "B")), strict=True):
        work = counted(few, near)
        assert work == counted(many, far)
        assert work.get("cells", 0) < 30


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
    assert cells[1] - cells[0] == 10
    assert len(machine.pools[0].reserved) == 30


def test_whatever_walks_the_pool_is_noticed():
    walks = [counted(work, lambda m=machine: list(m.pools[0].queue()))
             for machine, work in (machine_of(blocks, "chain") for blocks in (SMALL, 2 * SMALL))]
    assert walks[1]["cells"] > walks[0]["cells"] >= SMALL
    assert walks[1]["lines"] > walks[0]["lines"] > SMALL
