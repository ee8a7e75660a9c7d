"""The allocator as a picture and as a recording: snapshots and histories in, scenes out; it holds no machine.

Plain data only: `Allocator.snapshot()`, `AllocatorTxn.staged()` and `History.to_dict()` as they are in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.views import shapes
from kvlab.views.pool_beats import Beat, beats
from kvlab.views.pool_grid import Shelf, Window, block_of
from kvlab.views.pool_grid import shelves as shelves_of
from kvlab.views.pool_picture import WHY, View, key_of, picture
from kvlab.views.pool_score import Totals, cells, twin
from kvlab.views.pool_score import board as scoreboard
from kvlab.views.pool_sheet import letters
from kvlab.views.pool_words import asked, words
from kvlab.views.scene import Frame, Recording, Scene

Json = Mapping[str, Any]
KINDS = {"start": "start", "commit": "committed", "refused": "refused", "back": "refused"}


def scene(
    snapshot: Json,
    staged: Json | None = None,
    *,
    groups: Sequence[str] | None = None,
    window: Window | None = None,
    previous: View | None = None,
    owners: Mapping[str, str] | None = None,
    refused: Sequence[str] = (),
    reason: str = "",
    asked: str = "",
    digest: str | None = None,
    digest_before: str | None = None,
) -> Scene:
    """One still picture of an allocator: pool, free queue, staged lane and block tables (article 0x04D to 0x05G).

    `snapshot` is the committed state, `staged` the overlay of an open transaction. `groups` names one group (six
    columns) or two (three each; default the first two). `owners` fixes letters of requests, `previous` is the picture
    before, for motion. `refused` keys get a ring, with the `reason` word beside them, or beside what was `asked`. With
    `digest` its fingerprint stands at the top right, next to `digest_before`. ValueError for groups that cannot be
    shown. `pool_picture.picture` gives the same with what the next picture needs.
    """
    more = {"reason": reason, "asked": asked, "digest": digest, "digest_before": digest_before}
    keep = {"groups": groups, "window": window, "previous": previous, "owners": owners, "refused": refused}
    return picture(snapshot, staged, **keep, **more).scene


def recording(
    history: Json,
    *,
    title: str,
    question: str,
    notes: Json | None = None,
    board: Sequence[str] | None = None,
    owners: Mapping[str, str] | None = None,
    groups: Sequence[str] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> Recording:
    """What an allocator did, as frames for a reader; `history` is `History.to_dict()` of an `Allocator`.

    `notes`: facts that the allocator does not know, by committed epoch (int or str): {"pieces": {request: text},
    "say": {request: text so far}, "computed": rows, "recomputed": rows, "reserved_rows": rows}; a top-level
    "reserved_rows" holds from the start. `board`: labels of `pool_score.CELLS`, six at most. `reasons`: a sentence
    for each refusal word. ValueError for a history of another kind. O(steps x (pool + tables)).
    """
    if history.get("kvlab") != "history/1" or {s.get("kind") for s in history["snapshots"].values()} != {"allocator"}:
        raise ValueError("not the history of an allocator")
    notes, names = notes or {}, letters(_everyone(history), owners)
    labels, totals = cells(notes, board), Totals(reserved_rows=notes.get("reserved_rows", 0))
    view, digest, frames = None, None, []
    for beat in beats(history, notes):
        on, totals = shelves_of(beat.after, groups), totals.with_beat(beat)
        view = _view(beat, view, on, names, digest)
        frames.append(_frame(beat, view, on, labels, totals, reasons or {}))
        digest = beat.digest
    return Recording(title, question, shapes.VIEW, tuple(frames))


def _everyone(history: Json) -> Iterator[str]:
    """Request ids in order of appearance."""
    for step in history["steps"]:
        yield from history["snapshots"][step["digest"]]["requests"]
        yield from (step.get("staged") or {}).get("requests", ())
        yield from (step.get("receipt") or {}).get("requests", ())


def _view(beat: Beat, last: View | None, on: Sequence[Shelf], names: Mapping[str, str], digest: str | None) -> View:
    more: dict[str, Any] = {"groups": [s.group for s in on], "flow": beat.what == "copy"}
    if beat.what == "refused":
        entries = beat.staged["reserved"] if beat.staged else {}
        keys = [key_of(s.group, block_of(r["handle"])) for s in on for r in entries.get(s.group, ())]
        more |= {"refused": keys, "reason": beat.reason, "asked": asked(beat.op)}
    more |= {"digest": beat.digest, "digest_before": digest}
    return picture(beat.after, beat.open, previous=last, owners=names, **more)


def _frame(
    beat: Beat, view: View, on: Sequence[Shelf], labels: Sequence[str], totals: Totals, reasons: Mapping[str, str]
) -> Frame:
    said, here = words(beat, reasons), view.scene.by_key()
    ringed = [key for key, s in here.items() if s.get("refused")]
    return Frame(
        said.title,
        said.why,
        KINDS.get(beat.what, "staged"),
        scoreboard(labels, beat.after, totals),
        twin(beat, said.why, view.window, on),
        view.scene,
        shake=(*ringed, WHY)[0] if beat.what == "refused" else None,
        leave=view.leave,
    )
