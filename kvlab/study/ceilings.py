"""What a trace's blocks would hit without a limit, and with the best evictions of a given pool; it has no policy.

It owns the sequence of blocks that a replay saw, in 4 bytes a block and one entry a different block. A block counts
as hit only where all blocks before it in its prompt were hit too.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from kvlab.study.traced_request import TracedRequest

NEVER = np.iinfo(np.int32).max


class PrefixNodes:
    """Every different block that was seen (content behind a prefix) as a whole number from 1, its place in a trie."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, Hashable], int] = {}

    def __len__(self) -> int:
        return len(self._children)

    def walk(self, keys: Sequence[Hashable]) -> tuple[array, int]:
        """The nodes of a path of block keys, and how many of them, from the first on, were there before. O(keys)."""
        children, node, known = self._children, 0, 0
        nodes = array("i")
        for at, key in enumerate(keys):
            found = children.get((node, key))
            if found is None:  # a fresh node has no children, so nothing behind it is found either
                found = children[node, key] = len(children) + 1
            else:
                known = at + 1
            node = found
            nodes.append(node)
        return nodes, known


@dataclass(slots=True)
class Journal:
    """The blocks of the requests that were served, in their order.

    `nodes`: all requests' full blocks one after another. `ends[i]`: where request i ends in it. `useful[i]`: its
    leading blocks that may be hit. `blocks[i]`: blocks that it occupies while it runs, private ones included.
    """

    nodes: array = field(default_factory=lambda: array("i"))
    ends: array = field(default_factory=lambda: array("q"))
    useful: array = field(default_factory=lambda: array("i"))
    blocks: array = field(default_factory=lambda: array("i"))

    def add(self, nodes: array, useful: int, blocks: int) -> None:
        self.nodes.extend(nodes)
        self.ends.append(len(self.nodes))
        self.useful.append(useful)
        self.blocks.append(blocks)

    def next_uses(self) -> list[list[tuple[int, int]]]:
        """For each request, when its blocks are worth having again: (index of a later request, how many). O(blocks).

        A block is worth keeping for the very next request that has it, and only if that one may hit it: otherwise it
        is computed there in any case.
        """
        nodes = np.frombuffer(self.nodes, np.int32) if self.nodes else np.empty(0, np.int32)
        due = np.full(int(nodes.max(initial=0)) + 1, NEVER, np.int32)
        out: list[list[tuple[int, int]]] = [[] for _ in self.ends]
        for i in range(len(self.ends) - 1, -1, -1):
            mine = nodes[self.ends[i - 1] if i else 0 : self.ends[i]]
            when, how_many = np.unique(due[mine], return_counts=True)
            out[i] = [(w, n) for w, n in zip(when.tolist(), how_many.tolist(), strict=True) if w != NEVER]
            due[mine] = NEVER
            due[mine[: self.useful[i]]] = i
        return out


def best_hits(journal: Journal, pool_blocks: int) -> int:
    """Blocks hit by the best evictions that any policy could choose for a pool, requests one at a time.

    Evict what is needed again last, and of one request's path the deepest block first (Belady's rule on paths). What
    is needed by request k lies on the path of k behind blocks that are needed by k or sooner, so what is kept for k
    is a prefix of its path, and how many blocks are kept for each k is the whole state. A request's own blocks cannot
    go while it runs. Optimal: each (use, next use) is an interval that is kept or not, and dropping the farthest end
    first keeps the most intervals under any capacity. O(blocks + evictions log requests).
    """
    kept: dict[int, int] = {}
    heap: list[int] = []
    total = hits = 0
    for i, due in enumerate(journal.next_uses()):
        found = kept.pop(i, 0)
        hits += found
        total -= found
        room = max(0, pool_blocks - journal.blocks[i])
        while total > room:
            farthest = -heap[0]
            have = kept.get(farthest, 0)
            if farthest <= i or not have:
                heappop(heap)
                continue
            gone = min(have, total - room)
            kept[farthest] = have - gone
            total -= gone
        for when, how_many in due:
            if not kept.get(when):
                heappush(heap, -when)
            kept[when] = kept.get(when, 0) + how_many
            total += how_many
    return hits


@dataclass(frozen=True, slots=True)
class Walked:
    """One request against a cache without a limit.

    `nodes`: its full blocks, those of a known output included. `ideal`: tokens hit under the widest rule: a partial
    block that the trace names counts, and nothing is held back. `design`: tokens hit where only full blocks are found
    and one row at least is computed for the logits. `useful`: leading blocks that such a design may hit.
    """

    nodes: array
    ideal: int
    design: int
    useful: int


def walk(seen: PrefixNodes, request: TracedRequest, block_size: int) -> Walked:
    """Look a request up among all blocks so far and add its own. O(blocks)."""
    nodes, known = seen.walk(request.block_keys(block_size, output=True))
    prompt, useful = request.prompt_tokens, (request.prompt_tokens - 1) // block_size
    whole = prompt // block_size
    in_prompt = min(known, whole if request.prompt is not None else len(nodes))
    full = nodes if request.prompt is not None else nodes[:whole]
    return Walked(full, min(in_prompt * block_size, prompt), min(known, useful) * block_size, useful)
