"""The translator of the address contract: one K or V scalar of one token, step by step, to its byte address.

It reads snapshots and owns the order of the checks. It refuses to allocate, to move a byte, or to answer for a token
that the request cannot see. Every number is a Python integer, so no product ever wraps (articles 0x03C to 0x03I).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvlab.contract import Json, Rejected
from kvlab.memory.address_records import (
    KINDS,
    SCALES,
    AddressSnapshot,
    BlockDescriptor,
    GroupLayout,
    PhysicalRef,
    RequestSnapshot,
    ref_dict,
)
from kvlab.memory.layout import INNER_LANE, KV_KIND


@dataclass(frozen=True, slots=True)
class AddressTrace:
    """Every value on the way from a logical coordinate to a byte; None from where the way broke off.

    `strides` and `coordinate` are by axis, in memory order, in elements. `byte_offset` counts from `base`. `checks`
    are the steps that passed, in the order in which they ran; `refused` is the reason of the one that did not.
    """

    request_id: str
    table_version: int
    token: int
    layer: int
    kind: str
    head: int
    lane: int
    group_id: str | None = None
    layer_local: int | None = None
    logical_block: int | None = None
    token_offset: int | None = None
    physical_ref: PhysicalRef | None = None
    physical_slot: int | None = None
    valid_rows: int | None = None
    slot_id: int | None = None
    coordinate: Mapping[str, int] | None = None
    strides: Mapping[str, int] | None = None
    scalar_bytes: int | None = None
    element_offset: int | None = None
    byte_offset: int | None = None
    base: int | None = None
    byte_address: int | None = None
    checks: tuple[str, ...] = ()
    refused: str = ""
    detail: str = ""

    @property
    def signed_bits(self) -> int | None:
        """Bits of the narrowest signed integer that holds the element offset; past 32, an int32 wraps."""
        return None if self.element_offset is None else self.element_offset.bit_length() + 1

    def logical(self) -> Json:
        """The logical K/V coordinate of article 0x03."""
        return {"request_snapshot": f"{self.request_id}@{self.table_version}", "token_position": self.token,
                "model_layer": self.layer, "K_or_V": self.kind, "local_head": self.head, "lane": self.lane}

    def physical(self) -> Json:
        """The physical read coordinate of article 0x03."""
        ref = self.physical_ref
        return {"cache_group": self.group_id, "pool_identity": ref and ref.pool_id,
                "pool_generation": ref and ref.pool_generation, "physical_block": ref and ref.physical_block_id,
                "physical_slot": self.physical_slot, "layer_local_index": self.layer_local,
                "token_offset": self.token_offset, "KV_base": self.base, "head": self.head, "lane": self.lane}

    def to_dict(self) -> Json:
        out: Json = {f.name: getattr(self, f.name) for f in fields(self)}
        out |= {k: dict(out[k]) if out[k] is not None else None for k in ("coordinate", "strides")}
        out |= {"physical_ref": ref_dict(self.physical_ref) if self.physical_ref else None,
                "checks": list(self.checks), "guards": [GUARDS[c] for c in self.checks if c in GUARDS]}
        return out | {"signed_bits": self.signed_bits, "logical": self.logical(), "physical": self.physical()}


@dataclass(slots=True)
class _Way:
    """A translation under way: what was asked, and what each step found."""

    snapshot: AddressSnapshot
    view: RequestSnapshot
    found: dict[str, Any]
    group: GroupLayout | None = None
    ref: PhysicalRef | None = None
    block: BlockDescriptor | None = None

    def __getattr__(self, name: str) -> Any:
        return self.found[name]


def _token_in_context(w: _Way) -> None:
    if not 0 <= w.token < w.view.context_length:
        raise Rejected("outside_request_context",
                       f"{w.view.request_id} sees {w.view.context_length} tokens, token {w.token} is not one of them")


def _unique_group(w: _Way) -> None:
    holding = [g for g in w.snapshot.groups if g.layer_start <= w.layer < g.layer_end]
    if not holding:
        inside = 0 <= w.layer < w.snapshot.model_layers
        raise Rejected("layer_gap" if inside else "layer_out_of_range", f"layer {w.layer} of {w.snapshot.model_layers}")
    if len(holding) > 1:
        raise Rejected("layer_overlap", f"layer {w.layer} is in {' and '.join(g.id for g in holding)}")
    w.group, w.found["group_id"] = holding[0], holding[0].id
    if w.kind not in w.group.kinds:
        raise Rejected("unknown_operation", f"{w.group.id} has no tensor {w.kind}")


def _layer_local(w: _Way) -> None:
    w.found["layer_local"] = w.layer - w.group.layer_start


def _block_and_offset(w: _Way) -> None:
    w.found["logical_block"], w.found["token_offset"] = divmod(w.token, w.group.block_size)


def _table_bounds(w: _Way) -> None:
    table = w.view.block_tables_by_group.get(w.group.id, ())
    if not w.logical_block < len(table):
        raise Rejected("table_length_drift",
                       f"{w.view.request_id} has {len(table)} blocks in {w.group.id}, none at {w.logical_block}")
    w.ref = w.found["physical_ref"] = table[w.logical_block]


def _physical_identity(w: _Way) -> None:
    w.block = find_block(w.group, w.ref)
    w.found |= {"physical_slot": w.block.physical_slot, "valid_rows": w.block.valid_rows}


def _offset_valid(w: _Way) -> None:
    if not w.token_offset < w.block.valid_rows:
        raise Rejected("physical_row_not_valid",
                       f"row {w.token_offset} of block {w.ref.physical_block_id}, {w.block.valid_rows} rows are valid")


def _head_in_range(w: _Way) -> None:
    if not 0 <= w.head < w.group.kv_heads_local:
        raise Rejected("head_out_of_range", f"head {w.head} of {w.group.kv_heads_local}")


def _lane_in_range(w: _Way) -> None:
    if not 0 <= w.lane < w.group.head_dim:
        raise Rejected("lane_out_of_range", f"lane {w.lane} of {w.group.head_dim}")


def _slot_id(w: _Way) -> None:
    w.found["slot_id"] = w.block.physical_slot * w.group.block_size + w.token_offset


def _element_offset(w: _Way) -> None:
    group = w.group
    vector, inner = (0, 0) if w.kind in SCALES else divmod(w.lane, group.inner_lanes)
    index = {"layer_local": w.layer_local, "physical_slot": w.block.physical_slot, "token_offset": w.token_offset,
             "kv_head_local": w.head, "head_dim": vector, INNER_LANE: inner, KV_KIND: int(w.kind.startswith("V"))}
    strides = group.strides(w.kind)
    coordinate = {axis: index[axis] for axis in group.axis_order}
    w.found |= {"coordinate": coordinate, "strides": strides, "scalar_bytes": group.width(w.kind),
                "element_offset": sum(coordinate[a] * strides[a] for a in group.axis_order)}


def _address_in_range(w: _Way) -> None:
    base, end = w.group.base[w.kind], w.group.end[w.kind]
    offset = w.scalar_bytes * w.element_offset
    if not base <= base + offset <= end - w.scalar_bytes:
        raise Rejected("address_outside_tensor", f"{base + offset} is not in [{base}, {end})")
    w.found |= {"byte_offset": offset, "base": base, "byte_address": base + offset}


STEPS: tuple[tuple[str, Callable[[_Way], None]], ...] = (
    ("token_in_context", _token_in_context),
    ("unique_group_for_layer", _unique_group),
    ("layer_local", _layer_local),
    ("logical_block_and_offset", _block_and_offset),
    ("table_bounds", _table_bounds),
    ("physical_identity(pool,generation,block)", _physical_identity),
    ("offset<valid_rows", _offset_valid),
    ("head_in_range", _head_in_range),
    ("lane_in_range", _lane_in_range),
    ("slot_id", _slot_id),
    ("element_offset", _element_offset),
    ("address_in_[base,end)", _address_in_range),
)
"""The translator, in the order in which it runs and refuses (article 0x03I)."""

GUARDS = {
    "token_in_context": "request_visibility",
    "table_bounds": "table_bounds",
    "physical_identity(pool,generation,block)": "physical_identity",
    "offset<valid_rows": "physical_validity",
}
"""The four checks without which no lookup is legal (article 0x03C, 0x03G), by the step that makes them."""


def find_block(group: GroupLayout, ref: PhysicalRef) -> BlockDescriptor:
    """The published block that a reference names. O(1).

    Refused in this order: `wrong_pool_identity`, `stale_pool_generation`, `unknown_physical_block`,
    `stale_block_generation`.
    """
    if ref.pool_id != group.pool_id:
        raise Rejected("wrong_pool_identity", f"{ref.pool_id} is not the pool of {group.id}")
    if ref.pool_generation != group.pool_generation:
        raise Rejected("stale_pool_generation",
                       f"made for generation {ref.pool_generation}, {group.pool_id} is at {group.pool_generation}")
    block = group.descriptors.get(ref.physical_block_id)
    if block is None:
        raise Rejected("unknown_physical_block", f"{group.id} has no block {ref.physical_block_id}")
    if ref.block_generation != block.block_generation:
        raise Rejected("stale_block_generation", f"block {ref.physical_block_id} was at {ref.block_generation}, "
                                                 f"it is at {block.block_generation}")
    return block


def follow(snapshot: AddressSnapshot, request: str | RequestSnapshot, token: int, layer: int, kind: str, head: int,
           lane: int) -> AddressTrace:
    """Follow one scalar to its byte, as far as it goes; a refusal ends the trace and is named in it.

    `request` is a live request's id, or a snapshot that the reader took earlier. `kind` is K or V (or the scale of
    one). O(axes). Raises `Rejected` only where the question is none (`unknown_request`, `unknown_operation`).
    """
    view = snapshot.request(request) if not isinstance(request, RequestSnapshot) else request
    numbers = {"token": token, "layer": layer, "head": head, "lane": lane}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise Rejected("unknown_operation", f"{name} must be a whole number, not {value!r}")
    if kind not in (*KINDS, *SCALES):
        raise Rejected("unknown_operation", f"there is no tensor {kind!r}")
    asked = {"request_id": view.request_id, "table_version": view.table_version, "kind": kind, **numbers}
    way, checks = _Way(snapshot, view, asked), []
    for name, step in STEPS:
        try:
            step(way)
        except Rejected as no:
            return AddressTrace(**way.found, checks=tuple(checks), refused=no.reason, detail=no.detail)
        checks.append(name)
    return AddressTrace(**way.found, checks=tuple(checks))


def resolve(snapshot: AddressSnapshot, request: str | RequestSnapshot, token: int, layer: int, kind: str, head: int,
            lane: int) -> AddressTrace:
    """The checked address of one scalar (formulas F4.01 to F4.06). Raises `Rejected` with the first check that failed.

    Order: context, group, table bounds, pool, generation, block, valid rows, head, lane, [base, end) (article 0x03I).
    """
    trace = follow(snapshot, request, token, layer, kind, head, lane)
    if trace.refused:
        raise Rejected(trace.refused, trace.detail)
    return trace
