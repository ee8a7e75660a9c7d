"""One scalar's way to its byte as a recording: a frame for each step of the translator; it translates nothing.

Plain data only: `AddressMap.snapshot()` and `AddressTrace.to_dict()` as they are in JSON (articles 0x03C to 0x03I).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvlab.views import shapes
from kvlab.views.address_picture import CONTEXT, ELEMENT, SLOT, STEPS, Sight, scene
from kvlab.views.pool_sheet import letters
from kvlab.views.scene import Frame, Recording

Json = Mapping[str, Any]
Words = tuple[str, str]


def recording(snapshot: Json, trace: Json, *, title: str = "From a token to a byte", question: str = "Where is it?",
              owners: Mapping[str, str] | None = None, reasons: Mapping[str, str] | None = None,
              note: str = "") -> Recording:
    """A translation as frames: the question, then each step that passed, then the refusal where there was one.

    `reasons` gives a sentence for each refusal word, `owners` fixes the letters of requests, `note` is said at the
    last frame (such as what was read at the address). ValueError where trace and snapshot do not belong together.
    O(steps x (blocks shown)).
    """
    if snapshot.get("kind") != "addresses" or tuple(trace["checks"]) != STEPS[: len(trace["checks"])]:
        raise ValueError("not a trace over an address snapshot")
    if trace["request_id"] not in snapshot["requests"]:
        raise ValueError(f"no request {trace['request_id']!r} in this snapshot")
    names, passed = letters(snapshot["requests"], owners), len(trace["checks"])
    frames = [_frame(Sight(snapshot, trace, done, names), note if done == len(STEPS) else "")
              for done in range(passed + 1)]
    if trace["refused"]:
        ghost = _ghost(snapshot, trace, passed)
        frames.append(_refusal(Sight(snapshot, trace, passed, names, True, ghost), reasons or {}))
    return Recording(title, question, shapes.VIEW, tuple(frames))


def _ghost(snapshot: Json, trace: Json, passed: int) -> Json | None:
    """What stands at a place that the request may not see: the block its table would lead to, if there is one."""
    group = next((g for g in snapshot["groups"] if g["layer_start"] <= trace["layer"] < g["layer_end"]), None)
    if passed >= CONTEXT or group is None or trace["token"] < 0:
        return None
    j, offset = divmod(trace["token"], group["block_size"])
    table = snapshot["requests"][trace["request_id"]]["tables"][group["id"]]
    named = {b["physical_block_id"]: b for b in group["blocks"]}
    block = named.get(table[j]["physical_block_id"]) if j < len(table) else None
    if block is None or offset >= block["valid_rows"]:
        return None
    return {"group": group["id"], "logical_block": j, "token_offset": offset, "physical_ref": table[j],
            "physical_slot": block["physical_slot"], "valid_rows": block["valid_rows"]}


def _frame(s: Sight, note: str) -> Frame:
    title, why = _asked(s) if s.done == 0 else _SAID[s.done - 1](s)
    kind = "start" if s.done == 0 else "read"
    return Frame(title, why, kind, _board(s), _twin(s, note), scene(s))


def _refusal(s: Sight, reasons: Mapping[str, str]) -> Frame:
    t = s.trace
    told = reasons.get(t["refused"], t["refused"].replace("_", " ").capitalize())
    picture = scene(s)
    ringed = [key for key, shape in picture.by_key().items() if shape.get("refused")]
    twin = (*_twin(s, ""), f"Refused with {t['refused']}: {t['detail']}.")
    if s.ghost:
        twin += (f"Row {s.ghost['token_offset']} of block {s.ghost['physical_ref']['physical_block_id']} is written. "
                 f"{t['request_id']} may not see it.",)
    return Frame(f"Refused: {t['refused'].replace('_', ' ')}", f"{told.rstrip('.')}. Nothing was read.", "refused",
                 _board(s), twin, picture, shake=(*ringed, "why")[0])


def _board(s: Sight) -> tuple[Json, ...]:
    """The four numbers that people call an address, as soon as each is known."""
    t = s.trace
    cells = (("slot id", "slot_id", SLOT, "row"), ("element offset", "element_offset", ELEMENT, "elements"),
             ("byte offset", "byte_offset", len(STEPS), "bytes"), ("byte address", "byte_address", len(STEPS), ""))
    return tuple({"label": label, "value": t[name] if s.done >= since else "–", **({"unit": unit} if unit else {})}
                 for label, name, since, unit in cells)


def _twin(s: Sight, note: str) -> tuple[str, ...]:
    """The frame in sentences: the question, what has been found so far, and the note."""
    t = s.trace
    asked = f"Asked: {t['kind']} of token {t['token']}, layer {t['layer']}, head {t['head']}, lane {t['lane']}."
    found = [f"{_SAID[n](s)[0]}." for n in range(s.done)]
    return (asked, *found, *([note] if note else []))


# ---------------------------------------------------------------- what each step says
def _asked(s: Sight) -> Words:
    t = s.trace
    return (f"Where is {t['kind']} of token {t['token']:,}?",
            f"Layer {t['layer']}, head {t['head']}, lane {t['lane']}, for request {t['request_id']}. A block number "
            "answers one of twelve steps.")


def _context(s: Sight) -> Words:
    t, n = s.trace, s.context
    return (f"{t['request_id']} may see token {t['token']:,}",
            f"It sees {n:,} tokens, 0 to {n - 1:,}. This check comes first: what is not yours is not looked for.")


def _group(s: Sight) -> Words:
    t, g = s.trace, s.group
    return (f"Layer {t['layer']} belongs to {g['id']}",
            f"Exactly one group holds it: layers {g['layer_start']} to {g['layer_end'] - 1}. Each group has its own "
            "pool, tables and tensors.")


def _local(s: Sight) -> Words:
    t, g = s.trace, s.group
    return (f"It is layer {t['layer_local']} of the group",
            f"{t['layer']} − {g['layer_start']} = {t['layer_local']}. The group's tensor begins with its own first "
            "layer.")


def _block(s: Sight) -> Words:
    t, size = s.trace, s.group["block_size"]
    return (f"Token {t['token']:,} is row {t['token_offset']} of logical block {t['logical_block']}",
            f"{t['token']:,} = {t['logical_block']} × {size} + {t['token_offset']}. Blocks of this group hold {size} "
            "tokens.")


def _table(s: Sight) -> Words:
    t = s.trace
    return (f"The table says block {t['physical_ref']['physical_block_id']}",
            f"Entry {t['logical_block']} of the table in {t['group_id']}, at version {t['table_version']}. A block's "
            "number is a name, not a place.")


def _identity(s: Sight) -> Words:
    t, g = s.trace, s.group
    return (f"Block {t['physical_ref']['physical_block_id']} stands on slot {t['physical_slot']}",
            f"Pool {g['pool_id']} and its generation {g['pool_generation']} are those that the entry was made for.")


def _valid(s: Sight) -> Words:
    t = s.trace
    return (f"Row {t['token_offset']} is written",
            f"The block has {t['valid_rows']} valid rows. To be allowed to see a row, and the row being there, are two "
            "checks.")


def _headed(s: Sight) -> Words:
    t = s.trace
    return (f"Head {t['head']} is one of {s.group['kv_heads_local']}",
            "These are the K/V heads of this rank, counted from 0.")


def _lane(s: Sight) -> Words:
    t = s.trace
    return f"Lane {t['lane']} is one of {s.group['head_dim']}", "Now every coordinate is known."


def _slot(s: Sight) -> Words:
    t, size = s.trace, s.group["block_size"]
    return (f"Its slot id is {t['slot_id']:,}",
            f"{t['physical_slot']} × {size} + {t['token_offset']} = {t['slot_id']:,}. That names a token's row in the "
            "pool. It knows no layer, no head, no lane: it is no address.")


def _element(s: Sight) -> Words:
    t = s.trace
    return (f"{t['element_offset']:,} elements into the tensor",
            "Index times stride, added up. Strides follow from the axis order alone: the last axis has stride 1, each "
            "other one the product of the sizes behind it.")


def _address(s: Sight) -> Words:
    t = s.trace
    return (f"Byte {t['byte_address']:,}",
            f"{t['element_offset']:,} × {t['scalar_bytes']} = {t['byte_offset']:,} bytes past the base of "
            f"{t['kind']}, and before its end.")


_SAID: tuple[Callable[[Sight], Words], ...] = (
    _context, _group, _local, _block, _table, _identity, _valid, _headed, _lane, _slot, _element, _address,
)
