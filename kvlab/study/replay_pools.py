"""The two indexes as a replay drives them: begin a request if it fits, end it, count; real machines without tensors.

It owns no order of requests and no figure of a report: `kvlab.study.replay` has those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvlab.contract import Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.reuse.one_tenant import one_tenant
from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.slot_pool import PRIVATE
from kvlab.reuse.token_keys import TOKEN_BYTES
from kvlab.study.traced_request import TracedRequest


def unit_of(request: TracedRequest, block_size: int) -> int:
    """How many neighbouring tokens a replay may count as one: those that its trace and its blocks never part.

    1 for token ids. With ids of 512 tokens and blocks of 16 it is 16: every id is 32 units, a block is one. Where only
    lengths are known it is the block.
    """
    if request.prompt is not None:
        return 1
    return math.gcd(block_size, request.id_tokens) if request.block_ids is not None else block_size


def unit_rows(request: TracedRequest, unit: int) -> tuple[bytes, bytes] | None:
    """Prompt and output as packed ids of units, the form that an index takes. None where only lengths are known.

    Unit i of the block with id n is `n * (id_tokens / unit) + i`: equal ids, and nothing else, give equal units; what
    their output holds stays unknown. ValueError for an id that does not fit in 32 bits so.
    """
    if request.prompt is not None:
        return request.prompt, request.output or b""
    if request.block_ids is None:
        return None
    parts = request.id_tokens // unit
    starts = np.array(request.block_ids, np.int64) * parts
    if starts.size and not 0 <= int(starts.min()) <= int(starts.max()) < (1 << 32) - parts:
        raise ValueError(f"block ids from 0 to {((1 << 32) - 1) // parts - 1:,} can be replayed, and one is "
                         f"{max(request.block_ids, key=abs):,}")
    rows = starts.astype(np.uint32)[:, None] + np.arange(parts, dtype=np.uint32)
    return rows.tobytes()[: -(-request.prompt_tokens // unit) * TOKEN_BYTES], b""


def told(request: TracedRequest, rows: tuple[bytes, bytes], unit: int) -> bytes:
    """The units whose whole content is known, so that others may find them."""
    return rows[0] + rows[1] if request.prompt is not None else rows[0][: request.prompt_tokens // unit * TOKEN_BYTES]


@dataclass(frozen=True, slots=True)
class Use:
    """Blocks at one moment: `unique` different ones that requests in flight hold, `referenced` as often as their
    tables name one, `cached` ones that nobody holds and that could still be hit."""

    unique: int
    referenced: int
    cached: int


class Pool(Protocol):
    """What a replay needs of an index over its blocks."""

    evicted_blocks: int

    def begin(self, name: str, request: TracedRequest) -> int | None:
        """Take a request in: tokens that were found. None, and nothing changed, where it does not fit now."""

    def end(self, name: str) -> None:
        """The request is over."""

    def use(self) -> Use: ...

    @property
    def digest(self) -> str: ...


class PrefixPool:
    """A prefix chain over the real allocator, with chained receipts and without token witnesses.

    A request's blocks can be found from its beginning on, those of its output included. Its output takes its blocks
    at once.
    """

    def __init__(self, block_size: int, num_blocks: int, unit: int = 1, policy: str = "normative") -> None:
        group = CacheGroup("kv", 0, 1, 1, 1, 2, block_size // unit, num_blocks)
        allocator = Allocator(CacheLayoutManifest((group,)), audit="chain")
        self.cache, self.asker = one_tenant(allocator, policy=policy, witness=False)
        self.unit, self.block_size, self.evicted_blocks, self._referenced = unit, block_size // unit, 0, 0
        self._tables: dict[str, int] = {}

    def begin(self, name: str, request: TracedRequest) -> int | None:
        rows, hit = unit_rows(request, self.unit), 0
        whole = -(-(request.prompt_tokens + request.output_tokens) // self.unit)
        try:
            if rows is None:
                receipt = self.cache.allocator.allocate(name, whole)
            else:
                begun = self.cache.start(self.asker, name, rows[0], room=whole)
                hit, receipt = begun.match.lengths.runtime, begun.parts[0]
        except Rejected as no:
            if no.reason != "out_of_memory":
                raise
            return None
        if rows is not None:
            self.cache.publish(self.asker, name, told(request, rows, self.unit))
        self.evicted_blocks += len(receipt.ended)
        self._tables[name] = blocks = -(-whole // self.block_size)
        self._referenced += blocks
        return hit * self.unit

    def end(self, name: str) -> None:
        self.cache.apply({"op": "release", "request": name})
        self._referenced -= self._tables.pop(name)

    def use(self) -> Use:
        pool = self.cache.allocator.pools[0]
        return Use(pool.num_blocks - pool.free_count, self._referenced, len(pool.place))

    @property
    def digest(self) -> str:
        return self.cache.digest


class RadixPool:
    """A radix tree over its slots, one a block of `block_size` tokens (a page, in SGLang's words).

    The last prompt token is never asked for: its row gives the logits. Leaves are evicted when slots are wanted, as
    many as are missing.
    """

    def __init__(self, block_size: int, num_blocks: int, unit: int = 1, policy: str = "normative",
                 eviction: str = "lru") -> None:
        self.cache = RadixCache(num_blocks, block_size=block_size // unit, eviction=eviction, policy=policy,
                                audit="chain")
        self.unit, self.block_size, self.evicted_blocks, self._referenced = unit, block_size // unit, 0, 0
        self._tables: dict[str, int] = {}
        self._private: dict[str, list[int]] = {}

    def begin(self, name: str, request: TracedRequest) -> int | None:
        rows, whole = unit_rows(request, self.unit), -(-(request.prompt_tokens + request.output_tokens) // self.unit)
        blocks = -(-whole // self.block_size)
        if rows is None:
            if not self._room(blocks):
                return None
            self._private[name] = self._reserve(blocks)
            hit = 0
        elif (hit := self._admit(name, rows[0], told(request, rows, self.unit), blocks)) is None:
            return None
        self._tables[name] = blocks
        self._referenced += blocks
        return hit * self.unit

    def _admit(self, name: str, prompt: bytes, whole: bytes, blocks: int) -> int | None:
        cache = self.cache
        receipt = cache.handoff(name, prompt[:-TOKEN_BYTES])
        hit = receipt.matched_tokens
        if not self._room(blocks - hit // self.block_size):
            cache.settle(receipt, "defer")
            return None
        cache.settle(receipt, "admit")
        cache.publish(name, whole[hit * TOKEN_BYTES :])
        if unknown := blocks - -(-len(whole) // (TOKEN_BYTES * self.block_size)):
            self._private[name] = self._reserve(unknown)
        return hit

    def _room(self, blocks: int) -> bool:
        """Make so many slots free by evicting leaves, if there are as many that nobody has locked."""
        missing = blocks - self.cache.pool.free_count
        if missing > self.cache.tree.evictable:
            return False
        if missing > 0:
            done = self.cache.evict(missing * self.block_size)
            self.evicted_blocks += done.evicted_tokens // self.block_size
        return True

    def _reserve(self, blocks: int) -> list[int]:
        return list(self.cache.apply({"op": "reserve", "count": blocks}).allocated)

    def end(self, name: str) -> None:
        if name in self.cache.requests:
            self.cache.finish(name)
        if private := self._private.pop(name, None):
            self.cache.apply({"op": "give_back", "slots": private})
        self._referenced -= self._tables.pop(name)

    def use(self) -> Use:
        """`unique`: locked edges and private slots. `cached`: edges that nobody has locked."""
        tree = self.cache.tree
        return Use(tree.protected + self.cache.pool.counts[PRIVATE], self._referenced, tree.evictable)

    @property
    def digest(self) -> str:
        return self.cache.digest
