"""The questions that an address map answers, each a pure reading of one snapshot; it changes nothing.

A question is plain data, {"ask": word, ...}, and so is its answer. A question that is none raises KeyError, TypeError
or ValueError, which the map turns into a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvlab.contract import Json, Rejected
from kvlab.memory.address import find_block, resolve
from kvlab.memory.address_records import AddressSnapshot, GroupLayout, RequestSnapshot, read_request
from kvlab.memory.address_tables import (
    block_payload,
    block_table_rows,
    kernel_block_table,
    place_tensors,
    slot_mapping,
    writes_of,
)

Question = Mapping[str, Any]
COORDINATE = ("token", "layer", "kind", "head", "lane")


def _resolve(snapshot: AddressSnapshot, q: Question) -> Json:
    """One scalar's address. `view` is a request snapshot that the reader took earlier, `table_version` the version
    that the reader believes to be live."""
    request: str | RequestSnapshot = q["request"]
    if "view" in q:
        request = read_request(q["request"], q["view"])
    elif q.get("table_version", live := snapshot.request(request).table_version) != live:
        raise Rejected("stale_table_version", f"{request} is at version {live}, asked for {q['table_version']}")
    return resolve(snapshot, request, *(q[name] for name in COORDINATE)).to_dict()


def _group(snapshot: AddressSnapshot, q: Question) -> Json:
    """A group's geometry: shape, strides in elements, byte steps, and where its tensor begins and ends."""
    group, kind = snapshot.group(q["group"]), q.get("kind", "K")
    strides, width = group.strides(kind), group.width(kind)
    return {"layers": [group.layer_start, group.layer_end], "shape": list(group.shape_of(kind)),
            "strides": list(strides.values()), "steps": {axis: n * width for axis, n in strides.items()},
            "base": group.base[kind], "base_hex": hex(group.base[kind]), "extent": group.extent(kind),
            "end": group.base[kind] + group.extent(kind),
            "last_scalar": group.base[kind] + group.extent(kind) - width}


def _capacity(snapshot: AddressSnapshot, q: Question) -> Json:
    """Bytes by group and over all: a row, a bundle of blocks, what live blocks hold room for, the whole pool."""
    groups = snapshot.groups
    named = {g.id: {ref for r in snapshot.requests.values() for ref in r.block_tables_by_group[g.id]} for g in groups}
    return {"row_bytes": [g.row_bytes for g in groups], "row_sum": sum(g.row_bytes for g in groups),
            "block_bytes": [g.page_size_bytes for g in groups], "bundle": sum(g.page_size_bytes for g in groups),
            "live": sum(len(named[g.id]) * g.page_size_bytes for g in groups),
            "pool": sum(g.num_slots * g.page_size_bytes for g in groups)}


def _table(snapshot: AddressSnapshot, q: Question) -> Json:
    """What a request sees, in block ids: {context, version, group: [ids]}."""
    request = snapshot.request(q["request"])
    tables = {g: [ref.physical_block_id for ref in t] for g, t in request.block_tables_by_group.items()}
    return {"context": request.context_length, "version": request.table_version, **tables}


def _visibility(snapshot: AddressSnapshot, q: Question) -> Json:
    """Rows that a request may see beside the rows that are there, block by block, a list a group."""
    request = snapshot.request(q["request"])

    def rows(group: GroupLayout) -> list[Json]:
        table = request.block_tables_by_group[group.id]
        return [{"physical_block": ref.physical_block_id, "visible": request.visible_rows(j, group.block_size),
                 "valid": find_block(group, ref).valid_rows} for j, ref in enumerate(table)]

    return {"context": request.context_length, **{group.id: rows(group) for group in snapshot.groups}}


def _kernel_blocks(snapshot: AddressSnapshot, q: Question) -> Json:
    """A table in a kernel's unit, and the tokens of the pool that each entry spans."""
    table = kernel_block_table(q["table"], q["block_size"], size := q["kernel_block_size"])
    return {"table": table, "tokens": [[block * size, (block + 1) * size] for block in table]}


def _writes(snapshot: AddressSnapshot, q: Question) -> Json:
    """What a writer does with a mapping: [index in the batch, physical slot, offset] of each row that it writes."""
    return [list(write) for write in writes_of(q["mapping"], q["block_size"])]


def _payload(snapshot: AddressSnapshot, q: Question) -> Json:
    """The bytes that define a block, run by run and per tensor."""
    runs = block_payload(snapshot.group(q["group"]), q["block"])
    per_kind: Json = {}
    for run in runs:
        per_kind[run["kind"]] = per_kind.get(run["kind"], 0) + run["bytes"]
    return {"runs": runs, "bytes": per_kind}


ANSWERS: dict[str, Callable[[AddressSnapshot, Question], Any]] = {
    "resolve": _resolve,
    "group": _group,
    "capacity": _capacity,
    "table": _table,
    "visibility": _visibility,
    "slot_mapping": lambda s, q: slot_mapping(s, q["spans"], q.get("pad_to", 0)),
    "block_table_rows": lambda s, q: block_table_rows(s, q["group"], q["requests"], q["columns"]),
    "kernel_blocks": _kernel_blocks,
    "writes": _writes,
    "payload": _payload,
    "place": lambda s, q: {k: list(v) for k, v in place_tensors(q["sizes"], q["start"], q["granule"]).items()},
}
