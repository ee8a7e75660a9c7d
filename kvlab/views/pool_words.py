"""Says what a frame of an allocator's history shows: its title and why; it draws nothing and counts nothing.

Every sentence comes from the receipt, the overlay or the two snapshots of its beat, or from what the caller noted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.views.pool_beats import COPY_ON_WRITE, Beat
from kvlab.views.pool_grid import block_of
from kvlab.views.pool_sheet import clip, size

IN_PLACE = "in_place_write_row_o_valid_o_plus_1"
Json = Mapping[str, Any]


# ---------------------------------------------------------------- small words
def listed(words: Iterable[str], most: int = 4) -> str:
    """`a, b and c`; past `most` of them the rest is counted."""
    named = list(words)
    if len(named) > most:
        named = [*named[: most - 1], f"{len(named) - most + 1} more"]
    return " and ".join(part for part in (", ".join(named[:-1]), *named[-1:]) if part)


def amount(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def either(many: int | Iterable[Any], one: str, more: str) -> str:
    """The word that fits a count, or a collection of so many."""
    return one if (many if isinstance(many, int) else len(list(many))) == 1 else more


def everywhere(snapshot: Json) -> str:
    """`in both groups`, however many there are."""
    names = [g["group_id"] for g in snapshot["groups"]]
    return "in both groups" if len(names) == 2 else either(names, f"in group {names[0]}", f"in all {len(names)} groups")


def called(requests: Iterable[str], most: int = 3) -> str:
    """Requests in a sentence that must stay short: a few of them, long ids cut."""
    return listed((clip(r, 14) for r in requests), most)


def spell(word: str) -> str:
    return word.replace("_", " ")


def reserved(staged: Json) -> list[str]:
    """Handles that a transaction has reserved, over all groups."""
    return [r["handle"] for group in staged["reserved"].values() for r in group]


def asked(op: Json) -> str:
    """An operation in words, whatever its arguments are: a refused one may lack some."""
    name, who, tokens = str(op.get("op")), op.get("request"), op.get("tokens", 1)
    count = amount(tokens, "token") if isinstance(tokens, int) else f"{tokens!r} tokens"
    match name:
        case "append" if "requests" in op:
            return f"append to {listed(dict(op['requests']))}"
        case "append":
            return f"append {count} to {who}"
        case "truncate":
            return f"drop blocks {op['drop']} of {who}" if "drop" in op else f"truncate {who} to {count}"
        case "fork":
            return f"fork {who} into {op.get('child')}"
        case "allocate":
            return f"allocate {count} for {who}"
        case "cache_full":
            return f"name blocks {listed(map(str, op.get('blocks', ())))} of {who}"
        case "touch" | "evict":
            handles = listed(h for bundle in op.get("blocks", ()) for h in bundle)
            return f"{name} {handles} for {who}" if who else f"{name} {handles}"
        case "admit_writer":
            return f"write into {who}'s tail as {listed(op.get('handles', {}).values())}"
        case "lease":
            return f"lease {who}'s blocks, to {op.get('kind')} them"
        case "unlease":
            return f"end lease {op.get('lease')}"
        case "compensate":
            return f"undo the {spell(str(op.get('undone')))}" + (f" of {who}" if who else "")
    return f"{spell(name)} {who}" if who else spell(name)


@dataclass(frozen=True, slots=True)
class Words:
    title: str
    why: str


def words(beat: Beat, reasons: Mapping[str, str]) -> Words:
    """Title and why of a beat. `reasons` gives a sentence for a refusal's word, where the caller has one."""
    if beat.what == "refused":
        return _refused(beat, reasons)
    if beat.what == "commit":
        return _COMMITTED.get(beat.receipt["operation"], _other)(beat)
    return _BEFORE[beat.what](beat)


# ---------------------------------------------------------------- before publication
def _start(beat: Beat) -> Words:
    live, groups = beat.after["requests"], beat.after["groups"]
    if live:
        held = listed(f"{r} holds {amount(row['context'], 'token')}" for r, row in live.items())
        return Words(f"{amount(len(live), 'request')} at the start", held + _bundles(groups))
    pools = listed(f"{g['num_blocks']} blocks of {g['block_size']} tokens in {g['group_id']}" for g in groups)
    return Words("Every block is free", f"{pools}, and no request has a table yet.")


def _bundles(groups: Iterable[Json]) -> str:
    return ", with a block table in each group." if len(list(groups)) > 1 else "."


def _reserve(beat: Beat) -> Words:
    staged, some = beat.staged, beat.what == "reserve_some"
    who, handles = called(staged["requests"]), reserved(staged)
    at = next((g for g, rs in staged["reserved"].items() if rs), "") if some else ""
    place = f"in {at} first" if some else everywhere(beat.after)
    verb = "arrives" if beat.op["op"] in ("allocate", "touch") else either(staged["requests"], "appends", "append")
    return Words(
        f"{who} {verb}: reserve {place}",
        f"{_cause(beat)} {listed(handles)} {either(handles, 'leaves', 'leave')} "
        "the queue hatched: reserved, and in nobody's table.",
    )


def _cause(beat: Beat) -> str:
    """Why blocks are reserved: a new request, a shared tail, or a last block without room."""
    requests, live, of = beat.staged["requests"], beat.before["requests"], beat.after["groups"][0]["block_size"]
    if beat.op["op"] == "allocate":
        tokens = beat.op["tokens"]
        return f"{amount(tokens, 'token')} {either(tokens, 'needs', 'need')} room."
    if beat.op["op"] == "touch":
        return "What was found is leased, and the rest needs room."
    sharing = [r for r, row in requests.items() if row["path"] == COPY_ON_WRITE]
    if sharing:
        alone = " shares its tail, so it needs a block of its own."
        return called(sharing) + either(sharing, alone, " share their tails, so they need blocks of their own.")
    takers = {r["request"]: None for group in beat.staged["reserved"].values() for r in group}
    if all(r in live and live[r]["context"] % of == 0 for r in takers):
        return f"The last block of {called(takers)} is full."
    return f"The last block of {called(takers)} has too little room."


def _copy(beat: Beat) -> Words:
    copies = beat.staged["copies"]
    rows, of = copies[0]["rows"], beat.after["groups"][0]["block_size"]
    sources, total = list(dict.fromkeys(c["src"] for c in copies)), size(sum(c["bytes"] for c in copies))
    title, moved = "valid rows", "Only valid rows are copied"
    if len({c["rows"] for c in copies}) == 1:
        title = either(rows, "one valid row", f"{rows} valid rows")
        moved = f"{amount(rows, 'row')} of {of} {either(rows, 'is', 'are')} copied"
        moved += either(copies, "", " from each")
    return Words(
        f"Lease the source, copy its {title}",
        f"A lease holds {listed(sources)} while {either(sources, 'it is', 'they are')} read. {moved}, {total} in all.",
    )


def _write(beat: Beat) -> Words:
    rows = {_new_rows(beat, r) for r in beat.staged["requests"]}
    one = next(iter(rows)) if len(rows) == 1 else ()
    title = f"Write row {one[0]}" if len(one) == 1 else "Write the new rows"
    new = either(one, "row", "rows")
    return Words(
        title,
        f"The new {new} of {called(beat.staged['requests'])} {either(one, 'is', 'are')} written "
        f"{everywhere(beat.after)}. Still no table points at what is staged.",
    )


def _new_rows(beat: Beat, request: str) -> tuple[int, ...]:
    """Places inside their blocks of the rows that a request gains; in the first group, where blocks differ in size."""
    start, of = beat.before["requests"][request]["context"], beat.after["groups"][0]["block_size"]
    end = beat.staged["requests"][request]["context"]
    return tuple(t % of for t in range(start, end))


def _lease(beat: Beat) -> Words:
    op, handles = beat.op, [h for group in beat.staged["leases"].values() for h in group]
    return Words(
        f"A lease on {op['request']}'s blocks, to {op['kind']} them",
        f"{listed(handles)} {either(handles, 'stays', 'stay')} out of circulation until it ends, even if "
        f"{op['request']} lets go. A lease is no part of the state, so the digest is the same.",
    )


def _unlease(beat: Beat) -> Words:
    return Words("The lease ends", f"{listed(beat.op['handles'])}: whoever read or wrote there is done. "
                                   "What is free of it may be given away from now on.")


def _refused(beat: Beat, reasons: Mapping[str, str]) -> Words:
    told = reasons.get(beat.reason) or f"{spell(beat.reason).capitalize()}."
    detail = f" ({clip(beat.detail, 80)})" if len(beat.detail) > 3 else ""
    return Words(
        f"Refused: {clip(asked(beat.op), 60)}",
        f"{told.removesuffix('.')}{detail}. Nothing was published, so the digest is the same.",
    )


def _back(beat: Beat) -> Words:
    pairs = [(g, r["handle"]) for g, entries in beat.staged["reserved"].items() for r in entries]
    now = [f"{block_of(h)}@{_column(beat.after, g, h, 'generation')}" for g, h in pairs]
    places = either(now, "is back in its place in the queue", "are back in their places in the queue")
    told = f"{listed(now)} {places}, with the old generation. " if now else "Nothing had been reserved. "
    return Words("Rolled back, to the byte", f"{told}Before and after are the same state, so the digest is the same.")


def _column(snapshot: Json, group: str, handle: str, name: str) -> int:
    first = next(g["first_block_id"] for g in snapshot["groups"] if g["group_id"] == group)
    return snapshot["blocks"][group][name][block_of(handle) - first]


_BEFORE: dict[str, Callable[[Beat], Words]] = {
    "start": _start,
    "reserve": _reserve,
    "reserve_some": _reserve,
    "copy": _copy,
    "write": _write,
    "lease": _lease,
    "unlease": _unlease,
    "back": _back,
}


# ---------------------------------------------------------------- committed operations
def _fresh(beat: Beat, request: str) -> list[str]:
    """Handles that a request's tables have now and had not before, bundle by bundle."""
    now, old = beat.after["requests"][request]["tables"], beat.before["requests"][request]["tables"]
    new = [[h for h in table if h not in set(old[g])] for g, table in now.items()]
    return [h for bundle in zip(*new, strict=False) for h in bundle]


def _writes(beat: Beat, request: str) -> str:
    pieces = beat.note.get("pieces", {})
    if request in pieces:
        return f"{clip(request, 14)} writes {json.dumps(clip(pieces[request], 28), ensure_ascii=False)}"
    was, now = (state["requests"][request]["context"] for state in (beat.before, beat.after))
    return f"{clip(request, 14)} appends " + (f"token {was}" if now == was + 1 else f"{now - was} tokens")


def _append(beat: Beat) -> Words:
    paths = beat.receipt["paths"]
    title = listed((_writes(beat, r) for r in paths), 3)
    if len(paths) == 1:
        request, path = next(iter(paths.items()))
        why = _why_copy if beat.receipt["copied_rows"] else {IN_PLACE: _why_in_place}.get(path, _why_new_block)
        return Words(title, why(beat, request))
    if not beat.receipt["new_bundles"]:
        return Words(title, "Every tail has room and one owner, so all rows are written in place. No block moves.")
    ways: dict[str, list[str]] = {}
    for request, path in paths.items():
        way = {IN_PLACE: "in place", COPY_ON_WRITE: "into a copy of a shared tail"}.get(path, "into a new block")
        ways.setdefault(way, []).append(request)
    how = "; ".join(f"{called(who, 2)} {way}" for way, who in ways.items())
    return Words(title, f"One transaction: {how}. It is published {everywhere(beat.after)} at once.")


def _why_in_place(beat: Beat, request: str) -> str:
    row, fresh = beat.before["requests"][request], _fresh(beat, request)
    sizes = [g["block_size"] for g in beat.after["groups"]]
    places = [(table, row["context"] // of) for table, of in zip(row["tables"].values(), sizes, strict=True)]
    tails = [table[j] for table, j in places if j < len(table)]
    at = either(set(sizes), f"row {row['context'] % sizes[0]}", "the next row")
    more = f"The rest goes into {listed(fresh)}." if fresh else "No block moves."
    return f"{request} alone owns its tail {listed(tails)}, so {at} is written in place. {more}"


def _why_copy(beat: Beat, request: str) -> str:
    row, now = beat.before["requests"][request], beat.after["requests"][request]
    gone = [(g, h) for g, table in row["tables"].items() for h in table if h not in set(now["tables"][g])]
    left = {_column(beat.after, g, h, "ref_cnt") for g, h in gone}
    left_with = f"{either(gone, 'has', 'have')} {amount(min(left, default=0), 'owner')}"
    owners = f", and {listed(h for _, h in gone)} {left_with}" if len(left) == 1 else ""
    return f"Table, length and counts become true together: {request} has its own tail{owners}. The lease has ended."


def _why_new_block(beat: Beat, request: str) -> str:
    fresh = _fresh(beat, request)
    turn = either(fresh, "turns", "turn")
    return f"{listed(fresh)} {turn} solid in {request}'s table. The older blocks stay as they are."


def _allocate(beat: Beat) -> Words:
    request, computed, bundles = beat.receipt["requests"][0], beat.note.get("computed"), beat.receipt["new_bundles"]
    rows = "" if computed is None else f"The model computed {amount(computed, 'row')}. "
    place = either(beat.after["groups"], everywhere(beat.after), "in each group")
    blocks = f"{amount(bundles, 'block')} {place} {either(bundles, 'turns', 'turn')} solid"
    return Words(
        f"Publish {request}: {amount(beat.after['requests'][request]['context'], 'token')}",
        f"{rows}{blocks}; table, length and counts become true together.",
    )


def _fork(beat: Beat) -> Words:
    child, parent = beat.receipt["requests"][0], beat.op["request"]
    return Words(
        f"Fork {parent} into {child}",
        f"{child} gets {parent}'s table, not its bytes. Each block gains one reference, and nothing is copied.",
    )


def _truncate(beat: Beat) -> Words:
    request, freed, dropped = beat.receipt["requests"][0], beat.receipt["freed"], beat.receipt["refcount_deltas"]
    title = f"Truncate {request} to {amount(beat.after['requests'][request]['context'], 'token')}" + _told(beat.receipt)
    if not dropped:
        return Words(title, f"No block is given up: {request} only sees fewer rows of its last one.")
    fate = (
        "Others still hold them."
        if not freed
        else (
            "Nobody else owned them, so they go to the end of the queue."
            if len(freed) == len(dropped)
            else f"{listed(freed)} had no other owner and went to the end of the queue."
        )
    )
    return Words(title, f"{request} gives up {listed(dropped)}. {fate}")


def _end(beat: Beat) -> Words:
    receipt = beat.receipt
    request, freed = receipt["requests"][0], len(receipt["freed"])
    stay = len(receipt["refcount_deltas"]) - freed
    parts = [f"{amount(freed, 'block')} had no other owner and went to the end of the queue."] * bool(freed)
    parts += [f"{amount(stay, 'block')} {either(stay, 'stays', 'stay')}, held by others."] * bool(stay)
    leased = {h for group in (beat.open or {"leases": {}})["leases"].values() for h in group}
    parts += ["A lease keeps what it names there from being given away."] * bool(leased & set(receipt["freed"]))
    return Words(f"{receipt['operation'].capitalize()} {request}{_told(receipt)}", " ".join(parts))


def _told(receipt: Json) -> str:
    """Why it was done, where the receipt says more than what was done."""
    told = receipt["reason"] if receipt["reason"] != receipt["operation"] else ""
    return f": {spell(told)}" if told else ""


def _cache_full(beat: Beat) -> Words:
    blocks = list(map(str, beat.op["blocks"]))
    return Words(
        f"Name {either(blocks, 'block', 'blocks')} {listed(blocks)} of {beat.op['request']}",
        "A full block gets a cached identity, so that others may find it. It adds no reference.",
    )


def _touch(beat: Beat) -> Words:
    request, more = beat.receipt["requests"][0], beat.receipt["useful_new_rows"]
    row, sizes = beat.after["requests"][request], {g["group_id"]: g["block_size"] for g in beat.after["groups"]}
    found = row["context"] - more
    tables = {g: table[: -(-found // sizes[g])] for g, table in row["tables"].items()}
    woken = [h for g, table in tables.items() for h in table if block_of(h) in set(beat.before["free"][g])]
    left = f" {listed(woken)} {either(woken, 'leaves', 'leave')} the free queue." if woken else ""
    rest = f" {amount(more, 'new row')} {either(more, 'goes', 'go')} into fresh blocks, in the same transaction."
    return Words(
        f"{request} finds {amount(found, 'token')} in the cache" + (f", adds {more:,}" if more else ""),
        f"The rows are still there, and {request} takes a reference. Nothing is computed or copied"
        + (f" for them.{left}{rest}" if more else f".{left}"),
    )


def _evict(beat: Beat) -> Words:
    keys = dict.fromkeys(f"#{key[:4]}" for key in beat.receipt["evicted_identities"])
    return Words(
        f"Forget {listed(keys)}",
        "The identity goes, so nobody can find these rows any more. "
        "A request that has the block in its table keeps it.",
    )


def _other(beat: Beat) -> Words:
    return Words(asked(beat.op).capitalize(), f"Published {everywhere(beat.after)} at once.")


_COMMITTED: dict[str, Callable[[Beat], Words]] = {
    "append": _append,
    "allocate": _allocate,
    "fork": _fork,
    "truncate": _truncate,
    "release": _end,
    "cancel": _end,
    "cache_full": _cache_full,
    "touch": _touch,
    "evict": _evict,
}
