"""Bookkeeping measured: allocation, batched decoding, growth with the pool, bytes a token, beside other engines' cores.

It owns no machine: each row drives the real allocator, with receipts, generations and the chained digest on.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.memory.requests import Batch
from kvlab.study.bench import Row, interleaved
from kvlab.study.peers import BLOCK_SIZE, POOL, REQUESTS, Peer, cpu_time, folders

TARGETS = {"blocks 32": {"smol-vllm": 1.0, "vLLM v0.23.0": 0.5},
           "blocks 256": {"smol-vllm": 1.0, "mini-sglang": 1.0, "vLLM v0.23.0": 0.5},
           "append": {"SGLang v0.5.11": 0.5, "vLLM v0.23.0": 0.1}}
NAMES = {"blocks 32": "allocate + free 32 blocks", "blocks 256": "allocate + free 256 blocks",
         "append": "decode append, a token of 256"}
WITH = {("append", "SGLang v0.5.11"): "without publication", ("append", "vLLM v0.23.0"): "with hashing"}


def machine(blocks: int, audit: str = "chain") -> Allocator:
    """One cache group of one small layer: the bytes do not matter here."""
    return Allocator(CacheLayoutManifest((CacheGroup("kv", 0, 1, 1, 16, 2, BLOCK_SIZE, blocks),)), audit=audit)


def churn(allocator: Allocator, blocks: int) -> Callable[[], Any]:
    """Allocate that many blocks for one request and release it."""
    tokens = blocks * BLOCK_SIZE
    return lambda: (allocator.allocate("r", tokens), allocator.release("r"))


def decode_batch(room: int = 400_000) -> Callable[[], Any]:
    """One token for each of 256 requests of 100 tokens and more; they start again when the pool is full."""
    allocator, names = machine(room), [f"d{i}" for i in range(REQUESTS)]
    batch = Batch(names)

    def start() -> None:
        for name in names:
            if name in allocator.requests:
                allocator.release(name)
            allocator.allocate(name, 100)

    def step() -> None:
        if allocator.pools[0].spare < REQUESTS:
            start()
        allocator.append_batch(batch)

    start()
    return step


def against_peers() -> Iterator[Row]:
    """Ours and each peer's in turn: processor time of one thread, the least of fifteen rounds."""
    ours = {"blocks 32": (churn(machine(POOL), 32), 1), "blocks 256": (churn(machine(POOL), 256), 1),
            "append": (decode_batch(), REQUESTS)}
    for name in ("smol-vllm", "mini-sglang", "vLLM v0.23.0", "SGLang v0.5.11"):
        wanted = [w for w in TARGETS if name in TARGETS[w]]
        if not folders():
            yield from (Row(NAMES[w], "µs", median(cpu_time(*ours[w]) for _ in range(5)), target=TARGETS[w][name],
                            better="lower", note=f"not here: {name} (KVLAB_PEERS names no folder)") for w in wanted)
            continue
        with Peer(name) as peer:
            for w in wanted:
                if peer.why:
                    yield Row(NAMES[w], note=f"not here: {name} ({peer.why})")
                    continue
                pair = interleaved(lambda w=w: cpu_time(*ours[w]), lambda w=w: peer.measure(w), 15, min)
                if math.isnan(pair[1]):
                    yield Row(NAMES[w], "µs", pair[0], note=f"{name} broke off at it")
                    continue
                detail = f" {WITH[w, name]}" if (w, name) in WITH else ""
                yield Row(NAMES[w], "µs", pair[0], name + detail, pair[1], TARGETS[w][name], "lower")


def growth() -> Iterator[Row]:
    """The same work in a pool a thousand times as large."""
    small, large = machine(1_000), machine(1_000_000)
    for blocks in (32, 256):
        ours, theirs = churn(large, blocks), churn(small, blocks)
        pair = interleaved(lambda o=ours: cpu_time(o, 1), lambda t=theirs: cpu_time(t, 1), 15, min)
        yield Row(f"allocate + free {blocks}, 1,000,000 blocks", "µs", pair[0], "the same in a pool of 1,000 blocks",
                  pair[1], 1.3, "lower")


def audits() -> Iterator[Row]:
    """What the audit of the whole state costs, which lessons and tests have on."""
    pair = interleaved(lambda: cpu_time(churn(machine(64, "state"), 32), 1, 0.05),
                       lambda: cpu_time(churn(machine(64), 32), 1), 5, min)
    yield Row("allocate + free 32 blocks, state audit", "µs", pair[0], "the same with the chained digest", pair[1])


def metadata() -> Iterator[Row]:
    """Bytes of pool, tables and requests for 1,000 sequences of 2,048 tokens, over their tokens."""
    sequences, tokens = 1_000, 2_048
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    allocator = machine(sequences * tokens // BLOCK_SIZE)
    for i in range(sequences):
        allocator.allocate(f"s{i}", tokens)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    yield Row("metadata at block size 16", "B/token", taken / sequences / tokens, "limit", 7.0, 1.0, "lower")


def allocator() -> Iterator[Row]:
    """All rows of the ownership contract."""
    for rows in (against_peers, growth, audits, metadata):
        yield from rows()
