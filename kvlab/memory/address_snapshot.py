"""Which address snapshots are legal: geometry, ranges, blocks, tables, bundles, views, frozen addresses, in this order.

It owns the judgement and no state. Production calls it before it adopts a successor, so a malformed record is refused
by the same code that guards the real path (article 0x03I; the failure classes of the oracle).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from kvlab.contract import Rejected
from kvlab.memory.address import find_block, resolve
from kvlab.memory.address_records import AddressSnapshot, BlockDescriptor, GroupLayout, RequestSnapshot
from kvlab.memory.layout import AXES, INNER_LANE, KV_KIND


def validate(snapshot: AddressSnapshot) -> None:
    """Raise `Rejected` for the first thing that does not fit; None for a legal snapshot.

    Order: layers, axes, shapes, tensor ends, ranges, then blocks (pool, slot, rows), tables (length, identity),
    bundles, views, frozen addresses. O(blocks + tables + frozen addresses).
    """
    _check_layers(snapshot)
    for group in snapshot.groups:
        _check_axes(group)
    for group in snapshot.groups:
        _check_tensors(group)
    _check_ranges(snapshot)
    for group in snapshot.groups:
        _check_blocks(group)
    for request in snapshot.requests.values():
        _check_tables(snapshot, request)
    for request in snapshot.requests.values():
        _check_bundles(snapshot, request)
    for request in snapshot.requests.values():
        _check_view(snapshot, request)
    _check_frozen(snapshot)


def _check_layers(snapshot: AddressSnapshot) -> None:
    edge = 0
    for group in sorted(snapshot.groups, key=lambda g: g.layer_start):
        if group.layer_start > edge:
            raise Rejected("layer_gap", f"layers {edge} to {group.layer_start - 1} are in no group")
        if group.layer_start < edge:
            raise Rejected("layer_overlap", f"layer {group.layer_start} is in {group.id} and in another group")
        edge = group.layer_end
    if edge < snapshot.model_layers:
        raise Rejected("layer_gap", f"layers {edge} to {snapshot.model_layers - 1} are in no group")
    if edge > snapshot.model_layers:
        raise Rejected("layer_out_of_range", f"a group reaches layer {edge - 1} of {snapshot.model_layers}")


def _check_axes(group: GroupLayout) -> None:
    order = group.axis_order
    if twice := [axis for i, axis in enumerate(order) if axis in order[:i]]:
        raise Rejected("duplicate_axis", f"{group.id} names {twice[0]} twice")
    needed = (*AXES, *((INNER_LANE,) if group.inner_lanes > 1 else ()))
    if missing := [axis for axis in needed if axis not in order]:
        raise Rejected("missing_axis", f"{group.id} lacks {', '.join(missing)}")
    if unknown := set(order) - {*AXES, KV_KIND, INNER_LANE}:
        raise Rejected("malformed_snapshot", f"{group.id} has axes that nobody knows: {', '.join(sorted(unknown))}")


def _check_tensors(group: GroupLayout) -> None:
    sizes = tuple(group.axis_sizes().values())
    if group.shape != sizes or group.head_dim % group.inner_lanes:
        raise Rejected("shape_axis_mismatch", f"{group.id} has shape {list(group.shape)}, its axes say {list(sizes)}")
    for kind in group.kinds:
        if group.base[kind] + group.extent(kind) > group.end[kind]:
            raise Rejected("address_outside_tensor",
                           f"the last scalar of {kind} of {group.id} lies past {group.end[kind]}")


def _ranges(snapshot: AddressSnapshot) -> Iterator[tuple[int, int, str]]:
    for group in snapshot.groups:
        for kind in group.kinds:
            if not (group.interleaved and kind.startswith("V")):
                yield group.base[kind], group.end[kind], f"{kind} of {group.id}"


def _check_ranges(snapshot: AddressSnapshot) -> None:
    for (_, end, one), (base, _, other) in pairwise(sorted(_ranges(snapshot))):
        if base < end:
            raise Rejected("overlapping_tensor_ranges", f"{other} begins at {base}, {one} ends at {end}")


def _check_blocks(group: GroupLayout) -> None:
    taken: dict[int, int] = {}
    for block in group.descriptors.values():
        name = f"block {block.physical_block_id} of {group.id}"
        if block.pool_id != group.pool_id:
            raise Rejected("wrong_pool_identity", f"{name} says pool {block.pool_id}")
        if block.pool_generation != group.pool_generation:
            raise Rejected("stale_pool_generation", f"{name} says generation {block.pool_generation}")
        if not 0 <= block.physical_slot < group.num_slots:
            raise Rejected("slot_out_of_range", f"{name} on slot {block.physical_slot} of {group.num_slots}")
        if block.physical_slot in taken:
            raise Rejected("slot_reuse", f"{name} and block {taken[block.physical_slot]} on slot {block.physical_slot}")
        taken[block.physical_slot] = block.physical_block_id
        if block.valid_rows < 1:
            raise Rejected("invalid_tail", f"{name} is published with {block.valid_rows} rows")
        if block.valid_rows > group.block_size:
            raise Rejected("valid_rows_exceed_block", f"{name}: {block.valid_rows} of {group.block_size}")


def _check_tables(snapshot: AddressSnapshot, request: RequestSnapshot) -> None:
    tables = request.block_tables_by_group
    if set(tables) != {g.id for g in snapshot.groups}:
        raise Rejected("malformed_snapshot", f"{request.request_id} needs one table a group")
    for group in snapshot.groups:
        needed = -(-request.context_length // group.block_size)
        if len(tables[group.id]) != needed:
            raise Rejected("table_length_drift", f"{request.request_id} has {len(tables[group.id])} blocks in "
                                                 f"{group.id}, {request.context_length} tokens need {needed}")
        for ref in tables[group.id]:
            find_block(group, ref)


def _blocks(snapshot: AddressSnapshot, request: RequestSnapshot, group: GroupLayout) -> list[BlockDescriptor]:
    return [find_block(group, ref) for ref in request.block_tables_by_group[group.id]]


def _check_bundles(snapshot: AddressSnapshot, request: RequestSnapshot) -> None:
    """Blocks at one place of one table are one bundle: groups of equal block size hold equal rows."""
    first = snapshot.groups[0]
    for other in snapshot.groups[1:]:
        if other.block_size != first.block_size:
            continue
        pairs = zip(*(_blocks(snapshot, request, g) for g in (first, other)), strict=True)
        for j, (one, two) in enumerate(pairs):
            if one.valid_rows != two.valid_rows:
                raise Rejected("cross_group_bundle_mismatch", f"block {j} of {request.request_id}: {one.valid_rows} "
                                                              f"and {two.valid_rows} rows")


def _check_view(snapshot: AddressSnapshot, request: RequestSnapshot) -> None:
    for group in snapshot.groups:
        for j, block in enumerate(_blocks(snapshot, request, group)):
            seen = request.visible_rows(j, group.block_size)
            if block.valid_rows < seen:
                raise Rejected("valid_rows_below_view", f"block {block.physical_block_id} of {group.id}: "
                                                        f"{block.valid_rows} valid, {request.request_id} sees {seen}")


def _check_frozen(snapshot: AddressSnapshot) -> None:
    for f in snapshot.frozen:
        try:
            now = resolve(snapshot, f.request, f.token, f.layer, f.kind, f.head, f.lane).byte_address
        except Rejected as no:
            raise Rejected("frozen_address_drift", f"{f.byte_address} cannot be reached any more: {no}") from no
        if now != f.byte_address:
            raise Rejected("frozen_address_drift", f"recorded {f.byte_address}, computed {now}")
