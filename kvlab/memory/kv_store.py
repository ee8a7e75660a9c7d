"""The K/V tensors behind the handles, paged or rectangular, and the one seam through which an engine uses them.

It owns bytes: writing rows, copying rows, reading rows for attention. It refuses to decide who may have them.

    memory.open({"A": tokens})  ->  step.attend(layer, q, k, v) for every layer  ->  step.commit()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.reference import contiguous_attention, paged_attention
from kvlab.contract import Event, Receipt, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import AXES, CacheGroup, CacheLayoutManifest
from kvlab.memory.transaction import StagedRequest

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q, k, v)`: keep the new rows k, v `[n, kv_heads, head_dim]`, answer q `[n, heads, head_dim]`."""


class MemoryStep(Protocol):
    """New rows of one batch on their way into memory."""

    attend: Attend

    def commit(self) -> Receipt | None: ...

    def rollback(self) -> None: ...


class RowMemory(Protocol):
    """K/V memory as an engine sees it, whatever lies behind. `open` takes the new tokens of each request."""

    def open(self, rows: Mapping[str, Sequence[int]]) -> MemoryStep: ...

    def release(self, request: str) -> Receipt | None: ...

    def length(self, request: str) -> int: ...


class Memory(RowMemory, Protocol):
    """One in which a new request can begin with all rows of a live other."""

    def fork(self, parent: str, child: str) -> Receipt | None: ...


class StepTxn(Protocol):
    """What a paged step stands on: staged tables to read, groups to report as written, one end of two."""

    def view(self) -> list[StagedRequest]: ...

    def wrote(self, group_id: str) -> None: ...

    def publish(self) -> Receipt | None: ...

    def rollback(self) -> None: ...


# ---------------------------------------------------------------- paged
class PagedStore:
    """One K and one V tensor per cache group, in the group's own axis order.

    `k[g]` and `v[g]` are views `[layers, num_blocks, block_size, kv_heads, head_dim]` of them, whatever the
    memory order; `layers[n]` is the group and the two views of layer n. Every row starts as NaN: a row that was
    never written cannot pass for one.
    """

    def __init__(self, layout: CacheLayoutManifest, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.layout, self.dtype, self.device = layout, dtype, device
        width = torch.empty(0, dtype=dtype).element_size()
        if any(g.scalar_bytes != width for g in layout.groups):
            raise ValueError(f"the layout's scalar_bytes must be {width} for {dtype}")
        self.k, self.v = ([self._tensor(g) for g in layout.groups] for _ in range(2))
        self.layers = [(g, k, v) for g in range(len(layout.groups)) for k, v in zip(self.k[g], self.v[g], strict=True)]
        self.last_layer = {group.layer_end - 1: group.group_id for group in layout.groups}

    def _tensor(self, group: CacheGroup) -> Tensor:
        whole = torch.full(group.shape(), torch.nan, dtype=self.dtype, device=self.device)
        return whole.permute([group.axis_order.index(axis) for axis in AXES])

    def copy_rows(self, group: int, src: int, dst: int, rows: int) -> int:
        """Copy the first `rows` rows of block `src` into block `dst`, K and V, all layers; returns `rows`."""
        for tensor in (self.k[group], self.v[group]):
            tensor[:, dst, :rows] = tensor[:, src, :rows]
        return rows

    def write_rows(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Write n rows of one layer: row i goes to `offsets[i]` of block `blocks[i]` (int64 `[n]`)."""
        _, keys, values = self.layers[layer]
        keys.index_put_((blocks, offsets), k)
        values.index_put_((blocks, offsets), v)

    def poison(self, event: Event) -> None:
        """An allocator observer: fill every freed block with NaN, so that no recycled row is read unseen.

        A block that keeps a cached identity keeps its rows: somebody may find it again.
        """
        if event.kind != "committed":
            return
        for text in event.receipt.freed:
            block = int(text.partition("@")[0])
            for g, pool in enumerate(event.txn.allocator.pools):
                index = block - pool.first_block_id
                if 0 <= index < pool.num_blocks and index not in pool.keys:
                    self.blank(g, [index])

    def blank(self, group: int, blocks: list[int]) -> None:
        """Fill some blocks of one group with NaN."""
        self.k[group][:, blocks] = torch.nan
        self.v[group][:, blocks] = torch.nan


class PagedStep:
    """Rows on their way through an open transaction: attention reads the staged tables."""

    def __init__(self, store: PagedStore, txn: StepTxn) -> None:
        self.store, self.txn = store, txn
        requests = txn.view()
        self.context_lengths = [r.context for r in requests]
        self.query_lengths = [r.context - r.start for r in requests]
        self.tables, self.slots = [], []
        for g, group in enumerate(store.layout.groups):
            self.tables.append(_padded([r.tables[g] for r in requests], store.device))
            self.slots.append(_slots(requests, g, group.block_size, store.device))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store = self.store
        g, keys, values = store.layers[layer]
        store.write_rows(layer, *self.slots[g], k, v)
        out = paged_attention(q, keys, values, self.tables[g], self.context_lengths, self.query_lengths,
                              q.shape[-1] ** -0.5)
        if layer in store.last_layer:
            self.txn.wrote(store.last_layer[layer])
        return out

    def commit(self) -> Receipt | None:
        return self.txn.publish()

    def rollback(self) -> None:
        self.txn.rollback()


def _padded(tables: list[list[int]], device: str) -> Tensor:
    longest = max(len(t) for t in tables)
    return torch.tensor([t + [-1] * (longest - len(t)) for t in tables], device=device)


def _slots(requests: list[StagedRequest], g: int, block_size: int, device: str) -> tuple[Tensor, Tensor]:
    places = [(*divmod(t, block_size), r.tables[g]) for r in requests for t in range(r.start, r.context)]
    blocks = torch.tensor([table[j] for j, _, table in places], device=device)
    return blocks, torch.tensor([offset for _, offset, _ in places], device=device)


class PagedMemory:
    """Paged K/V memory: an allocator that says who holds which block, a store that holds the rows."""

    def __init__(self, allocator: Allocator, store: PagedStore) -> None:
        self.allocator, self.store = allocator, store
        allocator.mover = store.copy_rows

    def open(self, rows: Mapping[str, Sequence[int]]) -> PagedStep:
        """Reserve room for new rows, copying shared tails; a batch is one transaction, a new request another.

        Raises `Rejected` (for example `out_of_memory`) with nothing changed.
        """
        new = [r for r in rows if r not in self.allocator.requests]
        if new and len(rows) > 1:
            raise Rejected("unknown_operation", "start a new request in a step of its own")
        if new:
            op = {"op": "allocate", "request": new[0], "tokens": len(rows[new[0]])}
        else:
            op = {"op": "append", "requests": {request: len(tokens) for request, tokens in rows.items()}}
        txn = self.allocator.stage(op)
        txn.copy()
        return PagedStep(self.store, txn)

    def fork(self, parent: str, child: str) -> Receipt:
        return self.allocator.fork(parent, child)

    def release(self, request: str) -> Receipt:
        return self.allocator.release(request)

    def length(self, request: str) -> int:
        live = self.allocator.requests.get(request)
        return live.context if live else 0


# ---------------------------------------------------------------- rectangular
class RectangularStep:
    """Rows on their way into reserved rectangles; the contiguous view hands attention plain slices."""

    def __init__(self, memory: RectangularMemory, rows: Mapping[str, Sequence[int]]) -> None:
        self.memory, self.rows = memory, {request: len(tokens) for request, tokens in rows.items()}
        self.spans = [(memory.slot[r], memory.lengths[r], memory.lengths[r] + n) for r, n in self.rows.items()]
        self.context_lengths = [end for _, _, end in self.spans]
        self.query_lengths = [end - start for _, start, end in self.spans]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, at = self.memory.k[layer], self.memory.v[layer], 0
        for slot, start, end in self.spans:
            keys[slot, start:end] = k[at : at + end - start]
            values[slot, start:end] = v[at : at + end - start]
            at += end - start
        return contiguous_attention(q, [keys[s, :end] for s, _, end in self.spans],
                                    [values[s, :end] for s, _, end in self.spans],
                                    self.context_lengths, self.query_lengths, q.shape[-1] ** -0.5)

    def commit(self) -> None:
        for request, n in self.rows.items():
            self.memory.lengths[request] += n

    def rollback(self) -> None:
        self.rows.clear()


class RectangularMemory:
    """The layout that paging replaced: `max_length` rows are reserved for every request, used or not.

    `k`, `v`: `[layers, slots, max_length, kv_heads, head_dim]`. A fork copies every row of its parent.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, *, slots: int, max_length: int,
                 dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        shape = (layers, slots, max_length, kv_heads, head_dim)
        self.k = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.v = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.max_length, self.free = max_length, list(range(slots))
        self.slot: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        self.bytes_copied = 0

    def open(self, rows: Mapping[str, Sequence[int]]) -> RectangularStep:
        """Make room: a new request takes a whole rectangle; `out_of_memory` if none is left or it is too short."""
        for request, tokens in rows.items():
            if request not in self.slot:
                self._admit(request)
            if self.lengths[request] + len(tokens) > self.max_length:
                raise Rejected("out_of_memory", f"{request} needs more than {self.max_length} rows")
        return RectangularStep(self, rows)

    def _admit(self, request: str) -> None:
        if not self.free:
            raise Rejected("out_of_memory", f"no rectangle of {self.max_length} rows is left for {request}")
        self.slot[request], self.lengths[request] = self.free.pop(0), 0

    def fork(self, parent: str, child: str) -> None:
        if child in self.slot:
            raise Rejected("request_exists", child)
        self._admit(child)
        n, src, dst = self.lengths[parent], self.slot[parent], self.slot[child]
        for tensor in (self.k, self.v):
            tensor[:, dst, :n] = tensor[:, src, :n]
            self.bytes_copied += tensor[:, dst, :n].numel() * tensor.element_size()
        self.lengths[child] = n

    def release(self, request: str) -> None:
        if request not in self.slot:
            raise Rejected("unknown_request", request)
        self.free.append(self.slot.pop(request))
        del self.lengths[request]

    def length(self, request: str) -> int:
        return self.lengths.get(request, 0)
