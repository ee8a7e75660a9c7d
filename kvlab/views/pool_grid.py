"""Where everything of a pool picture stands: shelves, rows, the window of columns; it draws and says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.views.shapes import BLOCK_H, BLOCK_W, LANE, LEFT, PITCH, RIGHT

Snapshot = Mapping[str, Any]
Rect = dict[str, float]
Span = tuple[int, int]

SEATS = 3
HEAD_Y, FREE_Y, STAGED_Y, RULE_Y = 58, 74, 150, 224
ROW_Y = tuple(252 + seat * LANE for seat in range(SEATS))
MOST_COLUMNS = 6
LEAST = 2  # a table that changes shows this many blocks at least, where it has them


@dataclass(frozen=True, slots=True)
class Shelf:
    """One cache group's part of the picture: it starts at `x` and is `columns` blocks wide.

    `size` rows (tokens) a block, `row_bytes` bytes of K and V a row, `first` the printed id of block 0.
    """

    group: str
    x: float
    columns: int
    size: int
    row_bytes: int
    first: int
    layers: Span
    blocks: int

    def at(self, column: int, y: float, h: float = BLOCK_H) -> Rect:
        return {"x": self.x + column * PITCH, "y": y, "w": BLOCK_W, "h": h}

    @property
    def width(self) -> float:
        return (self.columns - 1) * PITCH + BLOCK_W


def row_bytes(group: Mapping[str, Any]) -> int:
    """Bytes of one token's K and V over the layers of a group (formula F3.01)."""
    layers = group["layer_end"] - group["layer_start"]
    return 2 * layers * group["kv_heads"] * group["head_dim"] * group["scalar_bytes"]


def shelves(snapshot: Snapshot, groups: Sequence[str] | None = None) -> tuple[Shelf, ...]:
    """The shelves of the groups that are shown: one of six columns, or two of three side by side.

    Without `groups` the first two. ValueError for a group that does not exist, or for more than two.
    """
    known = {g["group_id"]: g for g in snapshot["groups"]}
    names = list(known)[:2] if groups is None else list(groups)
    if not 1 <= len(names) <= 2 or not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(f"show one or two of the groups {', '.join(known)}, not {names}")
    columns = MOST_COLUMNS // len(names)
    second = RIGHT - (columns - 1) * PITCH - BLOCK_W
    return tuple(
        Shelf(
            g["group_id"],
            x,
            columns,
            g["block_size"],
            row_bytes(g),
            g["first_block_id"],
            (g["layer_start"], g["layer_end"]),
            g["num_blocks"],
        )
        for g, x in zip((known[name] for name in names), (LEFT, second), strict=False)
    )


def block_of(handle: str) -> int:
    """The printed block id of a handle such as `1002@9`."""
    return int(handle.partition("@")[0])


def fit(items: Sequence[Any], columns: int, keep: str = "first") -> tuple[list[tuple[Any, int]], int | None, list[Any]]:
    """Items with their columns, the column of a pile and what lies in it, so that nothing runs off the shelf.

    `keep` says which end stays in sight: the first ones (the pile stands last) or the last ones (it stands first).
    """
    if len(items) <= columns:
        return [(item, c) for c, item in enumerate(items)], None, []
    if keep == "first":
        return [(item, c) for c, item in enumerate(items[: columns - 1])], columns - 1, list(items[columns - 1 :])
    cut = len(items) - columns + 1
    return [(item, c + 1) for c, item in enumerate(items[cut:])], 0, list(items[:cut])


# ---------------------------------------------------------------- the window
@dataclass(frozen=True, slots=True)
class Window:
    """What of the tables is in sight: who sits in which row, and the first column of each (request, group).

    `recent` are the live requests, the one that changed longest ago first: it gives up its row first.
    """

    rows: tuple[str | None, ...] = (None,) * SEATS
    first: Mapping[tuple[str, str], int] = field(default_factory=dict)
    recent: tuple[str, ...] = ()

    def hidden(self, snapshot: Snapshot) -> list[str]:
        return [r for r in by_age(snapshot) if r not in self.rows]


def by_age(snapshot: Snapshot) -> list[str]:
    """Live request ids in order of appearance: a request's generation is the epoch that created it."""
    return sorted(snapshot["requests"], key=lambda r: (snapshot["requests"][r]["generation"], r))


def touched(
    before: Snapshot | None, after: Snapshot, staged: Mapping[str, Any] | None, on: Sequence[Shelf]
) -> dict[tuple[str, str], Span]:
    """First and last column that change, by (request, group); a new request counts with its last block. O(tables)."""
    out: dict[tuple[str, str], Span] = {}
    for request, row in after["requests"].items():
        old = before["requests"].get(request) if before else None
        if old is not None and old["generation"] != row["generation"]:
            old = None
        for shelf in on:
            columns = _changed_columns(old, row, shelf) | _staged_columns(request, row, staged, shelf)
            if columns:
                out[request, shelf.group] = (min(columns), max(columns))
    return out


def _changed_columns(old: Mapping[str, Any] | None, row: Mapping[str, Any], shelf: Shelf) -> set[int]:
    table, last = row["tables"][shelf.group], (row["context"] - 1) // shelf.size
    if old is None:
        return {len(table) - 1}
    was = old["tables"][shelf.group]
    columns = {j for j, handle in enumerate(table) if j >= len(was) or was[j] != handle}
    return columns | ({last} if row["version"] != old["version"] else set())


def _staged_columns(request: str, row: Mapping[str, Any], staged: Mapping[str, Any] | None, shelf: Shelf) -> set[int]:
    if staged is None or request not in staged["requests"]:
        return set()
    columns = {r["logical"] for r in staged["reserved"].get(shelf.group, ()) if r["request"] == request}
    return columns or {(row["context"] - 1) // shelf.size}


def follow(
    window: Window,
    after: Snapshot,
    on: Sequence[Shelf],
    before: Snapshot | None = None,
    staged: Mapping[str, Any] | None = None,
) -> Window:
    """The window for the next picture: it moves only where what changes would fall outside it."""
    moved = touched(before, after, staged, on)
    names = [r for r in by_age(after) if any(who == r for who, _ in moved)]
    recent = (*(r for r in window.recent if r in after["requests"] and r not in names), *names)
    rows = _seat(window.rows, after, names, recent)
    first: dict[tuple[str, str], int] = {}
    for shelf in on:
        order = [r for r in rows if r] + [r for r in by_age(after) if r not in rows]
        first |= {(r, shelf.group): f for r, f in _slide(shelf, after, order, window, moved).items()}
    return Window(rows, first, recent)


def _seat(
    rows: Sequence[str | None], after: Snapshot, names: Sequence[str], recent: Sequence[str]
) -> tuple[str | None, ...]:
    """Every request keeps its row while it lives; who has none gets an empty one, or that of the longest unchanged."""
    seats = [r if r in after["requests"] else None for r in rows]
    for request in [*names, *(r for r in by_age(after) if r not in names)]:
        if request in seats:
            continue
        empty = [s for s, r in enumerate(seats) if r is None]
        if not empty and request in names:
            empty = [seats.index(r) for r in recent if r in seats and r not in names][:1]
        if empty:
            seats[min(empty, key=lambda s: (-_near_sharer(s, seats, request, after), s))] = request
    return tuple(seats)


def _near_sharer(seat: int, seats: Sequence[str | None], request: str, after: Snapshot) -> int:
    beside = [seats[s] for s in (seat - 1, seat + 1) if 0 <= s < len(seats)]
    return int(any(r is not None and shares(after, request, r) for r in beside))


def shares(snapshot: Snapshot, a: str, b: str) -> bool:
    """Whether two requests start with the same block, in any group."""
    mine, theirs = snapshot["requests"][a]["tables"], snapshot["requests"][b]["tables"]
    return any(mine[g][:1] == theirs[g][:1] for g in mine)


def _slide(
    shelf: Shelf, after: Snapshot, order: Sequence[str], window: Window, moved: Mapping[tuple[str, str], Span]
) -> dict[str, int]:
    first: dict[str, int] = {}
    count = {r: len(after["requests"][r]["tables"][shelf.group]) for r in order}
    for request in order:
        known = window.first.get((request, shelf.group))
        if known is None:
            first[request] = _new_first(shelf, after, request, first, count[request])
        else:
            first[request] = _next_first(known, count[request], shelf.columns, moved.get((request, shelf.group)))
    for request in order:
        was, now = window.first.get((request, shelf.group)), first[request]
        if was is None or was == now:
            continue
        for other in order:  # rows that stood in line stay in line, where they can
            last = moved.get((other, shelf.group), (count[other] - 1,) * 2)
            if first[other] == was and now <= min(last[0], count[other] - 1) and last[1] < now + shelf.columns:
                first[other] = now
    return first


def _new_first(shelf: Shelf, after: Snapshot, request: str, seated: Mapping[str, int], count: int) -> int:
    for other, f in seated.items():
        if f < count <= f + shelf.columns and shares(after, request, other):
            return f
    return max(0, count - shelf.columns)


def _next_first(first: int, count: int, columns: int, span: Span | None) -> int:
    if count <= first:
        first = max(0, count - columns)
    if span is None:
        return first
    if count - first < LEAST:
        first = max(0, count - columns)
    low, high = span
    if high >= first + columns:
        return high - columns + 1
    return max(low, high - columns + 1) if low < first else first


# ---------------------------------------------------------------- bodies
@dataclass(frozen=True, slots=True)
class Stand:
    """A block in the tables: its body stands at `column` in `seats` (neighbours), and is linked to other places."""

    block: int
    column: int
    seats: tuple[int, ...]
    links: tuple[tuple[int, int], ...]


def stands(shelf: Shelf, snapshot: Snapshot, window: Window) -> list[Stand]:
    """One body for every block in sight. Owners in neighbouring rows, for whom it is the same logical block, share it;
    others get (seat, column) links."""
    places: dict[int, list[tuple[int, int, int]]] = {}
    for seat, request in enumerate(window.rows):
        if request is None:
            continue
        first, table = window.first[request, shelf.group], snapshot["requests"][request]["tables"][shelf.group]
        for column, handle in enumerate(table[first : first + shelf.columns]):
            places.setdefault(block_of(handle), []).append((seat, column, first))
    return [_stand(block, spots) for block, spots in places.items()]


def _stand(block: int, spots: list[tuple[int, int, int]]) -> Stand:
    runs = []
    for seat, column, first in spots:
        run = [(seat, column, first)]
        while (run[-1][0] + 1, column, first) in spots:
            run.append((run[-1][0] + 1, column, first))
        runs.append(run)
    body = max(runs, key=len)  # the first of the longest
    return Stand(
        block, body[0][1], tuple(s for s, *_ in body), tuple((s, c) for s, c, f in spots if (s, c, f) not in body)
    )


def unseen(shelf: Shelf, snapshot: Snapshot, window: Window) -> list[tuple[str, int, int, int]]:
    """(request, blocks before the window, first block after it, blocks in all) of every row in sight."""
    out = []
    for request in window.rows:
        if request is not None:
            count = len(snapshot["requests"][request]["tables"][shelf.group])
            first = window.first[request, shelf.group]
            out.append((request, first, min(count, first + shelf.columns), count))
    return out
