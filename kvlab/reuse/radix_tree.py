"""The compressed radix tree: edges that own equal token and slot segments, splits, path locks and the three ledgers.

It owns structure and lock counts. It refuses to know the slot pool, requests, versions and which leaf should go first
(article 0x08A-0x08D, F7.01-F7.09).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvlab.contract import FactSum, Rejected, fact_hash
from kvlab.reuse.token_keys import TOKEN_BYTES, TokenKey, tag

ROOT = 0


class RadixNode:
    """A node and its incoming edge. `key`: packed tokens, `value`: their slots, one a block (SGLang's two names)."""

    __slots__ = ("children", "created", "extra", "hits", "key", "last_access", "lock_ref", "node_id", "parent",
                 "priority", "queued", "value")

    def __init__(self, node_id: int, parent: RadixNode | None, key: bytes, value: array, extra: Any = None) -> None:
        self.node_id, self.parent, self.key, self.value, self.extra = node_id, parent, key, value, extra
        self.children: dict[bytes, RadixNode] = {}
        self.lock_ref = self.last_access = self.created = self.hits = self.priority = 0
        self.queued = False


@dataclass(slots=True)
class Walk:
    """Where a query ends: whole edges in order, bytes consumed, and the edge it ends inside of, if it does."""

    path: list[RadixNode]
    consumed: int
    partial: RadixNode | None = None
    into: int = 0

    def node(self, root: RadixNode) -> RadixNode:
        """The last node that was consumed whole."""
        return self.path[-1] if self.path else root

    def slots(self, block_bytes: int) -> array:
        """The matched slots, in order: references, not a second owner. O(matched)."""
        out = array("i")
        for node in self.path:
            out += node.value
        if self.partial is not None:
            out += self.partial.value[: self.into // block_bytes]
        return out


class RadixTree:
    """Nodes by id under one root; sub-trees of other extra keys hang there under selectors of their own.

    `exposed(node)` is called when a node becomes an unlocked leaf. Ledgers count blocks and are kept with every move:
    `protected`, `evictable`, and its part `leaf_ready`. Ids are given once and never again.
    """

    def __init__(self, block_size: int, facts: FactSum | None, exposed: Callable[[RadixNode], None]) -> None:
        self.block_size, self.block_bytes, self.facts = block_size, block_size * TOKEN_BYTES, facts
        self.root = RadixNode(ROOT, None, b"", array("i"))
        self.nodes: dict[int, RadixNode] = {ROOT: self.root}
        self.next_id = 1
        self.protected = self.evictable = self.leaf_ready = 0
        self._exposed = exposed

    def __iter__(self) -> Iterator[RadixNode]:
        """Every node but the root."""
        nodes = iter(self.nodes.values())
        next(nodes)
        return nodes

    def node(self, node_id: Any) -> RadixNode:
        """A node by id; `unknown_node` if there is none (it may have been evicted)."""
        node = self.nodes.get(node_id) if isinstance(node_id, int) else None
        if node is None:
            raise Rejected("unknown_node", f"node {node_id!r}")
        return node

    def ready(self, node: RadixNode) -> bool:
        """Is this an unlocked leaf? Only such a one may be evicted."""
        return not node.children and node.lock_ref == 0 and node.parent is not None

    # ------------------------------------------------------------------ reading
    def walk(self, key: TokenKey, extra: Any = None, below: RadixNode | None = None) -> Walk:
        """The longest stored prefix of a query; reads only. O(matched tokens + nodes), nothing is sliced again.

        `below`: a node whose path is known to be the query's beginning, so that its tokens are not compared again.
        """
        path = self.path(below) if below is not None else []
        at, limit, block = sum([len(node.key) for node in path]) if path else 0, key.limit, self.block_bytes
        children, selector = (path[-1].children, b"") if path else (self.root.children, tag(extra))
        while at < limit:
            child = children.get(selector + key.upto(at + block)[at : at + block])
            if child is None:
                break
            same = key.agree(at, child.key)
            if same < len(child.key):
                same -= same % block
                return Walk(path, at + same, child, same)
            path.append(child)
            at += same
            children, selector = child.children, b""
        return Walk(path, at)

    def path(self, node: RadixNode) -> list[RadixNode]:
        """The nodes from below the root down to this one. O(depth)."""
        row = []
        while node.parent is not None:
            row.append(node)
            node = node.parent
        row.reverse()
        return row

    def selector(self, node: RadixNode) -> bytes:
        """Under which key the parent files this node."""
        first = node.key[: self.block_bytes]
        return tag(node.extra) + first if node.parent is self.root else first

    # ------------------------------------------------------------------ structure
    def split(self, child: RadixNode, at: int) -> RadixNode:
        """Divide an edge at byte `at`; the new node is the parent, the old one keeps its id and the suffix (F7.05).

        No slot is allocated, copied as a row or freed. `split_out_of_range` unless 0 < at < edge, at a block.
        """
        if not 0 < at < len(child.key) or at % self.block_bytes:
            raise Rejected("split_out_of_range", f"at {at // TOKEN_BYTES} of {len(child.key) // TOKEN_BYTES} tokens, "
                           f"blocks of {self.block_size}")
        self.touch(child, edge=True)
        parent, selector, where = child.parent, self.selector(child), at // self.block_bytes
        if self.ready(child):
            self.leaf_ready -= where
        head, tail = (child.key[:at], child.value[:where]), (child.key[at:], child.value[where:])
        child.key, child.value = tail
        shared = RadixNode(self._new_id(), parent, *head, child.extra)
        child.parent = shared
        shared.children[tail[0][: self.block_bytes]] = child
        parent.children[selector] = shared
        shared.lock_ref = child.lock_ref
        self.nodes[shared.node_id] = shared
        return shared

    def _new_id(self) -> int:
        node_id = self.next_id
        if self.facts is not None:
            for cell in (("ids",), ("edge", node_id), ("use", node_id)):
                self.facts.touch(cell)
        self.next_id += 1
        return node_id

    def attach(self, parent: RadixNode, key: bytes, value: array, extra: Any) -> RadixNode:
        """A new leaf. The caller gives a key of whole blocks and as many slots."""
        if self.ready(parent):
            self.leaf_ready -= len(parent.value)
        leaf = RadixNode(self._new_id(), parent, key, value, extra)
        parent.children[self.selector(leaf)] = leaf
        self.nodes[leaf.node_id] = leaf
        self.evictable += len(value)
        self.leaf_ready += len(value)
        return leaf

    def detach(self, leaf: RadixNode) -> None:
        """Remove a whole edge. `internal_node_eviction` under children, `locked_leaf_eviction` under a lock."""
        if leaf.children or leaf.parent is None:
            raise Rejected("internal_node_eviction", f"node {leaf.node_id} has {len(leaf.children)} children")
        if leaf.lock_ref:
            raise Rejected("locked_leaf_eviction", f"node {leaf.node_id} has lock {leaf.lock_ref}")
        self.touch(leaf, edge=True)
        parent = leaf.parent
        del parent.children[self.selector(leaf)], self.nodes[leaf.node_id]
        leaf.parent = None
        self.evictable -= len(leaf.value)
        self.leaf_ready -= len(leaf.value)
        if self.ready(parent):
            self.leaf_ready += len(parent.value)
            self._exposed(parent)

    # ------------------------------------------------------------------ locks
    def lock(self, node: RadixNode) -> None:
        """One more reference on the whole path (F7.07). O(depth)."""
        while node.parent is not None:
            self.touch(node)
            if node.lock_ref == 0:
                blocks = len(node.value)
                self.evictable -= blocks
                self.protected += blocks
                if not node.children:
                    self.leaf_ready -= blocks
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        """One reference less on the whole path; `lock_underflow` before anything is changed. O(depth)."""
        path = self.path(node)
        if any(n.lock_ref == 0 for n in path):
            raise Rejected("lock_underflow", f"locks {[n.lock_ref for n in path]} on the path to {node.node_id}")
        for node in path:
            self.touch(node)
            node.lock_ref -= 1
            if node.lock_ref == 0:
                blocks = len(node.value)
                self.protected -= blocks
                self.evictable += blocks
                if not node.children:
                    self.leaf_ready += blocks
                    self._exposed(node)

    # ------------------------------------------------------------------ facts
    def touch(self, node: RadixNode, edge: bool = False) -> None:
        """Tell the digest that this node is about to change: its use (lock, recency), or its edge too."""
        if self.facts is not None:
            self.facts.touch(("use", node.node_id))
            if edge:
                self.facts.touch(("edge", node.node_id))

    def fact(self, kind: str, node_id: int) -> int:
        """One fact of the digest: `edge` (tokens, slots, place) or `use` (lock, recency, counts); 0 if no such node."""
        node = self.nodes.get(node_id)
        if node is None or node.parent is None:
            return 0
        if kind == "edge":
            return fact_hash("edge", node_id, node.parent.node_id, self.selector(node).hex(), node.key.hex(),
                             node.value.tobytes().hex())
        return fact_hash("use", node_id, node.lock_ref, node.last_access, node.created, node.hits, node.priority)

    def total_from_nothing(self) -> int:
        """The digest of all nodes, recomputed. O(tree)."""
        return sum(self.fact(kind, node.node_id) for node in self for kind in ("edge", "use"))

    def derived_ledgers(self) -> tuple[int, int, int]:
        """protected, evictable and leaf-ready blocks, summed afresh over all edges (F7.08, F7.09). O(nodes)."""
        protected = sum(len(n.value) for n in self if n.lock_ref)
        evictable = sum(len(n.value) for n in self if not n.lock_ref)
        return protected, evictable, sum(len(n.value) for n in self if self.ready(n))
