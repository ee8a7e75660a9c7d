"""Where everything of a radix picture stands: rows, capsules, what is collapsed or counted; it draws and says nothing.

x is depth in tokens, y a row a leaf. The branch that is asked for comes to the first row, so that each token of a query
stands above the slot that it is compared with; otherwise rows keep their order. What does not fit is never shrunk: long
edges show their ends, more leaves than rows are counted, and of a path that is too deep the last edges are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.views.shapes import SLOT_H, SLOT_W

Json = Mapping[str, Any]
Rect = dict[str, float]
Item = int | str  # a node, or a request whose private slots stand behind its path

ROOT_X, FIRST_X, GAP, PAD, BETWEEN = 14, 53, 26, 8.5, 3
ROWS, ROW_Y, ROW_PITCH = 4, 146, 83  # the middle of the first row, and from row to row
TOP_Y, FREE_Y = 54, 446
LEASE_X, LEASE_LIMIT = 734, 712
PILL_H, STUB_W = SLOT_H + 12, 104
MOST = (99, 10, 8, 6, 5, 4, 3, 2, 1)


@dataclass(frozen=True, slots=True)
class Cells:
    """How an edge of `count` blocks is shown: one block a cell, but for one cell that stands for many."""

    spans: tuple[tuple[int, int], ...]

    def at(self, block: int) -> int:
        return next(i for i, (first, end) in enumerate(self.spans) if first <= block < end)


def cells(count: int, most: int) -> Cells:
    """At most `most` cells: the first blocks, what is between them in one, the last block."""
    if count <= most:
        return Cells(tuple((i, i + 1) for i in range(count)))
    head, last = max(0, most - 2), most >= 2
    if most == 2:
        return Cells(((0, 1), (1, count)))
    tail = ((count - 1, count),) if last else ()
    return Cells((*((i, i + 1) for i in range(head)), (head, count - len(tail)), *tail))


@dataclass(frozen=True, slots=True)
class Pill:
    """The place of an edge, or of a request's private slots: its left end, its middle, its cells."""

    x: float
    row: int
    cells: Cells
    slot_w: float = SLOT_W

    @property
    def w(self) -> float:
        return 2 * PAD - BETWEEN + len(self.cells.spans) * (self.slot_w + BETWEEN)

    @property
    def y(self) -> float:
        return ROW_Y + self.row * ROW_PITCH

    @property
    def end(self) -> float:
        return self.x + self.w

    def rect(self, block: int, y: float | None = None) -> Rect:
        """The cell in which a block stands; with `y` the same place in another row."""
        return self.cell(self.cells.at(block), y)

    def cell(self, i: int, y: float | None = None) -> Rect:
        x = self.x + PAD + i * (self.slot_w + BETWEEN)
        return {"x": x, "y": self.y - SLOT_H / 2 if y is None else y, "w": self.slot_w, "h": SLOT_H}

    def cut(self, block: int) -> float:
        """x of the border before a block; the middle of its cell where that holds others before it."""
        i = self.cells.at(block)
        x = self.x + PAD + i * (self.slot_w + BETWEEN) - BETWEEN / 2
        return x if self.cells.spans[i][0] == block else x + (self.slot_w + BETWEEN) / 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Places by node or request, the nodes behind the stub at the root, and the nodes that are only counted."""

    pills: Mapping[Item, Pill]
    stub: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    hidden_tails: tuple[str, ...] = ()
    slot_w: float = SLOT_W
    ranks: Mapping[int, float] = field(default_factory=dict)


class Branches:
    """The tree of a snapshot as the picture orders it: children of an item, older branches first, tails last."""

    def __init__(self, state: Json, ranks: Mapping[int, float]) -> None:
        self.state, self.size = state, state["block_size"]
        self.nodes = {int(name): row for name, row in state["nodes"].items()}
        self.kids: dict[Item, list[Item]] = {}
        for node in self.nodes:
            self.kids.setdefault(self.nodes[node]["parent"], []).append(node)
        self.ranks = self._ranked(ranks)
        for row in self.kids.values():
            row.sort(key=self.ranks.__getitem__)
        self.tails = {r: row for r, row in state["requests"].items()
                      if len(row["table"]) > row["protected_len"] // self.size}
        for request, row in self.tails.items():
            self.kids.setdefault(row["terminal"], []).append(request)

    def _ranked(self, known: Mapping[int, float]) -> dict[int, float]:
        """A node keeps its rank; a split's parent takes the place of its child; a new branch comes last."""
        ranks = {node: known[node] for node in self.nodes if node in known}

        def rank(node: int) -> float:
            if node not in ranks:
                below = [rank(kid) for kid in self.kids.get(node, ())]
                ranks[node] = min([float(node), *below])
            return ranks[node]

        for node in self.nodes:
            rank(node)
        return ranks

    def to_the_front(self, path: Sequence[int]) -> None:
        """Let the first row follow this path; the others keep their order."""
        for node in path:
            row = self.kids[self.nodes[node]["parent"]]
            if row[0] != node:
                self.ranks[node] = self.ranks[row[0]] - 1
                row.remove(node)
                row.insert(0, node)

    def blocks(self, item: Item) -> int:
        if isinstance(item, int):
            return len(self.nodes[item]["slots"])
        return len(self.tails[item]["table"]) - self.tails[item]["protected_len"] // self.size

    def parent(self, item: Item) -> int:
        return self.nodes[item]["parent"] if isinstance(item, int) else self.tails[item]["terminal"]

    def path(self, item: Item) -> list[Item]:
        """From below the root down to this item."""
        row = [item] if item else []
        while row and (above := self.parent(row[-1])):
            row.append(above)
        return row[::-1]

    def leaves(self, item: Item = 0) -> list[Item]:
        """Items without children, in the order of the rows."""
        out, stack = [], list(reversed(self.kids.get(item, [])))
        while stack:
            at = stack.pop()
            below = self.kids.get(at, [])
            out += [] if below else [at]
            stack += reversed(below)
        return out


def lay(branches: Branches, focus: Iterable[Item], slot_w: float, limit: float = LEASE_LIMIT) -> Layout:
    """The layout of a tree around the items that changed. O(nodes)."""
    focus = set(focus)
    paths = {leaf: branches.path(leaf) for leaf in branches.leaves()}
    rows = _chosen(branches, paths, focus)
    pills, stub = _fit(branches, [paths[leaf] for leaf in rows], slot_w, limit)
    if pills is None:
        best = max(rows, key=lambda leaf: len(focus & set(paths[leaf])))
        pills, stub = _last_edges(branches, paths[best], slot_w, limit)
    shown = {*pills, *stub}
    hidden = tuple(n for n in branches.nodes if n not in shown)
    return Layout(pills, stub, hidden, tuple(r for r in branches.tails if r not in shown), slot_w, branches.ranks)


def _chosen(branches: Branches, paths: Mapping[Item, Sequence[Item]], focus: set[Item]) -> list[Item]:
    """Which leaves get a row: those that the moment is about, then those that were used last."""
    def first(leaf: Item) -> tuple[int, float]:
        used = branches.nodes[leaf]["last_access"] if isinstance(leaf, int) else float("inf")
        return (-len(focus & set(paths[leaf])), -used)

    kept = set(sorted(paths, key=first)[:ROWS])
    return [leaf for leaf in paths if leaf in kept]


def _fit(branches: Branches, rows: Sequence[Sequence[Item]], slot_w: float,
         limit: float) -> tuple[dict[Item, Pill] | None, tuple[int, ...]]:
    for most in MOST:
        pills = _places(branches, rows, slot_w, most)
        if max((p.end for p in pills.values()), default=0) <= limit:
            return pills, ()
    return None, ()


def _places(branches: Branches, rows: Sequence[Sequence[Item]], slot_w: float, most: int) -> dict[Item, Pill]:
    pills: dict[Item, Pill] = {}
    for row, path in enumerate(rows):
        x = FIRST_X
        for item in path:
            if item not in pills:
                pills[item] = Pill(x, row, cells(branches.blocks(item), most), slot_w)
            x = pills[item].end + GAP
    return pills


def _last_edges(branches: Branches, path: Sequence[Item], slot_w: float,
                limit: float) -> tuple[dict[Item, Pill], tuple[int, ...]]:
    """One path that is deeper than the picture is wide: its last edges, the others behind a stub."""
    one = 2 * PAD + slot_w + GAP
    fits = max(1, int((limit - FIRST_X - STUB_W) // one))
    pills, x = {}, FIRST_X + STUB_W + GAP
    for item in path[-fits:]:
        pills[item] = Pill(x, 0, cells(branches.blocks(item), 1), slot_w)
        x = pills[item].end + GAP
    return pills, tuple(n for n in path[:-fits] if isinstance(n, int))


# ---------------------------------------------------------------- a query over the tree
def way(branches: Branches, query: Sequence[int], extra: Any) -> list[int]:
    """The edges that a query is compared with, in order; the last one perhaps in part."""
    out: list[int] = []
    at, item = 0, 0
    while at < len(query) and (kid := _child(branches, item, query, at // branches.size, extra)) is not None:
        out.append(kid)
        same = _agree(branches.nodes[kid]["tokens"], query, at // branches.size, branches.size)
        if same < branches.blocks(kid):
            break
        at, item = at + same * branches.size, kid
    return out


@dataclass(frozen=True, slots=True)
class Track:
    """Where the blocks of a query stand: spans of blocks with their places, and how many of the blocks agree."""

    spans: tuple[tuple[int, int, Rect], ...]
    agree: int


def track(branches: Branches, layout: Layout, query: Sequence[int], extra: Any, limit: float,
          y: float = TOP_Y) -> Track:
    """Compare a query with the drawn tree and place each block above the slot that it is compared with."""
    size = branches.size
    total = -(-len(query) // size)
    spans: list[tuple[int, int, Rect]] = []
    at, item, x = 0, 0, FIRST_X + PAD
    if layout.stub:
        behind = sum(branches.blocks(n) for n in layout.stub)
        spans.append((0, min(behind, total), {"x": FIRST_X + 20, "y": y, "w": layout.slot_w, "h": SLOT_H}))
        at, item, x = min(behind, total), layout.stub[-1], FIRST_X + STUB_W + GAP + PAD
    while at < total and (kid := _child(branches, item, query, at, extra)) is not None and kid in layout.pills:
        pill, same = layout.pills[kid], _agree(branches.nodes[kid]["tokens"], query, at, size)
        for i, (first, end) in enumerate(pill.cells.spans):
            last = min(end, same)
            if first < last:
                spans.append((at + first, at + last, pill.cell(i, y)))
        at += same
        if same < branches.blocks(kid):
            i = pill.cells.at(same)
            x = pill.cell(i if pill.cells.spans[i][0] == same else i + 1)["x"]
            break
        item, x = kid, pill.end + GAP + PAD
    return Track((*spans, *_beyond(at, total, x, layout.slot_w, limit, y)), at)


def _child(branches: Branches, item: Item, query: Sequence[int], at: int, extra: Any) -> int | None:
    first = list(query[at * branches.size : (at + 1) * branches.size])
    for kid in branches.kids.get(item, ()):
        row = branches.nodes.get(kid) if isinstance(kid, int) else None
        if row and row["tokens"][: branches.size] == first and row["extra_key"] == extra:
            return kid
    return None


def _agree(edge: Sequence[int], query: Sequence[int], at: int, size: int) -> int:
    rest = query[at * size :]
    same = next((i for i, (a, b) in enumerate(zip(edge, rest, strict=False)) if a != b), min(len(edge), len(rest)))
    return same // size


def _beyond(at: int, total: int, x: float, slot_w: float, limit: float, y: float) -> list[tuple[int, int, Rect]]:
    """The blocks that the tree does not have, as many as fit in a row."""
    room = max(1, int((limit - x + BETWEEN) // (slot_w + BETWEEN)))
    return [(at + first, at + end, {"x": x + i * (slot_w + BETWEEN), "y": y, "w": slot_w, "h": SLOT_H})
            for i, (first, end) in enumerate(cells(total - at, room).spans)]


# ---------------------------------------------------------------- the pool
FREE_SLOTS, FREE_X, FREE_W, QUEUE = 24, 113, 32, 12


def free_places(state: Json) -> tuple[dict[int, Rect], Callable[[int], Rect]]:
    """Places of the slots that stand in the free row, and that of any other one when it goes there.

    Up to 24 slots: each has a place of its own. More: the next ones of the queue in order, the others on a pile.
    """
    first, count = state["first_slot"], state["num_slots"]
    if count <= FREE_SLOTS:
        home = {first + i: {"x": FREE_X + 35 * i, "y": FREE_Y, "w": FREE_W, "h": FREE_W} for i in range(count)}
        return home, home.__getitem__
    queue = {slot: {"x": FREE_X + 47 * i, "y": FREE_Y, "w": 44, "h": FREE_W}
             for i, slot in enumerate(state["free"][:QUEUE])}
    pile = {"x": FREE_X + 47 * QUEUE + 30, "y": FREE_Y, "w": 44, "h": FREE_W}
    return queue, lambda slot: queue.get(slot, pile)
