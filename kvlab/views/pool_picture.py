"""Draws one picture of an allocator: free queue, staged lane, block tables, digest; it chooses no frames and no words.

It reads plain snapshots (`Allocator.snapshot()`) and staged overlays (`AllocatorTxn.staged()`), never a live machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.views import shapes as draw
from kvlab.views.pool_grid import (
    FREE_Y,
    ROW_Y,
    STAGED_Y,
    Rect,
    Shelf,
    Snapshot,
    Stand,
    Window,
    block_of,
    by_age,
    fit,
    follow,
    shelves,
    stands,
)
from kvlab.views.pool_sheet import NOTHING_STAGED, Sheet, clip, headings, letters, row_heads, size
from kvlab.views.scene import Scene
from kvlab.views.shapes import BLOCK_H, BLOCK_W, CHIP_H, LANE, LEFT, LINK_H, PITCH, RIGHT, Shape

ASK, WHY = "ask", "why"


@dataclass(frozen=True, slots=True)
class View:
    """A picture and what the next one has to know of it.

    `where`: the rectangle of every block in sight by key, or that of the pile it lies in. `leave`: where the blocks
    go that were in the picture before and are not in this one.
    """

    scene: Scene
    window: Window
    where: Mapping[str, Rect]
    leave: Mapping[str, Rect]
    snapshot: Snapshot


def key_of(group: str, block: int) -> str:
    return f"b.{group}.{block}"


def picture(
    snapshot: Snapshot,
    staged: Mapping[str, Any] | None = None,
    *,
    groups: Sequence[str] | None = None,
    window: Window | None = None,
    previous: View | None = None,
    owners: Mapping[str, str] | None = None,
    refused: Sequence[str] = (),
    reason: str = "",
    asked: str = "",
    flow: bool = False,
    digest: str | None = None,
    digest_before: str | None = None,
) -> View:
    """The picture of a committed `snapshot` and of what an open transaction has `staged` over it.

    `window` keeps rows and columns where they were (by default it follows that of `previous`). `reason` is the word of
    a refusal: it stands beside the `refused` keys, or beside what was `asked`. `flow` shows rows being copied.
    ValueError for groups that cannot be shown. O(blocks in tables and queues).
    """
    on, overlay = shelves(snapshot, groups), staged or NOTHING_STAGED
    if window is None:
        last, before = (previous.window, previous.snapshot) if previous else (Window(), None)
        window = follow(last, snapshot, on, before, staged)
    names = letters([*by_age(snapshot), *overlay["requests"]], owners)
    sheet = Sheet(snapshot, overlay, on, window, names, tuple(refused))
    made = _shapes(sheet, flow)
    made += _refusal(sheet, reason, asked) if reason else []
    made += [draw.digest("digest", digest, digest_before)] if digest else []
    made, leave = _move(made, previous, sheet.where) if previous else (made, {})
    return View(Scene(draw.VIEW, tuple(made)), window, sheet.where, leave, snapshot)


def _shapes(sheet: Sheet, flow: bool) -> list[Shape]:
    made = [*headings(sheet), *row_heads(sheet)]
    for shelf in sheet.shelves:
        made += [*_free_lane(sheet, shelf), *_staged_lane(sheet, shelf), *_tables(sheet, shelf)]
        made += _flow(sheet, shelf) if flow else []
    return made


def _move(made: list[Shape], previous: View, where: Mapping[str, Rect]) -> tuple[list[Shape], dict[str, Rect]]:
    """A block that was not in sight comes from the pile it lay in; one that is gone goes into the pile it lies in."""
    shown, here = {s["key"] for s in previous.scene.shapes}, {s["key"] for s in made}
    came = (here - shown) & previous.where.keys()
    moved = [s | {"from": dict(previous.where[s["key"]])} if s["key"] in came else s for s in made]
    return moved, {key: where[key] for key in sorted(shown - here) if key in where}


# ---------------------------------------------------------------- blocks
def _block(sheet: Sheet, shelf: Shelf, block: int, place: Rect, role: str, **more: Any) -> Shape:
    columns, i, key = sheet.snapshot["blocks"][shelf.group], block - shelf.first, key_of(shelf.group, block)
    tag = str(columns["keys"].get(str(block), ""))[:4]
    fields = {"label": sheet.committed(shelf, block), "fill": columns["valid_rows"][i], "owners": ()}
    fields |= {"refs": columns["ref_cnt"][i] or None, "tag": tag or None} | more
    leases = sheet.leases(shelf, block)
    said = [f"{fields['label']}, group {shelf.group}, {role}, {fields['fill']} of {shelf.size} rows valid"]
    said += [f"ref_cnt {fields['refs']}"] if fields["refs"] else []
    said += [f"identity {fields['tag']}"] if fields["tag"] else []
    said += [f"lease {leases}"] if leases else []
    sheet.where[key] = place
    fields |= {"badge": leases or None, "refused": key in sheet.refused, "says": ", ".join(said)}
    return draw.block(key, place["x"], place["y"], h=place["h"], of=shelf.size, **fields)


def _pile(sheet: Sheet, shelf: Shelf, key: str, place: Rect, blocks: Sequence[int], **more: Any) -> Shape:
    for block in blocks:
        sheet.where[key_of(shelf.group, block)] = place
    return draw.pile(f"{key}.{shelf.group}", place["x"], place["y"], **more)


def _free_lane(sheet: Sheet, shelf: Shelf) -> Iterator[Shape]:
    """The queue in order. A reserved block keeps its committed place in it: a well with its committed handle."""
    queue, taken = sheet.snapshot["free"][shelf.group], {block_of(r["handle"]) for r in sheet.reserved(shelf)}
    seen, pile, rest = fit(queue, shelf.columns)
    wells = {column: sheet.committed(shelf, block) for block, column in seen if block in taken}
    wells.setdefault(0, "" if queue else "empty")
    for column, words in sorted(wells.items()):
        yield draw.well(f"home.{shelf.group}.{column}", shelf.x + column * PITCH, FREE_Y, words)
    for block, column in seen:
        if block not in taken:
            role = f"in the free queue, place {column + 1}"
            yield _block(sheet, shelf, block, shelf.at(column, FREE_Y), role)
    if pile is not None:
        says = f"{len(rest)} more free blocks of group {shelf.group}"
        inside = [block for block in rest if block not in taken]
        yield _pile(sheet, shelf, "pile", shelf.at(pile, FREE_Y), inside, label=f"+{len(rest)} free", says=says)


def _staged_lane(sheet: Sheet, shelf: Shelf) -> Iterator[Shape]:
    """Reserved blocks, hatched: the last ones, for they are the ones that come into sight below."""
    reserved = sheet.reserved(shelf)
    seen, pile, rest = fit(reserved, shelf.columns, keep="last")
    for item, column in seen:
        role, letter = f"staged for {item['request']}, not reachable", sheet.letters[item["request"]]
        fields = {"label": item["handle"], "owners": (letter,), "fill": item["rows"], "refs": None, "tag": None}
        yield _block(sheet, shelf, block_of(item["handle"]), shelf.at(column, STAGED_Y), role, hatch=1, **fields)
    if pile is not None:
        who = {r["request"] for r in reserved}
        owner = sheet.letters[min(who)] if len(who) == 1 else None
        inside = [block_of(r["handle"]) for r in rest]
        fields = {"label": f"+{len(rest)} more", "says": f"{len(rest)} more staged blocks of group {shelf.group}"}
        yield _pile(sheet, shelf, "heap", shelf.at(pile, STAGED_Y), inside, owner=owner, **fields)


def _tables(sheet: Sheet, shelf: Shelf) -> Iterator[Shape]:
    for stand in stands(shelf, sheet.snapshot, sheet.window):
        yield _body(sheet, shelf, stand)
        for seat, column in stand.links:
            request = sheet.window.rows[seat]
            logical = sheet.window.first[request, shelf.group] + column
            key, x, y = f"l.{shelf.group}.{request}.{logical}", shelf.x + column * PITCH, ROW_Y[seat]
            handle = sheet.table(request, shelf)[logical]
            says = f"{handle}, also block {logical} of {request}"
            yield draw.link(key, x, y + (BLOCK_H - LINK_H) / 2, handle, sheet.letters[request], says=says)


def _body(sheet: Sheet, shelf: Shelf, stand: Stand) -> Shape:
    rows = [sheet.window.rows[seat] for seat in stand.seats]
    handle = sheet.committed(shelf, stand.block)
    everyone = [r for r in by_age(sheet.snapshot) if handle in sheet.table(r, shelf)]
    role = f"block {sheet.window.first[rows[0], shelf.group] + stand.column} of {' and '.join(everyone)}"
    place = shelf.at(stand.column, ROW_Y[stand.seats[0]], BLOCK_H + (len(rows) - 1) * LANE)
    return _block(sheet, shelf, stand.block, place, role, owners=[sheet.letters[r] for r in rows])


# ---------------------------------------------------------------- motion and refusal
def _flow(sheet: Sheet, shelf: Shelf) -> Iterator[Shape]:
    """Rows that fly from a shared tail to its copy; one arrow a group, where nothing stands in its way."""
    owner = {r["handle"]: sheet.letters[r["request"]] for r in sheet.reserved(shelf)}
    for n, copy in enumerate(c for c in sheet.staged["copies"] if c["group"] == shelf.group):
        src, dst = (sheet.where.get(key_of(shelf.group, block_of(copy[end]))) for end in ("src", "dst"))
        if not (src and dst):
            continue
        wide, start = (BLOCK_W - 27) * copy["rows"] / shelf.size, {"x": src["x"] + 23, "y": src["y"] + 4}
        fly = {"w": wide, "h": BLOCK_H - 8, "start": start}
        yield draw.rows(f"fly.{shelf.group}.{n}", dst["x"] + 23, dst["y"] + 4, owner[copy["dst"]], **fly)
        if len(owner) == 1:
            last = copy["rows"] - 1
            words = f"{f'rows 0..{last}' if last else 'row 0'}, {size(copy['bytes'])}"
            yield draw.label(f"flowt.{shelf.group}", dst["x"] + BLOCK_W + 70, STAGED_Y + 56, words, "s")
            if src["y"] == ROW_Y[0]:
                yield _arrow(shelf, src, dst)


def _arrow(shelf: Shelf, src: Rect, dst: Rect) -> Shape:
    x, key = src["x"] + 27, f"flow.{shelf.group}"
    if src["x"] == dst["x"]:
        return draw.arrow(key, x, src["y"] - 1, x, dst["y"] + BLOCK_H + 5)
    return draw.arrow(key, x, src["y"] - 1, dst["x"] + BLOCK_W + 8, dst["y"] + 36)


def _refusal(sheet: Sheet, reason: str, asked: str) -> list[Shape]:
    """The reason beside what was refused: beside its staged blocks, or beside the request itself in the staged lane."""
    used = [min(s.columns, len(sheet.reserved(s))) for s in sheet.shelves]
    why = draw.reason(WHY, 0, 0, reason)
    if asked and not any(used):
        ask = draw.chip(ASK, LEFT + 4, STAGED_Y + 14, clip(asked, 52), refused=True, says=f"asked: {asked}")
        return [ask, why | {"x": ask["x"] + ask["w"] + 14, "y": ask["y"]}]
    for n, shelf in enumerate(sheet.shelves):
        limit = sheet.shelves[n + 1].x - 8 if any(used[n + 1 :]) else RIGHT
        x = shelf.x + used[n] * PITCH + 4
        if used[n] and x + why["w"] <= limit:
            return [why | {"x": x, "y": STAGED_Y + (BLOCK_H - CHIP_H) / 2}]
    return [why | {"x": LEFT, "y": 4}]
