"""The operations of the radix cache: each checks everything first, then changes tree, pool and requests, and reports.

It publishes nothing itself: `kvlab.reuse.radix_cache` gives the version, the digests and the receipt. A refusal comes
before the first change.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvlab.contract import Json, Rejected
from kvlab.reuse.radix_records import Evicted, RadixSchedulerHandoffReceipt
from kvlab.reuse.radix_requests import (
    LiveRequest,
    enough,
    live,
    references,
    reserved,
    verify_handoff,
    whole_number,
)
from kvlab.reuse.radix_tree import RadixNode, Walk
from kvlab.reuse.slot_pool import PRIVATE, TREE
from kvlab.reuse.token_keys import TOKEN_BYTES, TokenKey

if TYPE_CHECKING:
    from kvlab.reuse.radix_cache import RadixCache


# ---------------------------------------------------------------- parts that operations share
def visit(cache: RadixCache, walk: Walk, *, inserting: bool = False, priority: int = 0, counted: bool = True) -> Json:
    """Note the use of a walked path and make its end a node, by at most one split.

    Normative: the path is used now, once an operation; the suffix behind a split was not matched and keeps its times,
    the new parent inherits the age of its rows. sglang-0.5.11: the edge is touched before it is split, so its unmatched
    suffix looks used too; the new parent is new; only insertions count as hits.
    """
    tree, strict = cache.tree, cache.policy == "normative"
    now = cache.now()
    hit = counted and (strict or inserting)
    for node in walk.path:
        tree.touch(node)
        node.last_access = now
        node.hits += hit
        if inserting and priority > node.priority:
            node.priority = priority
    end, splits = walk.node(tree.root), ()
    if (child := walk.partial) is not None:
        tree.touch(child)
        if not strict:
            child.last_access = now
        end = tree.split(child, walk.into)
        end.last_access = now if strict else cache.now()
        end.created = child.created if strict else end.last_access
        end.hits = child.hits + hit
        end.priority = max(child.priority, priority) if inserting else child.priority
        splits = ((end.node_id, child.node_id, walk.into // TOKEN_BYTES),)
        if cache.heap.falling and tree.ready(child):
            cache.heap.offer(child)
    if cache.heap.falling and tree.ready(end):
        cache.heap.offer(end)
    return {"end": end, "splits": splits}


def graft(cache: RadixCache, end: RadixNode, key: bytes, slots: array, extra: Any, priority: int,
          counted: bool = True) -> RadixNode:
    """A new leaf that takes private slots over."""
    cache.pool.adopt(slots)
    leaf = cache.tree.attach(end, key, slots, extra)
    leaf.last_access = leaf.created = cache.now()
    leaf.hits, leaf.priority = int(counted), priority
    cache.heap.offer(leaf)
    return leaf


def ids(cache: RadixCache, node: RadixNode) -> tuple[int, ...]:
    return tuple([n.node_id for n in cache.tree.path(node)])


# ---------------------------------------------------------------- the index
def match(cache: RadixCache, tokens: Any, extra_key: Any = None) -> Json:
    """The longest cached prefix, in whole blocks. It notes the use and may split one edge. No logits cap: that is
    the caller's (pass tokens[:-1] when the last token's logits are needed)."""
    walk = cache.tree.walk(TokenKey(tokens, cache.tree.block_size), extra_key)
    slots = walk.slots(cache.tree.block_bytes)
    seen = visit(cache, walk)
    return {"matched": walk.consumed // TOKEN_BYTES, "slots": slots, "path": ids(cache, seen["end"]),
            "terminal": seen["end"].node_id, "splits": seen["splits"]}


def insert(cache: RadixCache, tokens: Any, slots: Sequence[int] | None = None, protected_len: int = 0,
           extra_key: Any = None, priority: int = 0) -> Json:
    """A finished producer's tokens: the cached prefix's incoming slots are released, the rest becomes one edge (F7.06).

    Without `slots` they are taken from the queue. The first `protected_len` tokens are the tree's already: their slots
    are references and are not released.
    """
    tree, pool = cache.tree, cache.pool
    key = TokenKey(tokens, tree.block_size)
    walk, blocks = tree.walk(key, extra_key), key.limit // tree.block_bytes
    found, keep = walk.consumed // tree.block_bytes, whole_number(protected_len, 0) // tree.block_size
    if keep > found or protected_len % tree.block_size:
        raise Rejected("path_slot_mismatch", f"{protected_len} tokens protected, {walk.consumed // TOKEN_BYTES} found")
    taken = array("i")
    if slots is None:
        enough(cache, blocks - keep)
        data = key.upto(key.limit)
        row = taken = pool.take(blocks - keep)
    else:
        references(walk, slots, keep, tree.block_bytes)
        data = key.whole()
        row = reserved(cache, slots[keep:], (blocks - keep, -(-key.tokens // tree.block_size) - keep))
        cache.own(row)
    seen = visit(cache, walk, inserting=True, priority=priority)
    released = row[: found - keep] + row[blocks - keep :]
    pool.give_back(released, PRIVATE)
    end, new = seen["end"], None
    if found < blocks:
        end = graft(cache, end, data[walk.consumed : key.limit], row[found - keep : blocks - keep], extra_key, priority)
        new = end.node_id
    return {"matched": walk.consumed // TOKEN_BYTES, "allocated": taken, "released": released, "new_node": new,
            "terminal": end.node_id, "path": ids(cache, end), "splits": seen["splits"]}


def split(cache: RadixCache, node: int, at: int) -> Json:
    """Divide one edge after `at` tokens, for its own sake."""
    child = cache.tree.node(node)
    shared = cache.tree.split(child, whole_number(at, 0) * TOKEN_BYTES)
    shared.last_access, shared.created = child.last_access, child.created
    shared.hits, shared.priority = child.hits, child.priority
    return {"terminal": shared.node_id, "path": ids(cache, shared), "splits": ((shared.node_id, node, at),)}


def evict(cache: RadixCache, tokens: int | None = None, node: int | None = None) -> Json:
    """Remove unlocked leaves, whole edges, until at least `tokens` are released or none is left; or one named leaf."""
    tree, gone = cache.tree, []
    wanted = whole_number(tokens) if node is None else 0
    released, count = array("i"), 0
    leaf = cache.heap.pop() if node is None else tree.node(node)
    while leaf is not None:
        tree.detach(leaf)
        gone.append(Evicted(leaf.node_id, leaf.key, leaf.value))
        released += leaf.value
        count += len(leaf.value) * tree.block_size
        leaf = cache.heap.pop() if count < wanted else None
    cache.pool.give_back(released, TREE)
    return {"released": released, "evicted": tuple(gone), "evicted_tokens": count,
            "outcome": "done" if count >= wanted else "short"}


# ---------------------------------------------------------------- leases
def _admit(cache: RadixCache, request: str, generation: int, node: RadixNode, tokens: bytes, prompt: int, extra: Any,
           priority: int, admitted: bool) -> LiveRequest:
    if request in cache.requests:
        raise Rejected("request_exists", f"request {request!r}")
    path = cache.tree.path(node)
    table = array("i")
    for step in path:
        table += step.value
    version = cache.version + 1
    return LiveRequest(request, whole_number(generation), f"lease-{request}-v{version}", node, version, extra, priority,
                       tokens, table, len(tokens) // TOKEN_BYTES, prompt, admitted)


def lock(cache: RadixCache, request: str, node: int, generation: int = 1, priority: int = 0) -> Json:
    """A lease on the path to a node: the request's table refers to the path's slots and nobody may evict them.

    Node 0 is the empty path, for a request that found nothing.
    """
    end = cache.tree.node(node)
    path = cache.tree.path(end)
    tokens = b"".join([n.key for n in path])
    made = _admit(cache, request, generation, end, tokens, len(tokens) // TOKEN_BYTES, end.extra, priority, True)
    cache.note(request)
    cache.requests[request] = made
    cache.tree.lock(end)
    return {"request": request, "lease": made.lease_id, "lock_to": node, "terminal": node, "path": ids(cache, end),
            "slots": made.table[:], "matched": made.protected}


def handoff(cache: RadixCache, request: str, tokens: Any, generation: int = 1, extra_key: Any = None,
            priority: int = 0) -> Json:
    """Match, lock and freeze: the evidence that the scheduler decides on, and no decision."""
    key = TokenKey(tokens, cache.tree.block_size)
    walk = cache.tree.walk(key, extra_key)
    prefix = key.data[: walk.consumed]
    made = _admit(cache, request, generation, cache.tree.root, prefix, key.tokens, extra_key, priority, False)
    made.table = walk.slots(cache.tree.block_bytes)
    seen = visit(cache, walk)
    end = made.terminal = seen["end"]
    cache.note(request)
    cache.requests[request] = made
    cache.tree.lock(end)
    path = ids(cache, end)
    receipt = RadixSchedulerHandoffReceipt(
        request, generation, made.tree_version, "", made.protected, tuple(made.table), path, end.node_id,
        (made.protected, key.tokens), made.lease_id)
    return {"request": request, "lease": made.lease_id, "lock_to": end.node_id, "terminal": end.node_id, "path": path,
            "slots": made.table[:], "matched": made.protected, "splits": seen["splits"], "handoff": receipt}


def settle(cache: RadixCache, receipt: Any, disposition: str) -> Json:
    """What the scheduler did with a handoff: `admit` keeps the lease, `defer` and `reject` give it back."""
    if disposition not in ("admit", "defer", "reject"):
        raise Rejected("unknown_operation", f"disposition {disposition!r}")
    request = verify_handoff(cache, receipt)
    if disposition != "admit":
        return cancel(cache, request.request_id)
    cache.note(request.request_id)
    request.admitted = True
    return {"request": request.request_id, "lease": request.lease_id, "terminal": request.terminal.node_id}


def unlock(cache: RadixCache, request: str | None = None, node: int | None = None) -> Json:
    """End a lease, named by its request or by the node where its path ends. The tree keeps the edges."""
    if request is None:
        end = cache.tree.node(node)
        request = next((r.request_id for r in cache.requests.values() if r.terminal is end), None)
        if request is None:
            locks = [n.lock_ref for n in cache.tree.path(end)]
            raise Rejected("lock_underflow", f"no lease ends at node {node}; the path's locks are {locks}")
    return cancel(cache, request)


def cancel(cache: RadixCache, request: str) -> Json:
    """A request ends and nothing of it is published: its private rows return to the pool, its lease ends."""
    found = cache.requests.get(request)
    if found is None:
        raise Rejected("unknown_request", f"request {request!r}")
    cache.note(request)
    tail = found.table[found.protected // cache.tree.block_size :]
    cache.tree.unlock(found.terminal)
    cache.pool.give_back(tail, PRIVATE)
    del cache.requests[request]
    return {"request": request, "lease": found.lease_id, "lock_from": found.terminal.node_id, "released": tail}


# ---------------------------------------------------------------- rows that are not published yet
def reserve(cache: RadixCache, count: int) -> Json:
    """Take slots for a producer that the cache does not know as a request; `insert` publishes them by number."""
    enough(cache, whole_number(count))
    taken = cache.pool.take(count)
    cache.disown(taken)
    return {"allocated": taken}


def give_back(cache: RadixCache, slots: Sequence[int]) -> Json:
    """Reserved slots that were never published return to the queue."""
    row = reserved(cache, slots, (len(slots),))
    cache.own(row)
    cache.pool.give_back(row, PRIVATE)
    return {"released": row}


def _appended(cache: RadixCache, found: LiveRequest, append: Any, slots: Sequence[int] | None) -> tuple[bytes, int]:
    """Packed tokens to append and how many new slots they need; every refusal that this can meet."""
    added, size = TokenKey(append, 1).whole(), cache.tree.block_size
    need = -(-(len(found.tokens) + len(added)) // (TOKEN_BYTES * size)) - len(found.table)
    if slots is None:
        enough(cache, need)
    else:
        reserved(cache, slots, (need,))
    return added, need


def _grow(cache: RadixCache, found: LiveRequest, added: bytes, need: int, slots: Sequence[int] | None) -> array:
    """Append tokens to a request with slots of its own; returns what was taken from the queue."""
    taken = cache.pool.take(need) if slots is None else array("i")
    if slots is not None:
        cache.own(slots)
    found.table += taken if slots is None else array("i", slots)
    found.tokens += added
    return taken


def extend(cache: RadixCache, request: str, append: Any, slots: Sequence[int] | None = None) -> Json:
    """Rows for more tokens of a request, private until they are published. Takes a slot a new block."""
    found = live(cache, request)
    added, need = _appended(cache, found, append, slots)
    cache.note(request)
    return {"request": request, "allocated": _grow(cache, found, added, need, slots), "slots": found.table[:],
            "terminal": found.terminal.node_id}


def _store(cache: RadixCache, found: LiveRequest, steps: list[str], counted: bool) -> Json:
    """Insert a request's whole blocks and release the duplicates behind its protected length."""
    tree = cache.tree
    key = TokenKey(found.tokens, tree.block_size)
    walk, size = tree.walk(key, found.extra, found.terminal), tree.block_bytes
    seen = visit(cache, walk, inserting=True, priority=found.priority, counted=counted)
    end, new = seen["end"], None
    if walk.consumed < key.limit:
        slots = found.table[walk.consumed // size : key.limit // size]
        end = graft(cache, end, found.tokens[walk.consumed : key.limit], slots, found.extra, found.priority, counted)
        new = end.node_id
    steps.append("insert_full_path")
    released = found.table[found.protected // tree.block_size : walk.consumed // size]
    cache.pool.give_back(released, PRIVATE)
    steps.append("free_slots[protected_len:prefix_len]")
    return {"key": key, "matched": walk.consumed // TOKEN_BYTES, "released": released, "splits": seen["splits"],
            "end": end, "new_node": new}


def publish(cache: RadixCache, request: str, append: Any = (), slots: Sequence[int] | None = None,
            chunked: bool = False) -> Json:
    """Publish an unfinished request: its whole blocks become the tree's, its table is rewritten to the tree's slots,
    its lease moves to the new end (golden L7.publish.order). A partial last block stays private.

    `chunked`: a prefill that goes on; under sglang-0.5.11 it does not count as a hit of its own edges.
    """
    found = live(cache, request)
    added, need = _appended(cache, found, append, slots)
    steps = ["validate_predecessor"]
    cache.note(request)
    taken = _grow(cache, found, added, need, slots)
    steps.append("reserve_append_slots")
    stored = _store(cache, found, steps, counted=not (chunked and cache.policy != "normative"))
    key, old, tree = stored["key"], found.terminal, cache.tree
    walk = tree.walk(key, found.extra)
    prefix = walk.slots(tree.block_bytes)
    end = visit(cache, walk, counted=False)["end"]
    steps.append("rematch_full_path")
    assert walk.consumed == key.limit and walk.partial is None, "what was inserted is not found whole"
    steps.append("assert_full_match")
    tree.unlock(old)
    steps.append("dec_lock_old")
    tree.lock(end)
    steps.append("inc_lock_new")
    found.table[: len(prefix)] = prefix
    found.protected, found.terminal = key.limit // TOKEN_BYTES, end
    steps += ["publish_request_prefix", "receipt"]
    return {"request": request, "matched": stored["matched"], "slots": found.table[:], "allocated": taken,
            "released": stored["released"], "splits": stored["splits"], "new_node": stored["new_node"],
            "terminal": end.node_id, "path": ids(cache, end), "lock_from": old.node_id, "lock_to": end.node_id,
            "lease": found.lease_id, "steps": tuple(steps)}


def finish(cache: RadixCache, request: str, append: Any = (), slots: Sequence[int] | None = None) -> Json:
    """A request ends: insert its whole blocks, release duplicates and the partial tail, end its lease."""
    found = live(cache, request)
    added, need = _appended(cache, found, append, slots)
    steps = ["validate_predecessor"]
    cache.note(request)
    taken = _grow(cache, found, added, need, slots)
    steps.append("reserve_append_slots")
    stored = _store(cache, found, steps, counted=True)
    tail = found.table[stored["key"].limit // cache.tree.block_bytes :]
    cache.pool.give_back(tail, PRIVATE)
    cache.tree.unlock(found.terminal)
    del cache.requests[request]
    steps += ["free_partial_tail", "dec_lock_old", "receipt"]
    end = stored["end"]
    return {"request": request, "matched": stored["matched"], "allocated": taken,
            "released": stored["released"] + tail, "splits": stored["splits"], "new_node": stored["new_node"],
            "terminal": end.node_id, "path": ids(cache, end), "lock_from": found.terminal.node_id,
            "lease": found.lease_id, "steps": tuple(steps)}
