"""Which unlocked leaf goes first: seven orders, and a heap that looks at an entry only when it comes up.

It ranks and never removes: what may be evicted at all (unlocked leaves, whole edges) is the tree's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Protocol

SEGMENT = 2
"""Hits from which segmented LRU protects an edge (SGLang v0.5.11)."""

Rank = tuple[int, ...]


class Leaf(Protocol):
    """What an order looks at."""

    node_id: int
    last_access: int
    created: int
    hits: int
    priority: int
    queued: bool


ORDERS: dict[str, Callable[[Leaf], Rank]] = {
    "lru": lambda n: (n.last_access,),
    "lfu": lambda n: (n.hits, n.last_access),
    "fifo": lambda n: (n.created,),
    "mru": lambda n: (-n.last_access,),
    "filo": lambda n: (-n.created,),
    "priority": lambda n: (n.priority, n.last_access),
    "segmented-lru": lambda n: (int(n.hits >= SEGMENT), n.last_access),
}
"""Name -> rank of a leaf; the smallest goes first, the node id breaks ties (normative)."""

FALLING = frozenset({"mru"})
"""Orders in which a use may lower the rank, so that the new rank has to enter the heap at once."""


class LeafHeap:
    """Candidates by rank. An entry may be out of date: then it is corrected or dropped when it reaches the top.

    `ready(leaf)` says whether a leaf may go now. Offering costs O(log leaves), a use costs nothing (one push under
    `mru`), a pop O(log leaves) and once more for each entry that was out of date. Nothing is ever ranked wholesale but
    when most entries are dead.
    """

    __slots__ = ("_entries", "_ready", "falling", "rank")

    def __init__(self, order: str, ready: Callable[[Leaf], bool]) -> None:
        self.rank, self.falling, self._ready = ORDERS[order], order in FALLING, ready
        self._entries: list[tuple[Rank, int, Leaf]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, leaf: Leaf) -> None:
        """This leaf may go from now on, or (falling orders) its rank has changed."""
        if not leaf.queued or self.falling:
            leaf.queued = True
            heappush(self._entries, (self.rank(leaf), leaf.node_id, leaf))

    def pop(self) -> Leaf | None:
        """The leaf to go first; None if none may go."""
        entries = self._entries
        while entries:
            rank, node_id, leaf = heappop(entries)
            if not self._ready(leaf):
                leaf.queued = False
            elif (now := self.rank(leaf)) != rank:
                heappush(entries, (now, node_id, leaf))
            else:
                leaf.queued = False
                return leaf
        return None

    def shrink(self, leaves: Iterable[Leaf], count: int) -> None:
        """Forget dead entries once they outnumber `count` live ones by far. O(leaves), rarely."""
        if len(self._entries) > 64 + 4 * count:
            for _, _, leaf in self._entries:
                leaf.queued = False
            self._entries = [(self.rank(leaf), leaf.node_id, leaf) for leaf in leaves if self._ready(leaf)]
            for _, _, leaf in self._entries:
                leaf.queued = True
            heapify(self._entries)

    def order(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """All of these leaves that may go now, first to last; reads only. O(leaves log leaves)."""
        return sorted((leaf for leaf in leaves if self._ready(leaf)), key=lambda n: (self.rank(n), n.node_id))
