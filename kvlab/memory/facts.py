"""The whole-state audit of one pool: every committed fact of every block, one hash each, kept while it changes.

It owns a second, plainer bookkeeping of what the pool says in packed form (columns and a linked queue), and from
it the facts that a state digest sums. It decides nothing; where the two disagree, `Allocator.check` finds it.

    free queue (a doubly linked list through two arrays; entry n is the list's fixed end):
        n <-> 3 <-> 7 <-> 0 <-> n        next[n] is the head, prev[n] the tail
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvlab.contract import FactSum, fact_hash

UNLINKED = -1


class PoolFacts:
    """Columns of one pool, a fact per block and a fact per place in the queue. Each change costs O(1)."""

    __slots__ = ("generation", "group", "keys", "next", "num_blocks", "prev", "ref_cnt", "sum", "valid_rows")

    def __init__(self, group: str, num_blocks: int, facts: FactSum) -> None:
        zeros = bytes(4 * num_blocks)
        self.group, self.num_blocks, self.sum = group, num_blocks, facts
        self.generation = array("I", zeros)
        self.ref_cnt = array("i", zeros)
        self.valid_rows = array("i", zeros)
        self.keys: dict[int, str] = {}
        self.link(range(num_blocks))

    def link(self, order: Sequence[int]) -> None:
        """Make the free queue exactly `order`, next one first, without telling the sum. O(pool)."""
        end = self.num_blocks
        self.next = array("i", [UNLINKED] * end + [end])
        self.prev = array("i", [UNLINKED] * end + [end])
        for before, index in zip([end, *order], [*order, end], strict=True):
            self.next[before], self.prev[index] = index, before

    # ------------------------------------------------------------------ what the pool does
    def begin(self, index: int, generation: int, rows: int) -> None:
        self._take(index)
        self.sum.touch(("block", self, index))
        self.generation[index], self.ref_cnt[index], self.valid_rows[index] = generation, 1, rows
        self.keys.pop(index, None)

    def add_ref(self, index: int) -> None:
        if self.next[index] != UNLINKED:
            self._take(index)
        self.sum.touch(("block", self, index))
        self.ref_cnt[index] += 1

    def drop_ref(self, index: int) -> None:
        self.sum.touch(("block", self, index))
        self.ref_cnt[index] -= 1
        if not self.ref_cnt[index]:
            if index not in self.keys:
                self.valid_rows[index] = 0
            self._put(index)

    def set_rows(self, index: int, rows: int) -> None:
        self.sum.touch(("block", self, index))
        self.valid_rows[index] = rows

    def set_key(self, index: int, key: str | None) -> None:
        self.sum.touch(("block", self, index))
        if key is not None:
            self.keys[index] = key
        elif self.keys.pop(index, None) is not None and self.next[index] != UNLINKED:
            self.valid_rows[index] = 0

    def _take(self, index: int) -> None:
        before, after = self.prev[index], self.next[index]
        self._touch_links(before, index)
        self.next[before], self.prev[after] = after, before
        self.next[index] = self.prev[index] = UNLINKED

    def _put(self, index: int) -> None:
        end = self.num_blocks
        tail = self.prev[end]
        self._touch_links(tail, index)
        self.next[tail], self.prev[index] = index, tail
        self.next[index], self.prev[end] = end, index

    def _touch_links(self, before: int, index: int) -> None:
        self.sum.touch(("link", self, before))
        self.sum.touch(("link", self, index))

    # ------------------------------------------------------------------ facts
    def fact(self, kind: str, index: int) -> int:
        """The hash of a block's own fact, or of its place in the queue: (block, next block)."""
        if kind == "link":
            after = self.next[index]
            return 0 if after == UNLINKED else fact_hash("link", self.group, index, after)
        return fact_hash("block", self.group, index, self.generation[index], self.ref_cnt[index],
                         self.valid_rows[index], self.keys.get(index))

    def total(self) -> int:
        """Sum of all facts, from nothing. O(pool): at load and in checks only."""
        return sum(self.fact("block", i) for i in range(self.num_blocks)) + sum(
            self.fact("link", i) for i in range(self.num_blocks + 1)
        )

    def columns(self) -> dict:
        """The columns as plain data, for comparison with the pool's own."""
        order, i = [], self.next[self.num_blocks]
        while i != self.num_blocks:
            order.append(i)
            i = self.next[i]
        return {"generation": self.generation.tolist(), "ref_cnt": self.ref_cnt.tolist(),
                "valid_rows": self.valid_rows.tolist(), "keys": self.keys, "free": order}
