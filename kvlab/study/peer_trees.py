"""Other engines' radix trees as workloads to be timed in a process of their own; never a dependency of the package.

It owns no measurement: `kvlab.study.peers` runs it, `kvlab.study.bench_radix` compares.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

UNUSED = ("mem_cache.allocator", "mem_cache.memory_pool", "observability.metrics_collector", "disaggregation.kv_events")
"""Modules that SGLang's tree imports for their types only, and that drag the GPU stack in."""

BLOCK_SIZE = 16
LENGTHS = (4_096, 32_768)
EVICT_TOKENS = 256


def prompt(tokens: int) -> list[int]:
    """A prompt without repetition."""
    return list(range(1, tokens + 1))


def queries(tokens: int) -> dict[str, list[int]]:
    """The cached prompt, one that leaves it half way, one that never meets it."""
    whole = prompt(tokens)
    return {"full": whole, "half": [*whole[: tokens // 2], *[0] * (tokens - tokens // 2)], "miss": [0] * tokens}


def sglang_tree() -> dict[str, tuple[Callable[[], Any], int]]:
    """SGLang v0.5.11's Python tree at page size 16: match by list, evict and insert 256 tokens at 1,000 leaves."""
    sys.modules.update({f"sglang.srt.{name}": MagicMock() for name in UNUSED})
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    def tree() -> Any:
        pool = SimpleNamespace(device="cpu", free=lambda slots: None)
        return RadixCache(CacheInitParams(disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=pool,
                                          page_size=BLOCK_SIZE))

    def insert(cache: Any, tokens: list[int]) -> None:
        cache.insert(InsertParams(key=RadixKey(tokens, None), value=torch.arange(len(tokens))))

    work = {}
    for tokens in LENGTHS:
        cache = tree()
        insert(cache, prompt(tokens))
        for kind, query in queries(tokens).items():
            cache.match_prefix(MatchPrefixParams(key=RadixKey(query, None)))
            work[f"match {tokens} {kind}"] = (
                lambda c=cache, q=query: c.match_prefix(MatchPrefixParams(key=RadixKey(q, None))), 1)
    small, fresh = tree(), count(1)

    def turn() -> None:
        small.evict(EvictParams(num_tokens=EVICT_TOKENS))
        insert(small, [next(fresh), *[7] * (EVICT_TOKENS - 1)])

    for _ in range(1_000):
        insert(small, [next(fresh), *[7] * (EVICT_TOKENS - 1)])
    work["turn 1000"] = (turn, 1)
    return work
