"""The records of the address contract and their JSON form: what a reader holds when it asks where a byte lives.

It owns names and sizes. It refuses to judge whether they fit together (`address_snapshot`) or to compute an address
(`address`). All sizes and addresses are Python integers, which never wrap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

from kvlab.contract import Json, Rejected
from kvlab.memory.layout import AXES, INNER_LANE, KV_KIND, row_major_strides

KINDS = ("K", "V")
SCALES = {"K_scale": "K", "V_scale": "V"}
"""Quantised rows have pools of scales, one scale a row and head; without them the K and V bytes mean nothing."""


@dataclass(frozen=True, slots=True)
class PhysicalRef:
    """The name of a block, scoped so that a recycled number cannot pass for it (article 0x03A, S4.1).

    `block_generation` is the lifetime that the ownership contract counts; 0 where nobody counts it.
    """

    cache_group_id: str
    pool_id: str
    pool_generation: int
    physical_block_id: int
    block_generation: int = 0


@dataclass(frozen=True, slots=True)
class BlockDescriptor:
    """Where a published block stands in its pool, and how many of its rows are written."""

    physical_block_id: int
    physical_slot: int
    valid_rows: int
    pool_id: str
    pool_generation: int
    block_generation: int = 0


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One cache group as bytes: its axes in memory order, its tensors' ranges, its blocks (article 0x03B, 0x03E).

    `base` and `end` give the byte range [base, end) of each tensor: K and V, and K_scale and V_scale where
    `scale_bytes` > 0. With the axis `kv_kind` K and V are one tensor and have one range. With `inner_lanes` = x > 1
    the axis `head_dim` counts vectors of x lanes and the axis `inner_lane` counts the lanes of one.
    """

    id: str
    layer_start: int
    layer_end: int
    block_size: int
    kv_heads_local: int
    head_dim: int
    axis_order: tuple[str, ...]
    shape: tuple[int, ...]
    scalar_bytes: int
    base: Mapping[str, int]
    end: Mapping[str, int]
    pool_id: str
    pool_generation: int
    num_slots: int
    descriptors: Mapping[int, BlockDescriptor]
    inner_lanes: int = 1
    scale_bytes: int = 0

    @property
    def layers(self) -> int:
        return self.layer_end - self.layer_start

    @property
    def interleaved(self) -> bool:
        return KV_KIND in self.axis_order

    @property
    def kinds(self) -> tuple[str, ...]:
        """The tensors that define a value of this group."""
        return (*KINDS, *(SCALES if self.scale_bytes else ()))

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K and V over all layers of the group (formula F3.01), scales left out."""
        return self.layers * self.kv_heads_local * self.head_dim * 2 * self.scalar_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of K and V of one block: `block_size` rows."""
        return self.block_size * self.row_bytes

    def axis_sizes(self) -> dict[str, int]:
        """What the geometry says about the size of each axis, in memory order; unknown axes are left out."""
        sizes = dict(zip(AXES, (self.layers, self.num_slots, self.block_size, self.kv_heads_local,
                                self.head_dim // max(1, self.inner_lanes)), strict=True))
        sizes |= {KV_KIND: 2, INNER_LANE: self.inner_lanes}
        return {axis: sizes[axis] for axis in self.axis_order if axis in sizes}

    def width(self, kind: str) -> int:
        """Bytes of one scalar of a tensor."""
        return self.scale_bytes if kind in SCALES else self.scalar_bytes

    def shape_of(self, kind: str) -> tuple[int, ...]:
        """The declared shape; a tensor of scales has one lane a head."""
        if kind not in SCALES:
            return self.shape
        return tuple(1 if axis in ("head_dim", INNER_LANE) else size
                     for axis, size in zip(self.axis_order, self.shape, strict=True))

    def strides(self, kind: str = "K") -> dict[str, int]:
        """Stride in elements of each axis, in memory order (formula F4.04)."""
        return dict(zip(self.axis_order, row_major_strides(self.shape_of(kind)), strict=True))

    def extent(self, kind: str) -> int:
        """Bytes from a tensor's base to the end of its last scalar."""
        return prod(self.shape_of(kind)) * self.width(kind)


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """What one reader may see: how many tokens, and one table a group, all of one version (article 0x03B)."""

    request_id: str
    context_length: int
    table_version: int
    block_tables_by_group: Mapping[str, tuple[PhysicalRef, ...]]

    def visible_rows(self, logical_block: int, block_size: int) -> int:
        """Rows of a logical block that this request may read."""
        return max(0, min(block_size, self.context_length - logical_block * block_size))


@dataclass(frozen=True, slots=True)
class FrozenAddress:
    """An address that somebody holds, such as a captured graph or a transfer in flight: it must not move."""

    request: str
    token: int
    layer: int
    kind: str
    head: int
    lane: int
    byte_address: int


@dataclass(frozen=True, slots=True)
class AddressSnapshot:
    """Everything that a translation reads, at one version: groups, blocks, requests (article 0x03)."""

    groups: tuple[GroupLayout, ...]
    requests: Mapping[str, RequestSnapshot]
    version: int
    model_layers: int
    frozen: tuple[FrozenAddress, ...] = ()

    def group(self, group_id: str) -> GroupLayout:
        """The group of this name; `Rejected` where there is none."""
        for group in self.groups:
            if group.id == group_id:
                return group
        raise Rejected("unknown_operation", f"there is no cache group {group_id!r}")

    def request(self, request_id: str) -> RequestSnapshot:
        try:
            return self.requests[request_id]
        except (KeyError, TypeError):
            raise Rejected("unknown_request", f"request {request_id!r}") from None

    def to_dict(self) -> Json:
        """Plain data; `read_snapshot` is the inverse."""
        return {
            "kind": "addresses", "version": self.version, "model_layers": self.model_layers,
            "groups": [_group_dict(g) for g in self.groups],
            "requests": {name: _request_dict(r) for name, r in sorted(self.requests.items())},
            "frozen": [asdict(f) for f in self.frozen],
        }


# ---------------------------------------------------------------- JSON
def _group_dict(group: GroupLayout) -> Json:
    out = {f.name: getattr(group, f.name) for f in fields(group) if f.name != "descriptors"}
    out |= {name: list(out[name]) for name in ("axis_order", "shape")} | {name: dict(out[name]) for name in RANGES}
    return out | {"blocks": [asdict(d) for _, d in sorted(group.descriptors.items())]}


def _request_dict(request: RequestSnapshot) -> Json:
    tables = {g: [ref_dict(r) for r in table] for g, table in request.block_tables_by_group.items()}
    return {"context_length": request.context_length, "table_version": request.table_version, "tables": tables}


def ref_dict(ref: PhysicalRef) -> Json:
    """A table entry as data; the group is the table's."""
    return {name: value for name, value in asdict(ref).items() if name != "cache_group_id"}


RANGES = ("base", "end")


def read_snapshot(data: Json) -> AddressSnapshot:
    """Records from plain data. `malformed_snapshot` where a field is missing or of the wrong form."""
    try:
        if data["kind"] != "addresses":
            raise ValueError(f"kind is {data['kind']!r}")
        groups = tuple(_read_group(g) for g in data["groups"])
        requests = {name: read_request(name, row) for name, row in data["requests"].items()}
        frozen = tuple(FrozenAddress(**f) for f in data.get("frozen", ()))
        if len({g.id for g in groups}) != len(groups) or not groups:
            raise ValueError("cache groups need distinct ids, and there must be one at least")
        snapshot = AddressSnapshot(groups, requests, whole(data["version"]), whole(data["model_layers"], 1), frozen)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Rejected("malformed_snapshot", f"{type(error).__name__}: {error}") from error
    return snapshot


def whole(value: Any, least: int = 0) -> int:
    """A whole number of at least `least`; ValueError for anything else, a bool too."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} is no whole number of at least {least}")
    return value


def _read_group(data: Json) -> GroupLayout:
    given = {k: v for k, v in data.items() if k != "blocks"}
    sizes = ("block_size", "kv_heads_local", "head_dim", "scalar_bytes", "num_slots")
    group = GroupLayout(**given | {
        "axis_order": tuple(given["axis_order"]), "shape": tuple(whole(n, 1) for n in given["shape"]),
        **{name: {kind: whole(n) for kind, n in given[name].items()} for name in RANGES},
        "descriptors": {d["physical_block_id"]: read_block(d) for d in data["blocks"]},
        "inner_lanes": whole(given.get("inner_lanes", 1), 1), "scale_bytes": whole(given.get("scale_bytes", 0)),
    })
    for name in sizes:
        whole(getattr(group, name), 1)
    if whole(group.layer_start) >= whole(group.layer_end) or len(group.descriptors) != len(data["blocks"]):
        raise ValueError(f"group {group.id} has no layer, or describes a block twice")
    if set(group.base) != set(group.kinds) or set(group.end) != set(group.kinds):
        raise ValueError(f"group {group.id} needs base and end of {', '.join(group.kinds)}")
    if group.interleaved and any(r["K"] != r["V"] for r in (group.base, group.end)):
        raise ValueError(f"group {group.id} keeps K and V in one tensor, so it has one range")
    whole(group.pool_generation)
    return group


def read_block(data: Json) -> BlockDescriptor:
    """A descriptor from plain data; ValueError, KeyError or TypeError where it is none.

    Whether its slot and rows are possible is not a question of form, so any integer passes here.
    """
    for name in ("physical_block_id", "pool_generation"):
        whole(data[name])
    for name in ("physical_slot", "valid_rows"):
        if isinstance(data[name], bool) or not isinstance(data[name], int):
            raise ValueError(f"{name} is {data[name]!r}")
    whole(data.get("block_generation", 0))
    return BlockDescriptor(**data)


def read_ref(group_id: str, data: Json) -> PhysicalRef:
    """A table entry from plain data."""
    whole(data["physical_block_id"])
    whole(data["pool_generation"])
    whole(data.get("block_generation", 0))
    return PhysicalRef(group_id, **data)


def read_tables(data: Mapping[str, Sequence[Json]]) -> dict[str, tuple[PhysicalRef, ...]]:
    return {g: tuple(read_ref(g, ref) for ref in table) for g, table in data.items()}


def read_request(name: str, data: Json) -> RequestSnapshot:
    """A request snapshot from plain data; ValueError, KeyError or TypeError where it is none."""
    if not isinstance(name, str):
        raise TypeError(f"a request id is a word, not {name!r}")
    return RequestSnapshot(name, whole(data["context_length"], 1), whole(data["table_version"]),
                           read_tables(data["tables"]))
