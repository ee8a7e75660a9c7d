"""The ledgers as a machine: a declared record is recomputed, refused where it drifted, and asked; it changes nothing.

A record is {"kind": "books", "convention", "block_size", "groups": [row geometry], "requests": {name: {tokens,
reserved, blocks}}, "valid_rows": {block: rows}, "pool_blocks", "metadata": {constants, "hashes"}, "arena", "declared"}.
Everything in "declared" can be computed from the rest, and is: that is how a wrong sum is found (article 0x0D).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from kvlab.contract import Event, Json, Rejected, digest_of
from kvlab.memory import ledger
from kvlab.memory.ledger import Amount, Arena, Holdings, MetadataConstants, RowGeometry, View, plain, positive

COUNTS = ("map", "descriptor", "hash", "tail", "free")


def holdings(record: Json) -> Holdings:
    """What the ledgers are computed from, checked up to its geometry and form; see `validate` for the rest."""
    try:
        groups = [RowGeometry(**g) for g in record["groups"]]
        views = tuple(View(name, r["tokens"], tuple(r["blocks"]), r["reserved"])
                      for name, r in record["requests"].items())
        valid = {int(block): rows for block, rows in record["valid_rows"].items()}
        numbers = [n for v in views for n in (v.tokens, v.reserved, *v.blocks)] + [*valid.values()]
        if not all(type(n) is int and n >= 0 for n in numbers) or not groups:
            raise ValueError("a length, a block or a count of rows is not a whole number")
        hashes = record.get("metadata", {}).get("hashes", 0)
        dict(record.get("declared", {}))
        convention, size, stock = record["convention"], record["block_size"], record["pool_blocks"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Rejected("malformed_snapshot", f"{type(error).__name__}: {error}") from error
    if convention not in (ledger.RANK_LOCAL, ledger.MODEL_WIDE):
        raise Rejected("malformed_snapshot", f"{convention!r} is no convention")
    return Holdings("+".join(g.group_id for g in groups), sum(g.row_bytes for g in groups),
                    positive("block_size", size), views, valid, positive("pool_blocks", stock), hashes, convention)


def validate(record: Json) -> Holdings:
    """Raise `Rejected` for the first thing that is wrong, in the order of Loop 3; the holdings of a right record."""
    h, said = holdings(record), record.get("declared", {})
    _same("row_bytes_drift", "row_bytes", said, h.row_bytes)
    rect = ledger.rectangular(h)
    for v in h.requests:
        if len(v.blocks) != -(-v.tokens // h.block_size):
            raise Rejected("block_count_drift", f"{v.request} lists {len(v.blocks)} blocks for {v.tokens} tokens")
    _validate_rows(h)
    _validate_prefixes(h)
    real, view = ledger.unique(h), ledger.request_view(h)
    detail = f" ({view.references} references)"
    _same("reference_count_used_as_unique_count", "unique_blocks", said, len(real.ids), detail)
    _same("materialized_rows_drift", "materialized_rows", said, real.rows)
    if h.pool_blocks < len(real.ids):
        raise Rejected("pool_below_live", f"{h.pool_blocks} blocks, {len(real.ids)} in use")
    _same("free_count_drift", "free_blocks", said, ledger.pool(h).idle)
    _validate_metadata(record, h, said)
    _same("slack_identity_broken", "slack_bytes", said, rect.slack.bytes)
    if "arena" in record:
        _arena(record["arena"])
    return h


def _same(reason: str, name: str, said: Json, found: Any, detail: str = "") -> None:
    if name in said and said[name] != found:
        raise Rejected(reason, f"{name} is declared as {said[name]}, counted {found}{detail}")


def _validate_rows(h: Holdings) -> None:
    for block, rows in h.valid_rows.items():
        if rows > h.block_size:
            raise Rejected("valid_rows_exceed_block", f"block {block}: {rows} of {h.block_size}")
    for v in h.requests:
        for j, block in enumerate(v.blocks):
            seen = min(h.block_size, v.tokens - j * h.block_size)
            if h.valid_rows.get(block, 0) < seen:
                held = h.valid_rows.get(block, 0)
                raise Rejected("valid_rows_below_view", f"block {block}: {held} valid, {v.request} sees {seen}")


def _validate_prefixes(h: Holdings) -> None:
    """A shared block stands at one place, behind one block: by induction, behind one whole prefix."""
    behind: dict[int, tuple[int, int | None]] = {}
    for v in h.requests:
        for j, block in enumerate(v.blocks):
            place = (j, v.blocks[j - 1] if j else None)
            if behind.setdefault(block, place) != place:
                raise Rejected("prefix_relation_broken", f"block {block} in the table of {v.request}, entry {j}")


def _validate_metadata(record: Json, h: Holdings, said: Json) -> None:
    if "metadata" not in record:
        return
    found = ledger.metadata(h, _constants(record))
    _same("metadata_count_drift", "metadata_counts", said, dict(zip(COUNTS, found.counts, strict=True)))
    _same("metadata_total_drift", "metadata_bytes", said, found.total.bytes)


def _constants(record: Json) -> MetadataConstants:
    try:
        return MetadataConstants(**{k: int(v) for k, v in record["metadata"].items() if k != "hashes"})
    except (KeyError, TypeError, ValueError) as error:
        raise Rejected("malformed_snapshot", f"metadata: {error}") from error


def _arena(row: Json) -> Arena:
    try:
        return Arena(row["size"], row["allocated"], tuple(row["free_extents"]))
    except (KeyError, TypeError) as error:
        raise Rejected("malformed_snapshot", f"arena: {type(error).__name__} {error}") from error


class Books:
    """One declared record, right or refused. `ask` computes; nothing it answers is stored.

    Questions: row, rectangular, request_view, unique, pool, metadata, savings, identities, fragmentation,
    fragmentation_ratio, expected_tail, cost, add, contiguous_failures. Any of them takes "instead": parts of the
    record to put in the place of the declared ones for this question. Each costs O(blocks named).
    """

    def __init__(self, record: Json) -> None:
        self.observers: list[Callable[[Event], None]] = []
        self.load(record)

    def load(self, snapshot: Json) -> None:
        """Keep a record; a wrong one is refused and the present one stays."""
        validate(snapshot)
        self._record = copy.deepcopy(snapshot)

    def snapshot(self) -> Json:
        return copy.deepcopy(self._record)

    @property
    def digest(self) -> str:
        return digest_of(self._record)

    def check(self) -> None:
        """Recompute everything that is declared; `Rejected` names the first drift."""
        validate(self._record)

    def ask(self, question: Json) -> Any:
        """Answer from the record in plain data; `unknown_operation` for a question that it has no answer to."""
        answer = _QUESTIONS.get(str(question.get("ask")))
        if answer is None:
            raise Rejected("unknown_operation", f"{question.get('ask')!r}")
        record = self._record
        if "instead" in question:
            record = {k: v for k, v in record.items() if k != "declared"} | question["instead"]
        try:
            return plain(answer(record, validate(record), question))
        except KeyError as missing:
            raise Rejected("unknown_operation", f"the question lacks {missing}") from missing


def _row(record: Json, h: Holdings, question: Json) -> Json:
    groups = [RowGeometry(**g) for g in record["groups"]]
    shards = positive("shards", question.get("shards", 1))
    tail = ledger.expected_tail(h.block_size, h.row_bytes, h.convention)
    return {"bytes": h.row_bytes, "kib": h.row_bytes / 1024, "convention": h.convention,
            "block_bytes": h.block_size * h.row_bytes, "most_tail": tail.most,
            "groups": {g.group_id: {"bytes": g.row_bytes, "factor_two": g.factor_two} for g in groups},
            "over_shards": Amount(h.row_bytes * shards, "row", ledger.MODEL_WIDE)}


def _identities(record: Json, h: Holdings, question: Json) -> Json:
    """Each as [left, right...]: bytes on both sides, each side inside one ledger or defined as a difference."""
    rect, view, real, saved = ledger.rectangular(h), ledger.request_view(h), ledger.unique(h), ledger.savings(h)
    rows = {
        "rect": (rect.reserved, rect.logical, rect.slack),
        "paged_view": (view.capacity, view.logical, view.tail),
        "unique": (real.capacity, real.materialized, real.tail),
        "capacity_avoided": (view.capacity, real.capacity, saved.capacity_avoided),
        "dedup": (rect.logical, real.materialized, saved.dedup_payload),
    }
    return {name: {"lhs_mib": left.mib, "rhs_mib": [a.mib for a in right],
                   "holds": left.bytes == sum(a.bytes for a in right)} for name, (left, *right) in rows.items()}


def _fragmentation(record: Json, h: Holdings, question: Json) -> Json:
    arena, candidate = _arena(record["arena"]), question["candidate"]
    needed, stock = ledger.blocks_for(candidate, h.block_size * h.row_bytes), ledger.pool(h)
    mib = [n / 2**20 for n in (arena.size, arena.allocated, sum(arena.free_extents))]
    return plain(ledger.fragmentation(arena, candidate, h.convention)) | {
        "balance_mib": mib, "block_pool_fit": {"blocks_needed": needed, "fits": needed <= stock.idle}}


def _cost(record: Json, h: Holdings, question: Json) -> Json:
    """What a prompt, a prefix hit and the growth behind it take (article 0x0D, model-wide illustration)."""
    prompt, hit, growth = (question.get(k, 0) for k in ("prompt", "hit", "growth"))
    blocks, hit_blocks = -(-prompt // h.block_size), hit // h.block_size
    skipped = ledger.tokens_skipped(hit_blocks, h.block_size, prompt)
    return {"blocks": blocks, "prompt": h.amount(prompt, ledger.REQUEST_VIEW), "hit_blocks": hit_blocks,
            "skipped": skipped, "to_compute": prompt - skipped, "growth": h.amount(growth, ledger.REQUEST_VIEW)}


def _terms(record: Json, h: Holdings) -> dict[str, Amount]:
    """Every amount of every ledger by its name, such as "rectangular.slack"."""
    parts: dict[str, Any] = {"rectangular": ledger.rectangular(h), "request_view": ledger.request_view(h),
                             "unique": ledger.unique(h), "pool": ledger.pool(h), "savings": ledger.savings(h)}
    if "arena" in record:
        parts["fragmentation"] = ledger.fragmentation(_arena(record["arena"]), 0, h.convention)
    if "metadata" in record:
        parts["metadata"] = ledger.metadata(h, _constants(record))
    return {f"{name}.{field}": value for name, part in parts.items() for field in part.__dataclass_fields__
            if isinstance(value := getattr(part, field), Amount)}


def _add(record: Json, h: Holdings, question: Json) -> Amount:
    """The sum of named amounts, where it means something."""
    known, terms = _terms(record, h), []
    for term in question["terms"]:
        if term not in known:
            raise Rejected("unknown_operation", f"no amount {term!r}; there are {', '.join(sorted(known))}")
        terms.append(known[term])
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _failures(record: Json, h: Holdings, question: Json) -> Json:
    """The four failures of coarse contiguous allocation, each measured on this record by a rule of its own (0x02G)."""
    rect, frag = ledger.rectangular(h), ledger.fragmentation(_arena(record["arena"]), question["candidate"])
    budget = rect.logical.bytes
    admitted, left = 0, budget // h.row_bytes
    for v in h.requests:
        if v.reserved <= left:
            admitted, left = admitted + 1, left - v.reserved
    measured = {
        "internal_reservation_slack": rect.slack,
        "external_fragmentation": {"ratio": frag.ratio, "contiguous": frag.contiguous},
        "over_reservation": {"requests": len(h.requests), "admitted_into_their_live_bytes": admitted},
        "duplication": ledger.savings(h).dedup_payload,
    }
    return {"order": list(measured), "measured": measured}


_QUESTIONS: dict[str, Callable[[Json, Holdings, Json], Any]] = {
    "row": _row,
    "rectangular": lambda r, h, q: ledger.rectangular(h),
    "request_view": lambda r, h, q: ledger.request_view(h),
    "unique": lambda r, h, q: ledger.unique(h),
    "pool": lambda r, h, q: ledger.pool(h),
    "metadata": lambda r, h, q: ledger.metadata(h, _constants(r)),
    "savings": lambda r, h, q: plain(ledger.savings(h)) | {"equal": ledger.savings(h).equal},
    "identities": _identities,
    "fragmentation": _fragmentation,
    "fragmentation_ratio": lambda r, h, q: str(ledger.fragmentation_ratio(_arena(r["arena"]))),
    "expected_tail": lambda r, h, q: ledger.expected_tail(q["block_size"], h.row_bytes, h.convention),
    "cost": _cost,
    "add": _add,
    "contiguous_failures": _failures,
}
