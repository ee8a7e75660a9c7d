"""SGLang v0.5.11's own radix cache and ours, side by side through random histories; a process of its own runs this.

`python -m tests.reuse.sglang_peer SEEDS` prints how many histories agreed, or stops at the first that did not.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from kvlab.reuse.eviction import ORDERS
from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.token_keys import unpack
from kvlab.study import peers

UNUSED = ("mem_cache.allocator", "mem_cache.memory_pool", "observability.metrics_collector", "disaggregation.kv_events")
"""Modules of the runtime that the tree imports for their types only, and that drag the GPU stack in."""


def sglang() -> SimpleNamespace:
    """The peer's classes."""
    sys.path[1:1] = peers.folders()
    sys.meta_path.append(peers.Absent())
    sys.modules.update({f"sglang.srt.{name}": MagicMock() for name in UNUSED})
    from sglang.srt.mem_cache import base_prefix_cache as base
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache as Theirs
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return SimpleNamespace(base=base, params=CacheInitParams, tree=Theirs, key=RadixKey)


class Pair:
    """One history on both; every step compares what was found, the edges with their counters, and the ledgers."""

    def __init__(self, peer: SimpleNamespace, order: str, size: int, seed: int) -> None:
        self.peer, self.rng, self.size, self.freed, self.leases = peer, random.Random(seed), size, [], []
        name = "slru" if order == "segmented-lru" else order
        pool = SimpleNamespace(device="cpu", free=lambda slots: self.freed.append(len(slots)))
        self.theirs = peer.tree(peer.params(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=pool, page_size=size,
            eviction_policy=name))
        self.ours = RadixCache(4000, block_size=size, eviction=order, policy="sglang-0.5.11", audit="chain")

    def step(self, at: int) -> None:
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 12 * self.size))]
        extra, kind = self.rng.choice([None, None, "a"]), self.rng.random()
        if kind < 0.35:
            self.insert(tokens, extra, self.rng.randrange(3))
        elif kind < 0.65:
            self.match(tokens, extra)
        elif kind < 0.75:
            self.lock(f"r{at}", tokens, extra)
        elif kind < 0.85 and self.leases:
            name, node = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.theirs.dec_lock_ref(node)
            self.ours.cancel(name)
        else:
            self.evict(self.rng.randrange(1, 10 * self.size))
        assert self.their_edges() == self.our_edges()
        ledgers = self.ours.ask({"ask": "ledgers"})
        assert (self.theirs.protected_size(), self.theirs.evictable_size()) == (
            ledgers["protected"], ledgers["evictable"])

    def insert(self, tokens: list[int], extra: str | None, priority: int) -> None:
        slots = torch.zeros(len(tokens), dtype=torch.int64)
        found = self.theirs.insert(self.peer.base.InsertParams(
            key=self.peer.key(tokens, extra), value=slots, priority=priority))
        assert found.prefix_len == self.ours.insert(tokens, extra_key=extra, priority=priority).matched

    def found(self, tokens: list[int], extra: str | None):
        return self.theirs.match_prefix(self.peer.base.MatchPrefixParams(key=self.peer.key(tokens, extra)))

    def match(self, tokens: list[int], extra: str | None) -> None:
        assert len(self.found(tokens, extra).device_indices) == self.ours.match(tokens, extra).matched

    def lock(self, name: str, tokens: list[int], extra: str | None) -> None:
        node = self.found(tokens, extra).last_device_node
        self.theirs.inc_lock_ref(node)
        self.ours.settle(self.ours.handoff(name, tokens, extra_key=extra), "admit")
        self.leases.append((name, node))

    def evict(self, tokens: int) -> None:
        self.freed.clear()
        gone = self.theirs.evict(self.peer.base.EvictParams(num_tokens=tokens)).num_tokens_evicted
        receipt = self.ours.evict(tokens)
        assert gone == receipt.evicted_tokens
        assert self.freed == [len(unpack(e.key)) for e in receipt.evicted]

    # ------------------------------------------------------------------ both trees, as sets of paths
    def their_edges(self) -> set:
        edges, stack = set(), [(self.theirs.root_node, ())]
        while stack:
            node, path = stack.pop()
            for child in node.children.values():
                here = (*path, tuple(child.key.token_ids))
                edges.add((child.key.extra_key, here, child.lock_ref, child.hit_count, child.priority))
                stack.append((child, here))
        return edges

    def our_edges(self) -> set:
        return {(n.extra, tuple(tuple(unpack(step.key)) for step in self.ours.tree.path(n)), n.lock_ref, n.hits,
                 n.priority) for n in self.ours.tree}


def main(seeds: int) -> None:
    peer, agreed = sglang(), 0
    for order in ORDERS:
        for size in (1, 2, 4):
            for seed in range(seeds):
                pair = Pair(peer, order, size, seed)
                for at in range(100):
                    pair.step(at)
                agreed += 1
    print("agreed", agreed)


if __name__ == "__main__":
    main(int(sys.argv[1]))
