"""The gate's recording over real walks: a frame a check, the first difference ends it, nothing overlaps."""

from __future__ import annotations

import copy
import json

import pytest

from kvlab.reasons import REASONS
from kvlab.study import fixtures
from kvlab.study.gate_walk import played, walk
from kvlab.views.identity import WORDS, fields, recording, scene, short
from kvlab.views.scene import Recording

FIXTURE = fixtures.load_fixture(fixtures.FIXTURES / "loop2_identity.json")
GATE = fixtures.play(FIXTURE, "publish p2").machine.snapshot()
LAYOUT = {row["manifest_id"]: digest for digest, row in GATE["layouts"].items()}
CHANGES = {
    "nothing": {},
    "rank": {"cache_layout_sha256": LAYOUT["l2-rank1"]},
    "quantiser": {"cache_layout_sha256": LAYOUT["l2-int8-scheme"]},
    "salt": {"cache_salt": None},
    "longer": {"covered_token_ids": [*GATE["records"]["g0/1000@3"]["manifest"]["covered_token_ids"], 1, 2]},
    "publication": {"publication_generation": 2},
}


def walked(name, principal="alice"):
    return walk(GATE, principal=principal, namespace="prod/a", record="g0/1000@3", change=CHANGES[name])


@pytest.mark.parametrize(("name", "frames", "kind", "title"), [
    ("nothing", 16, "committed", "Every fact agrees: the rows are held for the consumer"),
    ("longer", 16, "committed", "Every fact agrees: the rows are held for the consumer"),
    ("rank", 5, "refused", "Refused by cache_layout_sha256"),
    ("quantiser", 5, "refused", "Refused by cache_layout_sha256"),
    ("salt", 14, "refused", "Refused by cache_salt"),
    ("publication", 15, "refused", "Refused by publication_generation"),
])
def test_a_frame_for_every_check_that_was_made(name, frames, kind, title):
    made = played(walked(name))
    assert (len(made.frames), made.frames[-1].kind, made.frames[-1].title) == (frames, kind, title)
    assert [f.kind for f in made.frames[:-1]] == ["start", *["read"] * (frames - 2)]
    for n, frame in enumerate(made.frames):
        shapes = frame.scene.by_key()
        solid = [key for key, s in shapes.items() if key.startswith("check.") and not s.get("hatch")]
        assert len(solid) == min(n, 14) == sum(key.startswith("sign.") for key in shapes)
    assert Recording.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_a_refusal_rings_its_check_and_the_state_stays():
    last = played(walked("rank")).frames[-1]
    shapes = last.scene.by_key()
    assert last.shake == "check.cache_layout_sha256" and shapes[last.shake]["refused"]
    assert shapes["reason"]["label"] == "tp_rank_mismatch" and shapes["digest"]["value"] == shapes["digest"]["prev"]
    assert last.why.startswith(REASONS["tp_rank_mismatch"]) and "tp_rank" in last.why
    assert {c["label"]: c["value"] for c in last.board} == {"fields compared": 2, "index reads": 1,
                                                            "differences found": 1}
    held = played(walked("nothing")).frames[-1].scene.by_key()["digest"]
    assert held["value"] != held["prev"]


def test_who_may_not_look_is_stopped_before_the_key():
    made = played(walked("nothing", "bob"))
    assert len(made.frames) == 2 and made.frames[-1].title == "Refused before anything is looked up"
    assert {c["label"]: c["value"] for c in made.frames[-1].board}["index reads"] == 0
    assert made.frames[-1].twin[-1] == "13 not compared."


def test_a_key_that_differs_is_a_miss_and_no_refusal():
    made = played(walked("salt"))
    miss = made.frames[2]
    assert miss.kind == "read" and miss.title == "The concrete key is another one: no candidate"
    shapes = miss.scene.by_key()
    assert shapes["miss"]["label"] == "no candidate" and "tone" not in shapes["miss"]
    both = made.frames[-1].scene.by_key()
    assert "miss" in both and both["reason"]["label"] == "cache_salt_mismatch"
    assert sum(bool(s.get("refused")) for s in both.values()) == 1


def test_a_compatible_pair_under_another_key_changes_nothing():
    data = walk(GATE, principal="alice", namespace="prod/a", record="g0/1000@3", change={}, adapter_name="other")
    last = played(data).frames[-1]
    assert (last.title, last.kind) == ("Every fact agrees", "read")
    assert last.scene.by_key()["digest"]["value"] == last.scene.by_key()["digest"]["prev"]


@pytest.mark.parametrize("name", CHANGES)
def test_words_stand_apart(name):
    """Estimated widths, as generous as the stage's font: values, checks, signs and reasons of a row do not touch."""
    for frame in played(walked(name)).frames:
        shapes = frame.scene.by_key()
        for field in fields(walked(name)):
            check = shapes[f"check.{field}"]
            assert shapes[f"ours.{field}"]["x"] < check["x"] - 8
            assert shapes[f"ours.{field}"]["x"] - 7.6 * len(shapes[f"ours.{field}"]["label"]) > 130
            assert len(field) * 8.2 < check["w"]
            theirs = shapes[f"theirs.{field}"]
            assert theirs["x"] + 7.6 * len(theirs["label"]) < 692
        for key in ("reason", "miss"):
            if key in shapes:
                assert shapes[key]["x"] + shapes[key]["w"] <= 950
                assert len(shapes[key]["label"]) * 8.2 < shapes[key]["w"] + 8
        assert max(s["y"] + s.get("h", 0) for s in frame.scene.shapes) <= 480


def test_every_row_has_words_and_values_are_short():
    assert list(WORDS) == fields(walked("nothing"))
    assert [short(v) for v in (None, [], "a" * 64, "a word that is long", 3)] == [
        "none", "none", "a" * 8, "a word that is …", "3"]
    assert short([1, 2]).startswith("2 tokens ") and short([{"kind": "x"}]).startswith("1 side input ")
    assert short([1, 2]) != short([1, 3])
    for frame in played(walked("nothing")).frames:
        assert frame.title and frame.why.endswith((".", "?")) and all(line.endswith(".") for line in frame.twin)


def test_the_view_is_pure():
    data = walked("salt")
    kept = copy.deepcopy(data)
    one, other = (recording(data, title="t", question="q", reasons=REASONS) for _ in range(2))
    assert one.id == other.id and data == kept
    assert scene(data, 3) == scene(data, 3) and scene(data, 3).svg().startswith("<svg")
