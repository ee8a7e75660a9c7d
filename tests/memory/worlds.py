"""Small allocators for the tests of this room, and pictures of their whole state: what the tests here share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from kvlab.contract import Event, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.block_pool import HOLE, INDEX_MASK, BlockPool
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.memory.records import AllocationReceipt
from kvlab.memory.transaction import AllocatorTxn
from tests.support import FIXTURES

QUICK = settings(deadline=None, derandomize=True, database=None)

EQUAL = ((4, 9), (4, 7))
THREE = ((4, 8), (4, 11), (4, 9))
UNEQUAL = ((4, 8), (2, 15), (8, 6))
WORLDS = (EQUAL, THREE, UNEQUAL)
"""Per group: tokens a block, and blocks in the pool. Small, so that memory runs out."""
TIGHT = (((4, 6), (4, 5)), ((4, 5), (2, 9), (8, 4)), ((2, 7), (2, 8)))
"""Even smaller: hardly a block is taken that somebody else does not still want."""

NAMES = "ABCDEF"
KINDS = ("allocate", "fork", "append", "append", "decode", "truncate", "truncate", "end", "cache_full", "cache_full",
         "touch", "touch", "evict")
ODD = 9
PICKS = st.integers(0, ODD)
CHOICES = st.tuples(st.sampled_from(KINDS), PICKS, PICKS, PICKS)
"""What `propose` turns into an operation on whatever is there."""


def propose(choice: tuple[str, int, int, int], live: dict[str, int], bundles: list[list[str]],
            spare: str = NAMES) -> dict[str, Any]:
    """An operation that mostly makes sense: `live` gives each request's length, `bundles` cached ones, latest last.

    A new request gets one of the `spare` names.
    One pick in ten is odd: a name that nobody has, a name that somebody has, a length that cannot be.
    """
    kind, a, b, c = choice
    names = sorted(live)
    name = "Z" if a == ODD or not names else names[a % len(names)]
    new = names[0] if b == ODD and names else next((n for n in spare if n not in live), spare[0])
    picked = [bundles[-1 - i % len(bundles)] for i in range(b % 4, b % 4 + 1 + c % 2)] if bundles else []
    if c == ODD and picked:
        picked = [[*picked[0][:-1], bundles[0][-1]]]
    blocks = [[0], [1], [0, 1], [2]][b % 4]
    order = [names[(i + a) % len(names)] for i in range(len(names))] + [name] * (b == ODD)
    arguments: dict[str, dict[str, Any]] = {
        "allocate": {"request": new, "tokens": c + 3},
        "fork": {"request": name, "child": new},
        "append": {"requests": [[name, c % 5 + 1]]},
        "decode": {"requests": [[n, c % 3 + 1] for n in order]},
        "truncate": {"request": name, "tokens": 0 if b == ODD else max(1, live.get(name, 1) + 1 - c % 6)},
        "cache_full": {"request": name, "blocks": blocks,
                       "keys": [f"{c:08x}/{j:024x}" if c % 2 else f"{c:02x}b{j}" for j in blocks]},
        "touch": {"request": new, "blocks": picked} | ({"tokens": 4 * len(picked) + c - 1} if a % 3 == 1 else {}),
        "evict": {"blocks": picked},
    }
    crowded = len(names) >= len(spare)
    if kind == "end" or (crowded and kind in ("allocate", "fork", "touch") and b != ODD):
        kind = ("release", "cancel")[b % 2] if crowded or len(names) > 2 else "append"
    return {"op": "append" if kind == "decode" else kind, **arguments.get(kind, {"request": name})}


class PlugPulled(Exception):  # noqa: N818 - it is what happened, not an error of ours
    """What a fault looks like: not a refusal, just the end."""


class Plug:
    """An observer that pulls the plug at the `at`-th step of a transaction; past the last one it never does."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, event: Event) -> None:
        self.left -= event.kind == "staged"
        if event.kind == "staged" and not self.left:
            raise PlugPulled(event.step)


def lengths(allocator: Allocator) -> dict[str, int]:
    return {name: request.context for name, request in allocator.requests.items()}


def first_bundles(allocator: Allocator, request: str, blocks: list[int]) -> list[list[str]]:
    """The printed handles of some logical blocks of a request, one a group."""
    tables = allocator.snapshot()["requests"][request]["tables"].values()
    return [[table[j] for table in tables] for j in blocks if all(j < len(table) for table in tables)]


def layout_of(groups: tuple[tuple[int, int], ...]) -> CacheLayoutManifest:
    """One layer a group, one scalar a row: bytes do not matter here."""
    return CacheLayoutManifest(tuple(
        CacheGroup(f"g{i}", i, i + 1, 1, 1, 2, size, blocks, 1000 * (i + 1))
        for i, (size, blocks) in enumerate(groups)
    ))


def article() -> Allocator:
    """The article's machine before its trace: A with 33 tokens, one block of four free in each group."""
    base = json.loads((FIXTURES / "loop5_ownership.json").read_text())["base"]
    machine = Allocator(CacheLayoutManifest.from_dict(base))
    machine.load(base)
    return machine


def picture(allocator: Allocator) -> dict[str, Any]:
    """Everything that is committed, the words in the free queues included, bit for bit."""
    requests = {r.request_id: (r.generation, r.version, r.context, [t.tolist() for t in r.tables])
                for r in allocator.requests.values()}
    pools = [{"queue": [word for word in ring(p) if word != HOLE], "shared": dict(p.shared), "free": p.free_count}
             | allocator.snapshot()["blocks"][p.group] for p in allocator.pools]
    return {"epoch": allocator.epoch, "digest": allocator.digest, "requests": requests, "pools": pools}


def ring(pool: BlockPool) -> list[int]:
    """The words between head and tail, holes included."""
    return [int(pool.ring[position % pool.size]) for position in range(pool.head, pool.tail)]


def at_rest(allocator: Allocator) -> bool:
    """Whether no transaction holds anything: nothing reserved, nothing leased."""
    return not any(p.reserved or p.leases for p in allocator.pools)


def queues_are_sound(allocator: Allocator) -> bool:
    """Whether each free queue's counts and places are those of its ring, and nothing spare stands before the cursor."""
    for pool in allocator.pools:
        words = ring(pool)
        at = {word & INDEX_MASK: pool.head + n for n, word in enumerate(words) if word != HOLE}
        current = all(pool.current(word) for word in words if word != HOLE)
        noted = all(at.get(i) == position for notes in (pool.place, pool.reserved, pool.parked)
                    for i, position in notes.items())
        waiting = [p for i, p in at.items() if i not in pool.reserved and i not in pool.parked]
        if not (current and noted and len(at) == pool.free_count and words.count(HOLE) == pool.holes
                and words[:1] != [HOLE] and len(waiting) == pool.spare
                and all(p >= pool.cursor for p in waiting) and pool.place.keys() == at.keys() & pool.keys.keys()
                and len(pool.place) == len(list(pool.place)) and len(pool.keys) == len(list(pool.keys))):
            return False
    return True


def refused(reason: str, call: Callable[..., object], *args: object) -> None:
    """Assert that a call is refused with this reason."""
    with pytest.raises(Rejected) as no:
        call(*args)
    assert no.value.reason == reason


def shared(machine: Allocator) -> Allocator:
    """A and D share everything, the tail of two rows included."""
    machine.append("A")
    machine.fork("A", "D")
    return machine


def staged(machine: Allocator, request: str, tokens: int = 1) -> AllocatorTxn:
    return machine.stage({"op": "append", "request": request, "tokens": tokens})


def finish(txn: AllocatorTxn) -> AllocationReceipt:
    """Report every row as written, and publish."""
    txn.finish_writes()
    return txn.publish()
