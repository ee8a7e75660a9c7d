"""What lesson and page on the radix tree share: a cache that is asked, the traces they play, predictions, orders.

It owns no rule: the cache decides, the fixtures say what is forbidden, and this module asks and keeps the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvlab.contract import Event, History, Json, Rejected
from kvlab.reasons import REASONS
from kvlab.reuse.eviction import ORDERS
from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.token_keys import TOKEN_BYTES
from kvlab.study import fixtures
from kvlab.study.lesson_ownership import Case
from kvlab.study.traced_request import TracedRequest
from kvlab.views import radix
from kvlab.views.scene import Recording

QUESTION = "Is a radix tree just a faster dict?"
POLICIES = ("normative", "sglang-0.5.11")
OPERATIONS = 18
"""How many of the fixture's operations are the article's trace; the others are small cases behind it."""


def article() -> Json:
    """The article's trace: 18 operations on 24 slots of one token (0x08F), and what follows from it."""
    return fixtures.load_fixture(fixtures.FIXTURES / "loop7_radix.json")


def operations(count: int = OPERATIONS) -> list[Json]:
    """The first operations of the trace, without the questions between them."""
    return [step["op"] for step in article()["trace"] if "op" in step][:count]


# ---------------------------------------------------------------- a cache that is asked
class Tried:
    """One real radix cache, all that was asked of it, and what came of it: "" or the reason of a refusal."""

    def __init__(self, machine: RadixCache) -> None:
        self.machine, self.history, self.outcomes = machine, History(machine), []
        self.last: Any = None
        machine.observers.append(self._keep)

    def _keep(self, event: Event) -> None:
        self.last = event.receipt or self.last

    def do(self, op: Json) -> str:
        """Perform one operation; "" or the reason of its refusal."""
        try:
            self.machine.apply(op)
        except Rejected as no:
            self.outcomes.append(no.reason)
        else:
            self.outcomes.append("")
        return self.outcomes[-1]

    def recording(self, title: str, pieces: Mapping[int, str] | None = None, question: str = QUESTION) -> Recording:
        """All that has happened so far, to be played by a stage. `pieces`: token id -> text."""
        return radix.recording(self.history.to_dict(), title=title, question=question, pieces=pieces, reasons=REASONS)


def on_trace(count: int = OPERATIONS, *, eviction: str = "lru", policy: str = "normative",
             block_size: int = 1) -> Tried:
    """The article's operations on a cache of this kind. A lease ends where the match before it ended: node numbers
    are the article's only on its own machine."""
    tried = Tried(RadixCache(24, block_size=block_size, first_slot=1, eviction=eviction, policy=policy))
    for op in operations(count):
        plain = {k: v for k, v in op.items() if k != "tree_version"}
        tried.do(plain | {"node": tried.last.terminal} if op["op"] == "lock" else plain)
    return tried


# ---------------------------------------------------------------- chats grow the tree
def serve(tried: Tried, name: str, tokens: Sequence[int], *, runs_on: bool = False) -> int:
    """One chat as a server would do it; returns how many of its tokens were found.

    Match and lock all but the last token (something must be computed, for the logits), make room, compute the rest,
    publish. A chat that `runs_on` keeps its lease. What does not fit is refused and called off.
    """
    cache = tried.machine
    if tried.do({"op": "handoff", "request": name, "tokens": list(tokens[:-1])}):
        return 0
    found = tried.last.matched
    tried.do({"op": "settle", "receipt": tried.last.handoff, "disposition": "admit"})
    size = cache.tree.block_size
    short = -(-len(tokens) // size) - found // size - cache.pool.free_count
    if short > 0:
        tried.do({"op": "evict", "tokens": short * size})
    if tried.do({"op": "extend", "request": name, "append": list(tokens[found:])}):
        tried.do({"op": "cancel", "request": name})
    else:
        tried.do({"op": "publish" if runs_on else "finish", "request": name})
    return found


def found_in(requests: Iterable[TracedRequest], slots: int) -> Iterator[tuple[int, int, int, int]]:
    """(session, turn, prompt tokens, tokens found) of each request of a trace in text, one after another.

    The tree keeps prompts and answers; where it is full it evicts. `out_of_memory` if one does not fit at all.
    """
    cache = RadixCache(slots, audit="chain")
    for n, request in enumerate(requests):
        whole = request.prompt + request.output
        cache.settle(handed := cache.handoff(str(n), request.prompt[:-TOKEN_BYTES]), "admit")
        rest = whole[handed.matched_tokens * TOKEN_BYTES :]
        short = len(rest) // TOKEN_BYTES - cache.pool.free_count
        if short > 0:
            cache.evict(short)
        cache.finish(str(n), rest)
        yield request.session, request.turn, len(request.prompt) // TOKEN_BYTES, handed.matched_tokens


# ---------------------------------------------------------------- predictions, graded by running
PREDICTIONS: tuple[dict[str, str], ...] = (
    {"key": "split", "unit": "edges", "because": "A match may split, and it splits one edge at most.", "ask":
     "The tree holds one edge, 10 11 12 13 20 21. A request asks for 10 11 12 99. How many edges has the tree then?"},
    {"key": "back", "unit": "slots", "because": "What the tree has already is there twice.", "ask":
     "A chat has computed 10 11 12 13 30 31 on its own, in six slots. It is inserted. How many of the six go home?"},
    {"key": "evictable", "unit": "slots", "because": "A lock is on the whole path, up to the root.", "ask":
     "Two chats run, on 20 21 22 23 and on 30 31, both behind 10 11 12 13. The tree holds nothing else. How many slots "
     "are evictable?"},
    {"key": "ready", "unit": "slots", "because": "Only leaves may go, and 50 51 has children.", "ask":
     "Then 50 51 52 and 50 51 60 are inserted, and nobody runs them. Four slots are evictable. How many in leaves?"},
    {"key": "one", "unit": "slots", "because": "An edge goes whole.", "ask":
     "A tree whose only unlocked leaf is 70 71 72 is asked to evict 1 token. How many slots does it free?"},
    {"key": "none", "unit": "slots", "because": "Nobody evicts what is being read.", "ask":
     "And how many when every leaf is locked?"},
)


def answers() -> dict[str, int]:
    """The truth about the predictions, found by running the cache now."""
    all_of_it = [step["op"] for step in article()["trace"] if "op" in step]
    tried, told = Tried(RadixCache.of(article()["base"])), []
    ledgers, edges = [], []
    for op in all_of_it:
        tried.do(op)
        told.append(tried.last)
        ledgers.append(tried.machine.ask({"ask": "ledgers"}))
        edges.append(len(tried.machine.ask({"ask": "edges"})))
    return {"split": edges[1], "back": len(told[4].released), "evictable": ledgers[8]["evictable"],
            "ready": ledgers[10]["leaf_ready"], "one": len(told[-2].released), "none": len(told[-1].released)}


# ---------------------------------------------------------------- orders, policies, batches
SHELF: tuple[Json, ...] = (
    {"op": "insert", "tokens": [1, 1], "priority": 2}, {"op": "insert", "tokens": [2, 2], "priority": 1},
    {"op": "insert", "tokens": [3, 3], "priority": 3}, {"op": "insert", "tokens": [4, 4]},
    {"op": "match", "tokens": [1, 1]}, {"op": "match", "tokens": [3, 3]}, {"op": "match", "tokens": [1, 1]},
    {"op": "match", "tokens": [2, 2]}, {"op": "insert", "tokens": [5, 5], "priority": 4})
SHELF_NAMES = {1: "Anna", 2: "Ben", 3: "Clara", 4: "Dora", 5: "Emma"}
"""Five prompts of two tokens, used unequally: who goes first depends on the order, and on nothing else."""


def orders(policy: str = "normative") -> dict[str, list[str]]:
    """Eviction order -> whose prompt goes first, second, ... on the same workload."""
    out = {}
    for order in ORDERS:
        tried = Tried(RadixCache(10, eviction=order, policy=policy))
        for op in SHELF:
            tried.do(op)
        tried.do({"op": "evict", "tokens": 10})
        out[order] = [SHELF_NAMES[e.to_dict()["tokens"][0]] for e in tried.last.evicted]
    return out


HALF_USED: tuple[Json, ...] = (
    {"op": "insert", "tokens": [1, 2, 3, 4]}, {"op": "insert", "tokens": [9, 9]}, {"op": "match", "tokens": [1, 2]},
    {"op": "evict", "tokens": 1})


def half_used(policy: str) -> Tried:
    """A match that uses the first half of an edge, then an eviction: the policies differ in what it takes."""
    tried = Tried(RadixCache(8, policy=policy))
    for op in HALF_USED:
        tried.do(op)
    return tried


def rows_computed(requests: Sequence[Sequence[int]], order: Sequence[int], capacity: int) -> int:
    """Token rows that a cache of so many slots computes for a batch, served in this order, one after another."""
    cache, total = RadixCache(capacity), 0
    for i in order:
        cache.settle(handed := cache.handoff(str(i), requests[i]), "admit")
        need = len(requests[i]) - handed.matched_tokens
        if need > cache.pool.free_count:
            cache.evict(need - cache.pool.free_count)
        cache.finish(str(i), requests[i][handed.matched_tokens :])
        total += need
    return total


# ---------------------------------------------------------------- the failure lab
def malformed() -> list[Case]:
    """The malformed inputs of the article's loop."""
    return _cases(article())


def stories() -> list[Case]:
    """Inputs of public bugs that this cache refuses, by their issue."""
    return [case for name in ("incidents_radix", "incidents_radix_blocks")
            for case in _cases(fixtures.load_fixture(fixtures.FIXTURES / f"{name}.json"))]


def _cases(fixture: Json) -> list[Case]:
    return [Case(n["id"], n["what"], fixture, n) for n in fixture["negatives"]]
