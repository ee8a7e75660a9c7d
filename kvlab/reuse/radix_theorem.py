"""The offline depth-first bound as a theorem with its assumptions checked; it schedules nothing.

Theorem (SGLang paper, article 0x08E, F7.10). For a fixed batch known in advance, a radix tree built from that batch and
nothing else, and a cache that holds at least the longest request: visiting the requests in depth-first order computes
each edge once, and no order computes fewer token rows: C_KV = sum of |e| over the edges.
It says nothing about online arrivals, unknown output lengths, fairness, deadlines or smaller caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvlab.contract import Rejected

ASSUMPTIONS = ("offline_fixed_batch", "tree_from_that_batch", "capacity>=max_request_length")


@dataclass(frozen=True, slots=True)
class DfsBound:
    """A depth-first order of the batch (indices into it), and the token rows that it and no less can compute."""

    order: tuple[int, ...]
    rows: int


def dfs_bound(requests: Sequence[Sequence[int]], capacity: int, *, offline_fixed_batch: bool,
              tree_from_that_batch: bool) -> DfsBound:
    """The bound of a batch, or `dfs_bound_outside_assumptions` naming the assumption that does not hold.

    `capacity` in tokens. Sorting the requests by their tokens is a depth-first visit of their tree; then each row that
    a request does not share with the one before it is new. O(tokens log requests).
    """
    longest = max(map(len, requests), default=0)
    held = (offline_fixed_batch, tree_from_that_batch, capacity >= longest)
    broken = [name for name, holds in zip(ASSUMPTIONS, held, strict=True) if not holds]
    if broken:
        raise Rejected("dfs_bound_outside_assumptions", f"{', '.join(broken)} (capacity {capacity}, longest {longest})")
    order = tuple(sorted(range(len(requests)), key=lambda i: list(requests[i])))
    rows = len(requests[order[0]]) if order else 0
    for before, now in pairwise(order):
        rows += len(requests[now]) - _shared(requests[before], requests[now])
    return DfsBound(order, rows)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
