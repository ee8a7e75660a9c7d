"""The one face that every contract machine shows: operations, transactions, receipts, digests and history.

It owns no state of any contract: it only says how a state is named, changed, refused and remembered.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvlab.reasons import REASONS

Json = dict[str, Any]
Operation = Mapping[str, Any]

FACT_MODULUS = 1 << 256


class Rejected(Exception):  # noqa: N818 - the article's word; a rejection is an outcome, not a defect
    """A contract refused an operation or a record; nothing changed.

    `reason` is one word of `kvlab.reasons.REASONS`; `detail` says which value was refused.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.meaning = REASONS[reason]
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


class Receipt(Protocol):
    """What a committed transaction leaves behind: frozen, with the digests before and after it."""

    predecessor_digest: str
    successor_digest: str
    outcome: str

    def to_dict(self) -> Json: ...


class Txn(Protocol):
    """An open transaction: reserved, perhaps writing, visible to nobody but its owner."""

    def staged(self) -> Json: ...

    def publish(self) -> Receipt: ...

    def rollback(self) -> None: ...


class Machine(Protocol):
    """A contract as a machine: committed state, named operations, one point of publication."""

    observers: list[Callable[[Event], None]]

    @property
    def digest(self) -> str: ...

    def snapshot(self) -> Json: ...

    def load(self, snapshot: Json) -> None: ...

    def check(self) -> None: ...

    def stage(self, op: Operation) -> Txn: ...

    def apply(self, op: Operation) -> Receipt: ...


@dataclass(frozen=True, slots=True)
class Event:
    """One thing a machine just did. `kind`: staged, committed, refused or rolled_back.

    `step` names the transaction step (for example `reserve`), `group` the cache group it concerned.
    An observer that raises before publication makes the transaction fail there: that is how faults
    are injected and how a reader pulls the plug, without any switch inside the machine.
    """

    kind: str
    op: Operation
    step: str = ""
    group: str = ""
    txn: Txn | None = None
    receipt: Receipt | None = None
    reason: str = ""
    detail: str = ""


def _plain_sha256() -> Callable[[bytes], Any]:
    """CPython's own SHA-256 where it is built in: the same digest, and for 100 bytes a quarter less than OpenSSL's,
    which spends most of such a call on its setting up."""
    for name in ("_sha2", "_sha256"):  # since Python 3.12, before
        try:
            return importlib.import_module(name).sha256
        except ImportError:
            continue
    return hashlib.sha256


SHA256 = _plain_sha256()
"""For digests of a few hundred bytes."""


_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


def canonical(value: Any) -> bytes:
    """Canonical JSON bytes of plain data: sorted keys, no spaces, UTF-8 (the form that digests hash)."""
    return _ENCODE(value).encode()


def digest_of(value: Any) -> str:
    """SHA-256 hex digest of the canonical JSON of plain data."""
    return hashlib.sha256(canonical(value)).hexdigest()


def fact_hash(*fact: str | int | None) -> int:
    """One committed fact as a number modulo 2**256, so that a state's digest is the sum of its facts.

    A commit then costs only the facts it touched. The sum detects drift; it is no defence against
    somebody who may choose the facts.
    """
    return int.from_bytes(hashlib.sha256(json.dumps(fact).encode()).digest(), "big")


class FactSum:
    """An incrementally kept digest: `touch` a cell before you change it, `settle` when you are done.

    `read(cell)` gives a cell's present fact hash, 0 where the cell does not exist. Cost: two hashes a
    touched cell.
    """

    __slots__ = ("_dirty", "_read", "total")

    def __init__(self, read: Callable[[tuple], int]) -> None:
        self._read = read
        self._dirty: set[tuple] = set()
        self.total = 0

    def touch(self, cell: tuple) -> None:
        if cell not in self._dirty:
            self._dirty.add(cell)
            self.total -= self._read(cell)

    def settle(self) -> None:
        for cell in self._dirty:
            self.total += self._read(cell)
        self._dirty.clear()
        self.total %= FACT_MODULUS

    def hex(self) -> str:
        return f"{self.total:064x}"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a history: what was asked, what came of it, and the two sides of the state.

    `kind` is start, staged, committed or refused. `committed` is the committed snapshot after the step,
    `staged` the open transaction's overlay (staged and refused steps only). A refused step that was
    reached inside a transaction names the step where it stopped.
    """

    kind: str
    op: Json
    committed: Json
    digest: str
    step: str = ""
    group: str = ""
    receipt: Json | None = None
    reason: str = ""
    detail: str = ""
    staged: Json | None = None


class History:
    """What a machine did, step by step: read it, go back in it, or fork it and do something else.

    It listens to a live machine; `detach` ends that. Snapshots are kept once per distinct digest.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine: Machine | None = machine
        self._last = machine.snapshot()
        self.steps: list[Step] = [Step("start", {}, self._last, machine.digest)]
        self.at = 0
        machine.observers.append(self._saw)

    def _saw(self, event: Event) -> None:
        machine = self.machine
        if machine is None:
            return
        if machine.digest != self.steps[-1].digest:
            self._last = machine.snapshot()
        staged = event.txn.staged() if event.txn is not None and event.kind != "committed" else None
        receipt = event.receipt.to_dict() if event.receipt is not None else None
        kind = "refused" if event.kind == "rolled_back" else event.kind
        self.steps.append(
            Step(kind, dict(event.op), self._last, machine.digest, event.step, event.group, receipt,
                 event.reason, event.detail, staged)
        )
        self.at = len(self.steps) - 1

    def detach(self) -> None:
        """Stop listening; the steps stay."""
        if self.machine is not None:
            self.machine.observers.remove(self._saw)
            self.machine = None

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @property
    def now(self) -> Step:
        return self.steps[self.at]

    def seek(self, at: int) -> Step:
        """Go to step `at`; IndexError outside the history. O(1): no operation runs again."""
        if not 0 <= at < len(self.steps):
            raise IndexError(f"step {at} of {len(self.steps)}")
        self.at = at
        return self.now

    def back(self) -> Step:
        """One step back; stays at the first."""
        return self.seek(max(0, self.at - 1))

    def forward(self) -> Step:
        """One step forward; stays at the last."""
        return self.seek(min(len(self.steps) - 1, self.at + 1))

    def fork(self, at: int, machine: Machine) -> History:
        """A new history that shares steps 0..at with this one and lets you do something else from there.

        `machine` is a fresh machine of the same kind: it is loaded with the first snapshot and replays
        the operations that were committed up to `at`; ValueError if it does not arrive at the same digest.
        """
        self.seek(at)
        machine.load(self.steps[0].committed)
        for step in self.steps[1 : at + 1]:
            if step.kind == "committed":
                machine.apply(step.op)
        if machine.digest != self.now.digest:
            raise ValueError(f"replay arrived at {machine.digest[:12]}, the history says {self.now.digest[:12]}")
        forked = History(machine)
        forked.steps = self.steps[: at + 1]
        forked._last = forked.steps[-1].committed
        forked.at = at
        return forked

    def to_dict(self) -> Json:
        """Plain data: each snapshot once under its digest, steps refer to it. `from_dict` is the inverse."""
        snapshots: Json = {}
        rows = []
        for step in self.steps:
            snapshots.setdefault(step.digest, step.committed)
            row = {k: getattr(step, k) for k in Step.__slots__ if k != "committed"}
            rows.append({k: v for k, v in row.items() if v not in ("", None)})
        return {"kvlab": "history/1", "snapshots": snapshots, "steps": rows}

    @classmethod
    def from_dict(cls, data: Json) -> History:
        """A history to read (no machine behind it); ValueError on another format."""
        if data.get("kvlab") != "history/1":
            raise ValueError("not a kvlab history/1 document")
        history = cls.__new__(cls)
        history.machine = None
        blank = Step("start", {}, {}, "")
        history.steps = [replace(blank, committed=data["snapshots"][row["digest"]], **row) for row in data["steps"]]
        history._last = history.steps[-1].committed
        history.at = 0
        return history
