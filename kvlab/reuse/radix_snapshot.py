"""A radix cache as plain data: writing it, restoring it, and the validator that every load and check calls.

It recomputes each invariant of the index from edges, leases and slot lists alone, and holds no state.
Order: form, edges, selectors, slots, locks, requests (contract Loop 7; first failing check wins).
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvlab.contract import Json, Rejected
from kvlab.reuse.eviction import ORDERS
from kvlab.reuse.radix_requests import LiveRequest
from kvlab.reuse.radix_tree import ROOT, RadixNode
from kvlab.reuse.token_keys import pack, unpack

if TYPE_CHECKING:
    from kvlab.reuse.radix_cache import RadixCache

POLICIES = ("normative", "sglang-0.5.11")
NODE_NUMBERS = ("parent", "lock", "last_access", "created", "hits", "priority")
REQUEST_NUMBERS = ("generation", "terminal", "tree_version", "priority", "protected_len", "prompt")
LARGEST = (1 << 31) - 1


def write(cache: RadixCache) -> Json:
    """The committed state: pool, edges with the selector that their parent files them under, leases. O(state)."""
    tree, pool = cache.tree, cache.pool
    selectors = {child.node_id: unpack(key[-tree.block_bytes :])
                 for parent in tree.nodes.values() for key, child in parent.children.items()}
    nodes = {str(n.node_id): {
        "parent": n.parent.node_id, "selector": selectors[n.node_id], "tokens": unpack(n.key), "slots": list(n.value),
        "lock": n.lock_ref, "last_access": n.last_access, "created": n.created, "hits": n.hits, "priority": n.priority,
        "extra_key": n.extra} for n in sorted(tree, key=lambda n: n.node_id)}
    requests = {name: {
        "generation": r.generation, "lease": r.lease_id, "terminal": r.terminal.node_id, "tree_version": r.tree_version,
        "extra_key": r.extra, "priority": r.priority, "tokens": unpack(r.tokens), "table": list(r.table),
        "protected_len": r.protected, "prompt": r.prompt, "admitted": r.admitted}
        for name, r in sorted(cache.requests.items())}
    return {"kind": "radix", "policy": cache.policy, "eviction": cache.eviction, "block_size": tree.block_size,
            "version": cache.version, "clock": cache.clock, "next_node": tree.next_id, "first_slot": pool.first_slot,
            "num_slots": pool.num_slots, "nodes": nodes, "free": list(pool.free()), "private": pool.private(),
            "requests": requests}


def restore(cache: RadixCache, snapshot: Json) -> None:
    """Fill an empty cache from a validated snapshot. O(state)."""
    tree, rows = cache.tree, snapshot["nodes"]
    for name, row in rows.items():
        node = RadixNode(int(name), None, pack(row["tokens"]), array("i", row["slots"]), row["extra_key"])
        node.lock_ref, node.last_access, node.created = row["lock"], row["last_access"], row["created"]
        node.hits, node.priority = row["hits"], row["priority"]
        tree.nodes[node.node_id] = node
    for name, row in rows.items():
        node = tree.nodes[int(name)]
        node.parent = tree.nodes[row["parent"]]
        node.parent.children[tree.selector(node)] = node
    cache.version, cache.clock, tree.next_id = snapshot["version"], snapshot["clock"], snapshot["next_node"]
    tree.protected, tree.evictable, tree.leaf_ready = tree.derived_ledgers()
    owned = [slot for node in tree for slot in node.value]
    cache.pool.restore(snapshot["free"], snapshot["private"], owned)
    for name, row in snapshot["requests"].items():
        cache.requests[name] = LiveRequest(
            name, row["generation"], row["lease"], tree.nodes[row["terminal"]], row["tree_version"], row["extra_key"],
            row["priority"], pack(row["tokens"]), array("i", row["table"]), row["protected_len"], row["prompt"],
            row["admitted"])
    tails = [slot for r in cache.requests.values() for slot in r.table[r.protected // tree.block_size :]]
    cache.loose.update(set(snapshot["private"]) - set(tails))
    for node in tree:
        if tree.ready(node):
            cache.heap.offer(node)


# ---------------------------------------------------------------- the validator
def validate(snapshot: Json) -> None:
    """Raise `Rejected` for the first broken invariant; return None for a legal committed state. O(state)."""
    try:
        whole = _form(snapshot)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Rejected("malformed_snapshot", f"{type(error).__name__}: {error}") from error
    if not whole:
        raise Rejected("malformed_snapshot", "a field of the snapshot has the wrong form")
    nodes, size = {int(name): row for name, row in snapshot["nodes"].items()}, snapshot["block_size"]
    for name, row in nodes.items():
        _edge(name, row, size)
    paths = {name: _path(nodes, name) for name in nodes}
    _selectors(nodes, size)
    _partition(snapshot)
    _locks(snapshot, nodes, paths)
    for name, row in snapshot["requests"].items():
        _request(snapshot, nodes, paths, name, row)


def _numbers(row: Json, names: tuple[str, ...]) -> bool:
    return all(type(row[k]) is int and -LARGEST <= row[k] <= LARGEST for k in names)


def _slots(row: Any) -> bool:
    return isinstance(row, list) and all(type(s) is int for s in row)


def _tokens(row: Any) -> bool:
    return isinstance(row, list) and all(type(t) is int and 0 <= t < 1 << 32 for t in row)


def _form(snapshot: Json) -> bool:
    whole = snapshot["policy"] in POLICIES and snapshot["eviction"] in ORDERS
    counts = ("block_size", "version", "clock", "next_node", "first_slot", "num_slots")
    whole &= _numbers(snapshot, counts) and snapshot["block_size"] >= 1 and snapshot["num_slots"] >= 0
    whole &= min(snapshot[k] for k in counts) >= 0
    whole &= _slots(snapshot["free"]) and _slots(snapshot["private"])
    for name, row in snapshot["nodes"].items():
        whole &= ROOT < int(name) < snapshot["next_node"] and str(int(name)) == name and _numbers(row, NODE_NUMBERS)
        whole &= _tokens(row["tokens"]) and _tokens(row["selector"]) and _slots(row["slots"]) and "extra_key" in row
        whole &= row["lock"] >= 0
    for row in snapshot["requests"].values():
        whole &= _numbers(row, REQUEST_NUMBERS) and _tokens(row["tokens"]) and _slots(row["table"])
        whole &= isinstance(row["lease"], str) and isinstance(row["admitted"], bool) and "extra_key" in row
    return whole


def _edge(name: int, row: Json, size: int) -> None:
    if not row["tokens"]:
        raise Rejected("empty_edge", f"node {name} has no tokens")
    if len(row["tokens"]) != len(row["slots"]) * size:
        raise Rejected("edge_length_mismatch",
                       f"node {name}: {len(row['tokens'])} tokens, {len(row['slots'])} slots of {size}")


def _path(nodes: dict[int, Json], name: int) -> list[int]:
    """Ids from the root's child down to this node; `unknown_node` if a parent is missing or the chain never ends."""
    path = [name]
    while (parent := nodes[path[-1]]["parent"]) != ROOT:
        if parent not in nodes or parent in path:
            raise Rejected("unknown_node", f"node {path[-1]} hangs under {parent}")
        path.append(parent)
    return path[::-1]


def _selectors(nodes: dict[int, Json], size: int) -> None:
    seen: set[tuple] = set()
    for name, row in nodes.items():
        if row["selector"] != row["tokens"][:size]:
            raise Rejected("child_selector_mismatch", f"node {name} starts with {row['tokens'][:size]}, its parent "
                           f"files it under {row['selector']}")
        parent = nodes.get(row["parent"], {"extra_key": row["extra_key"]})
        place = (row["parent"], repr(row["extra_key"]), *row["selector"])
        if place in seen or parent["extra_key"] != row["extra_key"]:
            raise Rejected("child_selector_mismatch", f"node {name}: a sibling has this selector, or the extra key "
                           "is not its parent's")
        seen.add(place)


def _partition(snapshot: Json) -> None:
    """Tree, private and free slots: disjoint and complete (F7.03)."""
    first, count = snapshot["first_slot"], snapshot["num_slots"]
    owned = [s for row in snapshot["nodes"].values() for s in row["slots"]]
    seen = Counter([*owned, *snapshot["private"], *snapshot["free"]])
    for slot, times in seen.items():
        if not first <= slot < first + count:
            raise Rejected("slot_out_of_range", f"slot {slot}, the pool has {first}..{first + count - 1}")
        if times > 1:
            raise Rejected("duplicate_slot_owner", f"slot {slot} stands at {times} places")
    if len(seen) != count:
        lost = next(s for s in range(first, first + count) if s not in seen)
        raise Rejected("slot_pool_leak", f"slot {lost} is neither the tree's, private nor free")


def _locks(snapshot: Json, nodes: dict[int, Json], paths: dict[int, list[int]]) -> None:
    """Stored locks are the leases whose path contains the node (F7.07)."""
    derived: Counter = Counter()
    for name, row in snapshot["requests"].items():
        if row["terminal"] != ROOT and row["terminal"] not in nodes:
            raise Rejected("unknown_node", f"the lease of {name} ends at {row['terminal']}")
        derived.update(paths.get(row["terminal"], ()))
    for name, row in nodes.items():
        parent = nodes.get(row["parent"])
        if row["lock"] and parent is not None and not parent["lock"]:
            raise Rejected("split_drops_lock", f"node {name} is locked, its parent {row['parent']} is not")
    for name, row in nodes.items():
        if row["lock"] != derived[name]:
            raise Rejected("lock_count_drift", f"node {name}: lock {row['lock']}, {derived[name]} leases pass it")


def _request(snapshot: Json, nodes: dict[int, Json], paths: dict[int, list[int]], name: str, row: Json) -> None:
    """A live request's table: the path's slots, then private ones. So it never points at a free slot."""
    size, path = snapshot["block_size"], paths.get(row["terminal"], [])
    tokens = [t for n in path for t in nodes[n]["tokens"]]
    slots = [s for n in path for s in nodes[n]["slots"]]
    if len(row["table"]) != -(-len(row["tokens"]) // size):
        raise Rejected("table_length_drift", f"{name}: {len(row['table'])} slots for {len(row['tokens'])} tokens")
    if row["protected_len"] != len(tokens) or row["tokens"][: len(tokens)] != tokens or (
            row["table"][: len(slots)] != slots) or any(nodes[n]["extra_key"] != row["extra_key"] for n in path):
        raise Rejected("path_slot_mismatch", f"{name}: the table does not begin with the path's slots {slots}")
    tail = row["table"][len(slots) :]
    others = [s for other, r in snapshot["requests"].items() if other != name
              for s in r["table"][r["protected_len"] // size :]]
    for slot in tail:
        if slot not in snapshot["private"]:
            raise Rejected("private_slot_not_reserved", f"{name} points at slot {slot}, which is not private")
        if slot in others or tail.count(slot) > 1:
            raise Rejected("duplicate_slot_owner", f"private slot {slot} stands in two tables")
