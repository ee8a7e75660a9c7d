"""Live requests of a radix cache: a lease on a path, a table of slots, and the rows that are still their own.

It owns the record and the checks of slots and receipts that callers hand in; it changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import NoneType
from typing import TYPE_CHECKING, Any

from kvlab.contract import Rejected, canonical, fact_hash
from kvlab.reuse.radix_records import RadixSchedulerHandoffReceipt
from kvlab.reuse.radix_tree import RadixNode, Walk
from kvlab.reuse.slot_pool import PRIVATE, TREE
from kvlab.reuse.token_keys import tag

if TYPE_CHECKING:
    from kvlab.reuse.radix_cache import RadixCache


@dataclass(slots=True)
class LiveRequest:
    """A lease and what it serves. `tokens`: packed ids whose rows stand in `table`, one slot a block.

    The first `protected` tokens are the tree's: their slots are references. The rest is private.
    `tree_version`: when the lease was taken. `prompt`: tokens of the prompt. `admitted`: the scheduler has said yes.
    """

    request_id: str
    generation: int
    lease_id: str
    terminal: RadixNode
    tree_version: int
    extra: Any
    priority: int
    tokens: bytes
    table: array
    protected: int
    prompt: int
    admitted: bool

    def fact(self) -> int:
        """The request as one fact of the digest. O(table)."""
        return fact_hash("request", self.request_id, self.generation, self.lease_id, self.terminal.node_id,
                         self.tree_version, canonical(self.extra).decode(), self.priority, self.protected, self.prompt,
                         int(self.admitted), sha256(self.tokens).hexdigest(), sha256(self.table.tobytes()).hexdigest())


def live(cache: RadixCache, request: str) -> LiveRequest:
    """A request that the scheduler has admitted; `unknown_request`, `not_admitted`."""
    found = cache.requests.get(request)
    if found is None:
        raise Rejected("unknown_request", f"request {request!r}")
    if not found.admitted:
        raise Rejected("not_admitted", f"{request} was handed over and not admitted")
    return found


def enough(cache: RadixCache, blocks: int) -> None:
    """`out_of_memory` if fewer slots are free. Nobody is evicted behind the caller's back."""
    if blocks > cache.pool.free_count:
        raise Rejected("out_of_memory", f"{blocks} slots wanted, {cache.pool.free_count} free")


SHAPES: dict[str, tuple[type, ...]] = {
    "request": (str, NoneType), "node": (int, NoneType), "priority": (int,), "generation": (int,), "at": (int,),
    "chunked": (bool, int), "disposition": (str,), "slots": (list, tuple, array, NoneType)}


def well_formed(arguments: Mapping[str, Any]) -> None:
    """Arguments of an operation that came as data: `unknown_operation` for one of a wrong type. O(arguments)."""
    for name, value in arguments.items():
        if name == "extra_key":
            try:
                tag(value)
            except (TypeError, ValueError) as error:
                raise Rejected("unknown_operation", f"extra_key is no plain data: {error}") from error
        elif not isinstance(value, SHAPES.get(name, (object,))):
            raise Rejected("unknown_operation", f"{name} cannot be {value!r}")


def whole_number(value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Rejected("invalid_length", f"{value!r} is no whole number from {least}")
    return value


def reserved(cache: RadixCache, slots: Sequence[int], wanted: tuple[int, ...]) -> array:
    """Slots that a caller brings: as many as wanted, taken from the pool before, and nobody else's. O(slots)."""
    if len(slots) not in wanted:
        raise Rejected("edge_length_mismatch", f"{len(slots)} slots for {' or '.join(map(str, wanted))} blocks")
    for slot in slots:
        state = cache.pool.state(slot) if isinstance(slot, int) else None
        if state is None:
            raise Rejected("slot_out_of_range", f"slot {slot!r}")
        if state == TREE:
            raise Rejected("owned_slot_reuse", f"slot {slot} belongs to the tree")
        if state != PRIVATE or slot not in cache.loose:
            raise Rejected("private_slot_not_reserved", f"slot {slot} was not taken from the pool for this")
    if len(set(slots)) != len(slots):
        raise Rejected("duplicate_slot_owner", "one slot stands twice among the incoming ones")
    return array("i", slots)


def references(walk: Walk, slots: Sequence[int], keep: int, block_bytes: int) -> None:
    """The first `keep` incoming slots must be the tree's own, in order: `path_slot_mismatch`."""
    if list(slots[:keep]) != list(walk.slots(block_bytes)[:keep]):
        raise Rejected("path_slot_mismatch", f"the first {keep} slots are not those of the path")


def verify_handoff(cache: RadixCache, receipt: RadixSchedulerHandoffReceipt | Mapping) -> LiveRequest:
    """The request that a handoff receipt still speaks for. Order of refusals: seal, version, lease, path, suffix.

    With its lease the receipt stays good while the tree changes elsewhere: a split below a lock keeps the slots and
    their order. Without it, any mutation makes its use a stale read.
    """
    if not isinstance(receipt, RadixSchedulerHandoffReceipt):
        receipt = RadixSchedulerHandoffReceipt.from_dict(receipt)
    receipt.verify_seal()
    request = cache.requests.get(receipt.request_id)
    leased = (request is not None and not request.admitted and request.lease_id == receipt.lock_lease_id
              and request.generation == receipt.request_generation)
    if receipt.tree_version != (request.tree_version if leased else cache.version):
        raise Rejected("stale_tree_version", f"made at {receipt.tree_version}, the tree is at {cache.version}")
    if not leased:
        raise Rejected("handoff_without_lease", f"no live lease {receipt.lock_lease_id!r}")
    path = cache.tree.path(request.terminal)
    slots = [slot for node in path for slot in node.value]
    ids = iter([node.node_id for node in path])
    if list(receipt.prefix_slot_ids) != slots or receipt.matched_tokens != len(slots) * cache.tree.block_size:
        raise Rejected("path_slot_mismatch", f"{list(receipt.prefix_slot_ids)} is not the path's {slots}")
    if receipt.terminal_node_id != request.terminal.node_id or not all(n in ids for n in receipt.path_node_ids):
        raise Rejected("path_slot_mismatch", f"{list(receipt.path_node_ids)} is not the leased path")
    if tuple(receipt.suffix_interval) != (receipt.matched_tokens, request.prompt):
        raise Rejected("suffix_mismatch", f"{list(receipt.suffix_interval)} with {receipt.matched_tokens} matched of "
                       f"{request.prompt}")
    if receipt.tree_version == cache.version and receipt.tree_state_sha256 != cache.digest:
        raise Rejected("stale_tree_version", "the receipt names another state of this version")
    return request
