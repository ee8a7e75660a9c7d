"""Tensors of this process and their bytes: where they begin, how a group is laid out for real, what lies at an address.

It reads a scalar's bytes only at an address that the translator has computed, and owns no tensor itself.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvlab.contract import Json
from kvlab.memory.address import AddressTrace
from kvlab.memory.address_records import AddressSnapshot, GroupLayout
from kvlab.memory.address_sources import from_allocator, rebased
from kvlab.memory.kv_store import PagedStore
from kvlab.memory.layout import AXES, INNER_LANE, KV_KIND


def store_bases(store: PagedStore) -> dict[str, dict[str, int]]:
    """Where the store's K and V tensors begin in this process, by group."""
    return {group.group_id: {"K": k.data_ptr(), "V": v.data_ptr()}
            for group, k, v in zip(store.layout.groups, store.k, store.v, strict=True)}


def address_snapshot(store: PagedStore, allocator: Json) -> AddressSnapshot:
    """The address snapshot of real tensors under an allocator's committed snapshot."""
    return from_allocator(allocator, store_bases(store))


def lay_out(group: GroupLayout, keys: Tensor, values: Tensor) -> tuple[GroupLayout, tuple[Tensor, ...]]:
    """Real tensors in the group's layout that hold `keys` and `values`, and the group with their real bases.

    keys, values: `[layers, slots, tokens, kv_heads, head_dim]`, the logical order. Returns K's and V's tensor, or the
    one that holds both. Keep them alive as long as you read. O(scalars).
    """
    order = [axis for axis in group.axis_order if axis != KV_KIND]
    logical = [*AXES, *([INNER_LANE] if INNER_LANE in order else [])]
    parts = []
    for rows in (keys, values):
        split = rows.unflatten(-1, (-1, group.inner_lanes)) if INNER_LANE in order else rows
        parts.append(split.permute([logical.index(axis) for axis in order]))
    if group.interleaved:
        both = torch.stack(parts, dim=group.axis_order.index(KV_KIND)).contiguous()
        return rebased(group, both.data_ptr()), (both,)
    k, v = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return rebased(group, k.data_ptr(), v.data_ptr()), (k, v)


def read_scalar(trace: AddressTrace, dtype: torch.dtype) -> Tensor:
    """The scalar at a trace's address, read from this process's own memory, byte by byte; a tensor of no dimension.

    ValueError where the trace did not arrive, or `dtype` has another width. The tensor that the address was made for
    must be alive and on the CPU.
    """
    if trace.byte_address is None:
        raise ValueError(f"the trace was refused: {trace.refused}")
    if torch.empty(0, dtype=dtype).element_size() != trace.scalar_bytes:
        raise ValueError(f"{dtype} has not {trace.scalar_bytes} bytes")
    raw = ctypes.string_at(trace.byte_address, trace.scalar_bytes)
    return torch.frombuffer(bytearray(raw), dtype=dtype)[0]
