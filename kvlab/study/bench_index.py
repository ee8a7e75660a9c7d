"""The prefix chain measured: lookups of a long prompt with hashing, checks and receipt, beside vLLM's own.

It owns no machine: each row drives the real index over the real allocator, with the chained digest on.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvlab.contract import SHA256
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.reuse.one_tenant import one_tenant
from kvlab.reuse.prefix_cache import PrefixCache
from kvlab.reuse.prefix_lookup import Asker
from kvlab.reuse.token_keys import TOKEN_BYTES, pack
from kvlab.study.bench import Row, interleaved
from kvlab.study.peers import BLOCK_SIZE, Peer, Workloads, cpu_time, folders

TOKENS = 4_096
VLLM = "vLLM v0.23.0"
CASES = {"full": TOKENS, "half": TOKENS // 2, "no": 0}
"""How many tokens of the prompt the index holds."""


def prompt(hit: int, tokens: int = TOKENS) -> list[int]:
    """A prompt whose first `hit` tokens are those that were published."""
    return [(i * 7_919) % 50_000 for i in range(hit)] + [50_001] * (tokens - hit)


def filled(**design: Any) -> tuple[PrefixCache, Asker]:
    """An index that holds one published prompt, over a pool of twice its size."""
    group = CacheGroup("kv", 0, 1, 1, 16, 2, BLOCK_SIZE, 2 * TOKENS // BLOCK_SIZE)
    cache, owner = one_tenant(Allocator(CacheLayoutManifest((group,)), audit="chain"), **design)
    cache.start(owner, "first", prompt(TOKENS))
    cache.publish(owner, "first", prompt(TOKENS))
    return cache, owner


def vllm_lookups(manager: Any, request: Callable[[str, list[int]], Any]) -> Workloads:
    """The same lookups on a vLLM `manager` with caching on: the request's hashes anew, then the longest hit."""
    first = request("first", prompt(TOKENS))
    manager.allocate_slots(first, TOKENS)

    def lookup(asked: Any) -> None:
        asked.block_hashes.clear()
        asked.update_block_hashes()
        manager.get_computed_blocks(asked)

    asked = {name: request(name, prompt(hit)) for name, hit in CASES.items()}
    return {f"prefix {name}": (partial(lookup, one), 1) for name, one in asked.items()}


def chain_alone() -> Callable[[], bytes]:
    """SHA-256 over the same blocks and nothing else: what no lookup of a full hit can be below."""
    packed, stride = pack(prompt(TOKENS)), BLOCK_SIZE * TOKEN_BYTES

    def run() -> bytes:
        parent = bytes(32)
        for at in range(0, len(packed), stride):
            parent = SHA256(parent + packed[at : at + stride]).digest()
        return parent

    return run


def lookups() -> Iterator[Row]:
    """4,096 tokens given as a list, everything found, half of it, nothing."""
    cache, owner = filled()
    ours = {name: partial(cache.lookup, owner, "next", prompt(hit)) for name, hit in CASES.items()}
    pair = interleaved(lambda: cpu_time(ours["full"], 1), lambda: cpu_time(chain_alone(), 1), 15, min)
    yield Row("prefix lookup, 4,096 tokens, full hit", "µs", pair[0], "its SHA-256 alone", pair[1], 2.2, "lower")
    fast, second = filled(hash_name="crc32")
    quick = partial(fast.lookup, second, "next", prompt(TOKENS))
    pair = interleaved(lambda: cpu_time(quick, 1), lambda: cpu_time(ours["full"], 1), 15, min)
    yield Row("the same with CRC-32", "µs", pair[0], "with SHA-256", pair[1])
    if not folders():
        yield Row("prefix lookup", note=f"not here: {VLLM} (KVLAB_PEERS names no folder)")
        return
    with Peer(VLLM) as peer:
        for name, work in ours.items():
            pair = interleaved(partial(cpu_time, work, 1), partial(peer.measure, f"prefix {name}"), 15, min)
            row = f"prefix lookup, 4,096 tokens, {name} hit"
            if peer.why or math.isnan(pair[1]):
                yield Row(row, "µs", pair[0], note=f"not here: {VLLM} ({peer.why or 'no such workload'})")
            else:
                yield Row(row, "µs", pair[0], f"{VLLM}, hashing included", pair[1], 1 / 3, "lower")


def metadata() -> Iterator[Row]:
    """Bytes of index and identities for 64 prompts, over their tokens; with and without token witnesses."""
    prompts, tokens = 64, 2_048
    for witness in (False, True):
        group = CacheGroup("kv", 0, 1, 1, 16, 2, BLOCK_SIZE, prompts * tokens // BLOCK_SIZE)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        cache, owner = one_tenant(Allocator(CacheLayoutManifest((group,)), audit="chain"), witness=witness)
        for i in range(prompts):
            cache.allocator.allocate(f"s{i}", tokens)
            cache.publish(owner, f"s{i}", [i, *prompt(tokens - 1, tokens - 1)])
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        name = f"prefix index, {'with' if witness else 'without'} witnesses"
        yield Row(name, "B/token", taken / prompts / tokens, "limit", 7.0, 1.0, "lower")


def index() -> Iterator[Row]:
    """All rows of the prefix chain."""
    yield from lookups()
    yield from metadata()
