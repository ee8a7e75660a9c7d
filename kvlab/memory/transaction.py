"""One open allocator transaction: reserve, copy, write, publish, or roll back to the predecessor.

It owns the steps and their order. It refuses to decide what an operation changes (a plan does) and to apply
the change (the allocator does, at one point, for all cache groups at once).

    stage            copied(g)...     wrote(g)...          publish
    RESERVED ------> COPYING -------> READY_TO_PUBLISH --> PUBLISHED
       \\________________\\__________________\\____________> ROLLED_BACK
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from kvlab.contract import Event, Json, Operation, Rejected
from kvlab.memory.block_pool import index_of
from kvlab.memory.plan import GroupChange, Plan, RequestChange, identity
from kvlab.memory.records import PUBLICATION_ORDER, AllocationReceipt, AllocationTxn
from kvlab.memory.requests import Request

if TYPE_CHECKING:
    from kvlab.memory.allocator import Allocator

VALIDATE, LOAD, RESERVE, RETAIN, COPY, WRITE, FRONTIERS, PUBLISH, RELEASE = PUBLICATION_ORDER


@dataclass(frozen=True, slots=True)
class CopyIntent:
    """Copy the first `rows` rows of block `src` into block `dst`, both indices of cache group `group`."""

    group: int
    src: int
    dst: int
    rows: int


@dataclass(frozen=True, slots=True)
class StagedRequest:
    """What the owner of an open transaction sees of one request: block indices per group, rows to write."""

    request_id: str
    start: int
    context: int
    tables: tuple[list[int], ...]


class AllocatorTxn:
    """An open transaction of an `Allocator`. Its handles give the right to write only while it is open."""

    def __init__(self, allocator: Allocator, op: Operation, serial: int) -> None:
        self.allocator, self.op, self.serial, self.lock = allocator, op, serial, allocator.lock
        self.pools, self.groups = allocator.pools, allocator.groups
        self.phase, self.log = "RESERVED", []
        self.epoch = allocator.epoch
        self.plan = Plan(str(op.get("op")))
        self.copies: list[CopyIntent] = []
        self._seen: list[tuple[Request, int]] = []
        self._leased: list[tuple[int, int]] = []
        self._copied: set[int] = set()
        self._wrote: set[int] = set()
        self._handed_out = False

    @property
    def transaction_id(self) -> str:
        return f"t{self.serial}"

    # ------------------------------------------------------------------ steps 1 to 4
    def open(self, plan: Plan) -> None:
        """Validate, load, reserve every group, lease the sources; on any failure nothing is left behind."""
        self.plan = plan
        self._seen = [(r, r.version) for r in (*plan.reads, *(c.before for c in plan.changes if c.before))]
        try:
            self._step(VALIDATE)
            self._step(LOAD)
            for g, word, _ in plan.found if plan.changes else ():
                self.pools[g].lease(word)
                self._leased.append((g, word))
            for g, group in enumerate(self.groups):
                self._reserve(g)
                self._step(RESERVE, group.group_id)
            self._retain()
        except BaseException as failure:
            self._abort(failure)
            raise
        self._handed_out = True
        if not plan.writes:
            self.phase = "READY_TO_PUBLISH"

    def _reserve(self, g: int) -> None:
        pool, changes = self.pools[g], [c.groups[g] for c in self.plan.changes]
        wanted = sum(len(c.fresh_rows) for c in changes)
        if not wanted:
            return
        words = pool.reserve(wanted)
        if not words:
            raise Rejected("out_of_memory", f"group {pool.group} needs {wanted} blocks, {pool.spare} are free")
        at = 0
        for change in changes:
            change.fresh = words[at : at + len(change.fresh_rows)]
            at += len(change.fresh_rows)

    def _retain(self) -> None:
        """Lease every source of a copy and every tail to be written in place, until this transaction ends."""
        for change in self.plan.changes:
            for g, group in enumerate(change.groups):
                tail = group.copy_from if group.in_place is None else group.in_place
                if tail is None:
                    continue
                self.pools[g].lease(tail)
                self._leased.append((g, tail))
                if group.copy_from is not None:
                    self.copies.append(CopyIntent(g, index_of(tail), index_of(group.fresh[0]), group.copy_rows))
        if self.copies:
            self.phase = "COPYING"
            self._step(RETAIN)

    # ------------------------------------------------------------------ steps 5 and 6
    def copy(self) -> None:
        """Move the valid rows of every shared tail, through the allocator's row mover where one is attached."""
        mover = self.allocator.mover
        for g, group in enumerate(self.groups):
            intents = [c for c in self.copies if c.group == g]
            if not intents or g in self._copied:
                continue
            try:
                moved = sum(mover(c.group, c.src, c.dst, c.rows) if mover else c.rows for c in intents)
            except BaseException as failure:
                self._abort(failure)
                raise
            self.copied(group.group_id, moved)

    def copied(self, group_id: str, rows: int) -> None:
        """Report the rows that were copied in one group: exactly those planned, or `copied_row_count_drift`."""
        with self.lock:
            g = self._writable(group_id)
            planned = sum(c.rows for c in self.copies if c.group == g)
            if rows != planned:
                self._refuse("copied_row_count_drift", f"{rows} rows copied in {group_id}, {planned} are valid")
            self._copied.add(g)
            self._guarded(COPY, group_id)

    def wrote(self, group_id: str) -> None:
        """Report that every new row of one group is written."""
        with self.lock:
            g = self._writable(group_id)
            self._wrote.add(g)
            if len(self._wrote) == len(self.groups):
                self.phase = "READY_TO_PUBLISH"
            self._guarded(WRITE, group_id)

    def finish_writes(self) -> None:
        """Copy, and report every group as written: for callers that keep no rows, or have written them all."""
        self.copy()
        if self.plan.writes:
            for group in self.groups:
                self.wrote(group.group_id)

    def _writable(self, group_id: str) -> int:
        self._require_open()
        for g, group in enumerate(self.groups):
            if group.group_id == group_id:
                return g
        self._refuse("unknown_operation", f"no cache group {group_id!r}")

    # ------------------------------------------------------------------ steps 7 to 9
    def publish(self) -> AllocationReceipt:
        """Make it visible, for every group and request at once; the receipt is the proof.

        Refused with the state unchanged where rows are missing (the transaction stays open) or where what it
        touched has moved on (it is rolled back). O(blocks it names).
        """
        with self.lock:
            return self._publish()

    def _publish(self) -> AllocationReceipt:
        self._require_open()
        needed = {c.group for c in self.copies}
        if needed - self._copied:
            self._refuse("publish_before_copy_complete", f"{len(self._copied)} of {len(needed)} groups copied")
        if self.plan.writes and not self._wrote:
            self._refuse("publish_before_append_write", "no group has reported its new rows")
        if self.plan.writes and len(self._wrote) < len(self.groups):
            self._refuse("half_bundle_publication", f"{len(self._wrote)} of {len(self.groups)} groups")
        try:
            self._recheck()
            self._step(FRONTIERS)
        except BaseException as failure:
            self._abort(failure)
            raise
        receipt = self.allocator.commit(self)
        self.allocator.emit(Event("committed", self.op, PUBLISH, txn=self, receipt=receipt))
        return receipt

    def _recheck(self) -> None:
        """What this transaction read must still be true: versions, generations, one owner of a tail."""
        for change in self.plan.changes:
            if change.before is None and change.request_id in self.allocator.requests:
                raise Rejected("request_exists", change.request_id)
        for request, version in self._seen:
            self._recheck_request(request, version)
        for g, word, key in self.plan.found:
            if identity(self.pools[g], word) != key:
                raise Rejected("touch_without_identity", f"{self.pools[g].text(word)} has another identity by now")
        drops = Counter((g, index_of(w)) for c in self.plan.changes for g, x in enumerate(c.groups) for w in x.dropped)
        for change in self.plan.changes:
            for g, group in enumerate(change.groups):
                if group.in_place is not None:
                    self._recheck_tail(g, group.in_place, drops)

    def _recheck_request(self, request: Request, version: int) -> None:
        live = self.allocator.requests.get(request.request_id)
        if live is None:
            raise Rejected("unknown_request", request.request_id)
        if live is not request:
            raise Rejected("stale_request_generation", request.request_id)
        if live.version != version:
            raise Rejected("stale_table_version", f"{request.request_id} is at version {live.version}")

    def _recheck_tail(self, g: int, word: int, drops: Counter) -> None:
        pool, i = self.pools[g], index_of(word)
        if pool.refs(i) - drops[g, i] + pool.leases.get(i, 0) - self._leased.count((g, word)) != 1:
            raise Rejected("in_place_shared_tail_write", pool.text(word))

    def release_leases(self) -> None:
        for g, word in self._leased:
            self.pools[g].unlease(word)
        self._leased.clear()

    # ------------------------------------------------------------------ the other end
    def rollback(self) -> None:
        """Give everything back: the committed state is the predecessor's, to the bit, queue order included."""
        with self.lock:
            if self.phase == "PUBLISHED":
                self._refuse("rollback_after_publication", self.transaction_id)
            if self.phase != "ROLLED_BACK":
                self._abort(None)

    def _abort(self, failure: BaseException | None) -> None:
        with self.lock:
            self._give_back(failure)

    def _give_back(self, failure: BaseException | None) -> None:
        self.phase = "ROLLED_BACK"
        for g, pool in enumerate(self.pools):
            fresh = [w for c in self.plan.changes for w in c.groups[g].fresh]
            pool.unreserve(fresh)
            if self._handed_out:
                pool.spoil(fresh)
        self.release_leases()
        reason = failure.reason if isinstance(failure, Rejected) else "" if failure is None else type(failure).__name__
        detail = failure.detail if isinstance(failure, Rejected) else str(failure or "")
        self.allocator.emit(Event("rolled_back", self.op, self.log[-1] if self.log else VALIDATE, txn=self,
                                  reason=reason or "rolled_back", detail=detail))

    def _require_open(self) -> None:
        if self.pools is not self.allocator.pools:
            self.phase = "ROLLED_BACK"  # a snapshot has been loaded since: the blocks it held are gone
        if self.phase in ("PUBLISHED", "ROLLED_BACK"):
            self._refuse("transaction_closed", f"{self.transaction_id} is {self.phase.lower()}")

    def _refuse(self, reason: str, detail: str) -> NoReturn:
        """Refuse a call on this transaction, and let whoever watches see it."""
        self.allocator.emit(Event("refused", self.op, txn=self, reason=reason, detail=detail))
        raise Rejected(reason, detail)

    def _step(self, name: str, group_id: str = "") -> None:
        self.log.append(name if not group_id else f"{name}:{group_id}")
        self.allocator.emit(Event("staged", self.op, name, group_id, txn=self))

    def _guarded(self, name: str, group_id: str) -> None:
        try:
            self._step(name, group_id)
        except BaseException as failure:
            self._abort(failure)
            raise

    # ------------------------------------------------------------------ what can be seen of it
    def view(self) -> list[StagedRequest]:
        """The staged tables, for the owner's own reads and writes: block indices, old and new together.

        `Rejected` where a request has moved on since: its table now names blocks that this transaction may not write.
        """
        with self.lock:
            for request, version in self._seen:
                self._recheck_request(request, version)
            return [self._view(change) for change in self.plan.changes]

    def _view(self, change: RequestChange) -> StagedRequest:
        tables = []
        for g, group in enumerate(change.groups):
            old = change.before.tables[g][: group.keep] if change.before else ()
            tables.append([index_of(w) for part in (old, group.shared, group.fresh) for w in part])
        return StagedRequest(change.request_id, change.context - change.new_rows, change.context, tuple(tables))

    def record(self) -> AllocationTxn:
        """The intent as the article's frozen record (0x04D)."""
        pools, changes = self.pools, self.plan.changes
        touched = [pools[g].handle(w) for c in changes for g, x in enumerate(c.groups)
                   for w in (*x.dropped, *x.shared, *([x.in_place] if x.in_place is not None else []))]
        reserved = [pools[g].handle(w) for c in changes for g, x in enumerate(c.groups) for w in x.fresh]
        return AllocationTxn(self.transaction_id, self.epoch, tuple(c.request_id for c in changes),
                             tuple(r.generation for r, _ in self._seen), tuple(v for _, v in self._seen),
                             self.plan.operation, tuple(touched), tuple(reserved), self.phase)

    def staged(self) -> Json:
        """The overlay as plain data: reserved blocks, running copies, leases, successor lengths."""
        pools, ids = self.pools, [g.group_id for g in self.groups]
        row_bytes = [g.row_bytes for g in self.groups]
        out: Json = {"transaction": self.transaction_id, "phase": self.phase, "log": list(self.log),
                     "reserved": {i: [] for i in ids}, "copies": [], "leases": {i: [] for i in ids}, "requests": {}}
        for change in self.plan.changes:
            out["requests"][change.request_id] = {"context": change.context, "version": change.version,
                                                  "path": change.path, "ends": change.ends}
            for g, group in enumerate(change.groups):
                for n, word in enumerate(group.fresh):
                    rows = self._rows_now(g, group, n)
                    out["reserved"][ids[g]].append({"handle": pools[g].text(word), "request": change.request_id,
                                                    "logical": group.keep + n, "rows": rows})
                if group.copy_from is not None and group.fresh:
                    out["copies"].append({"group": ids[g], "src": pools[g].text(group.copy_from),
                                          "dst": pools[g].text(group.fresh[0]), "rows": group.copy_rows,
                                          "bytes": group.copy_rows * row_bytes[g], "done": g in self._copied})
        for g, word in self._leased:
            out["leases"][ids[g]].append(pools[g].text(word))
        return out

    def _rows_now(self, g: int, group: GroupChange, n: int) -> int:
        if g in self._wrote:
            return group.fresh_rows[n]
        return group.copy_rows if n == 0 and group.copy_from is not None and g in self._copied else 0
