"""Counts what an allocator's history has cost so far, and tells a frame in sentences; it draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.views.pool_beats import LEASES, Beat
from kvlab.views.pool_grid import Shelf, Window, row_bytes, unseen
from kvlab.views.pool_sheet import size
from kvlab.views.pool_words import amount, asked, either, listed

Json = Mapping[str, Any]
MOST_CELLS = 6
SHOWN_HANDLES = 6
SAID = 160  # characters of a request's text that a sentence repeats


# ---------------------------------------------------------------- the scoreboard
@dataclass(frozen=True, slots=True)
class Totals:
    """What has been committed up to a frame: bytes copied, rows written (receipts), rows computed (notes)."""

    copied: int = 0
    written: int = 0
    computed: int = 0
    recomputed: int = 0
    reserved_rows: int = 0

    def with_beat(self, beat: Beat) -> Totals:
        """The totals after a beat; only committed ones count. `reserved_rows` is a level, the rest are sums."""
        if beat.what != "commit":
            return self
        note, receipt = beat.note, beat.receipt
        return Totals(
            self.copied + receipt["copy_payload_bytes"],
            self.written + receipt["useful_new_rows"],
            self.computed + note.get("computed", 0),
            self.recomputed + note.get("recomputed", 0),
            note.get("reserved_rows", self.reserved_rows),
        )


def _kib(count: int) -> float:
    kib = round(count / 1024, 1)
    return int(kib) if kib == int(kib) else kib


def _refs(snapshot: Json) -> list[int]:
    return [n for group in snapshot["blocks"].values() for n in group["ref_cnt"]]


def live_bytes(snapshot: Json) -> int:
    """Bytes of the valid rows of every block that somebody references, each block counted once."""
    total = 0
    for group in snapshot["groups"]:
        columns = snapshot["blocks"][group["group_id"]]
        rows = sum(v for v, n in zip(columns["valid_rows"], columns["ref_cnt"], strict=True) if n)
        total += rows * row_bytes(group)
    return total


def _rectangle(snapshot: Json, totals: Totals) -> float:
    return _kib(totals.reserved_rows * sum(row_bytes(g) for g in snapshot["groups"]))


CELLS: dict[str, tuple[Callable[[Json, Totals], float], str]] = {
    "blocks in use": (lambda s, t: sum(n > 0 for n in _refs(s)), ""),
    "blocks shared": (lambda s, t: sum(n > 1 for n in _refs(s)), ""),
    "rows computed": (lambda s, t: t.computed, ""),
    "rows recomputed": (lambda s, t: t.recomputed, ""),
    "rows written": (lambda s, t: t.written, ""),
    "K/V copied": (lambda s, t: _kib(t.copied), "KiB"),
    "K/V live": (lambda s, t: _kib(live_bytes(s)), "KiB"),
    "K/V if rectangular": (_rectangle, "KiB"),
    "allocator epoch": (lambda s, t: s["epoch"], ""),
    "references": (lambda s, t: sum(_refs(s)), ""),
    "free blocks": (lambda s, t: sum(len(f) for f in s["free"].values()), ""),
}
"""Label -> (committed state, totals) -> number, and its unit. Blocks are counted over all cache groups."""


def cells(notes: Json, chosen: Sequence[str] | None) -> tuple[str, ...]:
    """The labels of a recording's board. ValueError for an unknown one, or for more than six."""
    if chosen is None:
        facts = {name for note in notes.values() if isinstance(note, Mapping) for name in note}
        computed = bool(facts & {"computed", "recomputed"})
        rectangle = "reserved_rows" in notes or "reserved_rows" in facts
        chosen = [
            "blocks in use",
            "blocks shared",
            "rows computed" if computed else "rows written",
            *(["rows recomputed"] if computed and ("recomputed" in facts or not rectangle) else []),
            "K/V copied",
            "K/V live",
            *(["K/V if rectangular"] if rectangle else []),
        ]
        chosen = [c for c in chosen if c != "blocks shared"] if len(chosen) > MOST_CELLS else chosen
    if len(chosen) > MOST_CELLS or not set(chosen) <= set(CELLS):
        raise ValueError(f"a board shows up to {MOST_CELLS} of {', '.join(CELLS)}, not {list(chosen)}")
    return tuple(chosen)


def board(labels: Sequence[str], snapshot: Json, totals: Totals) -> tuple[dict[str, Any], ...]:
    """The scoreboard of a frame: committed numbers only."""
    out = []
    for name in labels:
        value, unit = CELLS[name]
        out.append({"label": name, "value": value(snapshot, totals)} | ({"unit": unit} if unit else {}))
    return tuple(out)


# ---------------------------------------------------------------- the frame in sentences
def twin(beat: Beat, why: str, window: Window, shelves: Sequence[Shelf]) -> tuple[str, ...]:
    """What changed, why, at what cost, and what holds now: everything that the picture shows, in words."""
    cost, state = (*_cost(beat), *_noted(beat)), (*_tables(beat, window), _free(beat.after))
    return (*_changed(beat), why, *cost, *state, *_unseen(beat.after, window, shelves))


def _changed(beat: Beat) -> Iterator[str]:
    if beat.what == "start":
        yield f"The history starts at allocator epoch {beat.after['epoch']}."
    elif beat.what == "commit":
        yield f"Committed: {asked(beat.op)}. Allocator epoch {beat.before['epoch']} became {beat.after['epoch']}."
        yield from _requests(beat.before["requests"], beat.after["requests"])
        yield from _references(beat.receipt)
    elif beat.what == "refused":
        yield f"Refused: {asked(beat.op)}. Reason: {beat.reason}. The state is unchanged."
    elif beat.what == "back":
        yield f"Rolled back: {asked(beat.op)}. The state is unchanged."
    elif beat.what in LEASES:
        yield f"Outside any transaction: {asked(beat.op)}. The state is unchanged."
        yield from _staged(beat)
    else:
        yield f"Staged, not visible yet: {asked(beat.op)}. The state is unchanged."
        yield from _staged(beat)


def _requests(old: Json, new: Json) -> Iterator[str]:
    for r, row in new.items():
        was = old.get(r)
        if was is None:
            yield f"{r} is new: {amount(row['context'], 'token')}."
        elif (was["context"], was["version"]) != (row["context"], row["version"]):
            length = f"{amount(was['context'], 'token')} became {row['context']:,}, "
            length = length if was["context"] != row["context"] else ""
            yield f"{r}: {length}table version {was['version']} became {row['version']}."
    yield from (f"{r} has ended." for r in old if r not in new)


def _references(receipt: Json) -> Iterator[str]:
    deltas = receipt["refcount_deltas"]
    for step, verb in ((1, "One reference more"), (-1, "One reference less")):
        handles = [h for h, n in deltas.items() if n == step]
        if handles:
            yield f"{verb}: {listed(handles, SHOWN_HANDLES)}."
    if receipt["freed"]:
        yield f"Back in the free queue: {listed(receipt['freed'], SHOWN_HANDLES)}."
    if receipt["evicted_identities"]:
        keys = dict.fromkeys(k[:4] for k in receipt["evicted_identities"])
        yield f"Identity gone: {listed(keys, SHOWN_HANDLES)}."


def _staged(beat: Beat) -> Iterator[str]:
    entries = [r for group in beat.staged["reserved"].values() for r in group]
    if entries:
        rows = [f"{r['handle']} for {r['request']}, {amount(r['rows'], 'row')}" for r in entries]
        yield f"Reserved, in nobody's table: {'; '.join(rows[:SHOWN_HANDLES])}" + (
            f"; and {len(rows) - SHOWN_HANDLES} more." if len(rows) > SHOWN_HANDLES else "."
        )
    for copy in beat.staged["copies"]:
        state = "copied" if copy["done"] else "to copy"
        yield f"{copy['src']} to {copy['dst']}: {amount(copy['rows'], 'row')} {state}, {size(copy['bytes'])}."
    leases = [h for group in beat.staged["leases"].values() for h in group]
    if leases:
        yield f"Lease on {listed(leases, SHOWN_HANDLES)}."


def _cost(beat: Beat) -> Iterator[str]:
    if beat.what != "commit":
        return
    got, parts = beat.receipt, []
    for count, unit, total in (
        ("new_bundles", ("new block a group", "new blocks a group"), "new_capacity_bytes"),
        ("copied_rows", ("row copied", "rows copied"), "copy_payload_bytes"),
        ("useful_new_rows", ("row written", "rows written"), "write_bytes"),
    ):
        if got[count]:
            parts.append(f"{got[count]:,} {either(got[count], *unit)}, {size(got[total])}")
    yield "Cost: " + ("; ".join(parts) or "no new block, no row copied, no row written") + "."


def _noted(beat: Beat) -> Iterator[str]:
    note = beat.note
    for name, verb in (("computed", "computed"), ("recomputed", "computed again")):
        if name in note:
            yield f"{amount(note[name], 'row')} {verb} by the model."
    for request, said in note.get("say", {}).items():
        yield f"{request} so far: “{'…' * (len(said) > SAID) + said[-SAID:]}”"


def _tables(beat: Beat, window: Window) -> Iterator[str]:
    """The tables of the requests in sight; a long one by its ends."""
    for r in window.rows:
        if r is not None:
            row = beat.after["requests"][r]
            tables = "; ".join(f"{g} [{_table(table)}]" for g, table in row["tables"].items())
            yield f"Request {r}: {amount(row['context'], 'token')}, table version {row['version']}, {tables}."
    hidden = window.hidden(beat.after)
    if hidden:
        yield f"Not in the picture: {listed(hidden, 8)}."


def _table(table: Sequence[str]) -> str:
    if len(table) <= SHOWN_HANDLES:
        return ", ".join(table)
    return f"{', '.join(table[:2])}, {len(table) - 4} more, {', '.join(table[-2:])}"


def _free(snapshot: Json) -> str:
    out = []
    for group in snapshot["groups"]:
        queue = snapshot["free"][group["group_id"]]
        first = f", next {queue[0]}" if queue else ""
        out.append(f"{len(queue)} of {group['num_blocks']} in {group['group_id']}{first}")
    return "Free blocks: " + "; ".join(out) + "."


def _unseen(snapshot: Json, window: Window, shelves: Sequence[Shelf]) -> Iterator[str]:
    for shelf in shelves:
        parts = []
        for request, first, end, count in unseen(shelf, snapshot, window):
            beyond = [f"{first} before"] * bool(first) + [f"{count - end} after"] * (end < count)
            parts += [f"{request} has {' and '.join(beyond)}"] * bool(beyond)
        if parts:
            yield f"Blocks outside the window in {shelf.group}: {', '.join(parts)}."
