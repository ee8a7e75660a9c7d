"""The ownership contract as a machine: who holds which block, changed only by transactions that publish once.

It owns request maps, reference counts, the free queues and the epoch. It refuses to know what the rows mean
(identity), how they are found (index), where a byte lies (address) and who may run next (scheduling).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from hashlib import sha256
from threading import RLock

from kvlab.contract import Event, FactSum, Json, Operation, Rejected, canonical, fact_hash
from kvlab.memory import direct, direct_cached, leases
from kvlab.memory.block_pool import BlockPool, index_of
from kvlab.memory.chain import chained
from kvlab.memory.facts import PoolFacts
from kvlab.memory.layout import CacheLayoutManifest
from kvlab.memory.plan import PLANNERS, GroupChange, Plan, RequestChange, transition
from kvlab.memory.records import AllocationReceipt
from kvlab.memory.requests import Request
from kvlab.memory.snapshots import pool_columns, restore_pool, restore_tables, validate_snapshot
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
        self.lock = RLock()
        self.serial = 0
        self._reset()
        if queue_seed is not None:
            order = random.Random(queue_seed)
            for pool in self.pools:
                n = pool.num_blocks
                restore_pool(pool, {"generation": [0] * n, "ref_cnt": [0] * n, "valid_rows": [0] * n, "keys": {}},
                             [pool.first_block_id + i for i in order.sample(range(n), n)], {})
            self._seal()

    def _reset(self) -> None:
        self.epoch = 0
        self.held: dict[str, list[tuple[int, int]]] = {}
        self.requests: dict[str, Request] = {}
        self.facts = FactSum(self._read) if self.audit == "state" else None
        self.pools = tuple(
            BlockPool(g.group_id, g.num_blocks, g.first_block_id, g.block_size,
                      PoolFacts(g.group_id, g.num_blocks, self.facts) if self.facts is not None else None)
            for g in self.groups)
        self._seal()

    def _seal(self) -> None:
        """Take the digest of the state as it stands, from nothing. O(pool)."""
        if self.facts is not None:
            self.facts.total = self.total_from_nothing()
        else:
            self._chain = sha256(canonical(self.snapshot())).digest()

    # ------------------------------------------------------------------ operations
    def stage(self, op: Operation) -> AllocatorTxn:
        """Validate an operation and reserve what it needs; nothing is visible yet.

        Raises `Rejected` with the state and digest unchanged. `expected_epoch`, `expected_table_version`,
        `expected_request_generation` and `expected_tail` in `op` are compared where they are given.
        """
        with self.lock:
            self.serial += 1
            txn = AllocatorTxn(self, op, self.serial)
            txn.open(self._plan(op))
        return txn

    def _plan(self, op: Operation) -> Plan:
        try:
            expected = op.get("expected_epoch")
            if expected is not None and expected != self.epoch:
                raise Rejected("stale_allocator_epoch", f"expected {expected}, live is {self.epoch}")
            planner = PLANNERS.get(str(op.get("op")))
            if planner is None:
                raise Rejected("unknown_operation", f"{op.get('op')!r}")
            return planner(self, op)
        except Rejected as no:
            self.emit(Event("refused", op, reason=no.reason, detail=no.detail))
            raise

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

    allocate, release, cancel, append_batch = direct.allocate, direct.release, direct.cancel, direct.append_batch
    touch, cache_full = direct_cached.touch, direct_cached.cache_full
    lease, unlease, compensate = leases.lease, leases.unlease, leases.compensate

    def leased(self) -> bool:
        """Whether some open transaction holds a lease. O(groups)."""
        return any([pool.leases for pool in self.pools])  # noqa: C419 - a generator costs more

    def append(self, request: str, tokens: int = 1) -> AllocationReceipt:
        return self.apply({"op": "append", "request": request, "tokens": tokens})

    def fork(self, request: str, child: str) -> AllocationReceipt:
        return self.apply({"op": "fork", "request": request, "child": child})

    def truncate(self, request: str, tokens: int) -> AllocationReceipt:
        return self.apply({"op": "truncate", "request": request, "tokens": tokens})

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
            if pool.refs(index_of(word)) != 1:
                raise Rejected("in_place_shared_tail_write", f"{pool.text(word)} has other owners")

    # ------------------------------------------------------------------ the one point of publication
    def commit(self, txn: AllocatorTxn) -> AllocationReceipt:
        """Apply a checked transaction to every group and request; called by `AllocatorTxn.publish` only."""
        before, plan, runs, freed, evicted = self._digest, txn.plan, [], [], []
        self._touch(("epoch",))
        for change in plan.changes:
            self._note_rows(change)
            for g, group in enumerate(change.groups):
                self._apply_group(g, group, runs, freed, evicted)
            self._apply_request(change)
        for g, word, key in plan.identities:
            pool, index = self.pools[g], index_of(word)
            if key is None and (old := pool.keys.get(index)):
                evicted.append(old)
            pool.set_key(index, key)
        for request in plan.reads:
            request.share(tail=plan.operation == "fork")
        self.epoch += 1
        txn.phase = "PUBLISHED"
        txn.log.append(PUBLISH)
        txn.release_leases()
        if txn.copies:
            txn.log.append(RELEASE)
        self._settle(plan)
        return AllocationReceipt(
            txn.serial, before, self._digest, self.epoch, plan.operation, plan.reason, self.layout,
            tuple(c.request_id for c in plan.changes), sum(c.new_rows for c in plan.changes),
            tuple(c.path for c in plan.changes),
            tuple(sum(len(c.groups[g].fresh) for c in plan.changes) for g in range(len(self.groups))),
            tuple(runs), tuple(freed), tuple((c.group, c.rows) for c in txn.copies), tuple(evicted),
            tuple(c.version for c in plan.changes))

    def _note_rows(self, change: RequestChange) -> None:
        """Write down rows that tables alone will not tell: of a tail shared from now on, or seen less of than it is."""
        for g, (pool, group) in enumerate(zip(self.pools, change.groups, strict=True)):
            size, j = pool.block_size, group.keep + len(group.shared) - 1
            if group.shared:
                word, context = group.shared[-1], change.context
            elif change.before and change.context < change.before.context:
                word, context = change.before.tables[g][j], change.before.context
            else:
                continue
            rows = pool.valid_rows(index_of(word), min(size, context - j * size))
            if rows < size or change.context - j * size < rows:
                pool.rows[index_of(word)] = rows

    def _apply_group(self, g: int, group: GroupChange, runs: list, freed: list, evicted: list) -> None:
        pool = self.pools[g]
        for word, rows in zip(group.fresh, group.fresh_rows, strict=True):
            if key := pool.begin(word, rows):
                evicted.append(key)
        for word in group.shared:
            pool.add_ref(word)
        if group.in_place is not None:
            pool.set_rows(index_of(group.in_place), group.in_place_rows)
        gone = [word for word in group.dropped if pool.drop_ref(word)]
        runs += [(g, n, words) for n, words in ((1, group.fresh), (1, group.shared), (-1, group.dropped)) if words]
        if gone:
            freed.append((g, 0, gone))

    def _apply_request(self, change: RequestChange) -> None:
        request_id, request = change.request_id, change.before
        self._touch(("request", request_id))
        shared = any(group.shared for group in change.groups)
        if request is None:
            request = self.requests[request_id] = Request(
                request_id, [array("q") for _ in self.groups], self.epoch + 1, 0, 0, not shared)
        for g, (group, table) in enumerate(zip(change.groups, request.tables, strict=True)):
            added = (*group.shared, *group.fresh)
            for j in range(group.keep, max(len(table), group.keep + len(added))):
                self._touch(("entry", request_id, g, j))
            table[group.keep :] = array("q", added)
        request.move(change.version, change.context, change.new_rows > 0)
        if change.ends:
            del self.requests[request_id]

    # ------------------------------------------------------------------ digests
    @property
    def digest(self) -> str:
        return self._digest if self.facts is not None else self._chain.hex()

    @property
    def _digest(self) -> str | bytes:
        return self.facts.hex() if self.facts is not None else self._chain

    def _touch(self, cell: tuple) -> None:
        if self.facts is not None:
            self.facts.touch(cell)

    def _settle(self, plan: Plan) -> None:
        if self.facts is not None:
            self.facts.settle()
        else:
            self._chain = chained([self._chain, *transition(self.epoch, plan)])

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
        total = self._read(("epoch",)) + sum(pool.facts.total() for pool in self.pools)
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
            "blocks": {p.group: pool_columns(p, self._views(g)) for g, p in enumerate(self.pools)},
            "free": {p.group: [p.first_block_id + i for i in p.queue()] for p in self.pools},
            "requests": tables,
        }

    def _views(self, g: int) -> dict[int, int]:
        """The most rows that any table sees of each held block of a group, by index. O(tables)."""
        views: dict[int, int] = {}
        size = self.groups[g].block_size
        for request in self.requests.values():
            for j, word in enumerate(request.tables[g]):
                seen = min(size, request.context - j * size)
                views[index_of(word)] = max(seen, views.get(index_of(word), 0))
        return views

    def load(self, snapshot: Json) -> None:
        """Start from a snapshot; a malformed one is refused and the present state stays."""
        validate_snapshot(snapshot)
        self.layout = CacheLayoutManifest.from_dict(snapshot)
        self.groups = self.layout.groups
        self._reset()
        self.epoch = snapshot["epoch"]
        for request_id, row in snapshot["requests"].items():
            self.requests[request_id] = Request(
                request_id, restore_tables(row, self.pools), row["generation"], row["version"], row["context"], False)
        for g, pool in enumerate(self.pools):
            restore_pool(pool, snapshot["blocks"][pool.group], snapshot["free"][pool.group], self._views(g))
        self._seal()

    def check(self) -> None:
        """Recompute every invariant from first principles; `Rejected` names the first one that drifted.

        AssertionError if the digest that was kept along the way differs from the one computed afresh.
        """
        snapshot = self.snapshot()
        validate_snapshot(snapshot)
        if self.facts is None:
            return
        assert self.facts.total == self.total_from_nothing(), "the state digest drifted"
        for pool in self.pools:
            said = pool.facts.columns()
            kept = snapshot["blocks"][pool.group] | {"free": list(pool.queue()), "keys": pool.keys}
            assert said == kept, f"the audit of {pool.group} and its pool say different things"

    def emit(self, event: Event) -> None:
        for observer in tuple(self.observers):
            observer(event)
