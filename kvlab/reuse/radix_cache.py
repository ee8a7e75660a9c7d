"""The radix index as a machine: which token prefixes are cached, in which slots, and who keeps them from eviction.

It owns tree, slot pool, leases and the tree version. It refuses to know what the rows mean (identity), where a byte
lies (address), how rows are computed, and who runs next: a handoff carries evidence and no decision (article 0x08).
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from struct import Struct
from types import MappingProxyType
from typing import Any

import numpy as np

from kvlab.contract import SHA256, Event, FactSum, Json, Operation, Rejected, canonical, fact_hash
from kvlab.reuse import radix_operations, radix_questions, radix_snapshot
from kvlab.reuse.eviction import ORDERS, LeafHeap
from kvlab.reuse.radix_records import RadixMutationReceipt, RadixSchedulerHandoffReceipt
from kvlab.reuse.radix_requests import LiveRequest, well_formed
from kvlab.reuse.radix_tree import RadixTree
from kvlab.reuse.slot_pool import TREE, SlotPool
from kvlab.reuse.token_keys import Tokens

OPERATIONS: dict[str, Callable[..., Json]] = {f.__name__: f for f in (
    radix_operations.match, radix_operations.insert, radix_operations.split, radix_operations.evict,
    radix_operations.lock, radix_operations.unlock, radix_operations.handoff, radix_operations.settle,
    radix_operations.reserve, radix_operations.give_back, radix_operations.extend, radix_operations.publish,
    radix_operations.finish, radix_operations.cancel)}
ARGUMENTS = {name: (frozenset(p.name for p in list(inspect.signature(f).parameters.values())[1:]
                              if p.default is inspect.Parameter.empty),
                    frozenset(list(inspect.signature(f).parameters)[1:])) for name, f in OPERATIONS.items()}
NOTHING = (frozenset("*"), frozenset())
READS = frozenset({"match", "handoff", "lock", "split"})
TRANSITION = Struct("5q")


class RadixCache:
    """A compressed radix tree over `num_slots` slots of `block_size` tokens each (a token slot at block size 1).

    `eviction`: one of `kvlab.reuse.eviction.ORDERS`. `policy="normative"`: the article's contract.
    `policy="sglang-0.5.11"`: uses are counted and dated as the pinned source does (its unmatched suffix looks used,
    its split node is new, only insertions count as hits), so that it evicts what SGLang would.
    `audit="state"`: digests cover the whole state. `audit="chain"`: each chains the one before (replay, benchmarks).
    Every operation raises the version by one or is refused and changes nothing.
    """

    def __init__(self, num_slots: int, *, block_size: int = 1, first_slot: int = 0, eviction: str = "lru",
                 policy: str = "normative", audit: str = "state") -> None:
        if eviction not in ORDERS:
            raise ValueError(f"eviction is one of {', '.join(ORDERS)}, not {eviction!r}")
        if policy not in radix_snapshot.POLICIES or audit not in ("state", "chain"):
            raise ValueError(f"policy is one of {radix_snapshot.POLICIES}, audit 'state' or 'chain'")
        if block_size < 1 or num_slots < 0:
            raise ValueError("block_size counts tokens, at least one; num_slots is not negative")
        self.observers: list[Callable[[Event], None]] = []
        self.audit = audit
        self._reset(num_slots, block_size, first_slot, eviction, policy)
        self._seal()

    def _reset(self, num_slots: int, block_size: int, first_slot: int, eviction: str, policy: str) -> None:
        self.eviction, self.policy = eviction, policy
        self.version = self.clock = 0
        self.facts = FactSum(self._read) if self.audit == "state" else None
        self.tree = RadixTree(block_size, self.facts, lambda node: self.heap.offer(node))
        self.heap = LeafHeap(eviction, self.tree.ready)
        self.pool = SlotPool(num_slots, first_slot, self.facts)
        self.requests: dict[str, LiveRequest] = {}
        self.loose: set[int] = set()

    def _seal(self) -> None:
        if self.facts is not None:
            self.facts.total = self.total_from_nothing()
        else:
            self._chain = SHA256(canonical(self.snapshot())).digest()
        self._digest = self.facts.hex() if self.facts is not None else self._chain.hex()

    @classmethod
    def of(cls, snapshot: Json) -> RadixCache:
        """A cache that begins with a committed state; `Rejected` if it is none."""
        cache = cls(0)
        cache.load(snapshot)
        return cache

    # ------------------------------------------------------------------ the face of a machine
    def apply(self, op: Operation) -> RadixMutationReceipt:
        """Check an operation, do it, publish it at once. `Rejected` leaves the digest as it was.

        `tree_version` in `op` is compared first, where it is given.
        """
        arguments = dict(op)
        name, expected = arguments.pop("op", None), arguments.pop("tree_version", None)
        try:
            needs, knows = ARGUMENTS.get(name, NOTHING) if isinstance(name, str) else NOTHING
            if not needs <= arguments.keys() <= knows:
                raise Rejected("unknown_operation", f"{name!r} with {', '.join(map(str, arguments)) or 'nothing'}")
            well_formed(arguments)
            if expected is not None and expected != self.version:
                raise Rejected("stale_tree_version", f"expected {expected}, the tree is at {self.version}")
        except Rejected as no:
            self._emit("refused", op, reason=no.reason, detail=no.detail)
            raise
        return self._perform(name, arguments)

    def _perform(self, name: str, arguments: Json) -> RadixMutationReceipt:
        try:
            done = OPERATIONS[name](self, **arguments)
        except Rejected as no:
            if self.facts is not None:
                self.facts.settle()
            self._emit("refused", {"op": name, **arguments}, reason=no.reason, detail=no.detail)
            raise
        return self._publish(name, arguments, done)

    def _publish(self, name: str, arguments: Json, done: Json) -> RadixMutationReceipt:
        """The one point where an operation becomes history: version, digest, partition, receipt."""
        tree, counts, before = self.tree, self.pool.counts, self._digest
        if self.facts is not None:
            self.facts.touch(("version",))
        self.version += 1
        assert counts[TREE] == tree.protected + tree.evictable, "edges and tree-owned slots disagree"
        assert sum(counts) == self.pool.num_slots and 0 <= tree.leaf_ready <= tree.evictable, "the partition broke"
        if self.facts is not None:
            self.facts.settle()
            self._digest = after = self.facts.hex()
        else:
            self._chain = self._transition(name, done)
            self._digest = after = self._chain.hex()
        if (handoff := done.get("handoff")) is not None:
            done["handoff"] = replace(handoff, tree_state_sha256=after).sealed()
        self.heap.shrink(tree, len(tree.nodes))
        receipt = RadixMutationReceipt(name, before, after, self.version, MappingProxyType(done))
        if self.observers:
            self._emit("committed", {"op": name, **arguments}, receipt=receipt)
        return receipt

    def _transition(self, name: str, done: Json) -> bytes:
        """The chained digest: what was done, as packed bytes, after what was before. One hash an operation."""
        get = done.get
        new, splits = get("new_node"), get("splits")
        rows = [self._chain, name.encode(), (get("request") or "").encode(), TRANSITION.pack(
            self.version, get("terminal", 0), get("matched", 0), new or 0, splits[0][2] if splits else 0)]
        if name not in READS:
            for slots in (get("allocated"), get("released")):
                if slots:
                    rows.append(slots.tobytes())
            if new is not None:
                leaf = self.tree.nodes[new]
                rows += (leaf.key, leaf.value.tobytes())
        return SHA256(b"".join(rows)).digest()

    @property
    def digest(self) -> str:
        """Of the committed state (audit "state"), or of everything that was done (audit "chain")."""
        return self._digest

    def _read(self, cell: tuple) -> int:
        match cell:
            case ("edge" | "use" as kind, node_id):
                return self.tree.fact(kind, node_id)
            case ("version",):
                return fact_hash("version", self.version)
            case ("clock",):
                return fact_hash("clock", self.clock)
            case ("ids",):
                return fact_hash("ids", self.tree.next_id)
            case ("head",):
                return self.pool.head_fact()
            case ("request", request):
                found = self.requests.get(request)
                return found.fact() if found else 0
        raise AssertionError(cell)

    def total_from_nothing(self) -> int:
        """The state digest's number recomputed from every fact. O(state)."""
        total = self.tree.total_from_nothing() + self.pool.total_from_nothing()
        total += sum(self._read((one,)) for one in ("version", "clock", "ids"))
        return (total + sum(r.fact() for r in self.requests.values())) % (1 << 256)

    def snapshot(self) -> Json:
        return radix_snapshot.write(self)

    def load(self, snapshot: Json) -> None:
        """Start from a snapshot; a malformed one is refused and the present state stays. O(state)."""
        radix_snapshot.validate(snapshot)
        self._reset(snapshot["num_slots"], snapshot["block_size"], snapshot["first_slot"], snapshot["eviction"],
                    snapshot["policy"])
        radix_snapshot.restore(self, snapshot)
        self._seal()

    def check(self) -> None:
        """Recompute every invariant from first principles; `Rejected` names the first that drifted.

        AssertionError if a ledger or the digest that was kept along the way differs from the one computed afresh.
        """
        radix_snapshot.validate(self.snapshot())
        tree = self.tree
        assert (tree.protected, tree.evictable, tree.leaf_ready) == tree.derived_ledgers(), "a ledger drifted"
        assert self.facts is None or self.facts.total == self.total_from_nothing(), "the state digest drifted"

    def ask(self, question: Json) -> Any:
        """Answer a question without changing anything: one of `kvlab.reuse.radix_questions.QUESTIONS`."""
        return radix_questions.answer(self, question)

    def _emit(self, kind: str, op: Operation, **more: Any) -> None:
        if self.observers:
            plain = {k: _plain(v) for k, v in op.items()}
            for observer in tuple(self.observers):
                observer(Event(kind, plain, **more))

    # ------------------------------------------------------------------ for the operations
    def now(self) -> int:
        """The time of a use: the version being made, or (source-observed) a clock that each reading moves."""
        if self.policy == "normative":
            return self.version + 1
        if self.facts is not None:
            self.facts.touch(("clock",))
        self.clock += 1
        return self.clock

    def note(self, request: str) -> None:
        """This request is about to change."""
        if self.facts is not None:
            self.facts.touch(("request", request))

    def disown(self, slots: Iterable[int]) -> None:
        """Private slots that belong to no request."""
        self.loose.update(slots)

    def own(self, slots: Iterable[int]) -> None:
        """Private slots found their place."""
        self.loose.difference_update(slots)

    # ------------------------------------------------------------------ the common ones, as calls
    def match(self, tokens: Tokens, extra_key: Any = None) -> RadixMutationReceipt:
        """The longest cached prefix in whole blocks; `matched` tokens, `slots` one a block. May split one edge."""
        return self._perform("match", {"tokens": tokens, "extra_key": extra_key})

    def insert(self, tokens: Tokens, slots: Sequence[int] | None = None, protected_len: int = 0,
               extra_key: Any = None, priority: int = 0) -> RadixMutationReceipt:
        return self._perform("insert", {"tokens": tokens, "slots": slots, "protected_len": protected_len,
                                        "extra_key": extra_key, "priority": priority})

    def evict(self, tokens: int) -> RadixMutationReceipt:
        return self._perform("evict", {"tokens": tokens})

    def handoff(self, request: str, tokens: Tokens, generation: int = 1, extra_key: Any = None,
                priority: int = 0) -> RadixSchedulerHandoffReceipt:
        """Match and lock for the scheduler; hand the receipt to `settle` with its disposition."""
        return self._perform("handoff", {"request": request, "tokens": tokens, "generation": generation,
                                         "extra_key": extra_key, "priority": priority}).handoff

    def settle(self, receipt: RadixSchedulerHandoffReceipt, disposition: str) -> RadixMutationReceipt:
        return self._perform("settle", {"receipt": receipt, "disposition": disposition})

    def extend(self, request: str, append: Tokens) -> RadixMutationReceipt:
        return self._perform("extend", {"request": request, "append": append})

    def publish(self, request: str, append: Tokens = (), chunked: bool = False) -> RadixMutationReceipt:
        return self._perform("publish", {"request": request, "append": append, "chunked": chunked})

    def finish(self, request: str, append: Tokens = ()) -> RadixMutationReceipt:
        return self._perform("finish", {"request": request, "append": append})

    def cancel(self, request: str) -> RadixMutationReceipt:
        return self._perform("cancel", {"request": request})

    def table(self, request: str) -> array:
        """A live request's slots, one a block: the tree's first, then its own. `unknown_request`."""
        found = self.requests.get(request)
        if found is None:
            raise Rejected("unknown_request", f"request {request!r}")
        return found.table[:]


def _plain(value: Any) -> Any:
    """An operation's argument as JSON data, for observers."""
    if isinstance(value, RadixSchedulerHandoffReceipt):
        return value.to_dict()
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint32).tolist()
    return value.tolist() if isinstance(value, array | np.ndarray) else value
