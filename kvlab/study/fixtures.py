"""One runner for every fixture: play a trace on a real machine, compare its values, prove each refusal.

It owns the fixture format and no expected value: those come from the article's arithmetic or from an
independent derivation, never from what the code printed.

A fixture is JSON: {"fixture", "loop", "title", "machine", "base": snapshot, "trace": [step], "expect": [value],
"negatives": [negative]}.
    step      {"name", "do": apply|ask|stage|copied|wrote|publish|rollback|fault|admit_writer|lease|unlease|compensate,
               ..., "refused"?: reason}
              "ask" puts a question ({"ask": word, ...}) that changes nothing; its answer is plain data
    value     {"id", "step", "pointer": JSON pointer into the step's result, "equals"}
    negative  {"id", "reason", "what", "at": step name, "do": [step]}       one more operation, or
              {"id", "reason", "what", "at"?: step name, "patch": [RFC 6902]}   a malformed snapshot to load
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonpatch
from jsonpointer import resolve_pointer

from kvlab.contract import Event, Json, Machine, Rejected
from kvlab.memory.address_map import AddressMap
from kvlab.memory.address_records import read_snapshot
from kvlab.memory.allocator import Allocator
from kvlab.memory.books import Books
from kvlab.memory.layout import CacheLayoutManifest
from kvlab.reuse.identity import IdentityGate
from kvlab.reuse.prefix_cache import PrefixCache
from kvlab.reuse.radix_cache import RadixCache

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def _allocator(base: Json) -> Allocator:
    machine = Allocator(CacheLayoutManifest.from_dict(base))
    machine.load(base)
    return machine


MACHINES: dict[str, Callable[[Json], Machine]] = {
    "allocator": _allocator,
    "addresses": lambda base: AddressMap(read_snapshot(base)),
    "books": Books,
    "identity": IdentityGate.of,
    "prefix_cache": PrefixCache.of,
    "radix": RadixCache.of,
}


class FixtureError(Exception):
    """The fixture file itself is not one: names the file and what was expected."""


@dataclass(slots=True)
class Session:
    """A machine on its way through a trace: what each named step gave, and the transactions still open."""

    machine: Machine
    results: dict[str, Json] = field(default_factory=dict)
    open: dict[str, Any] = field(default_factory=dict)
    receipts: dict[str, Any] = field(default_factory=dict)
    leases: dict[str, Any] = field(default_factory=dict)

    def do(self, step: Json) -> Json:
        """Perform one step; returns its result as plain data. Raises `Rejected` as the machine does."""
        verb, txn = step.get("do", "apply"), self.open.get(step.get("txn", "t"))
        out: Json = {}
        if verb == "stage":
            self.open[step.get("txn", "t")] = txn = self.machine.stage(step["op"])
        elif verb == "fault":
            self._fault(step)
        elif verb == "admit_writer":
            self.machine.admit_writer(step["request"], step["handles"])
        elif verb == "apply":
            receipt = self.receipts[step.get("name", "")] = self.machine.apply(step["op"])
            out["receipt"] = receipt.to_dict()
        elif verb == "lease":
            self.leases[step["lease"]] = self.machine.lease(step["request"], step["kind"], step.get("blocks"))
        elif verb == "unlease":
            self.machine.unlease(self.leases[step["lease"]])
        elif verb == "compensate":
            out["receipt"] = self.machine.compensate(self.receipts[step["of"]]).to_dict()
        elif verb == "ask":
            out["answer"] = self.machine.ask(step["question"])
        else:
            receipt = getattr(txn, verb)(*[step[k] for k in ("group", "rows") if k in step])
            if receipt is not None:
                out["receipt"] = receipt.to_dict()
        if txn is not None and verb != "apply":
            out |= {"log": list(txn.log), "staged": txn.staged()}
        return out | {"state": self.machine.snapshot()}

    def _fault(self, step: Json) -> None:
        """Break a transaction off right after one of its steps, as a lost process would."""
        def pull_the_plug(event: Event) -> None:
            if event.kind == "staged" and event.txn.log[-1] == step["after"]:
                raise Rejected("fault_after_partial_reservation", f"after {step['after']}")

        self.machine.observers.append(pull_the_plug)
        try:
            txn = self.machine.stage(step["op"])
            txn.finish_writes()
            txn.publish()
        finally:
            self.machine.observers.remove(pull_the_plug)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one value or refusal held, and what came instead where it did not."""

    id: str
    held: bool
    got: Any = None
    wanted: Any = None


def load_fixture(path: Path) -> Json:
    """Read a fixture; `FixtureError` names the file and what is wrong with it."""
    try:
        fixture = json.loads(path.read_text())
    except OSError as error:
        raise FixtureError(f"{path}: {error.strerror}; expected a fixture in JSON") from error
    except json.JSONDecodeError as error:
        raise FixtureError(f"{path}: line {error.lineno}: {error.msg}") from error
    missing = [k for k in ("fixture", "loop", "machine", "base", "trace") if k not in fixture]
    if missing:
        raise FixtureError(f"{path}: a fixture needs {', '.join(missing)}")
    if fixture["machine"] not in MACHINES:
        raise FixtureError(f"{path}: no machine {fixture['machine']!r}; there are {', '.join(MACHINES)}")
    return fixture


def all_fixtures(folder: Path = FIXTURES) -> list[Path]:
    """The fixtures of the repository, in order."""
    return [*sorted(folder.glob("loop*.json")), *sorted(folder.glob("incidents_*.json"))]


def play(fixture: Json, until: str | None = None) -> Session:
    """Run the trace up to and with the step named `until` (all of it if None); results by step name.

    A step with "refused" must be refused with that reason and leave the digest as it was; ValueError otherwise.
    """
    session = Session(MACHINES[fixture["machine"]](fixture["base"]))
    session.results["base"] = {"state": session.machine.snapshot()}
    for step in fixture["trace"] if until != "base" else ():
        if "refused" in step:
            reason = refusal(session, [step])
            if reason != step["refused"]:
                raise ValueError(f"{step['name']}: {reason!r} instead of {step['refused']!r}")
            session.results[step["name"]] = {"refused": reason, "state": session.machine.snapshot()}
        else:
            session.results[step["name"]] = session.do(step)
        session.machine.check()
        if step["name"] == until:
            break
    return session


def refusal(session: Session, steps: list[Json]) -> str:
    """The reason that the last of some steps is refused with; "" if it is not, or if the digest moved by it."""
    for step in steps[:-1]:
        session.do(step)
    before = session.machine.digest
    try:
        session.do(steps[-1])
    except Rejected as no:
        return no.reason if session.machine.digest == before else f"{no.reason}, but the digest moved"
    return ""


def check_value(session: Session, value: Json) -> Verdict:
    """Compare one expected value with the result of its step."""
    got = resolve_pointer(session.results[value["step"]], value["pointer"], None)
    return Verdict(value["id"], got == value["equals"], got, value["equals"])


@dataclass(frozen=True, slots=True)
class Attempt:
    """One forbidden thing that was really tried on a fresh machine; `reason` is empty where it was accepted."""

    reason: str
    detail: str
    before: str
    after: str


def attempt(fixture: Json, negative: Json) -> Attempt:
    """Try a negative: play the trace up to its step, then load its malformed snapshot or do its steps."""
    session = play(fixture, negative.get("at", "base"))
    machine, good = session.machine, session.machine.snapshot()
    if "patch" in negative:
        machine.load(good)  # a load restarts the machine; its digest must not count as the refusal's doing
    for step in negative.get("do", ())[:-1]:
        session.do(step)
    before = machine.digest
    try:
        if "patch" in negative:
            machine.load(jsonpatch.apply_patch(good, negative["patch"]))
        else:
            session.do(negative["do"][-1])
    except Rejected as no:
        return Attempt(no.reason, no.detail, before, machine.digest)
    return Attempt("", "", before, machine.digest)


def check_negative(fixture: Json, negative: Json) -> Verdict:
    """Prove one refusal: the valid input passes, the malformed one is refused with this reason, nothing moves."""
    tried = attempt(fixture, negative)
    got = tried.reason or "accepted"
    if tried.reason and tried.before != tried.after:
        got += ", but the digest moved"
    return Verdict(negative["id"], got == negative["reason"], got, negative["reason"])


def check_fixture(fixture: Json) -> dict[str, list[Verdict]]:
    """All values and refusals of one fixture: {"golden": [...], "negatives": [...]}."""
    session = play(fixture)
    return {"golden": [check_value(session, v) for v in fixture.get("expect", ())],
            "negatives": [check_negative(fixture, n) for n in fixture.get("negatives", ())]}


def reasons_hit(paths: list[Path]) -> Iterator[str]:
    """Every reason that some fixture's trace or negative is refused with."""
    for path in paths:
        fixture = load_fixture(path)
        yield from (step["refused"] for step in fixture["trace"] if "refused" in step)
        yield from (negative["reason"] for negative in fixture.get("negatives", ()))


def report(results: list[tuple[int, dict[str, list[Verdict]]]]) -> Json:
    """Counts for machines: per loop and kind, how many held and the ids that failed."""
    counts: Json = {}
    for loop, kinds in sorted(results, key=lambda row: row[0]):
        row = counts.setdefault(str(loop), {kind: {"held": 0, "failed": []} for kind in kinds})
        for kind, verdicts in kinds.items():
            row[kind]["held"] += sum(v.held for v in verdicts)
            row[kind]["failed"] += [v.id for v in verdicts if not v.held]
    return counts
