"""Address snapshots of what the allocator has committed, and the same snapshots in other layouts; it reads no byte.

It joins the ownership and the address contract by plain data, without merging them (articles 0x03A, 0x03H, 0x03J).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import prod

from kvlab.contract import Json, Operation
from kvlab.memory.address_records import (
    AddressSnapshot,
    BlockDescriptor,
    GroupLayout,
    PhysicalRef,
    RequestSnapshot,
    ref_dict,
)
from kvlab.memory.layout import AXES, INNER_LANE, KV_KIND, CacheGroup, CacheLayoutManifest

Bases = Mapping[str, Mapping[str, int]]


# ---------------------------------------------------------------- the ownership contract
def from_allocator(snapshot: Json, bases: Bases, *, pool_generation: int = 1) -> AddressSnapshot:
    """An address snapshot of an allocator's committed snapshot; `bases` gives {"K", "V"} byte bases by group.

    A block's slot is its index in the pool, its generation is the handle's, and a block is published when a table
    names it. The pool is named after its group. O(pool + tables).
    """
    groups = []
    for group in CacheLayoutManifest.from_dict(snapshot).groups:
        columns, base = snapshot["blocks"][group.group_id], dict(bases[group.group_id])
        extent = prod(group.shape()) * group.scalar_bytes
        blocks = {group.first_block_id + i: _descriptor(group, columns, i, pool_generation)
                  for i, refs in enumerate(columns["ref_cnt"]) if refs}
        groups.append(GroupLayout(
            group.group_id, group.layer_start, group.layer_end, group.block_size, group.kv_heads, group.head_dim,
            group.axis_order, group.shape(), group.scalar_bytes, base, {k: b + extent for k, b in base.items()},
            group.group_id, pool_generation, group.num_blocks, blocks))
    requests = {name: RequestSnapshot(name, row["context"], row["version"], _tables(row, pool_generation))
                for name, row in snapshot["requests"].items()}
    return AddressSnapshot(tuple(groups), requests, snapshot["epoch"], groups[-1].layer_end)


def _descriptor(group: CacheGroup, columns: Json, index: int, pool_generation: int) -> BlockDescriptor:
    return BlockDescriptor(group.first_block_id + index, index, columns["valid_rows"][index], group.group_id,
                           pool_generation, columns["generation"][index])


def _tables(row: Json, pool_generation: int) -> dict[str, tuple[PhysicalRef, ...]]:
    out = {}
    for group, table in row["tables"].items():
        handles = [text.split("@") for text in table]
        out[group] = tuple(PhysicalRef(group, group, pool_generation, int(b), int(g)) for b, g in handles)
    return out


def successors(before: AddressSnapshot, after: AddressSnapshot) -> list[Operation]:
    """The operations that take an address map from one allocator snapshot to the next: retire, then adopt.

    A table that only grew is sent as an append, any other as a replacement that declares what it changes.
    """
    ops: list[Operation] = [{"op": "retire", "request": name, "table_version": old.table_version}
                            for name, old in before.requests.items() if name not in after.requests]
    for name, new in after.requests.items():
        old = before.requests.get(name)
        if old != new:
            ops.append(_adopt(old, new, after))
    return ops


def _adopt(old: RequestSnapshot | None, new: RequestSnapshot, after: AddressSnapshot) -> Operation:
    was = old.block_tables_by_group if old else {g.id: () for g in after.groups}
    now = new.block_tables_by_group
    grew = all(now[g][: len(t)] == t for g, t in was.items())
    changed = {g: [j for j in range(max(len(t), len(now[g]))) if t[j : j + 1] != now[g][j : j + 1]]
               for g, t in was.items()}
    blocks = {g.id: [asdict(g.descriptors[ref.physical_block_id]) for ref in now[g.id]] for g in after.groups}
    sent = {g: [ref_dict(ref) for ref in t[len(was[g]) if grew else 0 :]] for g, t in now.items()}
    return {"op": "adopt", "request": new.request_id, "mode": "append" if grew else "replace",
            "context_length": new.context_length, "table_version": new.table_version, "tables": sent,
            "changed": changed, "blocks": blocks}


# ---------------------------------------------------------------- other layouts of the same group
def relaid(group: GroupLayout, axis_order: Sequence[str], inner_lanes: int = 1) -> GroupLayout:
    """The same logical group in another layout, with tensors at base 0 and, for V, behind K: only strides change.

    `axis_order` may hold `kv_kind` (K and V in one tensor) and `inner_lane` (vectors of `inner_lanes` lanes, as
    vLLM's K cache [.., head_size / x, block_size, x]). ValueError where `inner_lanes` does not divide `head_dim`.
    """
    if group.head_dim % inner_lanes:
        raise ValueError(f"{inner_lanes} lanes do not divide a head of {group.head_dim}")
    new = replace(group, axis_order=tuple(axis_order), inner_lanes=inner_lanes)
    return rebased(replace(new, shape=tuple(new.axis_sizes().values())), 0)


def rebased(group: GroupLayout, k: int, v: int | None = None) -> GroupLayout:
    """The group with its K tensor at byte `k` and its V tensor at `v`; by default V lies right behind K."""
    extent = group.extent("K")
    base = {"K": k, "V": k if group.interleaved else k + extent if v is None else v}
    return replace(group, base=base, end={kind: b + extent for kind, b in base.items()})


def layout_axes(order: Sequence[str] = AXES, *, interleaved: bool = False, inner_lanes: int = 1) -> tuple[str, ...]:
    """Axes in memory order for a choice: K and V in one tensor puts `kv_kind` first, packing puts x lanes last."""
    return (*((KV_KIND,) if interleaved else ()), *order, *((INNER_LANE,) if inner_lanes > 1 else ()))


def flattened(snapshot: AddressSnapshot, layer: int, axes: Sequence[str], inner_lanes: int = 1) -> AddressSnapshot:
    """The snapshot with its tensors one behind another from byte 0 on, and the layer's group laid out by `axes`.

    So a picture of a translation is the same wherever the tensors really are. Other groups keep the order of `AXES`.
    """
    groups: list[GroupLayout] = []
    for group in snapshot.groups:
        mine = group.layer_start <= layer < group.layer_end
        laid = relaid(group, axes if mine else AXES, inner_lanes if mine else 1)
        groups.append(rebased(laid, groups[-1].end["V"] if groups else 0))
    return replace(snapshot, groups=tuple(groups))
