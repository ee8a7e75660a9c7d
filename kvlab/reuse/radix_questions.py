"""Questions to a radix cache: read-only matches, ledgers, paths, victims, handoff work, the offline bound.

It changes nothing, not even a time of use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvlab.contract import Json, Rejected
from kvlab.reuse.radix_records import handoff_work
from kvlab.reuse.radix_theorem import dfs_bound
from kvlab.reuse.slot_pool import FREE, PRIVATE, TREE
from kvlab.reuse.token_keys import TOKEN_BYTES, TokenKey, unpack

if TYPE_CHECKING:
    from kvlab.reuse.radix_cache import RadixCache


def match(cache: RadixCache, tokens: Any, extra_key: Any = None) -> Json:
    """What a match would find; it never splits. `inside`: (node, tokens of it) where the query ends inside an edge."""
    tree = cache.tree
    walk = tree.walk(TokenKey(tokens, tree.block_size), extra_key)
    inside = [walk.partial.node_id, walk.into // TOKEN_BYTES] if walk.partial is not None else None
    return {"matched": walk.consumed // TOKEN_BYTES, "slots": list(walk.slots(tree.block_bytes)),
            "path": [n.node_id for n in walk.path], "terminal": walk.node(tree.root).node_id, "inside": inside}


def ledgers(cache: RadixCache) -> Json:
    """The token ledgers: protected + evictable = owned by the tree; leaf_ready is a part of evictable."""
    tree, size = cache.tree, cache.tree.block_size
    return {"protected": tree.protected * size, "evictable": tree.evictable * size,
            "leaf_ready": tree.leaf_ready * size}


def pool(cache: RadixCache) -> Json:
    """The partition of the slots: tree, private, free and their total."""
    counts = cache.pool.counts
    return {"tree": counts[TREE], "private": counts[PRIVATE], "free": counts[FREE], "slots": cache.pool.num_slots}


def path(cache: RadixCache, node: int) -> Json:
    """Tokens and slots along the path to a node (F7.02)."""
    row = cache.tree.path(cache.tree.node(node))
    return {"nodes": [n.node_id for n in row], "tokens": [t for n in row for t in unpack(n.key)],
            "slots": [s for n in row for s in n.value], "locks": [n.lock_ref for n in row]}


def edges(cache: RadixCache) -> Json:
    """Every edge by node id: tokens, slots, lock, parent."""
    return {str(n.node_id): {"tokens": unpack(n.key), "slots": list(n.value), "lock": n.lock_ref,
                             "parent": n.parent.node_id} for n in sorted(cache.tree, key=lambda n: n.node_id)}


def victims(cache: RadixCache) -> list[int]:
    """The leaves that may go now, in the order in which they would."""
    return [n.node_id for n in cache.heap.order(cache.tree)]


def work(cache: RadixCache, prompt: int, matched: int, row_bytes: int, free_tail: int = 0,
         block_size: int | None = None) -> Json:
    """What is left to do after a match; see `kvlab.reuse.radix_records.handoff_work`."""
    return asdict(handoff_work(prompt, matched, row_bytes, block_size or cache.tree.block_size, free_tail))


def bound(_: RadixCache, requests: list[list[int]], capacity: int, offline_fixed_batch: bool,
          tree_from_that_batch: bool) -> Json:
    """The offline depth-first bound of a batch; see `kvlab.reuse.radix_theorem`."""
    found = dfs_bound(requests, capacity, offline_fixed_batch=offline_fixed_batch,
                      tree_from_that_batch=tree_from_that_batch)
    return {"order": list(found.order), "rows": found.rows}


QUESTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (match, ledgers, pool, path, edges, victims, work, bound)}


def answer(cache: RadixCache, question: Json) -> Any:
    """Answer {"ask": word, ...}; `unknown_operation` for a question that there is not."""
    found = QUESTIONS.get(str(question.get("ask")))
    if found is None:
        raise Rejected("unknown_operation", f"no question {question.get('ask')!r}")
    try:
        return found(cache, **{k: v for k, v in question.items() if k != "ask"})
    except TypeError as error:
        raise Rejected("unknown_operation", f"{question['ask']}: {error}") from error
