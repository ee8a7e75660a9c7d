"""Physical slots of a radix cache, each free, private to a producer, or owned by the tree; it knows no tokens.

A slot holds one block of `block_size` tokens (one token at block size 1). The three sets are disjoint and complete
(F7.03): every move names where the slot comes from, and a slot that is not there is a broken caller.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvlab.contract import FactSum, fact_hash

FREE, PRIVATE, TREE = range(3)
FEW = 24


class SlotPool:
    """`num_slots` slots from `first_slot` on; the free ones in a queue, taken at its head and given back at its tail.

    Taking, giving back and moving cost the slots they name. `facts` is the machine's incremental digest, if it keeps
    one: a link for each neighbouring pair of the queue, a fact for each private slot.
    """

    __slots__ = ("_state", "_view", "counts", "facts", "first_slot", "head", "num_slots", "ring")

    def __init__(self, num_slots: int, first_slot: int = 0, facts: FactSum | None = None) -> None:
        self.num_slots, self.first_slot, self.facts = num_slots, first_slot, facts
        self.ring = array("i", range(first_slot, first_slot + num_slots))
        self.head = 0
        self.counts = [num_slots, 0, 0]
        self._state = bytearray(num_slots)
        self._view = np.frombuffer(self._state, np.uint8)

    @property
    def free_count(self) -> int:
        return self.counts[FREE]

    def state(self, slot: int) -> int | None:
        """FREE, PRIVATE or TREE; None for a slot outside the pool."""
        index = slot - self.first_slot
        return self._state[index] if 0 <= index < self.num_slots else None

    def free(self) -> array:
        """The free queue in order. O(free)."""
        return self._peek(0, self.counts[FREE])

    def private(self) -> list[int]:
        return [self.first_slot + int(i) for i in np.flatnonzero(self._view == PRIVATE)]

    def _peek(self, start: int, count: int) -> array:
        at = (self.head + start) % self.num_slots if self.num_slots else 0
        row = self.ring[at : at + count]
        return row if len(row) == count else row + self.ring[: count - len(row)]

    # ------------------------------------------------------------------ moves
    def take(self, count: int) -> array:
        """The first `count` free slots become private; the caller has seen that there are as many."""
        assert count <= self.counts[FREE], "taken without looking"
        if self.facts is not None:
            self.facts.touch(("head",))
            self._links(self._peek(0, min(count + 1, self.counts[FREE])), -1)
        slots = self._peek(0, count)
        self.head = (self.head + count) % self.num_slots if self.num_slots else 0
        self._mark(slots, FREE, PRIVATE)
        return slots

    def give_back(self, slots: Sequence[int], source: int) -> None:
        """Slots return to the tail of the queue, in their order."""
        row = slots if isinstance(slots, array) else array("i", slots)
        if not row:
            return
        count = self.counts[FREE]
        if self.facts is not None:
            self.facts.touch(("head",))
            self._links(self._peek(count - 1, 1) + row if count else row, 1)
        self._mark(row, source, FREE)
        at = (self.head + count) % self.num_slots if self.num_slots else 0
        fits = self.num_slots - at
        self.ring[at : at + min(fits, len(row))] = row[:fits]
        if len(row) > fits:
            self.ring[: len(row) - fits] = row[fits:]

    def adopt(self, slots: array) -> None:
        """Private slots become the tree's."""
        self._mark(slots, PRIVATE, TREE)

    def _mark(self, slots: array, source: int, target: int) -> None:
        count, first = len(slots), self.first_slot
        if count <= FEW:
            state = self._state
            for slot in slots:
                assert state[slot - first] == source, f"slot {slot} is not where its owner says"
                state[slot - first] = target
        else:
            index = np.frombuffer(slots, np.int32) - first
            assert self._view[index].tobytes().count(source) == count, "a slot is not where its owner says"
            self._view[index] = target
        self.counts[source] -= count
        self.counts[target] += count
        if self.facts is not None and PRIVATE in (source, target):
            sign = 1 if target == PRIVATE else -1
            self.facts.total += sign * sum(fact_hash("private", s) for s in slots)

    def _links(self, row: Sequence[int], sign: int) -> None:
        self.facts.total += sign * sum(fact_hash("next", a, b) for a, b in pairwise(row))

    # ------------------------------------------------------------------ the whole of it
    def head_fact(self) -> int:
        return fact_hash("head", self._peek(0, 1)[0] if self.counts[FREE] else None)

    def total_from_nothing(self) -> int:
        """The digest of queue order and private slots, recomputed. O(pool)."""
        row = self.free()
        links = sum(fact_hash("next", a, b) for a, b in pairwise(row))
        return links + self.head_fact() + sum(fact_hash("private", s) for s in self.private())

    def restore(self, free: Sequence[int], private: Sequence[int], tree: Sequence[int]) -> None:
        """Fill the pool from a validated partition. O(pool)."""
        self.head = 0
        self.ring[: len(free)] = array("i", free)
        for kind, slots in ((FREE, free), (PRIVATE, private), (TREE, tree)):
            for slot in slots:
                self._state[slot - self.first_slot] = kind
            self.counts[kind] = len(slots)
