"""Real allocator histories for the tests of the pool view: the article's trace, a conversation, and random ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

from kvlab.contract import Event, History, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.block_pool import pack
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest, quarter_split
from kvlab.reasons import REASONS
from kvlab.views.pool import recording
from kvlab.views.scene import Frame, Recording

Json = dict[str, Any]
WORDS = {"title": "A pool", "question": "Who may write here?"}


def allocator(groups: int = 2, block_size: int = 16, num_blocks: int = 64) -> Allocator:
    if groups == 1:
        return Allocator(CacheLayoutManifest((CacheGroup("g0", 0, 8, 2, 32, 4, block_size, num_blocks, 100),)))
    return Allocator(quarter_split(8, 2, 32, 4, block_size=block_size, num_blocks=num_blocks))


def plain(history: History) -> Json:
    """Through JSON, as a file or a browser would hand it over."""
    return json.loads(json.dumps(history.to_dict()))


def attempt(call: Callable[..., Any], *args: Any) -> None:
    with suppress(Rejected):
        call(*args)


def article() -> Json:
    """One block free in each group; A forks into D; D's copy-on-write fails half way, then succeeds (article L5)."""
    machine = Allocator(
        CacheLayoutManifest(
            (CacheGroup("g0", 0, 24, 4, 128, 2, 16, 4, 1000), CacheGroup("g1", 24, 32, 4, 128, 2, 16, 4, 2000))
        )
    )
    machine.allocate("A", 34)
    history = History(machine)

    def fault(event: Event) -> None:
        if event.kind == "staged" and event.step.startswith("reserve") and event.group == "g0":
            raise Rejected("fault_after_partial_reservation", "the power went")

    machine.fork("A", "D")
    machine.observers.append(fault)
    attempt(machine.append, "D")
    machine.observers.remove(fault)
    machine.append("D")
    machine.append("D")
    machine.truncate("D", 32)
    attempt(machine.truncate, "D", 900)
    machine.allocate("F", 16)
    machine.cancel("D")
    machine.release("A")
    return plain(history)


def conversation(tokens: int = 20, **shape: int) -> tuple[Json, Json]:
    """Two prompts that decode in turn, one token an operation, with notes as an engine would write them."""
    machine, notes, said = allocator(**shape), {}, {"A": "", "B": ""}
    history = History(machine)
    for request, rows in (("A", 30), ("B", 27)):
        machine.allocate(request, rows)
        notes[machine.epoch] = {"computed": rows}
    for i in range(tokens):
        for request in "AB":
            machine.append(request)
            piece = f" word{i}"
            said[request] += piece
            notes[machine.epoch] = {"pieces": {request: piece}, "say": {request: said[request]}, "computed": 1}
    machine.release("A")
    machine.release("B")
    return plain(history), notes


class Walk:
    """Random legal and illegal operations on a real allocator, up to eight requests of up to forty blocks."""

    def __init__(self, seed: int, names: Callable[[int], str], **shape: int) -> None:
        self.random, self.names, self.count, self.keys = random.Random(seed), names, 0, 0
        self.machine = allocator(**shape)
        self.history = History(self.machine)

    def run(self, steps: int) -> Json:
        moves = [self.allocate, self.fork, self.append, self.append, self.append, self.batch, self.truncate, self.end]
        moves += [self.cache, self.found, self.too_much, self.rolled_back, self.two_open]
        self.machine.allocate(self.fresh(), self.size * (self.machine.groups[0].num_blocks * 5 // 8))
        for _ in range(steps):
            attempt(self.random.choice(moves))
        self.machine.check()
        return plain(self.history)

    def any(self) -> str:
        return self.random.choice(list(self.machine.requests))

    def fresh(self) -> str:
        self.count += 1
        return self.names(self.count - 1)

    @property
    def size(self) -> int:
        return self.machine.groups[0].block_size

    def allocate(self) -> None:
        if len(self.machine.requests) < 8:
            blocks = self.random.choice([1, 3, 12, 40])
            self.machine.allocate(self.fresh(), self.random.randint(1, self.size * blocks))

    def fork(self) -> None:
        if len(self.machine.requests) < 8:
            self.machine.fork(self.any(), self.fresh())

    def append(self) -> None:
        self.machine.append(self.any(), self.random.choice([1, 1, 1, 3 * self.size]))

    def batch(self) -> None:
        self.machine.apply({"op": "append", "requests": dict.fromkeys(self.machine.requests, 1)})

    def truncate(self) -> None:
        request = self.any()
        self.machine.truncate(request, self.random.randint(1, self.machine.requests[request].context + 2))

    def end(self) -> None:
        if len(self.machine.requests) > 1:
            self.machine.apply({"op": self.random.choice(["release", "cancel"]), "request": self.any()})

    def cache(self) -> None:
        request = self.any()
        self.keys += 1
        block = self.random.randrange(max(1, self.machine.requests[request].context // self.size))
        op = {"op": "cache_full", "request": request, "blocks": [block], "keys": [f"{self.keys:04x}beef"]}
        self.machine.apply(op)

    def found(self) -> None:
        pools = self.machine.pools
        index = self.random.choice([i for i in pools[0].keys if all(i in p.keys for p in pools)] or [0])
        bundle = [p.text(pack(index, int(p.generations()[index]))) for p in pools]
        op = {"op": "evict"} if self.random.random() < 0.3 else {"op": "touch", "request": self.fresh()}
        self.machine.apply(op | {"blocks": [bundle]})

    def too_much(self) -> None:
        self.machine.allocate("ZZ", self.size * 1000)

    def rolled_back(self) -> None:
        self.machine.stage({"op": "append", "request": self.any(), "tokens": self.size}).rollback()

    def two_open(self) -> None:
        """A transaction stays open while another one commits."""
        first = self.machine.stage({"op": "append", "request": self.any(), "tokens": self.size})
        attempt(self.machine.append, self.any())
        try:
            first.finish_writes()
            first.publish()
        except Rejected:
            first.rollback()


def walk(seed: int, steps: int = 35, names: Callable[[int], str] | None = None, **shape: int) -> Json:
    return Walk(seed, names or (lambda n: "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[n % 26]), **shape).run(steps)


def long_names(n: int) -> str:
    return f"chat-{n}-of-the-day"


WALKS: dict[str, tuple[dict[str, Any], list[str] | None]] = {
    "16 tokens": ({"seed": 1}, None),
    "4 tokens": ({"seed": 2, "block_size": 4}, None),
    "32 tokens, few blocks": ({"seed": 3, "block_size": 32, "num_blocks": 9}, None),
    "one group": ({"seed": 4, "groups": 1, "block_size": 8}, None),
    "one of two groups": ({"seed": 5, "block_size": 4}, ["g1"]),
    "long ids": ({"seed": 6, "names": long_names, "block_size": 8, "num_blocks": 24}, None),
}


@cache
def walked(name: str) -> Json:
    return walk(**WALKS[name][0])


@cache
def played(name: str) -> Recording:
    if name == "article":
        return recording(article(), reasons=REASONS, **WORDS)
    return recording(walked(name), groups=WALKS[name][1], **WORDS)


def frames() -> Iterator[tuple[str, int, Frame]]:
    for name in (*WALKS, "article"):
        yield from ((name, i, f) for i, f in enumerate(played(name).frames))


def states() -> Iterator[tuple[Json, list[str] | None]]:
    """Every committed state of the walks, with the groups that are shown."""
    for name, (_, groups) in WALKS.items():
        yield from ((snapshot, groups) for snapshot in walked(name)["snapshots"].values())
