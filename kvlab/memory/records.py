"""The frozen records of the ownership contract: what a transaction intends and what a committed one leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvlab.contract import Json
from kvlab.memory.block_pool import PhysicalBlockHandle

BOUNDARY = "reserve_new_bundle_write_row_0"
IN_PLACE = "in_place_write_row_o_valid_o_plus_1"
COPY_ON_WRITE = "copy_on_write_bundle_then_append"

PUBLICATION_ORDER = (
    "validate_epoch_generation_version",
    "load_expected_sources_with_generations",
    "reserve_every_group_unpublished",
    "retain_sources_during_copy",
    "copy_exactly_valid_rows",
    "write_appended_row_every_group",
    "validate_destination_frontiers",
    "atomic_publish_tables_length_refdeltas",
    "release_source_leases",
)
"""The nine steps of an append (article 0x05C); the eighth is the point where everybody sees it."""


def append_path(position: int, block_size: int, tail_owners: int) -> str:
    """Which of the three physical paths an append at token `position` takes (article 0x04E).

    A new block is taken when `position % block_size == 0`: the row to be written opens a block. With 16-token
    blocks that is the append of tokens 0, 16, 32: the length *before* it is a whole number of blocks.
    """
    if position % block_size == 0:
        return BOUNDARY
    return IN_PLACE if tail_owners == 1 else COPY_ON_WRITE


@dataclass(frozen=True, slots=True)
class AllocationTxn:
    """What a transaction intends (article 0x04D), with one entry a request where it spans a batch."""

    transaction_id: str
    expected_allocator_epoch: int
    request_id: tuple[str, ...]
    expected_request_generation: tuple[int, ...]
    expected_table_version: tuple[int, ...]
    operation: str
    touched_handles: tuple[PhysicalBlockHandle, ...]
    reserved_handles: tuple[PhysicalBlockHandle, ...]
    publication_state: str


@dataclass(frozen=True, slots=True)
class AllocationReceipt:
    """What one committed transaction did, in physical facts (article 0x04D).

    `new_physical_blocks` counts handles, `new_bundles` counts blocks of one group at most. `copied_rows` counts
    bundle rows, `copy_payload_bytes` their bytes over all groups; `traffic_bytes` is read + write of the copy
    plus the write of the new rows. `refcount_deltas` names handles. `reason` tells release from cancel.
    """

    transaction_id: str
    predecessor_digest: str
    successor_digest: str
    useful_new_rows: int
    new_physical_blocks: int
    copied_rows: int
    copy_payload_bytes: int
    refcount_deltas: tuple[tuple[str, int], ...]
    allocator_epoch_after: int
    outcome: str
    operation: str
    reason: str
    requests: tuple[str, ...]
    paths: tuple[tuple[str, str], ...]
    new_bundles: int
    new_capacity_bytes: int
    write_bytes: int
    freed: tuple[str, ...]
    evicted_identities: tuple[str, ...]

    @property
    def traffic_bytes(self) -> int:
        """Formula F5.05: the copy is read and written, the new rows are written."""
        return 2 * self.copy_payload_bytes + self.write_bytes

    @property
    def amplification(self) -> float | None:
        """Formula F5.06: traffic over that of the same append in place; None where nothing was written."""
        return self.traffic_bytes / self.write_bytes if self.write_bytes else None

    def to_dict(self) -> Json:
        out: Json = {f.name: getattr(self, f.name) for f in fields(self)}
        out["refcount_deltas"] = dict(self.refcount_deltas)
        out["paths"] = dict(self.paths)
        out |= {k: list(out[k]) for k in ("requests", "freed", "evicted_identities")}
        return out | {"traffic_bytes": self.traffic_bytes, "amplification": self.amplification}
