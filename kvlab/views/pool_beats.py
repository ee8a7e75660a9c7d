"""Chooses which steps of an allocator's history a reader sees, and when; it has no words and draws nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RESERVE, COPY, WRITE = (
    "reserve_every_group_unpublished",
    "copy_exactly_valid_rows",
    "write_appended_row_every_group",
)
COPY_ON_WRITE = "copy_on_write_bundle_then_append"
GIVEN_UP = "rolled_back"
"""Step, path and outcome as the allocator logs them (article 0x05C, 0x04E); the last is a rollback by choice."""
LEASES = ("lease", "unlease")
"""A lease outside a transaction is staged under its own name: it begins, and ends with nothing leased any more."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Beat:
    """One frame to be: `what` is start, reserve_some, reserve, copy, write, commit, lease, unlease, refused or back.

    `before` and `after` are committed snapshots, equal unless `what` is commit. `staged` is the overlay of the
    transaction concerned, `open` that of every transaction that is open at this point, the concerned one included
    where its blocks are still reserved.
    """

    what: str
    op: Json
    before: Json
    after: Json
    digest: str
    staged: Json | None = None
    open: Json | None = None
    receipt: Json | None = None
    reason: str = ""
    detail: str = ""
    note: Json = field(default_factory=dict)


def beats(history: Json, notes: Json | None = None) -> Iterator[Beat]:
    """The frames of a history in its JSON form (`History.to_dict()`), in order. O(steps).

    In-place appends are one frame. A new block is reserved in one and published in another; a copy-on-write shows
    reserving, copying, writing and publishing, the first of them also the moment when only one group has its block.
    """
    steps, snapshots, notes = history["steps"], history["snapshots"], notes or {}
    before, running, seen_some = snapshots[steps[0]["digest"]], {}, False
    for at, step in enumerate(steps):
        after, staged, kind = snapshots[step["digest"]], step.get("staged"), step["kind"]
        name = staged["transaction"] if staged else (step.get("receipt") or {}).get("transaction_id")
        if kind == "staged":
            running[name] = staged
            what = _staged_beat(step, steps[at + 1 : at + 2], len(after["groups"]), seen_some)
            seen_some |= what == "reserve_some"
        else:
            ended = bool(staged) and staged["phase"] == "ROLLED_BACK"
            what = {"start": "start", "committed": "commit"}.get(kind, "refused")
            what = "" if step.get("reason") == GIVEN_UP else what
            if kind == "committed" or ended:
                running.pop(name, None)
        if what:
            shown = {**running, name: staged} if staged else running
            note = notes.get(str(after["epoch"]), notes.get(after["epoch"], {})) if kind == "committed" else {}
            yield Beat(
                what,
                step["op"],
                before,
                after,
                step["digest"],
                staged,
                overlay(shown.values()),
                step.get("receipt"),
                step.get("reason", ""),
                step.get("detail", ""),
                note,
            )
        if kind == "refused" and ended and (any(staged["reserved"].values()) or not what):
            yield Beat("back", step["op"], after, after, step["digest"], staged, overlay(running.values()))
        before = after


def _staged_beat(step: Json, following: Sequence[Json], groups: int, seen_some: bool) -> str:
    staged, name = step["staged"], step.get("step")
    if name in LEASES:
        return name
    copying = bool(staged["copies"]) or COPY_ON_WRITE in {r["path"] for r in staged["requests"].values()}
    if name == RESERVE and any(staged["reserved"].values()):
        if sum(entry.startswith(RESERVE) for entry in staged["log"]) == groups:
            return "reserve"
        fails = bool(following) and following[0]["kind"] == "refused"
        return "reserve_some" if fails or (copying and not seen_some) else ""
    if name == COPY and all(c["done"] for c in staged["copies"]):
        return "copy"
    if name == WRITE and copying and staged["phase"] == "READY_TO_PUBLISH":
        return "write"
    return ""


def overlay(transactions: Any) -> Json | None:
    """What several open transactions have staged, as one overlay; None where there is none."""
    parts = list(transactions)
    if len(parts) < 2:
        return parts[0] if parts else None
    merged: dict[str, Any] = {"reserved": {}, "leases": {}, "copies": [], "requests": {}}
    for part in parts:
        for name in ("reserved", "leases"):
            for group, items in part[name].items():
                merged[name].setdefault(group, []).extend(items)
        merged["copies"] += part["copies"]
        merged["requests"] |= part["requests"]
    return merged
