"""The radix index measured: matches, deep chains, eviction, bytes a token; beside other engines where they are here.

It owns no machine: each row drives the real cache, with receipts, partition checks and the chained digest on.
"""

from __future__ import annotations

import math
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from statistics import median
from typing import Any

from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.token_keys import pack
from kvlab.study.bench import Row, interleaved
from kvlab.study.peer_trees import BLOCK_SIZE, EVICT_TOKENS, LENGTHS, prompt, queries
from kvlab.study.peers import CACHED, Peer, cpu_time, folders

PEER, CPP, MINI, FULL = "SGLang v0.5.11 tree", "SGLang v0.5.11 C++ tree", "mini-sglang tree", "vLLM v0.23.0, full pool"
Wanted = tuple[str, str, Callable[[], float], float | None]
"""A row's name, the peer's workload, our measurement of the same, the target."""


def beside(name: str, wanted: Sequence[Wanted], rounds: int = 7) -> Iterator[Row]:
    """Ours and one peer's in turn, the least of the rounds; one row that says why where the peer is not here."""
    if not folders():
        yield Row(wanted[0][0], note=f"not here: {name} (KVLAB_PEERS names no folder)")
        return
    with Peer(name) as peer:
        if peer.why:
            yield Row(wanted[0][0], note=f"not here: {name} ({peer.why})")
            return
        for row, workload, ours, target in wanted:
            pair = interleaved(ours, partial(peer.measure, workload), rounds, min)
            known = not math.isnan(pair[1])
            yield Row(row, "µs", pair[0], name if known else "", pair[1] if known else None, target, "lower",
                      "" if known else f"{name} has no such workload")


def cache(tokens: int, block_size: int = BLOCK_SIZE) -> RadixCache:
    """Room for so many tokens."""
    return RadixCache(tokens // block_size, block_size=block_size, audit="chain")


def matches(tokens: int, packed: bool) -> dict[str, Callable[[], Any]]:
    """A match of a cached prompt, of one that leaves it half way, and of a stranger."""
    tree, asked = cache(4 * tokens), queries(tokens)
    tree.insert(prompt(tokens))
    rows = {kind: pack(query) if packed else query for kind, query in asked.items()}
    for query in rows.values():
        tree.match(query)
    return {kind: lambda q=query: tree.match(q) for kind, query in rows.items()}


def turn(leaves: int) -> Callable[[], Any]:
    """Evict 256 tokens and insert 256 others, in a tree of so many leaves."""
    tree, fresh = cache((leaves + 1) * EVICT_TOKENS), count(1)
    rest = [7] * (EVICT_TOKENS - 1)

    def insert() -> None:
        tree.insert(array("I", [next(fresh), *rest]))

    def step() -> None:
        tree.evict(EVICT_TOKENS)
        insert()

    for _ in range(leaves):
        insert()
    return step


def chain(nodes: int) -> Callable[[], Any]:
    """A match that descends through so many edges of one block."""
    tree, tokens = cache(2 * nodes * BLOCK_SIZE), prompt(nodes * BLOCK_SIZE)
    tree.insert(tokens)
    for end in range(nodes - 1, 0, -1):
        tree.match(tokens[: end * BLOCK_SIZE])
    query = pack(tokens)
    return lambda: tree.match(query)


def against_sglang() -> Iterator[Row]:
    """Ours and the peer's in turn, both given Python lists; then ours with packed keys."""
    ours = {f"match {n} {kind}": work for n in LENGTHS for kind, work in matches(n, packed=False).items()}
    ours["turn 1000"] = turn(1_000)
    if not folders():
        yield from (Row(f"radix, {name}", "µs", median(cpu_time(work, 1) for _ in range(3)),
                        note=f"not here: {PEER} (KVLAB_PEERS names no folder)") for name, work in ours.items())
        return
    with Peer(PEER) as peer:
        if peer.why:
            yield Row("radix", note=f"not here: {PEER} ({peer.why})")
            return
        for name, work in ours.items():
            pair = interleaved(lambda w=work: cpu_time(w, 1), lambda n=name: peer.measure(n), 5)
            known = not math.isnan(pair[1])
            yield Row(f"radix, {name}", "µs", pair[0], PEER if known else "", pair[1] if known else None, 1.0, "lower")


def packed_keys() -> Iterator[Row]:
    """What a caller saves who keeps token ids packed."""
    for n in LENGTHS:
        lists, packed = matches(n, packed=False), matches(n, packed=True)
        for kind in packed:
            pair = interleaved(lambda w=packed[kind]: cpu_time(w, 1), lambda w=lists[kind]: cpu_time(w, 1), 5)
            yield Row(f"radix, match {n} {kind}, packed", "µs", pair[0], "the same from a list", pair[1])


def packed_beside() -> Iterator[Row]:
    """Packed keys beside a tree that takes ready tensors, and beside a compiled one that takes lists."""
    for name, target in ((MINI, 1.0), (CPP, 0.5)):
        yield from beside(name, [
            (f"radix, match {n} {kind}, packed", f"match {n} {kind}", partial(cpu_time, work, 1), target)
            for n in LENGTHS for kind, work in matches(n, packed=True).items()])


def full_pool() -> Iterator[Row]:
    """Evict and insert 256 tokens where 50,000 sequences of as many are cached and nothing is free."""
    yield from beside(FULL, [("radix, evict + insert, 50,000 leaves", f"turn {CACHED}",
                              partial(cpu_time, turn(CACHED), 1), 1 / 1.5)])


def growth() -> Iterator[Row]:
    """Eviction in a large tree, and a chain ten times as deep."""
    small, large = turn(1_000), turn(50_000)
    pair = interleaved(lambda: cpu_time(large, 1), lambda: cpu_time(small, 1), 7)
    yield Row("radix, evict + insert, 50,000 leaves", "µs", pair[0], "the same at 1,000 leaves", pair[1], 1.3, "lower")
    deep, shallow = chain(1_000), chain(100)
    pair = interleaved(lambda: cpu_time(deep, 1_000), lambda: cpu_time(shallow, 100), 5)
    yield Row("radix, match, a node of 1,000", "µs", pair[0], "a node of 100", pair[1], 1.3, "lower")


def metadata(sequences: int = 1_000, tokens: int = 2_048) -> Iterator[Row]:
    """Bytes of tree and pool for sequences that share nothing, over their tokens."""
    for block_size, target in ((16, 1.0), (1, None)):
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        tree = cache(sequences * tokens, block_size)
        for i in range(sequences):
            tree.insert(array("I", range(i * tokens, (i + 1) * tokens)))
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        yield Row(f"radix, metadata at block size {block_size}", "B/token", taken / sequences / tokens, "limit", 7.0,
                  target, "lower")


def radix() -> Iterator[Row]:
    """All rows of the radix index."""
    for rows in (against_sglang, packed_keys, packed_beside, full_pool, growth, metadata):
        yield from rows()
