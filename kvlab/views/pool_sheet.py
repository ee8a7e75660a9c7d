"""What stands around the blocks of a pool picture: headings, columns, row heads, letters; it draws no block."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any

from kvlab.views import shapes as draw
from kvlab.views.pool_grid import (
    FREE_Y,
    HEAD_Y,
    ROW_Y,
    RULE_Y,
    SEATS,
    STAGED_Y,
    Rect,
    Shelf,
    Snapshot,
    Window,
    block_of,
    unseen,
)
from kvlab.views.shapes import BLOCK_W, GUTTER, PITCH, Shape

NARROW = 10  # characters of a request's id that fit beside its letter
NOTHING_STAGED: Mapping[str, Any] = {"reserved": {}, "copies": [], "leases": {}, "requests": {}}


@dataclass(frozen=True, slots=True)
class Sheet:
    """All that the drawing functions read; in `where` they note the place of every block they draw, by its key."""

    snapshot: Snapshot
    staged: Mapping[str, Any]
    shelves: tuple[Shelf, ...]
    window: Window
    letters: Mapping[str, str]
    refused: tuple[str, ...] = ()
    where: dict[str, Rect] = field(default_factory=dict)

    def table(self, request: str, shelf: Shelf) -> Sequence[str]:
        return self.snapshot["requests"][request]["tables"][shelf.group]

    def reserved(self, shelf: Shelf) -> list[Mapping[str, Any]]:
        return list(self.staged["reserved"].get(shelf.group, ()))

    def leases(self, shelf: Shelf, block: int) -> int:
        return sum(block_of(h) == block for h in self.staged["leases"].get(shelf.group, ()))

    def committed(self, shelf: Shelf, block: int) -> str:
        """The handle of a block's committed lifetime."""
        return f"{block}@{self.snapshot['blocks'][shelf.group]['generation'][block - shelf.first]}"


def letters(requests: Iterable[str], owners: Mapping[str, str] | None = None) -> dict[str, str]:
    """A letter for every request, in order of appearance: its own where its id is one, else the next free one.

    After Z comes AA. `owners` fixes some of them; hues repeat after seven letters, letters never do.
    """
    order = list(dict.fromkeys(requests))
    out = dict(owners or {})
    for r in order:
        if len(r) == 1 and r in string.ascii_uppercase and r not in out.values():
            out.setdefault(r, r)
    alphabet, taken = string.ascii_uppercase, set(out.values())
    spare = (w for w in chain(alphabet, map("".join, product(alphabet, repeat=2))) if w not in taken)
    for r in order:
        if r not in out:
            out[r] = next(spare)
    return out


def size(count: int) -> str:
    """Bytes in KiB, or in bytes below half of one."""
    if count < 512:
        return f"{count} B"
    kib = round(count / 1024, 1)
    return f"{int(kib) if kib == int(kib) else kib:,} KiB"


def clip(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def layers(first: int, end: int) -> str:
    """The layers from `first` up to `end`, which is not one of them."""
    return f"layer {first}" if end == first + 1 else f"layers {first}–{end - 1}"


# ---------------------------------------------------------------- the shelves
def headings(sheet: Sheet) -> Iterator[Shape]:
    """The name of each shelf, the rule over its tables and the numbers of its columns."""
    for shelf in sheet.shelves:
        first, end = shelf.layers
        words = f"{shelf.group} · {layers(first, end)} · {size(shelf.row_bytes)} a row"
        yield draw.label(f"head.{shelf.group}", shelf.x, HEAD_Y, words, "d")
        yield draw.rule(f"line.{shelf.group}", shelf.x, RULE_Y, shelf.width, _beyond(sheet, shelf))
        yield from _columns(sheet, shelf)


def _beyond(sheet: Sheet, shelf: Shelf) -> str:
    """What of the tables lies outside the window, once for all rows where they agree."""
    rows = unseen(shelf, sheet.snapshot, sheet.window)
    before = {sheet.letters[r]: (0, first) for r, first, _, _ in rows if first}
    after = {sheet.letters[r]: (end, count) for r, _, end, count in rows if end < count}
    parts = [f"‹ {_ranges(before, len(rows))} before"] if before else []
    parts += [f"{_ranges(after, len(rows))} after ›"] if after else []
    return " · ".join(parts)


def _ranges(spans: Mapping[str, tuple[int, int]], rows: int) -> str:
    named = {who: str(low) if end == low + 1 else f"{low}–{end - 1}" for who, (low, end) in spans.items()}
    first, alike = next(iter(named.values())), len(set(named.values())) == 1
    if len(named) == rows and alike:
        return f"blocks {first}" if "–" in first else f"block {first}"
    return ", ".join(f"{who} {numbers}" for who, numbers in named.items())


def _columns(sheet: Sheet, shelf: Shelf) -> Iterator[Shape]:
    """`block 3` over each column; a row whose window differs from the one above it gets its own, in the gap."""
    above = None
    for seat, request in enumerate(sheet.window.rows):
        first = sheet.window.first[request, shelf.group] if request else above if seat else 0
        if first is not None and first != above:
            yield from _numbers(sheet, shelf, seat, first, sheet.table(request, shelf) if request else ())
        above = first


def _numbers(sheet: Sheet, shelf: Shelf, seat: int, first: int, table: Sequence[str]) -> Iterator[Shape]:
    for column in range(shelf.columns):
        key, x, j = f"col.{shelf.group}.{seat}.{column}", shelf.x + column * PITCH, first + column
        if seat == 0:
            yield draw.label(key, x + BLOCK_W / 2, RULE_Y + 18, f"block {j}", "s d c")
        elif j < len(table) and not sheet.leases(shelf, block_of(table[j])):  # a padlock stands where the words would
            yield draw.label(key, x + BLOCK_W, ROW_Y[seat] - 7, f"block {j}", "s d e")


# ---------------------------------------------------------------- the rows
def row_heads(sheet: Sheet) -> Iterator[Shape]:
    """What the rows are: free, staged, published, and each request with its letter."""
    yield draw.lane("lane.free", GUTTER, FREE_Y + 11, "free queue", "next one first")
    yield draw.lane("lane.staged", GUTTER, STAGED_Y + 11, "staged", "nobody can read it")
    yield draw.label("lane.published", GUTTER, RULE_Y + 4, "published below", "s d")
    for seat, request in enumerate(sheet.window.rows):
        if request is not None:
            row, letter = sheet.snapshot["requests"][request], sheet.letters[request]
            held = f"{row['context']:,} token{'s' if row['context'] != 1 else ''}"
            words = (held, f"table v{row['version']}") if request == letter else (clip(request, NARROW), held)
            yield draw.lane(f"lane.r.{request}", GUTTER, ROW_Y[seat] + 13, *words, owner=letter)
    more = [sheet.letters[r] for r in sheet.window.hidden(sheet.snapshot)]
    if more:
        noun = {1: " request", 2: " requests"}.get(len(more), "")
        names = ", ".join(more[:4]) + (", …" if len(more) > 4 else "")
        yield draw.label("lane.more", GUTTER, ROW_Y[SEATS - 1] + 66, f"{len(more)} more{noun}: {names}", "s d")
