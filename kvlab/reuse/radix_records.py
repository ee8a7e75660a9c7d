"""What radix operations leave behind: the mutation receipt and the sealed scheduler handoff; it owns no state.

The handoff carries physical evidence and never a scheduling decision (article 0x08G, F7 handoff).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from kvlab.contract import Json, Rejected, digest_of
from kvlab.reuse.token_keys import unpack

SCHEDULER = "M5.2"


@dataclass(frozen=True, slots=True)
class RadixSchedulerHandoffReceipt:
    """A match, frozen for the scheduler together with the lease that keeps it true (golden L7.handoff.fields).

    `suffix_interval` is half open, in tokens of the prompt. The scheduler retains, exchanges or releases the lease.
    """

    request_id: str
    request_generation: int
    tree_version: int
    tree_state_sha256: str
    matched_tokens: int
    prefix_slot_ids: tuple[int, ...]
    path_node_ids: tuple[int, ...]
    terminal_node_id: int
    suffix_interval: tuple[int, int]
    lock_lease_id: str
    lock_required_until_scheduler_disposition: bool = True
    scheduler_owner: str = SCHEDULER
    policy_decision: None = None
    receipt_sha256: str = ""

    def to_dict(self) -> Json:
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}

    def sealed(self) -> RadixSchedulerHandoffReceipt:
        """The same with the SHA-256 of everything else in it."""
        return replace(self, receipt_sha256=self.seal())

    def seal(self) -> str:
        body = self.to_dict()
        del body["receipt_sha256"]
        return digest_of(body)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RadixSchedulerHandoffReceipt:
        """The record of a plain form; `receipt_tampering` unless it has exactly these fields."""
        if not isinstance(data, Mapping) or set(data) != {f.name for f in fields(cls)}:
            raise Rejected("receipt_tampering", "a handoff receipt has exactly the fields of one")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})

    def verify_seal(self) -> None:
        """`receipt_tampering` if a field was edited after the seal, or a decision was written into it."""
        if self.receipt_sha256 != self.seal():
            raise Rejected("receipt_tampering", f"sealed {self.receipt_sha256[:12]}, the fields say {self.seal()[:12]}")
        if self.policy_decision is not None or self.scheduler_owner != SCHEDULER:
            raise Rejected("receipt_tampering", "the cache hands over evidence and decides nothing")


@dataclass(frozen=True, slots=True)
class Evicted:
    """One edge that went: its node, packed tokens and slots."""

    node: int
    key: bytes
    slots: array

    def to_dict(self) -> Json:
        return {"node": self.node, "tokens": unpack(self.key), "slots": list(self.slots)}


SAID: Json = {
    "outcome": "done", "request": None, "matched": 0, "path": (), "slots": (), "terminal": 0, "allocated": (),
    "released": (), "splits": (), "new_node": None, "evicted": (), "evicted_tokens": 0, "lock_from": None,
    "lock_to": None, "lease": None, "steps": (), "handoff": None}
"""What an operation may say of itself, and what it means when it says nothing."""


def _said(name: str) -> Any:
    default = SAID[name]
    return property(lambda receipt: receipt.done.get(name, default))


class RadixMutationReceipt(NamedTuple):
    """What one committed operation did to tree and pool; `done` holds what it said of itself, read by name.

    `matched`: tokens found in the tree; `path` and `slots`: where; `allocated`: slots taken from the queue;
    `released`: slots returned to it, in order; `splits`: (new parent, old node, tokens of the parent);
    `steps`: really taken, in this order. `outcome`: done, or short where an eviction found less than was asked for.
    """

    operation: str
    predecessor_digest: str
    successor_digest: str
    version: int
    done: Mapping[str, Any]

    outcome, request, matched, path = _said("outcome"), _said("request"), _said("matched"), _said("path")
    slots, terminal, new_node, splits = _said("slots"), _said("terminal"), _said("new_node"), _said("splits")
    allocated, released = _said("allocated"), _said("released")
    evicted, evicted_tokens = _said("evicted"), _said("evicted_tokens")
    lease, lock_from, lock_to = _said("lease"), _said("lock_from"), _said("lock_to")
    steps, handoff = _said("steps"), _said("handoff")

    def to_dict(self) -> Json:
        out = self._asdict() | SAID | dict(self.done)
        del out["done"]
        out["splits"] = [list(s) for s in self.splits]
        out["evicted"] = [e.to_dict() for e in self.evicted]
        out["handoff"] = self.handoff.to_dict() if self.handoff else None
        return {k: list(v) if isinstance(v, tuple | array) else v for k, v in out.items()}


@dataclass(frozen=True, slots=True)
class HandoffWork:
    """What a handed-over request still needs: tokens, useful bytes, and blocks with their capacity in bytes."""

    prompt_tokens_to_compute: int
    new_useful_KV_bytes: int  # noqa: N815 - the article's name
    new_physical_blocks: int
    new_physical_capacity_bytes: int


def handoff_work(prompt: int, matched: int, row_bytes: int, block_size: int = 1, free_tail: int = 0) -> HandoffWork:
    """Work left after a match (article 0x08G). Useful bytes and capacity stay two numbers.

    `free_tail`: rows still free in the request's private tail block. `invalid_length` for a negative number, for more
    matched than there is, or a block size below 1.
    """
    if min(prompt, matched, row_bytes, free_tail) < 0 or matched > prompt or block_size < 1:
        raise Rejected("invalid_length", f"prompt {prompt}, matched {matched}, block size {block_size}")
    compute = prompt - matched
    blocks = -(-max(compute - free_tail, 0) // block_size)
    return HandoffWork(compute, compute * row_bytes, blocks, blocks * block_size * row_bytes)
