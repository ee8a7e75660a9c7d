"""The frozen records of the ownership contract: what a transaction intends and what a committed one leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvlab.contract import Json
from kvlab.memory.block_pool import PhysicalBlockHandle, generation_of, index_of
from kvlab.memory.identities import Name, texts_of
from kvlab.memory.layout import CacheLayoutManifest

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
class Lease:
    """The right to read or write some blocks for a while, whoever lets go of them meanwhile (article 0x04A)."""

    lease_id: str
    kind: str
    handles: tuple[PhysicalBlockHandle, ...]


Run = tuple[int, int, np.ndarray | Sequence[int]]
"""(cache group, references more or less, words of the handles)."""

RECEIPT_FIELDS = (
    "transaction_id", "predecessor_digest", "successor_digest", "useful_new_rows", "new_physical_blocks",
    "copied_rows", "copy_payload_bytes", "refcount_deltas", "allocator_epoch_after", "outcome", "operation", "reason",
    "requests", "paths", "new_bundles", "new_capacity_bytes", "write_bytes", "freed", "evicted_identities",
    "traffic_bytes", "amplification",
)
"""What a receipt says in plain data, in this order."""


class AllocationReceipt(NamedTuple):
    """What one committed transaction did, in physical facts (article 0x04D). Frozen.

    It keeps the packed facts and words them when asked. `new_physical_blocks` counts handles, `new_bundles` counts
    blocks of one group at most. `copied_rows` counts bundle rows, `copy_payload_bytes` their bytes over all groups;
    `traffic_bytes` is read + write of the copy plus the write of the new rows. `refcount_deltas` names handles.
    `reason` tells release from cancel.
    """

    serial: int
    before: str | bytes
    after: str | bytes
    allocator_epoch_after: int
    operation: str
    reason: str
    layout: CacheLayoutManifest
    requests: tuple[str, ...]
    useful_new_rows: int
    path_of: Sequence[str]
    fresh: tuple[int, ...]
    runs: tuple[Run, ...]
    free_runs: tuple[Run, ...]
    copies: tuple[tuple[int, int], ...]
    ended: tuple[Name, ...]
    versions: Sequence[int]

    outcome = "committed"

    @property
    def transaction_id(self) -> str:
        return f"t{self.serial}"

    @property
    def predecessor_digest(self) -> str:
        return self.before if isinstance(self.before, str) else self.before.hex()

    @property
    def successor_digest(self) -> str:
        return self.after if isinstance(self.after, str) else self.after.hex()

    @property
    def new_physical_blocks(self) -> int:
        return sum(self.fresh)

    @property
    def new_bundles(self) -> int:
        return max(self.fresh, default=0)

    @property
    def new_capacity_bytes(self) -> int:
        return sum(n * g.page_size_bytes for n, g in zip(self.fresh, self.layout.groups, strict=True))

    @property
    def copied_rows(self) -> int:
        rows = Counter()
        for g, n in self.copies:
            rows[g] += n
        return max(rows.values(), default=0)

    @property
    def copy_payload_bytes(self) -> int:
        return sum(rows * self.layout.groups[g].row_bytes for g, rows in self.copies)

    @property
    def write_bytes(self) -> int:
        return self.useful_new_rows * self.layout.row_bytes

    @property
    def paths(self) -> tuple[tuple[str, str], ...]:
        return tuple((r, p) for r, p in zip(self.requests, self.path_of, strict=False) if p)

    def _text(self, g: int, word: int) -> str:
        return f"{self.layout.groups[g].first_block_id + index_of(word)}@{generation_of(word)}"

    @property
    def refcount_deltas(self) -> tuple[tuple[str, int], ...]:
        deltas: dict[tuple[int, int], int] = {}
        for g, count, words in self.runs:
            for word in map(int, words):
                deltas[g, word] = deltas.get((g, word), 0) + count
        return tuple((self._text(g, word), n) for (g, word), n in deltas.items())

    @property
    def freed(self) -> tuple[str, ...]:
        return tuple(self._text(g, word) for g, _, words in self.free_runs for word in map(int, words))

    @property
    def evicted_identities(self) -> tuple[str, ...]:
        """How the identities print that this transaction ended."""
        return tuple(texts_of(self.ended))

    @property
    def traffic_bytes(self) -> int:
        """Formula F5.05: the copy is read and written, the new rows are written."""
        return 2 * self.copy_payload_bytes + self.write_bytes

    @property
    def amplification(self) -> float | None:
        """Formula F5.06: traffic over that of the same append in place; None where nothing was written."""
        return self.traffic_bytes / self.write_bytes if self.write_bytes else None

    def to_dict(self) -> Json:
        out: Json = {name: getattr(self, name) for name in RECEIPT_FIELDS}
        out["refcount_deltas"] = dict(self.refcount_deltas)
        out["paths"] = dict(self.paths)
        return out | {k: list(out[k]) for k in ("requests", "freed", "evicted_identities")}
