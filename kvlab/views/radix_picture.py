"""Draws one picture of a radix cache: root, edges, slots, leases, the free row, a query above; it chooses no words.

It reads plain snapshots (`RadixCache.snapshot()`), never a live machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.views import radix_grid as grid
from kvlab.views import shapes as draw
from kvlab.views.pool_sheet import clip
from kvlab.views.radix_grid import Branches, Item, Layout, Pill, Rect, Track
from kvlab.views.radix_names import Names, amount, spread
from kvlab.views.scene import Scene
from kvlab.views.shapes import GUTTER, RIGHT, SLOT_H, VIEW, Shape

Json = Mapping[str, Any]
MOST_LEASES = 5
HEAD = 17  # characters that fit before the free row
ASK, WHY = "ask", "why"
NEWCOMER = "?"
"""Whose rows are hatched where a producer has no name: it gets a letter of its own, as requests do."""


@dataclass(frozen=True, slots=True)
class View:
    """A picture, and what the next one needs: the place of every slot, the layout, and where shapes go that left."""

    scene: Scene
    layout: Layout
    where: Mapping[int, Rect]
    leave: Mapping[str, Rect]


@dataclass(frozen=True, slots=True)
class Over:
    """What stands over the tree: a query with the slots that it brings, a refusal, and which slots are staged."""

    query: Sequence[int] = ()
    extra: Any = None
    brought: Sequence[int] = ()
    staged: frozenset[int] = frozenset()
    says: str = ""
    asked: str = ""
    reason: str = ""
    ring: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Sheet:
    """All that the drawing functions read; in `where` they note the place of every slot."""

    state: Json
    branches: Branches
    layout: Layout
    names: Names
    letters: Mapping[str, str]
    over: Over
    where: dict[int, Rect] = field(default_factory=dict)


def picture(state: Json, *, names: Names, letters: Mapping[str, str], over: Over | None = None,
            focus: Iterable[Item] = (), parted: tuple[int, int, int] | None = None, previous: View | None = None,
            digest: str | None = None, digest_before: str | None = None) -> View:
    """The picture of a state. `focus`: nodes that must be in sight; `parted`: the split that it shows as motion.

    O(nodes + slots).
    """
    ranks = previous.layout.ranks if previous else {}
    branches, over = Branches(state, ranks), over or Over()
    path = grid.way(branches, over.query, over.extra)
    branches.to_the_front(path)
    requests = {r for r in branches.tails if branches.tails[r]["terminal"] in set(focus)}
    layout = grid.lay(branches, {*focus, *requests, *path}, names.slot_w)
    sheet = Sheet(state, branches, layout, names, letters, over)
    made = [*_tree(sheet), *_query(sheet), *_leases(sheet), *_free(sheet), *_refusal(sheet)]
    made += [draw.digest("digest", digest, digest_before, label="tree and pool")] if digest else []
    leave: dict[str, Rect] = {}
    if previous is not None:
        made, leave = _move(made, previous, sheet.where)
        made = _part(made, previous, parted, state["block_size"]) if parted else made
    return View(Scene(VIEW, tuple(made)), layout, sheet.where, leave)


def _key(slot: int) -> str:
    return f"s{slot}"


def _move(made: list[Shape], previous: View, where: Mapping[int, Rect]) -> tuple[list[Shape], dict[str, Rect]]:
    """A slot that was not in sight comes from where it lay; one that is no more in sight goes where it lies now."""
    shown, here = {s["key"] for s in previous.scene.shapes}, {s["key"] for s in made}
    before = {_key(slot): rect for slot, rect in previous.where.items()}
    moved = [s | {"from": dict(before[s["key"]])} if s["key"] in before and s["key"] not in shown else s for s in made]
    return moved, {_key(slot): rect for slot, rect in where.items() if _key(slot) in shown - here}


def _part(made: list[Shape], previous: View, parted: tuple[int, int, int], size: int) -> list[Shape]:
    """A split starts from two touching halves of the edge that was there; then they part."""
    new, old, at = parted
    was = previous.layout.pills.get(old)
    if was is None or new in previous.layout.pills:
        return made
    cut = was.cut(at // size)
    starts = {f"n{new}": {"x": was.x, "w": cut - was.x}, f"n{old}": {"x": cut, "w": was.end - cut}, f"e{new}": {}}
    return [s | {"from": starts[s["key"]]} if s["key"] in starts else s for s in made]


# ---------------------------------------------------------------- the tree
def _tree(sheet: Sheet) -> Iterator[Shape]:
    layout = sheet.layout
    yield draw.root("root", grid.ROOT_X, grid.ROW_Y)
    if layout.stub:
        yield from _stub(sheet)
    for item, pill in layout.pills.items():
        yield _line(sheet, item, pill)
        if isinstance(item, int):
            yield from _edge(sheet, item, pill)
        else:
            yield from _tail(sheet, item, pill)
    yield from _hidden(sheet)


def _line(sheet: Sheet, item: Item, pill: Pill) -> Shape:
    above = sheet.layout.pills.get(sheet.branches.parent(item))
    x, y = (above.end, above.y) if above else (grid.ROOT_X + 6, grid.ROW_Y)
    x = grid.FIRST_X + grid.STUB_W if above is None and sheet.layout.stub else x
    end = pill.x if isinstance(item, int) else pill.x + grid.PAD
    return draw.edge(f"e{item}", x, y, end, pill.y)


def _edge(sheet: Sheet, node: int, pill: Pill) -> Iterator[Shape]:
    row, size = sheet.branches.nodes[node], sheet.branches.size
    leaf = "inner node" if any(isinstance(k, int) for k in sheet.branches.kids.get(node, ())) else "leaf"
    says = (f"node {node}: {sheet.names.say(row['tokens'])} in {'slot' if len(row['slots']) == 1 else 'slots'} "
            f"{spread(row['slots'])}, lock_ref {row['lock']}, {leaf}")
    yield draw.pill(f"n{node}", pill.x, pill.y - grid.PILL_H / 2, w=pill.w, h=grid.PILL_H, label=f"node {node}",
                    badge=row["lock"] or None, says=says, refused=node in sheet.over.ring)
    blocks = [row["tokens"][i * size : (i + 1) * size] for i in range(len(row["slots"]))]
    yield from _slots(sheet, str(node), pill, row["slots"], blocks, None)


def _tail(sheet: Sheet, request: str, pill: Pill) -> Iterator[Shape]:
    """Rows of a request that are not published: private slots behind its path, in its colour, in no capsule."""
    row, size = sheet.branches.tails[request], sheet.branches.size
    first = row["protected_len"] // size
    blocks = [row["tokens"][i * size : (i + 1) * size] for i in range(first, len(row["table"]))]
    yield from _slots(sheet, request, pill, row["table"][first:], blocks, sheet.letters[request])


def _slots(sheet: Sheet, name: str, pill: Pill, slots: Sequence[int], blocks: Sequence[Sequence[int]],
           owner: str | None) -> Iterator[Shape]:
    for i, (first, end) in enumerate(pill.cells.spans):
        place = pill.cell(i)
        yield from _cell(sheet, f"g.{name}", place, slots[first:end], blocks[first:end], owner)


def _cell(sheet: Sheet, gap: str, place: Rect, slots: Sequence[int], blocks: Sequence[Sequence[int]],
          owner: str | None) -> Iterator[Shape]:
    """One slot, or the count of those that stand in one cell."""
    sheet.where.update(dict.fromkeys(slots, place))
    if len(slots) > 1:
        yield draw.label(gap, place["x"] + place["w"] / 2, place["y"] + SLOT_H / 2 + 4.5, f"+{len(slots)}", "d c")
    else:
        hatch = 1 if slots[0] in sheet.over.staged else 0
        yield draw.slot(_key(slots[0]), place["x"], place["y"], str(slots[0]), sheet.names.block(blocks[0]),
                        owner=owner, w=place["w"], h=place["h"], hatch=hatch)


def _stub(sheet: Sheet) -> Iterator[Shape]:
    """The first edges of a path that is deeper than the picture is wide."""
    stub, y = sheet.layout.stub, grid.ROW_Y
    slots = [s for n in stub for s in sheet.branches.nodes[n]["slots"]]
    place = {"x": grid.FIRST_X + 26, "y": y - SLOT_H / 2, "w": sheet.names.slot_w, "h": SLOT_H}
    sheet.where.update(dict.fromkeys(slots, place))
    yield draw.edge("e.stub", grid.ROOT_X + 6, y, grid.FIRST_X, y)
    yield draw.pile("stub", grid.FIRST_X, y - 27, amount(len(stub), "edge"), w=grid.STUB_W, h=54,
                    says=f"{amount(len(stub), 'edge')} before it, {amount(len(slots), 'slot')}")


def _hidden(sheet: Sheet) -> Iterator[Shape]:
    """What has no row, counted."""
    layout, nodes = sheet.layout, sheet.branches.nodes
    slots = [s for n in layout.hidden for s in nodes[n]["slots"]]
    for request in layout.hidden_tails:
        row = sheet.branches.tails[request]
        slots += row["table"][row["protected_len"] // sheet.branches.size :]
    place = {"x": grid.LEASE_X + 40, "y": 384, "w": sheet.names.slot_w, "h": SLOT_H}
    sheet.where.update(dict.fromkeys(slots, place))
    if slots:
        parts = [amount(len(layout.hidden), "edge")] * bool(layout.hidden)
        parts += [amount(len(layout.hidden_tails), "request")] * bool(layout.hidden_tails)
        words = f"+{' and '.join(parts)}, {amount(len(slots), 'slot')}"
        yield draw.pile("more", grid.LEASE_X, 376, clip(words, 28), w=RIGHT - grid.LEASE_X, h=56,
                        says=f"not in the picture: {words[1:]}")


# ---------------------------------------------------------------- what stands over it
def _query(sheet: Sheet) -> Iterator[Shape]:
    """The blocks of a question, or of an insertion with the slots that it brings, over those they are compared with."""
    over = sheet.over
    if not over.query:
        return
    way = grid.track(sheet.branches, sheet.layout, over.query, over.extra, RIGHT)
    yield draw.label("asks", grid.FIRST_X + grid.PAD, grid.TOP_Y - 9, over.says, "d")
    for n, (first, end, place) in enumerate(way.spans):
        if over.brought:
            yield from _brought(sheet, n, first, end, place)
        else:
            yield _asked_block(sheet, way, n, first, end, place)


def _asked_block(sheet: Sheet, way: Track, n: int, first: int, end: int, place: Rect) -> Shape:
    size = sheet.branches.size
    mark = "=" if first < way.agree else "≠" if first == way.agree else ""
    words = f"+{end - first}" if end - first > 1 else sheet.names.block(sheet.over.query[first * size : end * size])
    return draw.query(f"q{n}", place["x"] + 1.5, place["y"], words, mark, w=place["w"] - 3)


def _brought(sheet: Sheet, n: int, first: int, end: int, place: Rect) -> Iterator[Shape]:
    size, over = sheet.branches.size, sheet.over
    mine = [(s, over.query[i * size : (i + 1) * size]) for i, s in enumerate(over.brought)][first:end]
    mine = [(slot, block) for slot, block in mine if slot in over.staged]  # references stay where the tree has them
    if mine:
        yield from _cell(sheet, f"b{n}", place, [s for s, _ in mine], [b for _, b in mine], sheet.letters[NEWCOMER])


def _leases(sheet: Sheet) -> Iterator[Shape]:
    requests = sheet.state["requests"]
    order = sorted(requests, key=lambda r: (requests[r]["tree_version"], r))
    if order:
        yield draw.label("leases", grid.LEASE_X, 128, "who holds a lock, leaf to root", "d")
    for n, request in enumerate(order[:MOST_LEASES]):
        path = [str(i) for i in reversed(sheet.branches.path(requests[request]["terminal"]))]
        held = " · ".join(path) if len(path) < 6 else f"{' · '.join(path[:3])} … {path[-1]}"
        words = f"node{'s' * (len(path) > 1)} {held}" if path else "no node"
        words += "" if requests[request]["admitted"] else ", undecided"
        yield draw.lane(f"lease.{request}", grid.LEASE_X, 144 + 44 * n, clip(request, 20), clip(words, 28),
                        owner=sheet.letters[request])
    if len(order) > MOST_LEASES:
        yield draw.label("leases.more", grid.LEASE_X, 144 + 44 * MOST_LEASES + 6,
                         f"{len(order) - MOST_LEASES} more requests", "s d")


def _free(sheet: Sheet) -> Iterator[Shape]:
    """The free row. A slot that was taken and stands in no table is there too, with a border of its own colour."""
    state = sheet.state
    queue, place = grid.free_places(state)
    free = state["free"]
    loose = [s for s in state["private"] if s not in sheet.where]
    for slot in [*free, *loose]:
        sheet.where[slot] = rect = place(slot)
        if slot in queue:
            owner = sheet.letters[NEWCOMER] if slot in loose else None
            yield draw.slot(_key(slot), rect["x"], rect["y"], str(slot), owner=owner, w=rect["w"], h=rect["h"])
    of = f"{len(free):,} of {state['num_slots']:,}"
    head = f", next {free[0]}" if free and state["num_slots"] <= grid.FREE_SLOTS else ""
    of += head if len(of + head) <= HEAD else ""
    yield draw.lane("pool", GUTTER, grid.FREE_Y + 4, "free slots", of)
    rest = len(free) + len(loose) - sum(slot in queue for slot in (*free, *loose))
    if rest:
        yield draw.pile("pile", grid.FREE_X + 47 * grid.QUEUE + 4, grid.FREE_Y - 4, f"+{rest:,} more", h=40,
                        says=f"{rest:,} more slots that are free")


def _refusal(sheet: Sheet) -> list[Shape]:
    """What was asked and the reason's word, above the tree; the edge that it is about has a ring."""
    over = sheet.over
    if not over.reason:
        return []
    ask = draw.chip(ASK, grid.FIRST_X, 60, clip(over.asked, 54), refused=True, says=f"asked: {over.asked}")
    return [ask, draw.reason(WHY, ask["x"] + ask["w"] + 14, 60, over.reason)]


