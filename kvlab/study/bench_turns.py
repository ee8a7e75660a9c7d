"""Chats that grow turn by turn through the radix index, beside other engines' trees.

It owns no machine and no workload of a peer: `kvlab.study.peer_trees` has the chats and the peers' calls.

A request, here: `match` the prompt, `lock` its node, `finish` (slots for the rest and the answer, insert, duplicates
and tail given back, unlock), with three receipts, partition checks and the chained digest. There: match, lock, take
slots, insert, give back, unlock, and no records. What a sealed handoff to a scheduler adds here has rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.token_keys import TOKEN_BYTES, pack
from kvlab.study.bench import Row, interleaved
from kvlab.study.bench_radix import CPP, MINI, PEER, beside
from kvlab.study.peer_trees import CHATS, chat_turns
from kvlab.study.peers import prepared_time

LIGHTLLM = "LightLLM tree"
BESIDE: dict[str, tuple[tuple[int, bool, float | None], ...]] = {
    PEER: ((16, False, None), (1, False, None)),
    CPP: ((16, False, 0.5), (1, False, 0.5), (16, True, 0.5), (1, True, 0.5)),
    MINI: ((16, True, None), (1, True, None)),
    LIGHTLLM: ((1, True, 0.5),)}
"""Peer -> block size, our keys packed or not, target. SGLang's trees take lists whatever their caller holds; the other
two take their tokens ready in a tensor, and stand beside our packed keys.
"""
Asked = tuple[list[tuple[Any, Any]], int]


def requests(packed: bool) -> Asked:
    """Each request's prompt and all its tokens, in one form; the bytes (packed) or items (list) a token takes."""
    form = pack if packed else list
    return [(form(tokens[:said]), form(tokens)) for tokens, said in chat_turns()], TOKEN_BYTES if packed else 1


def play(tree: RadixCache, asked: Asked, sealed: bool = False) -> RadixCache:
    """Every request in turn, to its end; `sealed` takes the lease by a handoff that the scheduler admits."""
    rows, stride = asked
    for i, (said, whole) in enumerate(rows):
        name = f"r{i}"
        if sealed:
            receipt = tree.handoff(name, said)
            matched = receipt.matched_tokens
            tree.settle(receipt, "admit")
        else:
            found = tree.match(said)
            matched = found.matched
            tree.apply({"op": "lock", "request": name, "node": found.terminal})
        tree.finish(name, whole[matched * stride :])
    return tree


def measured(block_size: int, packed: bool, sealed: bool = False) -> Callable[[], float]:
    """Microseconds a request, on an empty tree with room for all."""
    asked = requests(packed)
    room = 2 * sum(len(tokens) for tokens, _ in chat_turns()[-CHATS:])

    def empty() -> RadixCache:
        return RadixCache(room // block_size, block_size=block_size, audit="chain")

    return lambda: prepared_time(lambda tree: play(tree, asked, sealed), len(asked[0]), empty)


def turns() -> Iterator[Row]:
    """All rows of growing chats."""
    for size in (16, 1):
        packed, lists = measured(size, packed=True), measured(size, packed=False)
        pair = interleaved(packed, lists, 5, min)
        yield Row(f"turns of chats, block size {size}, packed", "µs", pair[0], "the same from lists", pair[1])
        pair = interleaved(measured(size, packed=True, sealed=True), packed, 5, min)
        yield Row(f"turns of chats, block size {size}, handoff", "µs", pair[0], "without its sealed receipt", pair[1])
    for peer, wanted in BESIDE.items():
        yield from beside(peer, [(f"turns of chats, block size {size}{', packed' if packed else ''}", f"turns {size}",
                                  measured(size, packed), target) for size, packed, target in wanted])
