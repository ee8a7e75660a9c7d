"""What outlasts a transaction and what follows one: leases on a request's blocks, and compensation after publication.

It owns no committed state: a lease is no part of a digest, and a compensation is an ordinary successor. These
functions are the allocator's methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlab.contract import Rejected
from kvlab.memory.block_pool import index_of
from kvlab.memory.plan import live
from kvlab.memory.records import AllocationReceipt, Lease

if TYPE_CHECKING:
    from kvlab.memory.allocator import Allocator


def lease(self: Allocator, request: str, kind: str = "read", blocks: Sequence[int] | None = None) -> Lease:
    """Protect logical blocks of a live request (all of them if None) from being given away, until `unlease`.

    For whoever reads or writes them outside a transaction, such as a transfer. A "write" lease is exclusive: refused
    with `in_place_shared_tail_write` where somebody else owns, may find or has leased a block; until it ends nobody
    may copy, share or lease the block (`write_in_flight`). Releasing the request ends no lease: its blocks stay out
    of circulation. ValueError for another kind. O(blocks leased).
    """
    if kind not in ("read", "write"):
        raise ValueError(f"a lease is for 'read' or 'write', not {kind!r}")
    with self.lock:
        tables, words = live(self, request).tables, []
        for g, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            for j in range(len(table)) if blocks is None else blocks:
                if not 0 <= j < len(table):
                    raise Rejected("truncate_beyond_context", f"block {j} of {len(table)} of {request} in {pool.group}")
                index = index_of(table[j])
                if index in pool.written:
                    raise Rejected("write_in_flight", pool.text(table[j]))
                if kind == "write" and (pool.refs(index) > 1 or index in pool.keys or index in pool.leases):
                    raise Rejected("in_place_shared_tail_write", pool.text(table[j]))
                words.append((g, table[j]))
        self.serial += 1
        taken = Lease(f"l{self.serial}", kind, tuple(self.pools[g].handle(word) for g, word in words))
        self.held[taken.lease_id] = words
        for g, word in words:
            self.pools[g].lease(word)
            if kind == "write":
                self.pools[g].written.add(index_of(word))
        return taken


def unlease(self: Allocator, ended: Lease) -> None:
    """The reader or writer is done. `lease_ended` where it was before, or where a snapshot has been loaded since."""
    with self.lock:
        words = self.held.pop(ended.lease_id, None)
        if words is None:
            raise Rejected("lease_ended", ended.lease_id)
        for g, word in words:
            self.pools[g].unlease(word)
            if ended.kind == "write":
                self.pools[g].written.discard(index_of(word))


def compensate(self: Allocator, receipt: AllocationReceipt) -> AllocationReceipt:
    """Undo a published transaction by a successor, for history is never erased (article 0x04F).

    A request that it started is cancelled; rows that it appended are cut off again. `stale_table_version` where the
    request has moved on since, `not_compensable` for what gave something back. The receipt's reason is "compensate".
    """
    if len(receipt.requests) != 1 or receipt.operation not in ("allocate", "fork", "touch", "append"):
        raise Rejected("not_compensable", f"{receipt.operation} of {len(receipt.requests)} requests")
    request = receipt.requests[0]
    op = {"request": request, "expected_table_version": int(receipt.versions[0]), "reason": "compensate"}
    if receipt.operation != "append":
        return self.apply(op | {"op": "cancel"})
    return self.apply(op | {"op": "truncate", "tokens": live(self, request).context - receipt.useful_new_rows})
