"""The address contract as a machine: one committed snapshot that answers questions and consumes published successors.

It owns the snapshot and the addresses that were frozen in it. It refuses to allocate: blocks, slots and tables come
from the ownership contract, as a successor that says itself what it changes (article 0x03H).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kvlab.contract import Event, Json, Operation, Rejected, digest_of
from kvlab.memory.address import resolve
from kvlab.memory.address_answers import ANSWERS
from kvlab.memory.address_records import (
    AddressSnapshot,
    BlockDescriptor,
    FrozenAddress,
    GroupLayout,
    PhysicalRef,
    RequestSnapshot,
    read_block,
    read_snapshot,
    read_tables,
    whole,
)
from kvlab.memory.address_snapshot import validate

Tables = Mapping[str, tuple[PhysicalRef, ...]]


@dataclass(frozen=True, slots=True)
class AddressReceipt:
    """What one adopted successor changed. `moved` names which of version, mapping and valid rows it moved together."""

    predecessor_digest: str
    successor_digest: str
    outcome: str
    operation: str
    request: str
    table_version: int
    snapshot_version: int
    changed: tuple[tuple[str, tuple[int, ...]], ...]
    moved: tuple[str, ...]

    def to_dict(self) -> Json:
        out: Json = {f.name: getattr(self, f.name) for f in fields(self)}
        return out | {"changed": {g: list(at) for g, at in self.changed}, "moved": list(self.moved)}


@dataclass(frozen=True, slots=True)
class _Staged:
    """A validated successor of the whole snapshot, and what it is a successor in."""

    state: AddressSnapshot
    request: str
    table_version: int
    changed: Mapping[str, Sequence[int]]
    moved: tuple[str, ...]


class AddressMap:
    """Translations of one snapshot. `adopt`, `retire` and `freeze` publish a successor of it, or change nothing.

    Each validates the whole successor, O(blocks + tables), so that no error can be left over from the predecessor.
    """

    def __init__(self, snapshot: AddressSnapshot) -> None:
        validate(snapshot)
        self.state = snapshot
        self.observers: list[Callable[[Event], None]] = []
        self._digest = digest_of(snapshot.to_dict())

    @property
    def digest(self) -> str:
        return self._digest

    def snapshot(self) -> Json:
        """The committed state as plain data."""
        return self.state.to_dict()

    def load(self, snapshot: Json) -> None:
        """Start from a snapshot; a malformed one is refused and the present state stays."""
        successor = read_snapshot(snapshot)
        validate(successor)
        self._publish(successor)

    def check(self) -> None:
        """Judge the committed state again, and compute every frozen address again; AssertionError on digest drift."""
        validate(self.state)
        assert self._digest == digest_of(self.snapshot()), "the state digest drifted"

    def ask(self, question: Mapping[str, Any]) -> Json:
        """Answer one question from the committed snapshot; see `kvlab.memory.address_answers`. Changes nothing."""
        answer = ANSWERS.get(str(question.get("ask")))
        if answer is None:
            raise Rejected("unknown_operation", f"no question {question.get('ask')!r}")
        try:
            return answer(self.state, question)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Rejected("unknown_operation", f"{type(error).__name__}: {error}") from error

    def apply(self, op: Operation) -> AddressReceipt:
        """Publish a successor. Raises `Rejected`, the state and digest unchanged.

        adopt   {request, mode: append|replace, context_length, table_version, tables, changed?, blocks?}
                the author says whether `tables` follow the old entries or stand instead of them; nobody infers it
        retire  {request, table_version}
        freeze  {addresses: [{request, token, layer, kind, head, lane}]}   instead of what was frozen before
        """
        try:
            staged = self._stage(op)
        except Rejected as no:
            self._emit(Event("refused", op, reason=no.reason, detail=no.detail))
            raise
        before = self._digest
        self._publish(staged.state)
        changed = tuple((g, tuple(at)) for g, at in staged.changed.items())
        receipt = AddressReceipt(before, self._digest, "committed", str(op["op"]), staged.request, staged.table_version,
                                 staged.state.version, changed, staged.moved)
        self._emit(Event("committed", op, receipt=receipt))
        return receipt

    # ------------------------------------------------------------------ the three operations
    def _stage(self, op: Operation) -> _Staged:
        stages = {"adopt": self._adopt, "retire": self._retire, "freeze": self._freeze}
        stage = stages.get(str(op.get("op")))
        if stage is None:
            raise Rejected("unknown_operation", f"{op.get('op')!r}")
        try:
            staged = stage(op)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Rejected("unknown_operation", f"{type(error).__name__}: {error}") from error
        staged = replace(staged, state=replace(staged.state, version=self.state.version + 1))
        validate(staged.state)
        return staged

    def _adopt(self, op: Operation) -> _Staged:
        before = _predecessor(self.state, op["request"])
        version = whole(op["table_version"])
        if version != before.table_version + 1:
            raise Rejected("stale_successor_version", f"{before.request_id} is at version {before.table_version}, "
                                                      f"the successor says {version}")
        tables, changed = _successor_tables(before, op)
        after = RequestSnapshot(before.request_id, whole(op["context_length"], 1), version, tables)
        brought = {g: [read_block(b) for b in blocks] for g, blocks in op.get("blocks", {}).items()}
        requests = {**self.state.requests, after.request_id: after}
        groups = tuple(_with_blocks(g, tables.get(g.id, ()), brought.get(g.id, ())) for g in self.state.groups)
        groups = _without_unnamed(groups, before, requests)
        moves = {"table_version": True, "mapping": any(changed.values()), "valid_rows": any(brought.values())}
        moved = tuple(what for what, it_moved in moves.items() if it_moved)
        return _Staged(replace(self.state, groups=groups, requests=requests), after.request_id, version, changed, moved)

    def _retire(self, op: Operation) -> _Staged:
        before = self.state.request(op["request"])
        if op["table_version"] != before.table_version:
            raise Rejected("stale_table_version", f"{before.request_id} is at version {before.table_version}")
        requests = {name: r for name, r in self.state.requests.items() if name != before.request_id}
        groups = _without_unnamed(self.state.groups, before, requests)
        return _Staged(replace(self.state, groups=groups, requests=requests), before.request_id, before.table_version,
                       {g: range(len(t)) for g, t in before.block_tables_by_group.items()}, ("mapping",))

    def _freeze(self, op: Operation) -> _Staged:
        frozen = []
        for asked in op["addresses"]:
            coordinate = {k: asked[k] for k in ("request", "token", "layer", "kind", "head", "lane")}
            frozen.append(FrozenAddress(**coordinate, byte_address=resolve(self.state, **coordinate).byte_address))
        return _Staged(replace(self.state, frozen=tuple(frozen)), "", 0, {}, ())

    # ------------------------------------------------------------------ publication
    def _publish(self, successor: AddressSnapshot) -> None:
        self.state, self._digest = successor, digest_of(successor.to_dict())

    def _emit(self, event: Event) -> None:
        for observer in tuple(self.observers):
            observer(event)


def _predecessor(state: AddressSnapshot, request: str) -> RequestSnapshot:
    """The live request, or the empty one that a new request succeeds."""
    return state.requests.get(request) or RequestSnapshot(request, 0, 0, {g.id: () for g in state.groups})


def _successor_tables(before: RequestSnapshot, op: Operation) -> tuple[Tables, dict[str, list[int]]]:
    """The successor's tables and the entries that differ; refused where one differs that was not declared."""
    sent, mode = read_tables(op["tables"]), op["mode"]
    if mode not in ("append", "replace"):
        raise ValueError(f"mode is append or replace, not {mode!r}")
    tables, changed = {}, {}
    for group, old in before.block_tables_by_group.items():
        new = (*old, *sent.get(group, ())) if mode == "append" else sent[group]
        differ = [j for j in range(max(len(old), len(new))) if old[j : j + 1] != new[j : j + 1]]
        declared = range(len(old), len(new)) if mode == "append" else op["changed"][group]
        if undeclared := [j for j in differ if j not in declared]:
            raise Rejected("stale_successor_version",
                           f"entry {undeclared[0]} of {before.request_id} in {group} changed and was not declared")
        tables[group], changed[group] = new, differ
    if unknown := set(sent) - set(tables):
        raise ValueError(f"there is no group {', '.join(sorted(unknown))}")
    return tables, changed


def _with_blocks(group: GroupLayout, table: Sequence[PhysicalRef], brought: Sequence[BlockDescriptor]) -> GroupLayout:
    """The group with the blocks that a successor brings: new ones, and new rows in those that it already names."""
    named, blocks = {ref.physical_block_id for ref in table}, dict(group.descriptors)
    for new in brought:
        old, name = blocks.get(new.physical_block_id), f"block {new.physical_block_id} of {group.id}"
        if new.physical_block_id not in named:
            raise Rejected("stale_successor_version", f"it brings {name} and does not name it")
        same_life = old is not None and old.block_generation == new.block_generation
        if same_life and asdict(old) | {"valid_rows": max(old.valid_rows, new.valid_rows)} != asdict(new):
            raise Rejected("stale_successor_version", f"{name} would lose rows or change its place")
        blocks[new.physical_block_id] = new
    return replace(group, descriptors=blocks)


def _without_unnamed(groups: Sequence[GroupLayout], before: RequestSnapshot,
                     requests: Mapping[str, RequestSnapshot]) -> tuple[GroupLayout, ...]:
    """The groups without those blocks of the predecessor that no table names any more."""
    out = []
    for group in groups:
        named = {ref.physical_block_id for r in requests.values() for ref in r.block_tables_by_group.get(group.id, ())}
        lost = {ref.physical_block_id for ref in before.block_tables_by_group[group.id]} - named
        kept = {b: d for b, d in group.descriptors.items() if b not in lost}
        out.append(replace(group, descriptors=kept))
    return tuple(out)
