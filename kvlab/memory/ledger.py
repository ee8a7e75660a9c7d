"""Every byte ledger of K/V memory, as frozen records and pure functions; it holds no state and never makes one total.

Three ledgers count the same rows by different rules: what rectangles reserve and what requests see (rows counted once
a request), what blocks really hold (once a block), and what the pool provides. Article sections 0x02 and 0x0D.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from kvlab.contract import Json, Rejected

RECTANGULAR, REQUEST_VIEW, UNIQUE, POOL = "rectangular", "request view", "unique physical", "pool"
METADATA, EXTERNAL, SAVINGS, MODEL = "metadata", "external fragmentation", "savings", "expectation"
RANK_LOCAL, MODEL_WIDE = "rank-local", "model-wide"
NOT_APPLICABLE = "not_applicable"


def positive(name: str, value: Any) -> int:
    """A size of the geometry: a whole number, at least 1; `invalid_geometry` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Rejected("invalid_geometry", f"{name} is {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes that know by which ledger's rule, and for one rank or the whole model, they were counted.

    Adding amounts of two ledgers, or of two conventions, is refused: `ledgers_not_addable`, and
    `fragmentation_added_to_slack` where bytes of an external fragmentation meet reservation slack (article 0x02F).
    """

    bytes: int
    ledger: str
    convention: str = RANK_LOCAL

    def __add__(self, other: Amount) -> Amount:
        if {self.ledger, other.ledger} == {RECTANGULAR, EXTERNAL}:
            raise Rejected("fragmentation_added_to_slack", f"{self.bytes:,} B and {other.bytes:,} B")
        if (self.ledger, self.convention) != (other.ledger, other.convention):
            said = [f"{a.bytes:,} B ({a.ledger}, {a.convention})" for a in (self, other)]
            raise Rejected("ledgers_not_addable", " and ".join(said))
        return Amount(self.bytes + other.bytes, self.ledger, self.convention)

    @property
    def mib(self) -> float:
        return self.bytes / 2**20


@dataclass(frozen=True, slots=True)
class RowGeometry:
    """What one token's K and V take in one cache group: widths in bytes a scalar, apart for K and V.

    `invalid_geometry` where a size is not a positive whole number.
    """

    group_id: str
    layers: int
    kv_heads: int
    head_dim: int
    k_bytes: int
    v_bytes: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "k_bytes", "v_bytes"):
            positive(f"{self.group_id}: {name}", getattr(self, name))

    @property
    def row_bytes(self) -> int:
        """Bytes a token on this worker (formula F3.01)."""
        return self.layers * self.kv_heads * self.head_dim * (self.k_bytes + self.v_bytes)

    @property
    def factor_two(self) -> int | None:
        """The short form L * 2 * H * d * b, which holds only where K and V are equally wide; None elsewhere."""
        if self.k_bytes != self.v_bytes:
            return None
        return self.layers * 2 * self.kv_heads * self.head_dim * self.k_bytes


@dataclass(frozen=True, slots=True)
class View:
    """One request as a ledger sees it: its committed tokens, its block table, what a rectangle would reserve for it."""

    request: str
    tokens: int
    blocks: tuple[int, ...]
    reserved: int | None = None


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the ledgers of one cache group are computed from; `valid_rows` has the blocks that some table names.

    `block_size` counts tokens, `row_bytes` bytes a token of this group. `hashes`: cached identities.
    """

    group_id: str
    row_bytes: int
    block_size: int
    requests: tuple[View, ...]
    valid_rows: Mapping[int, int]
    pool_blocks: int
    hashes: int = 0
    convention: str = RANK_LOCAL

    def amount(self, rows: int, ledger: str) -> Amount:
        return Amount(rows * self.row_bytes, ledger, self.convention)


def from_snapshot(snapshot: Json, reserved: Mapping[str, int] | int | None = None) -> tuple[Holdings, ...]:
    """The holdings of a live allocator, one a cache group, out of `Allocator.snapshot()`.

    `reserved`: the tokens that a rectangle would reserve, for each request or for all alike. O(blocks named).
    """
    out = []
    for group in snapshot["groups"]:
        g, first = group["group_id"], group["first_block_id"]
        rows, valid, views = snapshot["blocks"][g]["valid_rows"], {}, []
        for name, request in snapshot["requests"].items():
            blocks = tuple(int(handle.partition("@")[0]) for handle in request["tables"][g])
            valid.update((block, rows[block - first]) for block in blocks)
            kept = reserved.get(name) if isinstance(reserved, Mapping) else reserved
            views.append(View(name, request["context"], blocks, kept))
        width, layers = group["scalar_bytes"], group["layer_end"] - group["layer_start"]
        row = RowGeometry(g, layers, group["kv_heads"], group["head_dim"], width, width)
        out.append(Holdings(g, row.row_bytes, group["block_size"], tuple(views), MappingProxyType(valid),
                            group["num_blocks"], len(snapshot["blocks"][g]["keys"])))
    return tuple(out)


# ---------------------------------------------------------------- the ledgers
def _by(pairs: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    return MappingProxyType(dict(pairs))


@dataclass(frozen=True, slots=True)
class RectangularLedger:
    """What contiguous reservations take. Rows that several requests share count once for each of them."""

    logical_rows: int
    reserved_rows: int
    slack_rows: int
    logical: Amount
    reserved: Amount
    slack: Amount


def rectangular(h: Holdings) -> RectangularLedger:
    """Formulas F3.03 and F3.04. O(requests).

    ValueError for a request without a reservation, `committed_exceeds_reserved` for one with too small a one.
    """
    logical, reserved = 0, 0
    for v in h.requests:
        if v.reserved is None:
            raise ValueError(f"nobody said what is reserved for {v.request}")
        if v.tokens > v.reserved:
            raise Rejected("committed_exceeds_reserved", f"{v.request} has {v.tokens} tokens of {v.reserved} reserved")
        logical, reserved = logical + v.tokens, reserved + v.reserved
    slack = reserved - logical
    return RectangularLedger(logical, reserved, slack, *(h.amount(n, RECTANGULAR) for n in (logical, reserved, slack)))


@dataclass(frozen=True, slots=True)
class RequestViewLedger:
    """What block tables name, every reference counted: the no-sharing baseline, not physical memory.

    `hidden_rows`: unused slots of a request's last block that hold valid rows of somebody else.
    """

    blocks: Mapping[str, int]
    visible_in_last: Mapping[str, int]
    tail_by_request: Mapping[str, int]
    hidden_rows: Mapping[str, int]
    references: int
    slots: int
    tail_slots: int
    logical: Amount
    capacity: Amount
    tail: Amount


def request_view(h: Holdings) -> RequestViewLedger:
    """Formulas F3.05 to F3.07. O(requests)."""
    size = h.block_size
    seen = {v.request: v.tokens - (len(v.blocks) - 1) * size if v.blocks else 0 for v in h.requests}
    tails = {v.request: len(v.blocks) * size - v.tokens for v in h.requests}
    hidden = {v.request: h.valid_rows[v.blocks[-1]] - seen[v.request] if v.blocks else 0 for v in h.requests}
    refs, logical = sum(len(v.blocks) for v in h.requests), sum(v.tokens for v in h.requests)
    slots, tail = refs * size, refs * size - logical
    blocks = _by((v.request, len(v.blocks)) for v in h.requests)
    return RequestViewLedger(blocks, _by(seen.items()), _by(tails.items()), _by(hidden.items()), refs, slots, tail,
                             *(h.amount(n, REQUEST_VIEW) for n in (logical, slots, tail)))


@dataclass(frozen=True, slots=True)
class UniqueLedger:
    """What really lies in memory: each block once, however many tables name it."""

    ids: tuple[int, ...]
    rows: int
    slots: int
    tail_slots: int
    materialized: Amount
    capacity: Amount
    tail: Amount


def unique(h: Holdings) -> UniqueLedger:
    """Formulas F3.09 to F3.11. O(blocks named)."""
    ids = tuple(sorted({block for v in h.requests for block in v.blocks}))
    rows, slots = sum(h.valid_rows[block] for block in ids), len(ids) * h.block_size
    amounts = (h.amount(n, UNIQUE) for n in (rows, slots, slots - rows))
    return UniqueLedger(ids, rows, slots, slots - rows, *amounts)


@dataclass(frozen=True, slots=True)
class PoolLedger:
    """What was provided at the start. Idle blocks are room for others, not waste."""

    blocks: int
    live: int
    idle: int
    provisioned: Amount
    in_use: Amount
    free: Amount


def pool(h: Holdings) -> PoolLedger:
    """Formula F3.08. O(blocks named)."""
    live = len({block for v in h.requests for block in v.blocks})
    counts = (h.pool_blocks, live, h.pool_blocks - live)
    return PoolLedger(*counts, *(h.amount(n * h.block_size, POOL) for n in counts))


@dataclass(frozen=True, slots=True)
class Savings:
    """Two savings of sharing that are not each other: rows not stored twice, and block capacity not taken twice."""

    dedup_payload: Amount
    capacity_avoided: Amount

    @property
    def equal(self) -> bool:
        return self.dedup_payload.bytes == self.capacity_avoided.bytes


def savings(h: Holdings) -> Savings:
    """Formulas S3.1 and S3.2. O(blocks named)."""
    view, real = request_view(h), unique(h)
    logical = sum(v.tokens for v in h.requests)
    return Savings(h.amount(logical - real.rows, SAVINGS), h.amount(view.slots - real.slots, SAVINGS))


@dataclass(frozen=True, slots=True)
class MetadataConstants:
    """Bytes a record of each kind. Inputs, not measurements: a Python object and a packed struct differ (0x02E)."""

    map: int
    descriptor: int
    hash: int
    tail: int
    free: int
    fixed: int


@dataclass(frozen=True, slots=True)
class MetadataLedger:
    """`counts` and `terms` in the order map, descriptor, hash, tail, free; the last term is the fixed part."""

    counts: tuple[int, ...]
    terms: tuple[int, ...]
    total: Amount


def metadata(h: Holdings, size: MetadataConstants) -> MetadataLedger:
    """Formula F3.12, in synthetic bytes whose placement nobody has said. O(blocks named)."""
    stock = pool(h)
    counts = (sum(len(v.blocks) for v in h.requests), stock.blocks, h.hashes, len(h.requests), stock.idle)
    widths = (size.map, size.descriptor, size.hash, size.tail, size.free)
    terms = (*(n * width for n, width in zip(counts, widths, strict=True)), size.fixed)
    return MetadataLedger(counts, terms, Amount(sum(terms), METADATA, h.convention))


# ---------------------------------------------------------------- what is not a subtraction
@dataclass(frozen=True, slots=True)
class Arena:
    """One stretch of memory for contiguous allocations, in bytes."""

    size: int
    allocated: int
    free_extents: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.allocated + sum(self.free_extents) != self.size or min((self.allocated, *self.free_extents)) < 0:
            raise Rejected("malformed_snapshot", "an arena's allocated and free extents do not add up to it")


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """External fragmentation: a ratio of one snapshot, and whether one candidate fits. No bytes to add to slack."""

    total_free: int
    largest_free: int
    ratio: str
    contiguous: str
    out_of_reach: Amount


def fragmentation(arena: Arena, candidate: int, convention: str = RANK_LOCAL) -> Fragmentation:
    """Formula F3.13 as an exact fraction; `not_applicable` where nothing is free. O(extents)."""
    free, largest = sum(arena.free_extents), max(arena.free_extents, default=0)
    ratio = str(1 - Fraction(largest, free)) if free else NOT_APPLICABLE
    fits = "accept" if candidate <= largest else "reject"
    return Fragmentation(free, largest, ratio, fits, Amount(free - largest, EXTERNAL, convention))


def fragmentation_ratio(arena: Arena) -> Fraction:
    """F_ext as a number; `fragmentation_ratio_undefined` where nothing is free."""
    if not sum(arena.free_extents):
        raise Rejected("fragmentation_ratio_undefined", f"{arena.size:,} B, none of them free")
    return 1 - Fraction(max(arena.free_extents), sum(arena.free_extents))


def blocks_for(size: int, block_bytes: int) -> int:
    """Blocks that hold `size` bytes: any free ones will do."""
    return -(-size // block_bytes)


@dataclass(frozen=True, slots=True)
class ExpectedTail:
    """The mean unused part of a last block, if every fill from 1 to P were equally likely. No trace promises that."""

    slots: float
    bytes: float
    most: Amount


def expected_tail(block_size: int, row_bytes: int = 1, convention: str = RANK_LOCAL) -> ExpectedTail:
    """Formulas F3.14, F3.15 and S3.3 (`most`: one row in the block)."""
    size = positive("block_size", block_size)
    return ExpectedTail((size - 1) / 2, (size - 1) * row_bytes / 2, Amount((size - 1) * row_bytes, MODEL, convention))


def tokens_skipped(hit_blocks: int, block_size: int, prompt_tokens: int) -> int:
    """Prompt tokens that need no prefill: the hit, but at least one token is computed, for its logits.

    The rest is aligned down to whole blocks, so a prompt that is all hit computes its last block again.
    """
    return min(hit_blocks * block_size, (prompt_tokens - 1) // block_size * block_size)


def plain(value: Any) -> Any:
    """Records as plain JSON data, in field order; an amount also says its MiB."""
    if isinstance(value, Amount):
        return {"bytes": value.bytes, "mib": value.mib, "ledger": value.ledger, "convention": value.convention}
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(v) for v in value]
    return value
