"""The radix cache as a picture and as a recording: snapshots and histories in, scenes out; it holds no machine.

Plain data only: `RadixCache.snapshot()` and `History.to_dict()` as they are in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.views.pool_sheet import letters
from kvlab.views.radix_beats import Beat, beats
from kvlab.views.radix_names import Names, names_of
from kvlab.views.radix_picture import ASK, NEWCOMER, Over, View, picture
from kvlab.views.radix_words import Totals, asked, board, query_says, twin, words
from kvlab.views.scene import Frame, Recording, Scene
from kvlab.views.shapes import VIEW

Json = Mapping[str, Any]
KINDS = {"start": "start", "commit": "committed", "refused": "refused"}


def scene(snapshot: Json, *, pieces: Mapping[int, str] | None = None, digest: str | None = None,
          focus: Sequence[int] = ()) -> Scene:
    """One still picture of a tree, its pool and its leases (article 0x08A to 0x08E).

    `pieces`: token id -> text. `focus`: nodes that must be in sight where not everything fits. O(nodes + slots).
    """
    who = letters([*snapshot["requests"], NEWCOMER])
    return picture(snapshot, names=names_of([snapshot], pieces), letters=who, focus=focus, digest=digest).scene


def recording(history: Json, *, title: str, question: str, pieces: Mapping[int, str] | None = None,
              reasons: Mapping[str, str] | None = None) -> Recording:
    """What a radix cache did, as frames for a reader; `history` is `History.to_dict()` of a `RadixCache`.

    `pieces`: token id -> text. `reasons`: a sentence for each refusal word. ValueError for a history of another kind.
    O(steps x state).
    """
    moments = list(beats(history))
    names = names_of(list(history["snapshots"].values()), pieces)
    who = letters([*_everyone(history), NEWCOMER])
    totals, view, frames = Totals(), None, []
    for n, beat in enumerate(moments):
        coming = moments[n + 1] if n + 1 < len(moments) else None
        totals = totals.with_beat(beat)
        view = _view(beat, coming, names, who, view)
        frames.append(_frame(beat, view, names, totals, reasons or {}))
    return Recording(title, question, VIEW, tuple(frames))


def _everyone(history: Json) -> Iterator[str]:
    """Request ids in order of appearance."""
    for step in history["steps"]:
        yield from history["snapshots"][step["digest"]]["requests"]


def _view(beat: Beat, coming: Beat | None, names: Names, who: Mapping[str, str], previous: View | None) -> View:
    over = Over(query=beat.query, extra=beat.op.get("extra_key"), brought=beat.brought, staged=beat.staged,
                says=query_says(beat, names) if beat.query else "")
    if beat.what == "refused":
        node = beat.op.get("node")
        ring = frozenset({node} if isinstance(node, int) and str(node) in beat.tree["nodes"] else ())
        over = Over(asked=asked(beat.op, names), reason=beat.reason, ring=ring)
    leaving = {e["node"] for e in coming.receipt["evicted"]} if coming is not None and coming.receipt else set()
    return picture(beat.tree, names=names, letters=who, over=over, focus=beat.focus | leaving, parted=beat.parted,
                   previous=previous, digest=beat.digest, digest_before=beat.digest_before)


def _frame(beat: Beat, view: View, names: Names, totals: Totals, reasons: Mapping[str, str]) -> Frame:
    said, why = words(beat, names, reasons)
    shapes = view.scene.by_key()
    says = {key: s["says"] for key, s in shapes.items() if "says" in s}
    ringed = [key for key, s in shapes.items() if s.get("refused") and key != ASK]
    return Frame(said, why, KINDS.get(beat.what, "staged"), board(beat.after, totals),
                 twin(beat, names, view.layout, says), view.scene,
                 shake=(*ringed, ASK)[0] if beat.what == "refused" else None, leave=view.leave)
