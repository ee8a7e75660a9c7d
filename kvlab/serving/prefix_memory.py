"""Paged memory whose new requests begin with rows that others have computed: the index meets the tensors here.

It owns neither rows nor entries: a lookup finds, one transaction admits, the engine computes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvlab.contract import Receipt
from kvlab.memory.kv_store import PagedMemory, PagedStep
from kvlab.reuse.prefix_cache import PrefixCache
from kvlab.reuse.prefix_lookup import Asker


class PrefixMemory:
    """A paged memory, an index over its allocator, and who asks. ValueError where the two are not one allocator's."""

    def __init__(self, memory: PagedMemory, cache: PrefixCache, asker: Asker) -> None:
        if memory.allocator is not cache.allocator:
            raise ValueError("the index stands over another allocator than the memory")
        if cache.partial_tails:
            raise ValueError("partial tails are shown on the index alone: a model's step begins at a block's edge here")
        self.memory, self.cache, self.asker = memory, cache, asker

    def open(self, rows: Mapping[str, Sequence[int]]) -> PagedStep:
        return self.memory.open(rows)

    def fork(self, parent: str, child: str) -> Receipt:
        return self.memory.fork(parent, child)

    def release(self, request: str) -> Receipt:
        return self.memory.release(request)

    def length(self, request: str) -> int:
        return self.memory.length(request)

    def start(self, request: str, tokens: Sequence[int]) -> tuple[PagedStep, int]:
        """A new request over the longest prefix that may be reused, and how many tokens that is.

        The hit and the fresh blocks for the rest are one open transaction: its blocks are pinned until it ends. A row
        is left to compute always, for the next token's logits. `Rejected` as the index and the allocator do.
        """
        match = self.cache.lookup(self.asker, request, tokens)
        txn = self.cache.stage_admit(match.receipt)
        txn.copy()
        return PagedStep(self.memory.store, txn), match.lengths.runtime

    def offer(self, request: str, tokens: Sequence[int]) -> None:
        """Let others find the full blocks of a live request whose rows are those of `tokens`."""
        self.cache.publish(self.asker, request, tokens)
