"""What kernels and connectors are handed instead of a snapshot: slot mappings, padded tables, kernel blocks, byte runs.

Each says which unit its numbers have, and each is made in one place. It refuses to guess: no width, no padding and no
conversion is inferred by whoever receives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from kvlab.contract import Json, Rejected
from kvlab.memory.address import find_block
from kvlab.memory.address_records import SCALES, AddressSnapshot, GroupLayout
from kvlab.memory.layout import KV_KIND

PAD = -1
"""The sentinel in every padded table and mapping: nothing is read or written for it."""


def slot_mapping(
    snapshot: AddressSnapshot, spans: Mapping[str, Sequence[int]], pad_to: int = 0
) -> dict[str, list[int]]:
    """Slot ids of tokens [start, stop) of each request, one after another, a list a group (formula F4.03).

    Made for writers: a token must be visible and its block published, its row need not be written yet. Lists are
    filled up to `pad_to` entries with `PAD`. As in vLLM v0.23.0 each group has its own block size and mapping.
    Raises `unknown_request`, `outside_request_context`, or what `find_block` raises. O(tokens x groups).
    """
    out: dict[str, list[int]] = {}
    for group in snapshot.groups:
        slots = []
        for name, (start, stop) in spans.items():
            view = snapshot.request(name)
            if not 0 <= start <= stop <= view.context_length:
                raise Rejected("outside_request_context", f"{name} sees {view.context_length} tokens, not {start} to "
                                                          f"{stop - 1}")
            for token in range(start, stop):
                j, offset = divmod(token, group.block_size)
                block = find_block(group, view.block_tables_by_group[group.id][j])
                slots.append(block.physical_slot * group.block_size + offset)
        out[group.id] = slots + [PAD] * (pad_to - len(slots))
    return out


def writes_of(mapping: Sequence[int], block_size: int) -> list[tuple[int, int, int]]:
    """Who writes where: (index in the batch, physical slot, offset). Sentinels write nothing, in any language.

    In Python and in NumPy -1 // 16 and -1 % 16 name the last row of the block before the first, which exists.
    """
    return [(i, *divmod(slot, block_size)) for i, slot in enumerate(mapping) if slot >= 0]


def block_table_rows(
    snapshot: AddressSnapshot, group_id: str, requests: Sequence[str], columns: int
) -> list[list[int]]:
    """Block tables as one rectangle of physical slots, every unused cell set to `PAD`, so no old entry survives.

    `table_length_drift` where a table needs more columns: the width comes from the longest request there can be.
    """
    group, rows = snapshot.group(group_id), []
    for name in requests:
        table = snapshot.request(name).block_tables_by_group[group_id]
        if len(table) > columns:
            raise Rejected("table_length_drift", f"{name} needs {len(table)} columns, the buffer has {columns}")
        slots = [find_block(group, ref).physical_slot for ref in table]
        rows.append(slots + [PAD] * (columns - len(slots)))
    return rows


def kernel_block_table(table: Sequence[int], block_size: int, kernel_block_size: int) -> list[int]:
    """Block ids in units of `block_size` tokens -> ids in units of `kernel_block_size`: id * (M / K) + j.

    The one place where the unit changes. `kernel_block_does_not_divide_allocator` unless M % K == 0.
    """
    if kernel_block_size < 1 or block_size % kernel_block_size:
        raise Rejected("kernel_block_does_not_divide_allocator", f"{block_size} tokens a block, {kernel_block_size} a "
                                                                 "kernel block")
    split = block_size // kernel_block_size
    return [PAD if block == PAD else block * split + j for block in table for j in range(split)]


def place_tensors(sizes: Mapping[str, int], start: int, granule: int) -> dict[str, tuple[int, int]]:
    """Disjoint ranges [base, end) for tensors of so many bytes, each base on a multiple of `granule` bytes.

    `end` is where the tensor ends, not where its last granule does: what lies between is never addressed.
    """
    out, at = {}, start
    for name, size in sizes.items():
        at = -(-at // granule) * granule
        out[name] = (at, at + size)
        at += size
    return out


def block_payload(group: GroupLayout, physical_block_id: int) -> list[Json]:
    """Every byte that defines a block's values: per tensor (scales too) its runs {kind, start, bytes}.

    `start` counts from the tensor's base; runs are in memory order. `unknown_physical_block` if there is no such
    block. O(runs).
    """
    block = group.descriptors.get(physical_block_id)
    if block is None:
        raise Rejected("unknown_physical_block", f"{group.id} has no block {physical_block_id}")
    return [run for kind in group.kinds for run in _runs(group, kind, block.physical_slot)]


def _runs(group: GroupLayout, kind: str, slot: int) -> list[Json]:
    fixed = {"physical_slot": slot, KV_KIND: int((SCALES.get(kind) or kind) == "V")}
    order, strides, width = group.axis_order, group.strides(kind), group.width(kind)
    sizes = dict(zip(order, group.shape_of(kind), strict=True))
    last = max(order.index(axis) for axis in fixed if axis in order)
    outer = [range(sizes[a]) if a not in fixed else (fixed[a],) for a in order[: last + 1]]
    steps = [strides[a] * width for a in order[: last + 1]]
    return [{"kind": kind, "start": sum(i * step for i, step in zip(at, steps, strict=True)),
             "bytes": strides[order[last]] * width} for at in product(*outer)]
