"""One picture of a translation under way: context, group, table, pool, block, axes, tensor, each in its own row.

Plain data in (an address snapshot and a trace, as JSON), shapes out. It computes no address; what a step has not found
yet is not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.views import shapes
from kvlab.views.scene import Scene
from kvlab.views.shapes import LEFT, PITCH, Shape

Json = Mapping[str, Any]
STEPS = ("token_in_context", "unique_group_for_layer", "layer_local", "logical_block_and_offset", "table_bounds",
         "physical_identity(pool,generation,block)", "offset<valid_rows", "head_in_range", "lane_in_range", "slot_id",
         "element_offset", "address_in_[base,end)")
(CONTEXT, GROUP, LOCAL, BLOCK, TABLE, IDENTITY, VALID, HEAD, LANE, SLOT, ELEMENT, ADDRESS) = range(1, 13)
"""How many steps have passed when each of them has."""

WIDE, CELLS, ROWS, ROW_PITCH = 812, 6, 16, 51
Y = {"context": 40, "group": 84, "table": 130, "pool": 176, "rows": 258, "axes": 334, "tensor": 434}
WORD = {"layer_local": "layer", "physical_slot": "slot", "token_offset": "row", "kv_head_local": "head",
        "head_dim": "lane", "kv_kind": "K/V", "inner_lane": "inner"}


@dataclass(frozen=True, slots=True)
class Sight:
    """What a picture shows: the trace after `done` steps, its group and request, and every request's letter.

    `ghost` is what stands where the request may not look, if anything does: {slot, block, valid, block_at, offset}.
    """

    snapshot: Json
    trace: Json
    done: int
    letters: Mapping[str, str]
    refused: bool = False
    ghost: Json | None = None

    @property
    def letter(self) -> str:
        return self.letters[self.trace["request_id"]]

    @property
    def group(self) -> Json | None:
        wanted = self.trace["group_id"] if self.done >= GROUP else self.ghost and self.ghost["group"]
        return next((g for g in self.snapshot["groups"] if g["id"] == wanted), None)

    @property
    def context(self) -> int:
        return self.snapshot["requests"][self.trace["request_id"]]["context_length"]


def scene(sight: Sight) -> Scene:
    """The picture after `sight.done` steps."""
    parts = [_context(sight), _groups(sight)]
    if sight.group is not None:
        parts += [_table(sight), _pool(sight), _rows(sight), _axes(sight), _tensor(sight)]
    return Scene(shapes.VIEW, tuple(shape for part in parts for shape in part))


def _head(key: str, label: str, sub: str = "", owner: str | None = None) -> Shape:
    return shapes.lane(f"head/{key}", shapes.GUTTER, Y[key] - (4 if owner else 2), label, sub, owner=owner)


def _context(s: Sight) -> Iterator[Shape]:
    """The tokens that the request sees, and where the asked one stands."""
    t, n, wide = s.trace, s.context, WIDE - 90
    yield _head("context", f"sees {n:,}", f"version {t['table_version']}", s.letter)
    yield shapes.strip("context", LEFT, Y["context"], max(1, n), w=wide, h=22)
    outside = not 0 <= t["token"] < n
    x = LEFT + (wide + 50 if outside else wide * (t["token"] + 0.5) / n)
    yield shapes.gate("token", x, Y["context"], 22, f"token {t['token']:,}")
    if not outside:
        yield shapes.label("tokens", LEFT + wide + 10, Y["context"] + 15, f"0 to {n - 1:,}", "s d")
    if s.refused and s.done < CONTEXT:
        yield shapes.well("asked", x - 12, Y["context"], w=24, h=22, refused=True)
        yield shapes.reason("why", LEFT + WIDE - 262, Y["context"] + 34, t["refused"])


def _groups(s: Sight) -> Iterator[Shape]:
    """Every cache group by its layers; the one that holds the layer carries the request's stripe."""
    t = s.trace
    if s.done < CONTEXT and not s.ghost:
        return
    yield _head("group", f"layer {t['layer']}", f"local layer {t['layer_local']}" if s.done >= LOCAL else "")
    x = LEFT
    for g in s.snapshot["groups"]:
        words = f"{g['id']}: layers {g['layer_start']}–{g['layer_end'] - 1}"
        if s.group is not None and g["id"] == s.group["id"]:
            yield shapes.link(f"group/{g['id']}", x, Y["group"], words, s.letter, w=168, says=f"Cache group {words}")
        else:
            yield shapes.well(f"group/{g['id']}", x, Y["group"], words, w=168, h=22, says=f"Cache group {words}")
        x += 180
    if s.refused and s.done == CONTEXT:
        yield shapes.reason("why", x, Y["group"] - 2, t["refused"])


def _entries(s: Sight) -> list[Json]:
    return s.snapshot["requests"][s.trace["request_id"]]["tables"].get(s.group["id"], [])


def _window(at: int, count: int, most: int) -> range:
    """`most` of `count` places, with `at` among them."""
    first = max(0, min(at - most // 2, count - most))
    return range(first, min(count, first + most))


def _at(s: Sight, name: str) -> Any:
    """A value of the trace, or of what stands there though it may not be looked at."""
    found = s.trace[name]
    return found if found is not None or not s.ghost else s.ghost.get(name)


def _table(s: Sight) -> Iterator[Shape]:
    """The request's block table in this group: each entry a handle, the chosen one with its number."""
    j, entries = _at(s, "logical_block"), _entries(s)
    known = s.done >= BLOCK or s.ghost
    places = _window(j if known else 0, max(len(entries), (j + 1) if known else 0), CELLS)
    sub = f"{s.trace['token']:,} = {j} × {s.group['block_size']} + {_at(s, 'token_offset')}" if known else ""
    yield _head("table", "block table", sub)
    for column, place in enumerate(places):
        x, key = LEFT + column * PITCH, f"entry/{place}"
        chosen, first = known and place == j, place * s.group["block_size"]
        says = f"Entry {place} of the table: tokens {first} to {first + s.group['block_size'] - 1}"
        if place >= len(entries):
            yield shapes.well(key, x, Y["table"], "no entry", h=22, refused=s.refused and s.done == BLOCK, says=says)
        elif chosen and (s.done >= TABLE or s.ghost):
            yield shapes.link(key, x, Y["table"], _handle(entries[place]), s.letter,
                              refused=(s.refused and s.done == TABLE) or None, says=says)
        else:
            yield shapes.well(key, x, Y["table"], f"▸ block {place}" if chosen else f"block {place}", h=22, says=says)
    if s.refused and s.done in (BLOCK, TABLE):
        yield shapes.reason("why", LEFT, Y["pool"] + 10, s.trace["refused"])


def _handle(entry: Json) -> str:
    generation = entry.get("block_generation")
    return f"{entry['physical_block_id']}@{generation}" if generation else str(entry["physical_block_id"])


def _pool(s: Sight) -> Iterator[Shape]:
    """The group's physical slots, and the blocks that stand on them. The chosen one comes down from the table."""
    if s.done < IDENTITY and not s.ghost:
        return
    slot, group = _at(s, "physical_slot"), s.group
    standing = {b["physical_slot"]: b for b in group["blocks"]}
    column = _at(s, "logical_block") - _window(_at(s, "logical_block"), len(_entries(s)), CELLS).start
    yield _head("pool", f"pool {group['pool_id']}"[:18], f"generation {group['pool_generation']}")
    for place, at in enumerate(_window(slot, group["num_slots"], CELLS)):
        x, block = LEFT + place * PITCH, standing.get(at)
        yield shapes.label(f"slot/{at}", x + 60, Y["pool"] + 68, f"slot {at}", "s d c")
        if block is None:
            yield shapes.well(f"place/{at}", x, Y["pool"])
            continue
        start = {"x": LEFT + column * PITCH, "y": Y["table"]} if at == slot and s.done == IDENTITY else None
        owners = _owners(s, block["physical_block_id"])
        yield shapes.block(f"block/{at}", x, Y["pool"], label=_handle(block), of=group["block_size"],
                           fill=block["valid_rows"], owners=owners[:2], h=54, lane=27, refs=len(owners),
                           **({"start": start} if start else {}))


def _owners(s: Sight, block: int) -> list[str]:
    """Letters of the requests whose tables name a block, the asking one first."""
    naming = [name for name, row in s.snapshot["requests"].items()
              if any(e["physical_block_id"] == block for e in row["tables"].get(s.group["id"], ()))]
    first = s.trace["request_id"]
    return [s.letters[name] for name in sorted(naming, key=lambda name: name != first)]


def _rows(s: Sight) -> Iterator[Shape]:
    """The rows of the chosen block: hers to see, there but not hers, or not written."""
    if s.done < IDENTITY and not s.ghost:
        return
    offset, size, valid = _at(s, "token_offset"), s.group["block_size"], _at(s, "valid_rows")
    first = _at(s, "logical_block") * size
    yield _head("rows", f"block {_at(s, 'physical_ref')['physical_block_id']}", f"{valid} of {size} rows valid")
    places = _window(offset, size, ROWS)
    for column, row in enumerate(places):
        mine = first + row < s.context
        token = None if row >= valid else f"{first + row}" if mine else "·"
        no = s.refused and row == offset and (s.ghost is not None or s.done == IDENTITY)
        yield shapes.slot(f"row/{row}", LEFT + column * ROW_PITCH, Y["rows"], str(row), token,
                          owner=s.letter if mine and row < valid else None, w=47, h=40, refused=no or None,
                          says=f"Row {row} of this block: token {first + row}{'' if mine else f', not for {s.letter}'}")
    x = LEFT + (offset - places.start) * ROW_PITCH + 23.5
    if s.done >= VALID:
        words = f"slot id {s.trace['slot_id']:,}" if s.done >= SLOT else f"row {offset}"
        yield shapes.kernel("row", x, Y["rows"] + 44, words)
    elif s.refused and s.done == IDENTITY:
        yield shapes.reason("why", min(x - 20, 700), Y["rows"] + 46, s.trace["refused"])
    elif s.ghost:
        yield shapes.label("ghost", min(x - 20, 700), Y["rows"] + 58,
                           f"the row is there, and it is not {s.letter}'s", "s d")


def _index(s: Sight, axis: str) -> int | None:
    """The index on an axis, once the step that finds it has passed."""
    t = s.trace
    simple = {"layer_local": (LOCAL, t["layer_local"]), "token_offset": (BLOCK, t["token_offset"]),
              "physical_slot": (IDENTITY, t["physical_slot"]), "kv_head_local": (HEAD, t["head"])}
    late = (t["coordinate"] or {}).get(axis)
    since, value = simple.get(axis, (LANE, late))
    return value if s.done >= since else None


def _axes(s: Sight) -> Iterator[Shape]:
    """The tensor's axes in memory order, slowest first: index over name, and under it what one step costs."""
    order, t = s.group["axis_order"], s.trace
    if s.done < GROUP:
        return
    yield _head("axes", "axes in memory", "slowest first")
    pitch = WIDE / len(order)
    for n, axis in enumerate(order):
        index, size, x = _index(s, axis), s.group["shape"][n], LEFT + n * pitch
        no = s.refused and (s.done, axis) in ((VALID, "kv_head_local"), (HEAD, "head_dim"))
        yield shapes.slot(f"axis/{axis}", x, Y["axes"], f"{WORD[axis]} of {size}", None if index is None else index,
                          w=round(pitch - 10), h=44, owner=None if index is None else s.letter, refused=no or None,
                          says=f"{WORD[axis]}: {'not known yet' if index is None else index}, of {size}")
        if s.done >= ELEMENT:
            stride, middle = t["strides"][axis], x + (pitch - 10) / 2
            yield shapes.label(f"stride/{axis}", middle, Y["axes"] + 60, f"× {stride:,}", "s m d c")
            yield shapes.label(f"product/{axis}", middle, Y["axes"] + 75, f"= {t['coordinate'][axis] * stride:,}",
                               "s m c")
    if s.refused and s.done in (VALID, HEAD):
        yield shapes.reason("why", LEFT, Y["axes"] + 56, t["refused"])


def _tensor(s: Sight) -> Iterator[Shape]:
    """The bytes of one tensor from base to end, and the scalar's byte among them."""
    t = s.trace
    if s.done < ELEMENT:
        return
    base, end = s.group["base"][t["kind"]], s.group["end"][t["kind"]]
    share = min(1.0, t["element_offset"] * t["scalar_bytes"] / (end - base)) if end > base else 1.0
    yield _head("tensor", f"{t['kind']} tensor", f"{(end - base):,} bytes")
    yield shapes.strip("tensor", LEFT, Y["tensor"], 16, w=WIDE, h=18)
    yield shapes.label("base", LEFT, Y["tensor"] + 35, f"base {base:,}", "s d m")
    yield shapes.label("end", LEFT + WIDE, Y["tensor"] + 35, f"end {end:,}", "s d m e")
    words = f"+ {t['element_offset']:,} × {t['scalar_bytes']} bytes"
    if s.done >= ADDRESS:
        yield shapes.gate("byte", LEFT + WIDE * share, Y["tensor"], 18, "")
        words = f"{words} = byte {t['byte_address']:,}"
    yield shapes.label("sum", LEFT + WIDE / 2, Y["tensor"] + 35, words, "m b c")
    if s.refused:
        yield shapes.reason("why", LEFT + WIDE - 230, Y["tensor"] - 4, t["refused"])
