"""The ownership contract as a machine: who holds which block, changed only by transactions that publish once.

It owns request maps, reference counts, the free queues and the epoch. It refuses to know what the rows mean
(identity), how they are found (index), where a byte lies (address) and who may run next (scheduling).
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable

from kvlab.contract import Event, FactSum, Json, Operation, Rejected, digest_of, fact_hash
from kvlab.memory.block_pool import BlockPool, index_of
from kvlab.memory.layout import CacheLayoutManifest
from kvlab.memory.plan import PLANNERS, GroupChange, Plan, Request, RequestChange
from kvlab.memory.records import AllocationReceipt
from kvlab.memory.snapshots import pool_snapshot, restore_pool, restore_request, validate_snapshot
from kvlab.memory.transaction import PUBLISH, RELEASE, AllocatorTxn

RowMover = Callable[[int, int, int, int], int]
"""`mover(group, src, dst, rows) -> rows moved`: copies the first rows of one block into another."""


class Allocator:
    """Block allocation over one or more cache groups, all groups or none.

    `audit="state"`: digests cover the whole committed state (lessons, tests). `audit="chain"`: each digest
    chains the one before with the transition's packed bytes, one hash a transaction (replay, benchmarks).
    Operations (plain dicts, see `kvlab.memory.plan`): allocate, append, fork, truncate, release, cancel,
    cache_full, touch, evict. Each costs O(blocks it names), whatever the pools hold.
    `queue_seed` shuffles the free queues, so that no code can live by the identity map. `mover` copies rows.
    """

    def __init__(
        self, layout: CacheLayoutManifest, *, audit: str = "state", mover: RowMover | None = None,
        queue_seed: int | None = None,
    ) -> None:
        if audit not in ("state", "chain"):
            raise ValueError(f"audit is 'state' or 'chain', not {audit!r}")
        self.layout, self.groups, self.audit, self.mover = layout, layout.groups, audit, mover
        self.observers: list[Callable[[Event], None]] = []
        self._serial = 0
        self._reset()
        if queue_seed is not None:
            order = random.Random(queue_seed)
            for pool in self.pools:
                pool.queue_up(order.sample(range(pool.num_blocks), pool.num_blocks))
            self._seal()

    def _reset(self) -> None:
        self.epoch = 0
        self.requests: dict[str, Request] = {}
        self.facts = FactSum(self._read) if self.audit == "state" else None
        self.pools = tuple(BlockPool(g.group_id, g.num_blocks, g.first_block_id, self.facts) for g in self.groups)
        self._seal()

    def _seal(self) -> None:
        """Take the digest of the state as it stands, from nothing. O(pool)."""
        if self.facts is not None:
            self.facts.total = self.total_from_nothing()
        else:
            self._chain = digest_of(self.snapshot())

    # ------------------------------------------------------------------ operations
    def stage(self, op: Operation) -> AllocatorTxn:
        """Validate an operation and reserve what it needs; nothing is visible yet.

        Raises `Rejected` with the state and digest unchanged. `expected_epoch`, `expected_table_version`,
        `expected_request_generation` and `expected_tail` in `op` are compared where they are given.
        """
        self._serial += 1
        txn = AllocatorTxn(self, op, f"t{self._serial}")
        try:
            expected = op.get("expected_epoch")
            if expected is not None and expected != self.epoch:
                raise Rejected("stale_allocator_epoch", f"expected {expected}, live is {self.epoch}")
            planner = PLANNERS.get(str(op.get("op")))
            if planner is None:
                raise Rejected("unknown_operation", f"{op.get('op')!r}")
            plan = planner(self, op)
        except Rejected as no:
            self.emit(Event("refused", op, reason=no.reason, detail=no.detail))
            raise
        txn.open(plan)
        return txn

    def apply(self, op: Operation) -> AllocationReceipt:
        """Stage, copy and publish in one call: for operations between which nothing else has to happen."""
        txn = self.stage(op)
        try:
            txn.finish_writes()
            return txn.publish()
        except BaseException:
            if txn.phase != "PUBLISHED":
                txn.rollback()
            raise

    def allocate(self, request: str, tokens: int) -> AllocationReceipt:
        return self.apply({"op": "allocate", "request": request, "tokens": tokens})

    def append(self, request: str, tokens: int = 1) -> AllocationReceipt:
        return self.apply({"op": "append", "request": request, "tokens": tokens})

    def fork(self, request: str, child: str) -> AllocationReceipt:
        return self.apply({"op": "fork", "request": request, "child": child})

    def truncate(self, request: str, tokens: int) -> AllocationReceipt:
        return self.apply({"op": "truncate", "request": request, "tokens": tokens})

    def release(self, request: str) -> AllocationReceipt:
        return self.apply({"op": "release", "request": request})

    def cancel(self, request: str) -> AllocationReceipt:
        return self.apply({"op": "cancel", "request": request})

    def admit_writer(self, request: str, handles: dict[str, str]) -> None:
        """May whoever holds these handles still write into this request's tail? (article 0x05F)

        `stale_block_generation` if the block has another lifetime by now or is not the request's tail,
        `in_place_shared_tail_write` if somebody else owns it too. O(groups).
        """
        live = self.requests.get(request)
        if live is None:
            raise Rejected("unknown_request", f"request {request!r}")
        for group, pool, table in zip(self.groups, self.pools, live.tables, strict=True):
            word = pool.word(handles[group.group_id])
            if not pool.current(word) or table[-1] != word:
                raise Rejected("stale_block_generation", f"{handles[group.group_id]} is not the tail of {request}")
            if pool.ref_cnt[index_of(word)] != 1:
                raise Rejected("in_place_shared_tail_write", f"{pool.text(word)} has other owners")

    # ------------------------------------------------------------------ the one point of publication
    def commit(self, txn: AllocatorTxn) -> AllocationReceipt:
        """Apply a checked transaction to every group and request; called by `AllocatorTxn.publish` only."""
        before, plan, deltas = self.digest, txn.plan, {}
        self._touch(("epoch",))
        evicted, freed = [], []
        for change in plan.changes:
            for g, group in enumerate(change.groups):
                self._apply_group(g, group, deltas, evicted, freed)
            self._apply_request(change)
        for g, word, key in plan.identities:
            pool, index = self.pools[g], index_of(word)
            if key is None and (old := pool.keys.get(index)):
                evicted.append(old)
            pool.set_key(index, key)
        self.epoch += 1
        txn.phase = "PUBLISHED"
        txn.log.append(PUBLISH)
        txn.release_leases()
        if txn.copies:
            txn.log.append(RELEASE)
        self._settle(plan)
        return self._receipt(txn, before, deltas, evicted, freed)

    def _apply_group(self, g: int, group: GroupChange, deltas: dict, evicted: list, freed: list) -> None:
        pool = self.pools[g]
        for word, rows in zip(group.fresh, group.fresh_rows, strict=True):
            if key := pool.begin(index_of(word), rows):
                evicted.append(key)
            deltas[g, word] = 1
        for word in group.shared:
            pool.add_ref(index_of(word))
            deltas[g, word] = deltas.get((g, word), 0) + 1
        if group.in_place is not None:
            pool.set_rows(index_of(group.in_place), group.in_place_rows)
        for word in group.dropped:
            deltas[g, word] = deltas.get((g, word), 0) - 1
            if pool.drop_ref(index_of(word)):
                freed.append(pool.text(word))

    def _apply_request(self, change: RequestChange) -> None:
        request_id, request = change.request_id, change.before
        self._touch(("request", request_id))
        if request is None:
            tables = [array("q") for _ in self.groups]
            request = self.requests[request_id] = Request(request_id, self.epoch + 1, 0, 0, tables)
        for g, (group, table) in enumerate(zip(change.groups, request.tables, strict=True)):
            added = (*group.shared, *group.fresh)
            for j in range(group.keep, max(len(table), group.keep + len(added))):
                self._touch(("entry", request_id, g, j))
            table[group.keep :] = array("q", added)
        request.version, request.context = change.version, change.context
        if change.ends:
            del self.requests[request_id]

    def _receipt(self, txn: AllocatorTxn, before: str, deltas: dict, evicted: list, freed: list) -> AllocationReceipt:
        plan, groups = txn.plan, self.groups
        fresh = [sum(len(c.groups[g].fresh) for c in plan.changes) for g in range(len(groups))]
        rows = sum(c.new_rows for c in plan.changes)
        return AllocationReceipt(
            transaction_id=txn.transaction_id, predecessor_digest=before, successor_digest=self.digest,
            useful_new_rows=rows, new_physical_blocks=sum(fresh),
            copied_rows=max((sum(c.rows for c in txn.copies if c.group == g) for g in range(len(groups))), default=0),
            copy_payload_bytes=sum(c.rows * groups[c.group].row_bytes for c in txn.copies),
            refcount_deltas=tuple((self.pools[g].text(word), n) for (g, word), n in deltas.items()),
            allocator_epoch_after=self.epoch, outcome="committed", operation=plan.operation, reason=plan.reason,
            requests=tuple(c.request_id for c in plan.changes),
            paths=tuple((c.request_id, c.path) for c in plan.changes if c.path), new_bundles=max(fresh, default=0),
            new_capacity_bytes=sum(n * g.page_size_bytes for n, g in zip(fresh, groups, strict=True)),
            write_bytes=rows * self.layout.row_bytes, freed=tuple(freed), evicted_identities=tuple(evicted),
        )

    # ------------------------------------------------------------------ digests
    @property
    def digest(self) -> str:
        return self.facts.hex() if self.facts is not None else self._chain

    def _touch(self, cell: tuple) -> None:
        if self.facts is not None:
            self.facts.touch(cell)

    def _settle(self, plan: Plan) -> None:
        if self.facts is not None:
            self.facts.settle()
        else:
            self._chain = hashlib.sha256(self._chain.encode() + transition_bytes(self.epoch, plan)).hexdigest()

    def _read(self, cell: tuple) -> int:
        match cell:
            case ("block" | "link" as kind, pool, index):
                return pool.fact(kind, index)
            case ("epoch",):
                return fact_hash("epoch", self.epoch)
            case ("request", request_id):
                r = self.requests.get(request_id)
                return fact_hash("request", request_id, r.generation, r.version, r.context) if r else 0
            case ("entry", request_id, g, j):
                r = self.requests.get(request_id)
                return fact_hash("entry", request_id, g, j, r.tables[g][j]) if r and j < len(r.tables[g]) else 0
        raise AssertionError(cell)

    def total_from_nothing(self) -> int:
        """The state digest's number recomputed from every fact. O(pool + tables)."""
        total = self._read(("epoch",)) + sum(pool.facts_total() for pool in self.pools)
        for request_id, request in self.requests.items():
            total += self._read(("request", request_id))
            total += sum(self._read(("entry", request_id, g, j))
                         for g, table in enumerate(request.tables) for j in range(len(table)))
        return total % (1 << 256)

    # ------------------------------------------------------------------ state as plain data
    def snapshot(self) -> Json:
        """The committed state: groups, blocks, free queues in order, requests with their tables. O(pool)."""
        tables = {
            r.request_id: {"generation": r.generation, "version": r.version, "context": r.context,
                           "tables": {g.group_id: [p.text(w) for w in t]
                                      for g, p, t in zip(self.groups, self.pools, r.tables, strict=True)}}
            for r in sorted(self.requests.values(), key=lambda r: r.request_id)
        }
        return {
            "kind": "allocator", "epoch": self.epoch, "groups": self.layout.to_dict()["groups"],
            "blocks": {p.group: pool_snapshot(p) for p in self.pools},
            "free": {p.group: [p.first_block_id + i for i in p.queue()] for p in self.pools},
            "requests": tables,
        }

    def load(self, snapshot: Json) -> None:
        """Start from a snapshot; a malformed one is refused and the present state stays."""
        validate_snapshot(snapshot)
        self.layout = CacheLayoutManifest.from_dict(snapshot)
        self.groups = self.layout.groups
        self._reset()
        self.epoch = snapshot["epoch"]
        for pool in self.pools:
            restore_pool(pool, snapshot["blocks"][pool.group], snapshot["free"][pool.group])
        for request_id, row in snapshot["requests"].items():
            self.requests[request_id] = restore_request(request_id, row, self.pools)
        self._seal()

    def check(self) -> None:
        """Recompute every invariant from first principles; `Rejected` names the first one that drifted.

        AssertionError if the digest that was kept along the way differs from the one computed afresh.
        """
        validate_snapshot(self.snapshot())
        assert self.facts is None or self.facts.total == self.total_from_nothing(), "the state digest drifted"

    def emit(self, event: Event) -> None:
        for observer in tuple(self.observers):
            observer(event)


def transition_bytes(epoch: int, plan: Plan) -> bytes:
    """One committed transition as packed bytes, for the chained digest: who, what, and every handle moved."""
    parts = [f"{epoch} {plan.operation}".encode()]
    for change in plan.changes:
        parts.append(f"\0{change.request_id}\0{change.version} {change.context} {change.ends}".encode())
        for group in change.groups:
            parts.append(f"\0{group.keep} {group.in_place} {group.in_place_rows} {len(group.shared)}".encode())
            parts += [array("q", words).tobytes() for words in (group.dropped, group.shared, group.fresh)]
    parts += [f"\0{g} {word} {key}".encode() for g, word, key in plan.identities]
    return b"".join(parts)
