"""The identity contract as a machine: who may look, under which manifest rows were published, who still holds them.

It authorises before it looks, finds candidates by key and lets the manifest decide. It refuses to know where rows lie
(address), which prefix is longest (index, lesson 6) and who may write (ownership).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from kvlab.contract import Event, FactSum, Json, Operation, Rejected
from kvlab.reuse.gate_operations import OPERATIONS, Draft, Telemetry
from kvlab.reuse.gate_state import Grant, State, grant_cell, read_state
from kvlab.reuse.manifests import CacheCompatibilityManifest, plain
from kvlab.reuse.questions import answer

Manifest = CacheCompatibilityManifest


@dataclass(frozen=True, slots=True)
class GateReceipt:
    """What one committed operation did. `steps` were really taken, in this order; `candidates` were really compared.

    `outcome`: done, hit or miss. `verdicts` names each candidate with what it was refused for ("" for the hit).
    `handle` is the object that was published, found or released; None for a miss.
    """

    operation: str
    predecessor_digest: str
    successor_digest: str
    outcome: str
    steps: tuple[str, ...] = ()
    handle: str | None = None
    request: str | None = None
    generation: int | None = None
    verdicts: tuple[tuple[str, str], ...] = ()
    reclaimed: tuple[str, ...] = ()

    def to_dict(self) -> Json:
        out: Json = {f.name: getattr(self, f.name) for f in fields(self)}
        return out | {"steps": list(self.steps), "verdicts": dict(self.verdicts), "reclaimed": list(self.reclaimed)}


class IdentityGate:
    """Published manifests of many namespaces, and the one door to them.

    Operations (plain dicts): create, authorize, publish, lookup, release, admit_layout, reset_prefix_cache,
    successor. Each costs the rows it touches; a lookup one key and one comparison a candidate, a successor every
    record of the generation that it ends. `telemetry` counts how often the index was really read, and where. It is
    not part of the state, and nothing moves it before authorisation.
    `hash_name` is one of `kvlab.reuse.keys.HASHES`.
    """

    def __init__(self, hash_name: str = "sha256") -> None:
        self.observers: list[Callable[[Event], None]] = []
        self._take(State(hash_name))

    def _take(self, state: State) -> None:
        self.state = state
        self.telemetry = Telemetry()
        self.facts = FactSum(state.fact)
        self.facts.total = self.total_from_nothing()

    # ------------------------------------------------------------------ the face of a machine
    @property
    def digest(self) -> str:
        """Digest of the committed state: ABIs, layouts, directories, grants, records with their owners."""
        return self.facts.hex()

    def total_from_nothing(self) -> int:
        """The digest's sum recomputed from every row. O(state)."""
        whole = FactSum(self.state.fact)
        for cell in self.state.cells():
            whole.total += self.state.fact(cell)
        whole.settle()
        return whole.total

    def snapshot(self) -> Json:
        return self.state.snapshot()

    @classmethod
    def of(cls, snapshot: Json) -> IdentityGate:
        """A gate that begins with a committed state."""
        gate = cls()
        gate.load(snapshot)
        return gate

    def load(self, snapshot: Json) -> None:
        """Take over a committed state; telemetry starts anew. `Rejected` with the present state kept. O(snapshot)."""
        self._take(read_state(snapshot))

    def check(self) -> None:
        """Recompute digests, keys, generations and references of everything. `Rejected` for the first drift."""
        again = read_state(self.snapshot())
        if again != self.state or self.total_from_nothing() != self.facts.total:
            raise Rejected("malformed_snapshot", "the key index or the digest is not that of the rows")

    def apply(self, op: Operation) -> GateReceipt:
        """Validate an operation, stage its changes, publish them at once. `Rejected` leaves the digest as it was."""
        draft = Draft(self.state, self.telemetry)
        try:
            self._stage(draft, op)
        except Rejected as no:
            step = draft.steps[-1] if draft.steps else ""
            self._emit(Event("refused", op, step=step, reason=no.reason, detail=no.detail))
            raise
        before = self.digest
        for cell in draft.changes:
            self.facts.touch(cell)
        for cell, row in draft.changes.items():
            self.state.put(cell, row)
        self.facts.settle()
        receipt = GateReceipt(str(op["op"]), before, self.digest, steps=tuple(draft.steps), **draft.facts)
        self._emit(Event("committed", op, receipt=receipt))
        return receipt

    def _stage(self, draft: Draft, op: Operation) -> None:
        handler = OPERATIONS.get(str(op.get("op")))
        if handler is None:
            raise Rejected("unknown_operation", f"{op.get('op')!r}")
        try:
            handler(draft, op)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Rejected("unknown_operation", f"{op['op']}: {type(error).__name__}: {error}") from error

    def _emit(self, event: Event) -> None:
        if self.observers:
            op = {k: plain(v) if is_dataclass(v) else v for k, v in event.op.items()}
            for observer in tuple(self.observers):
                observer(replace(event, op=op))

    def ask(self, question: Json) -> Any:
        """Answer a question without changing anything: one of `kvlab.reuse.questions.QUESTIONS`."""
        return answer(self.state, self.telemetry, question)

    # ------------------------------------------------------------------ the common ones, as calls
    def authorize(self, principal: str, namespace: str) -> Grant:
        """May this principal look into this namespace? The grant names the generation it is good for.

        `unauthorized_namespace` before anything is looked up, and whether or not the namespace exists.
        """
        self.apply({"op": "authorize", "principal": principal, "namespace": namespace})
        return self.state.get(grant_cell(principal, namespace))

    def publish(self, grant: Grant, handle: str, group: str, manifest: Manifest,
                adapter_name: str | None = None) -> GateReceipt:
        return self.apply({"op": "publish", "principal": grant.principal, "namespace": grant.namespace,
                           "handle": handle, "group": group, "manifest": manifest, "adapter_name": adapter_name})

    def lookup(self, grant: Grant, group: str, consumer: Manifest, adapter_name: str | None = None) -> GateReceipt:
        return self.apply({"op": "lookup", "principal": grant.principal, "namespace": grant.namespace,
                           "group": group, "consumer": consumer, "adapter_name": adapter_name})

    def release(self, request: str) -> GateReceipt:
        return self.apply({"op": "release", "request": request})
