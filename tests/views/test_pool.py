"""A pool's recording over real allocator histories: choice of frames, motion, words and numbers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvlab.contract import History
from kvlab.views.pool import recording, scene
from kvlab.views.pool_beats import overlay
from kvlab.views.pool_picture import picture
from kvlab.views.pool_score import CELLS
from kvlab.views.scene import Frame, Recording
from tests.views.histories import WALKS, WORDS, allocator, article, conversation, frames, played, walked

Json = Mapping[str, Any]


def by_title(made: Recording, start: str) -> Frame:
    return next(f for f in made.frames if f.title.startswith(start))


# ---------------------------------------------------------------- which frames
def test_the_article_trace_shows_every_step_of_copy_on_write_and_merges_the_rest() -> None:
    made = played("article")
    assert [(f.kind, f.title) for f in made.frames] == [
        ("start", "1 request at the start"),
        ("committed", "Fork A into D"),
        ("staged", "D appends: reserve in g0 first"),
        ("refused", "Refused: append 1 token to D"),
        ("refused", "Rolled back, to the byte"),
        ("staged", "D appends: reserve in both groups"),
        ("staged", "Lease the source, copy its 2 valid rows"),
        ("staged", "Write row 2"),
        ("committed", "D appends token 34"),
        ("committed", "D appends token 35"),
        ("committed", "Truncate D to 32 tokens"),
        ("refused", "Refused: truncate D to 900 tokens"),
        ("staged", "F arrives: reserve in both groups"),
        ("committed", "Publish F: 16 tokens"),
        ("committed", "Cancel D"),
        ("committed", "Release A"),
    ]


def test_the_picture_of_a_copy_on_write() -> None:
    made = played("article")
    some, both, copying, written, published = (made.frame(i).scene.by_key() for i in (2, 5, 6, 7, 8))
    assert some["b.g0.1003"]["hatch"] == 1 and "hatch" not in some["b.g1.2003"]
    assert some["home.g0.0"]["label"] == "1003@0" and some["b.g0.1003"]["label"] == "1003@1"
    assert both["b.g1.2003"]["hatch"] == 1 and both["b.g1.2003"]["fill"] == 0
    assert copying["b.g0.1003"]["fill"] == 2 and copying["b.g0.1002"]["badge"] == 1
    assert copying["fly.g0.0"]["transient"] and copying["flowt.g0"]["label"] == "rows 0..1, 96 KiB"
    assert written["b.g0.1003"]["fill"] == 3 and written["b.g0.1002"]["owners"] == ["A", "D"]
    assert published["b.g0.1002"]["owners"] == ["A"] and "badge" not in published["b.g0.1002"]
    assert published["b.g0.1003"]["owners"] == ["D"] and "hatch" not in published["b.g0.1003"]
    assert published["home.g0.0"]["label"] == "empty"


def test_a_refusal_rings_what_was_refused_and_the_digest_stands_still() -> None:
    made = played("article")
    fault, back, plain = made.frame(3), made.frame(4), made.frame(11)
    assert fault.shake == "b.g0.1003" and fault.scene.by_key()["b.g0.1003"]["refused"]
    assert fault.scene.by_key()["why"]["label"] == "fault_after_partial_reservation"
    assert back.scene.by_key()["b.g0.1003"]["label"] == "1003@0" and "why" not in back.scene.by_key()
    assert plain.shake == "ask" and plain.scene.by_key()["ask"]["label"] == "truncate D to 900 tokens"
    assert plain.why.startswith("You cannot keep more tokens than the request has")
    for _, _, f in frames():
        digest = f.scene.by_key()["digest"]
        if f.kind in ("staged", "refused"):
            assert digest["value"] == digest["prev"]
        if f.kind == "committed":
            assert digest["value"] != digest["prev"]


def test_a_conversation_of_two_prompts_takes_forty_to_seventy_frames() -> None:
    for tokens in (16, 24):
        history, notes = conversation(tokens)
        made = recording(history, notes=notes, **WORDS)
        assert 40 <= len(made.frames) <= 70
        assert Recording.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_two_open_transactions_are_one_overlay() -> None:
    machine = allocator()
    machine.allocate("A", 16)
    machine.allocate("B", 16)
    both = [machine.stage({"op": "append", "request": r}).staged() for r in "AB"]
    merged = overlay(both)
    assert [r["request"] for r in merged["reserved"]["g0"]] == ["A", "B"] and overlay([]) is None
    shapes = scene(machine.snapshot(), merged).by_key()
    assert shapes["b.g0.1002"]["owners"] == ["A"] and shapes["b.g0.1003"]["owners"] == ["B"]
    assert both == [overlay(both[:1]), overlay(both[1:])]


# ---------------------------------------------------------------- motion
def test_a_freed_block_glides_into_the_pile_and_a_drawn_one_comes_from_it() -> None:
    history, notes = conversation(tokens=3, block_size=4)
    made = recording(history, notes=notes, **WORDS)
    release, arrival = by_title(made, "Release A"), by_title(made, "A arrives")
    pile = {k: release.scene.by_key()["pile.g0"][k] for k in ("x", "y", "w", "h")}
    gone = [k for k in release.leave if k.startswith("b.g0.")]
    assert gone and all(release.leave[k] == pile for k in gone)
    heap = arrival.scene.by_key()["heap.g0"]
    assert heap["label"] == "+6 more" and heap["owner"] == "A"
    assert arrival.leave["b.g0.1000"] == {k: heap[k] for k in ("x", "y", "w", "h")}
    late = arrival.scene.by_key()["b.g0.1007"]
    assert late["from"] == {k: made.frame(0).scene.by_key()["pile.g0"][k] for k in ("x", "y", "w", "h")}
    published = by_title(made, "Publish A").scene.by_key()
    assert published["b.g0.1005"]["from"]["y"] == heap["y"] and "from" not in published["b.g0.1007"]


def test_no_block_appears_from_nowhere_but_out_of_the_window() -> None:
    for name, (_, groups) in WALKS.items():
        last = None
        for snapshot in walked(name)["snapshots"].values():
            view = picture(snapshot, groups=groups, previous=last)
            for key in view.scene.by_key().keys() - (last.scene.by_key().keys() if last else set()):
                came = "from" in view.scene.by_key()[key]
                assert came == bool(last and key in last.where), (name, key)
            last = view


# ---------------------------------------------------------------- words and numbers
def live_kib(snapshot: Json) -> float:
    """K/V rows that somebody references, recomputed from the tables alone."""
    rows: dict[tuple[str, str], int] = {}
    for request in snapshot["requests"].values():
        for group in snapshot["groups"]:
            columns, g = snapshot["blocks"][group["group_id"]], group["group_id"]
            for handle in request["tables"][g]:
                index = int(handle.split("@")[0]) - group["first_block_id"]
                rows[g, handle] = columns["valid_rows"][index]
    layers = {g["group_id"]: g["layer_end"] - g["layer_start"] for g in snapshot["groups"]}
    one = snapshot["groups"][0]
    scalars = one["kv_heads"] * one["head_dim"] * one["scalar_bytes"] * 2
    return round(sum(n * layers[g] * scalars for (g, _), n in rows.items()) / 1024, 1)


@pytest.mark.parametrize("name", WALKS)
def test_the_board_counts_committed_facts(name: str) -> None:
    history, made = walked(name), played(name)
    copied, written = 0, 0
    facts = []
    for step in (s for s in history["steps"] if s["kind"] in ("start", "committed")):
        receipt = step.get("receipt", {})
        copied += receipt.get("copy_payload_bytes", 0)
        written += receipt.get("useful_new_rows", 0)
        snapshot = history["snapshots"][step["digest"]]
        handles = [(g, h) for r in snapshot["requests"].values() for g, table in r["tables"].items() for h in table]
        facts.append({
            "blocks in use": len(set(handles)),
            "blocks shared": sum(handles.count(h) > 1 for h in set(handles)),
            "rows written": written,
            "K/V copied": round(copied / 1024, 1),
            "K/V live": live_kib(snapshot),
        })  # fmt: skip
    seen = -1
    for f in made.frames:
        seen += f.kind in ("start", "committed")
        assert {c["label"]: c["value"] for c in f.board} == facts[seen], (name, f.title)
    assert seen == len(facts) - 1


def test_notes_become_titles_sentences_and_cells() -> None:
    history, notes = conversation(tokens=4)
    notes["reserved_rows"] = 256
    made = recording(history, notes={str(k): v for k, v in notes.items()}, **WORDS)
    word = by_title(made, 'B writes " word2"')
    assert "B so far: “ word0 word1 word2”" in word.twin and "1 row computed by the model." in word.twin
    cells = {c["label"]: c["value"] for c in word.board}
    assert cells["rows computed"] == 30 + 27 + 6 and cells["K/V if rectangular"] == 256 * 8 * 2 * 32 * 4 * 2 / 1024
    assert len(word.board) <= 6
    chosen = recording(history, board=["allocator epoch", "references", "free blocks"], **WORDS)
    assert [c["label"] for c in chosen.frame(0).board] == ["allocator epoch", "references", "free blocks"]
    assert {c["value"] for c in chosen.frame(0).board} == {0, 128}


def test_words_name_only_what_the_step_touched() -> None:
    """Every handle in a title or why is one of the state before, of the state after, or of the overlay."""
    for name in WALKS:
        history = walked(name)
        known = {h for s in history["steps"] for group in (s.get("staged") or {}).get("reserved", {}).values()
                 for h in (r["handle"] for r in group)}  # fmt: skip
        for snapshot in history["snapshots"].values():
            for group in snapshot["groups"]:
                generations = snapshot["blocks"][group["group_id"]]["generation"]
                known |= {f"{group['first_block_id'] + i}@{g}" for i, g in enumerate(generations)}
        for f in played(name).frames:
            assert set(re.findall(r"\d+@\d+", f"{f.title} {f.why}")) <= known
            assert f.title and f.why.endswith(".") and len(f.title) < 110 and len(f.why) < 330, f.why
            assert all(sentence.strip() and sentence[-1] in ".”" for sentence in f.twin)


def test_the_words_of_a_reuse_and_of_a_batch() -> None:
    machine = allocator()
    history = History(machine)
    machine.allocate("A", 32)
    machine.apply({"op": "cache_full", "request": "A", "blocks": [0], "keys": ["7be1c0ffee"]})
    machine.release("A")
    machine.apply({"op": "touch", "request": "B", "blocks": [["1000@1", "2000@1"]]})
    machine.apply({"op": "evict", "blocks": [["1000@1", "2000@1"]]})
    machine.allocate("C", 4)
    machine.apply({"op": "append", "requests": {"B": 1, "C": 1}})
    machine.apply({"op": "append", "requests": {"B": 1, "C": 1}})
    made = recording(history.to_dict(), **WORDS)
    named = by_title(made, "Name block 0 of A").scene.by_key()["b.g0.1000"]
    assert named["tag"] == "7be1"
    evictable = by_title(made, "Release A").scene.by_key()
    assert all("tag" not in s for k, s in evictable.items() if k == "b.g0.1001")
    found = by_title(made, "B finds 16 tokens in the cache")
    assert found.why.endswith("1000@1 and 2000@1 leave the free queue.")
    assert by_title(made, "Forget #7be1").kind == "committed"
    mixed, plain = (f for f in made.frames if f.title == "B appends token 16 and C appends token 4"), made.frames[-1]
    assert "B into a new block; C in place" in next(mixed).why
    assert plain.why.startswith("Every tail has room and one owner")


# ---------------------------------------------------------------- the contract of the view
def test_a_view_is_pure() -> None:
    history = article()
    kept = copy.deepcopy(history)
    first, second = recording(history, **WORDS), recording(history, **WORDS)
    assert first.id == second.id and history == kept
    snapshot = next(iter(history["snapshots"].values()))
    assert scene(snapshot) == scene(snapshot)
    assert scene(snapshot).svg().startswith("<svg")


def test_a_still_with_a_refusal_and_a_digest() -> None:
    machine = allocator()
    machine.allocate("A", 20)
    still = scene(machine.snapshot(), refused=["b.g0.1000"], reason="stale_block_generation", digest=machine.digest)
    shapes = still.by_key()
    assert shapes["b.g0.1000"]["refused"] and shapes["why"]["label"] == "stale_block_generation"
    assert shapes["digest"]["value"] == machine.digest[:12] and "prev" not in shapes["digest"]


def test_what_cannot_be_shown_is_an_error() -> None:
    snapshot = allocator().snapshot()
    for groups in (["g9"], [], ["g0", "g0"], ["g0", "g1", "g0"]):
        with pytest.raises(ValueError, match="show one or two"):
            scene(snapshot, groups=groups)
    with pytest.raises(ValueError, match="not the history"):
        recording({"kvlab": "history/1", "snapshots": {"x": {}}, "steps": [{"kind": "start", "digest": "x"}]}, **WORDS)
    for board in (["no such cell"], list(CELLS)[:7]):
        with pytest.raises(ValueError, match="a board shows"):
            recording(article(), board=board, **WORDS)


def test_five_hundred_frames_stay_well_under_two_megabytes() -> None:
    sizes: Sequence[tuple[int, int]] = [
        (len(r.frames), len(json.dumps(r.to_dict(), ensure_ascii=False))) for r in map(played, WALKS)
    ]
    assert max(size / n for n, size in sizes) * 500 < 1_900_000
