"""What lesson and page on ownership share: a bench on which a real allocator is asked, and the failure lab's cases.

It owns no rule: the allocator decides, the fixtures say what is forbidden, and this module asks and keeps the answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.contract import Event, History, Json, Rejected, digest_of
from kvlab.memory.allocator import Allocator
from kvlab.memory.records import PUBLICATION_ORDER
from kvlab.reasons import REASONS
from kvlab.study import fixtures
from kvlab.study.fixtures import Session
from kvlab.views import pool
from kvlab.views.pool_beats import beats
from kvlab.views.pool_words import asked
from kvlab.views.scene import Recording

BOARD = ("blocks in use", "blocks shared", "rows written", "K/V copied", "K/V live", "allocator epoch")
_VALIDATE, _LOAD, _RESERVE, _RETAIN, _COPY, _WRITE, _FRONTIERS, *_ = PUBLICATION_ORDER
PLUGS = (_VALIDATE, _LOAD, f"{_RESERVE}:g0", f"{_RESERVE}:g1", _RETAIN, f"{_COPY}:g0", f"{_COPY}:g1", f"{_WRITE}:g0",
         f"{_WRITE}:g1", _FRONTIERS)
"""After which steps an append over groups g0 and g1 may be broken off, in order: all of them before publication."""


def article() -> Json:
    """The article's trace: two cache groups, one copy-on-write, and what follows from it (0x04D to 0x05F)."""
    return fixtures.load_fixture(fixtures.FIXTURES / "loop5_ownership.json")


def incidents() -> Json:
    """Public bugs of real engines, played on this allocator: the same input, the right answer, and their stories."""
    return fixtures.load_fixture(fixtures.FIXTURES / "incidents_ownership.json")


def fresh(blocks: int = 6) -> Json:
    """The article's machine with so many blocks a group and nobody in it."""
    groups = [group | {"num_blocks": blocks} for group in article()["base"]["groups"]]
    none = [0] * blocks
    return {
        "kind": "allocator", "epoch": 0, "groups": groups, "requests": {},
        "blocks": {g["group_id"]: {"generation": none, "ref_cnt": none, "valid_rows": none, "keys": {}}
                   for g in groups},
        "free": {g["group_id"]: [g["first_block_id"] + i for i in range(blocks)] for g in groups},
    }


# ---------------------------------------------------------------- operations in short words
NAME, COUNT, BUNDLE = r"[A-Za-z0-9_]{1,12}", r"-?\d{1,6}", r"\d{1,9}@\d{1,9}(?:-\d{1,9}@\d{1,9})*"


def _apply(op: str, **more: Any) -> Json:
    return {"do": "apply", "op": {"op": op, **more}}


def _name(request: str, blocks: str) -> Json:
    """Identities for the first blocks of a request; nobody computes with them here, so any distinct word will do."""
    first = range(int(blocks))
    return _apply("cache_full", request=request, blocks=list(first), keys=[digest_of([request, j])[:4] for j in first])


def _bundles(text: str) -> list[list[str]]:
    return [bundle.split("-") for bundle in text.strip(".").split(".")]


def _touch(request: str, more: str, bundles: str) -> Json:
    found: Json = {"request": request, "blocks": _bundles(bundles)}
    if int(more):
        found["tokens"] = 16 * len(found["blocks"]) + int(more)
    return _apply("touch", **found)


def _plug(request: str, after: str) -> Json:
    return {"do": "fault", "op": {"op": "append", "request": request}, "after": PLUGS[int(after)]}


GRAMMAR: dict[str, tuple[str, Callable[..., Json]]] = {
    "allocate": (rf"({NAME})\.({COUNT})", lambda r, n: _apply("allocate", request=r, tokens=int(n))),
    "append": (rf"({NAME})\.({COUNT})", lambda r, n: _apply("append", request=r, tokens=int(n))),
    "fork": (rf"({NAME})\.({NAME})", lambda r, child: _apply("fork", request=r, child=child)),
    "truncate": (rf"({NAME})\.({COUNT})", lambda r, n: _apply("truncate", request=r, tokens=int(n))),
    "release": (rf"({NAME})", lambda r: _apply("release", request=r)),
    "cancel": (rf"({NAME})", lambda r: _apply("cancel", request=r)),
    "name": (rf"({NAME})\.(\d{{1,2}})", _name),
    "touch": (rf"({NAME})\.(\d{{1,6}})((?:\.{BUNDLE})+)", _touch),
    "evict": (rf"({BUNDLE}(?:\.{BUNDLE})*)", lambda bundles: _apply("evict", blocks=_bundles(bundles))),
    "lease": (rf"({NAME})\.(read|write)", lambda r, kind: {"do": "lease", "request": r, "kind": kind}),
    "unlease": (r"(\d{1,3})", lambda n: {"do": "unlease", "lease": n}),
    "plug": (rf"({NAME})\.([0-9])", _plug),
    "compensate": ("", lambda: {"do": "compensate", "of": "last"}),
}
"""Word -> the form of what follows it, and the step of a fixture's trace that both stand for."""


def step_of(text: str) -> Json:
    """A short operation such as `append.D.1`, `touch.G.0.1000@3-2000@6` or `compensate` as a step of a trace.

    ValueError where it is none; whether it is allowed is for the machine to say.
    """
    word, _, rest = text.partition(".")
    form, made = GRAMMAR.get(word, (None, None))
    found = re.fullmatch(form, rest) if form is not None else None
    if found is None:
        raise ValueError(f"{text!r} is no operation. One is, for example, append.D.1 or fork.A.B.")
    return made(*found.groups())


def in_words(step: Json) -> str:
    """A step as a person would say it."""
    if step["do"] == "fault":
        name, _, group = step["after"].partition(":")
        return f"{asked(step['op'])}, the plug pulled after “{name.replace('_', ' ')}”{group and f' in {group}'}"
    if step["do"] == "compensate":
        return "compensate the last transaction"
    return asked(step["op"]) if "op" in step else asked({"op": step["do"], **step})


# ---------------------------------------------------------------- the bench
@dataclass(frozen=True, slots=True)
class SeenLease:
    """A lease as a history's reader sees it: like something staged, for it is no part of the committed state."""

    transaction: str
    leases: Json

    def staged(self) -> Json:
        return {"transaction": self.transaction, "phase": "LEASED" if self.leases else "LEASE_ENDED", "log": [],
                "reserved": {}, "copies": [], "leases": self.leases, "requests": {}}


class Bench:
    """One real allocator, all that was asked of it, and what came of it, refusals and leases included.

    `base` is a snapshot, `steps` those of a fixture's trace. `marks` are the history's lengths before each step,
    `outcomes` the reasons of refusals, empty where a step went through.
    """

    def __init__(self, base: Json, steps: Sequence[Json] = ()) -> None:
        self.session = Session(fixtures.MACHINES["allocator"](base))
        self.machine: Allocator = self.session.machine
        self.history = History(self.machine)
        self.machine.observers.append(self._committed)
        self.marks: list[int] = []
        self.outcomes: list[str] = []
        for step in steps:
            self.do(step)

    def _committed(self, event: Event) -> None:
        if event.receipt is not None:
            self.session.receipts["last"] = event.receipt

    def do(self, step: Json) -> str:
        """Perform one step; "" or the reason of its refusal. ValueError where it names a lease that never began."""
        if step.get("do") == "unlease" and step["lease"] not in self.session.leases:
            raise ValueError(f"There is no lease {step['lease']}; {len(self.session.leases)} have begun.")
        if step.get("do") == "compensate" and step["of"] not in self.session.receipts:
            raise ValueError("Nothing has been published yet, so there is nothing to undo.")
        if step.get("do") == "lease":
            step = {"lease": str(len(self.session.leases) + 1)} | step
        self.marks.append(seen := len(self.history))
        try:
            self.session.do(step)
        except Rejected as no:
            self.outcomes.append(no.reason)
            if len(self.history) == seen or self.history.steps[-1].kind != "refused":
                self.machine.emit(Event("refused", self._op(step), reason=no.reason, detail=no.detail))
            return no.reason
        if step.get("do") in ("lease", "unlease"):
            self._show_lease(step)
        self.outcomes.append("")
        return ""

    def say(self, text: str) -> str:
        """`do`, in the short words of `step_of`."""
        return self.do(step_of(text))

    def _op(self, step: Json) -> Json:
        """What was asked, as an operation for the history, where the machine itself told nobody."""
        op = {"op": step["do"]} | {k: v for k, v in step.items() if k not in ("do", "name", "refused")}
        if step["do"] == "compensate":
            receipt = self.session.receipts[step["of"]]
            return op | {"undone": receipt.operation} | ({"request": receipt.requests[0]} if receipt.requests else {})
        return op

    def _show_lease(self, step: Json) -> None:
        taken, leases = self.session.leases[step["lease"]], {}
        for handle in taken.handles:
            leases.setdefault(handle.cache_group_id, []).append(str(handle))
        op = self._op(step) | {"handles": [str(h) for h in taken.handles]}
        seen = SeenLease(taken.lease_id, leases if step["do"] == "lease" else {})
        self.machine.emit(Event("staged", op, step["do"], txn=seen))

    # ------------------------------------------------------------------ what a reader may point at
    @property
    def live(self) -> dict[str, int]:
        """Live requests and their lengths in tokens."""
        return {name: request.context for name, request in sorted(self.machine.requests.items())}

    def everyone(self) -> list[str]:
        """Every request that ever lived here, those that have ended last."""
        ever = {name: None for step in self.history for name in step.committed["requests"]}
        return [*self.live, *(name for name in ever if name not in self.live)]

    def named(self) -> dict[str, str]:
        """Every bundle with a cached identity, as `1000@3-2000@6`, and that identity."""
        return _named(self.machine.snapshot())

    def ever_named(self) -> dict[str, str]:
        """The same, and after them every bundle that had one once."""
        found = self.named()
        for snapshot in {step.digest: step.committed for step in self.history}.values():
            found |= _named(snapshot)
        return found

    def frame(self, recording: Recording, back: int = 1) -> int:
        """The frame that shows what came of the last step (or of the one `back` steps ago): refused, or done."""
        told = self.history.to_dict()
        first, end = (sum(1 for _ in beats(told | {"steps": told["steps"][:n]}))
                      for n in [*self.marks, len(self.history)][-back - 1 :][:2])
        refused = (n for n in range(first, end) if recording.frames[n].kind == "refused")
        return next(refused, end - 1)

    def recording(self, title: str, question: str = "Who may write here?") -> Recording:
        """All that has happened so far, to be played by a stage."""
        return pool.recording(self.history.to_dict(), title=title, question=question, board=BOARD, reasons=REASONS)


def _named(snapshot: Json) -> dict[str, str]:
    columns = {g["group_id"]: (g["first_block_id"], snapshot["blocks"][g["group_id"]]) for g in snapshot["groups"]}
    first, *others = [{key: f"{block}@{column['generation'][int(block) - start]}"
                       for block, key in sorted(column["keys"].items(), key=lambda row: int(row[0]))}
                      for start, column in columns.values()]
    return {"-".join([handle, *(other[key] for other in others)]): key
            for key, handle in first.items() if all(key in other for other in others)}


# ---------------------------------------------------------------- the failure lab
@dataclass(frozen=True, slots=True)
class Case:
    """Something forbidden that can be tried at any time. `engine`, `wrong` and `right` are those of a public bug."""

    id: str
    what: str
    fixture: Json
    negative: Json
    engine: str = ""
    wrong: str = ""
    right: str = ""

    @property
    def tried(self) -> list[Json]:
        """The patch on a valid snapshot, or the steps, the last of which is forbidden, in the form of the fixture."""
        return self.negative["patch"] if "patch" in self.negative else self.negative["do"]

    def attempt(self) -> fixtures.Attempt:
        """Try it now, on a fresh machine that has played the fixture so far."""
        return fixtures.attempt(self.fixture, self.negative)


def malformed() -> list[Case]:
    """The malformed inputs of the article's loop."""
    fixture = article()
    return [Case(n["id"], n["what"], fixture, n) for n in fixture["negatives"]]


def stories() -> list[Case]:
    """Public bugs of real engines, each with the refusal that would have stopped it, by engine."""
    fixture = incidents()
    negatives = {n["id"]: n for n in fixture["negatives"]}
    names = ["base", *(step["name"] for step in fixture["trace"])]
    steps = {step["name"]: step for step in fixture["trace"]}
    out = []
    for story in fixture["stories"]:
        at = story.get("step")
        negative = negatives[story["id"]] if at is None else {
            "id": story["id"], "reason": steps[at]["refused"], "at": names[names.index(at) - 1], "do": [steps[at]]}
        out.append(Case(story["id"], story["symptom"], fixture, negative, story["engine"], story["wrong"],
                        story["right"]))
    return sorted(out, key=lambda case: case.engine.lower())
