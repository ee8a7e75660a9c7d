"""Which moments of a radix cache's history a reader sees, and the state that each of them shows; it draws nothing.

Plain data only: `History.to_dict()` of a `RadixCache`. An operation with parts becomes several beats: what arrives, a
split, an eviction edge by edge. All of them but the last are staged: nobody else sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Json = Mapping[str, Any]

SHOWN_EVICTIONS = 3
ASKS = frozenset({"match", "handoff"})
PUBLISHES = frozenset({"publish", "finish", "extend"})


@dataclass(frozen=True, slots=True)
class Beat:
    """One moment. `before` and `after` are committed states with their digests, `tree` is the one in the picture.

    `what`: start, ask (a question stands over the tree), arrive (rows that are not published), split, evict, commit,
    refused. `query`: the tokens above the tree; `brought`: their slots, where they have some. `parted`: (new parent,
    old node, tokens of the parent) of the split that this beat shows. `gone`: edges evicted so far, in order.
    """

    what: str
    op: Json
    before: Json
    after: Json
    tree: Json
    digest: str
    digest_before: str | None = None
    receipt: Json | None = None
    reason: str = ""
    detail: str = ""
    query: tuple[int, ...] = ()
    brought: tuple[int, ...] = ()
    staged: frozenset[int] = frozenset()
    parted: tuple[int, int, int] | None = None
    gone: tuple[Json, ...] = ()

    @property
    def focus(self) -> set[int]:
        """Nodes that this beat is about, in any order; some may not be in its picture."""
        if self.receipt is None:
            node = self.op.get("node")
            return {node} if isinstance(node, int) else set()
        told = self.receipt
        nodes = {*told["path"], told["terminal"], *(self.parted or ())[:2]}
        nodes |= {n for n in (told["lock_from"], told["lock_to"], told["new_node"]) if n is not None}
        return nodes | {self.before["nodes"][str(e["node"])]["parent"] for e in self.gone}


def beats(history: Json) -> Iterator[Beat]:
    """The beats of a history, in order. ValueError for the history of another machine. O(steps x state)."""
    if history.get("kvlab") != "history/1" or {s.get("kind") for s in history["snapshots"].values()} != {"radix"}:
        raise ValueError("not the history of a radix cache")
    before, digest = None, None
    for step in history["steps"]:
        after = history["snapshots"][step["digest"]]
        base = Beat("start", step["op"], before or after, after, after, step["digest"], digest,
                    step.get("receipt"), step.get("reason", ""), step.get("detail", ""))
        if step["kind"] == "start":
            yield base
        elif step["kind"] == "refused":
            yield replace(base, what="refused")
        else:
            yield from _committed(replace(base, what="commit"))
        before, digest = after, step["digest"]


def _committed(done: Beat) -> Iterator[Beat]:
    name = done.receipt["operation"]
    if name in ASKS:
        yield from _asked(done)
    elif name == "insert":
        yield from _inserted(done)
    elif name in PUBLISHES:
        yield from _published(done)
    elif name == "evict":
        yield from _evicted(done)
    else:
        yield replace(done, parted=_parted(done))


def _parted(done: Beat) -> tuple[int, int, int] | None:
    return next((tuple(s) for s in done.receipt["splits"]), None)


def _staged(done: Beat, what: str, tree: Json, **more: Any) -> Beat:
    """Something that happens before publication: the committed state is still the one before."""
    return replace(done, what=what, after=done.before, tree=tree, digest=done.digest_before, **more)


def _asked(done: Beat) -> Iterator[Beat]:
    query = tuple(done.op["tokens"])
    if done.receipt["splits"]:
        yield _staged(done, "ask", done.before, query=query)
    yield replace(done, query=query, parted=_parted(done))


def _inserted(done: Beat) -> Iterator[Beat]:
    told, query = done.receipt, tuple(done.op["tokens"])
    if not told["matched"]:
        yield done
        return
    brought = tuple(done.op.get("slots") or _references(done) + told["allocated"])
    mine = frozenset(told["allocated"]) or frozenset(done.before["private"]) & frozenset(brought)
    tree = taken(done.before, told["allocated"])
    arrived = _staged(done, "arrive", tree, query=query, brought=brought, staged=mine)
    yield arrived
    if (split := _parted(done)) is not None:
        yield replace(arrived, what="split", tree=divided(tree, *split), parted=split)
    yield done


def _references(done: Beat) -> list[int]:
    """The slots of the protected tokens, which an insertion leaves to the tree."""
    keep, out = done.op.get("protected_len", 0) // done.before["block_size"], []
    for node in done.receipt["path"]:
        out += done.after["nodes"][str(node)]["slots"]
    return out[:keep]


def _published(done: Beat) -> Iterator[Beat]:
    told, request = done.receipt, done.receipt["request"]
    row = done.before["requests"][request]
    if told["operation"] == "extend":
        yield done
        return
    grown = row | {"tokens": [*row["tokens"], *done.op.get("append", ())]}
    slots = [*told["allocated"], *(done.op.get("slots") or ())]
    tree = taken(done.before, told["allocated"])
    tree = tree | {"requests": tree["requests"] | {request: grown | {"table": [*row["table"], *slots]}}}
    mine = frozenset(slots)
    split = _parted(done)
    if slots:
        yield _staged(done, "arrive", tree, staged=mine)
    if split is not None:
        yield _staged(done, "split", divided(tree, *split), staged=mine, parted=split)
    yield done


def _evicted(done: Beat) -> Iterator[Beat]:
    edges, tree = done.receipt["evicted"], done.before
    for i, edge in enumerate(edges[:-1][:SHOWN_EVICTIONS], 1):
        tree = without(tree, edge)
        yield _staged(done, "evict", tree, gone=tuple(edges[:i]))
    yield replace(done, gone=tuple(edges))


# ---------------------------------------------------------------- states between two commits
def taken(state: Json, slots: Sequence[int]) -> Json:
    """Slots that have left the free queue for a producer."""
    gone = set(slots)
    return {**state, "free": [s for s in state["free"] if s not in gone], "private": sorted({*state["private"], *gone})}


def divided(state: Json, new: int, old: int, at: int) -> Json:
    """A split that has been made and not published: the new node is the parent and holds the first `at` tokens."""
    row, where = state["nodes"][str(old)], at // state["block_size"]
    head = row | {"tokens": row["tokens"][:at], "slots": row["slots"][:where]}
    tail = row | {"tokens": row["tokens"][at:], "slots": row["slots"][where:], "parent": new}
    return {**state, "nodes": state["nodes"] | {str(new): head, str(old): tail}}


def without(state: Json, edge: Json) -> Json:
    """A leaf that is gone; its slots stand at the end of the free queue."""
    nodes = {name: row for name, row in state["nodes"].items() if name != str(edge["node"])}
    return {**state, "nodes": nodes, "free": [*state["free"], *edge["slots"]]}
