"""The way from a token to a byte as frames: one a step, nothing shown before it is found, refusals beside causes."""

from __future__ import annotations

import copy
import json
from itertools import permutations

import pytest

from kvlab.memory.address import STEPS, follow
from kvlab.memory.address_records import read_snapshot
from kvlab.memory.address_sources import flattened, layout_axes
from kvlab.memory.layout import AXES
from kvlab.reasons import REASONS
from kvlab.views import address, address_picture
from kvlab.views.scene import Recording
from tests.support import FIXTURES

BASE = json.loads((FIXTURES / "loop4_addresses.json").read_text())["base"]
SNAPSHOT = read_snapshot(BASE)
ASKED = {"request": "A", "token": 16, "layer": 24, "kind": "K", "head": 1, "lane": 5}


def made(snapshot=SNAPSHOT, **asked):
    trace = follow(snapshot, **(ASKED | asked))
    return address.recording(snapshot.to_dict(), trace.to_dict(), reasons=REASONS)


def test_the_view_knows_the_translators_steps():
    assert tuple(name for name, _ in STEPS) == address_picture.STEPS


def test_a_frame_for_the_question_and_one_for_each_step():
    recording = made()
    assert [f.kind for f in recording.frames] == ["start"] + ["read"] * 12
    assert recording.frames[-1].title == "Byte 4,311,843,082"
    assert Recording.from_dict(recording.to_dict()).id == recording.id


def test_a_number_is_shown_when_it_is_found_and_not_before():
    known = [[c["value"] for c in f.board] for f in made().frames]
    first = [next(n for n, row in enumerate(known) if row[i] != "–") for i in range(4)]
    assert first == [10, 11, 12, 12]
    assert known[-1] == [96, 49285, 98570, 4311843082]
    words = [" ".join(f.twin) for f in made().frames]
    assert ["2001" in text for text in words] == [n >= 5 for n in range(13)]


def test_the_chosen_block_comes_down_from_the_table_once():
    scenes = [f.scene.by_key() for f in made().frames]
    assert [("block/6" in s and "from" in s["block/6"]) for s in scenes] == [n == 6 for n in range(13)]
    assert scenes[5]["entry/1"]["label"] == "2001" and scenes[-1]["block/6"]["owners"] == ["A", "B"]
    assert scenes[-1]["block/6"]["refs"] == 2


def test_products_of_the_axes_add_up():
    shapes = made().frames[-1].scene.by_key()
    products = [int(shapes[f"product/{axis}"]["label"].removeprefix("= ").replace(",", "")) for axis in AXES]
    assert products == [0, 49152, 0, 128, 5] and sum(products) == 49285


REFUSED = [({"token": 33}, "outside_request_context", 0), ({"token": -1}, "outside_request_context", 0),
           ({"layer": 32}, "layer_out_of_range", 1), ({"head": 4}, "head_out_of_range", 7),
           ({"lane": 128}, "lane_out_of_range", 8)]


@pytest.mark.parametrize(("asked", "reason", "passed"), REFUSED)
def test_a_refusal_is_the_last_frame_and_says_why(asked, reason, passed):
    recording = made(**asked)
    last = recording.frames[-1]
    assert len(recording.frames) == passed + 2
    assert last.kind == "refused" and last.scene.by_key()["why"]["label"] == reason
    assert last.why.startswith(REASONS[reason].rstrip("."))
    assert last.shake in last.scene.by_key()


def test_refusals_behind_the_table_say_why_too():
    broken = copy.deepcopy(BASE)
    for change in ({"pool_generation": 6}, {"physical_block_id": 2999}):
        broken["requests"]["A"]["tables"]["g1"][1] = BASE["requests"]["A"]["tables"]["g1"][1] | change
        shown = made(read_snapshot(broken)).frames[-1].scene.by_key()
        assert shown["entry/1"]["refused"] and "why" in shown
    broken = copy.deepcopy(BASE)
    broken["requests"]["A"]["tables"]["g1"] = broken["requests"]["A"]["tables"]["g1"][:1]
    shown = made(read_snapshot(broken)).frames[-1].scene.by_key()
    assert shown["entry/1"]["refused"] and shown["why"]["label"] == "table_length_drift"
    broken = copy.deepcopy(BASE)
    broken["groups"][1]["blocks"][2]["valid_rows"] = 1
    broken["requests"]["A"]["context_length"] = 40
    shown = made(read_snapshot(broken), token=38).frames[-1].scene.by_key()
    assert shown["row/6"]["refused"] and shown["why"]["label"] == "physical_row_not_valid"
    broken = copy.deepcopy(BASE)
    broken["groups"][1]["end"]["K"] = broken["groups"][1]["base"]["K"] + 8
    shown = made(read_snapshot(broken)).frames[-1].scene.by_key()
    assert shown["why"]["label"] == "address_outside_tensor"


def test_a_row_that_is_there_and_not_hers_is_shown_so():
    last = made(request="B", token=25).frames[-1]
    shown = last.scene.by_key()
    assert shown["row/9"]["refused"] and shown["row/9"]["token"] == "·" and "owner" not in shown["row/9"]
    assert shown["row/8"]["owner"] == "B" and shown["row/8"]["token"] == "24"
    assert "Row 9 of block 2001 is written. B may not see it." in last.twin
    assert "row/0" not in made(request="C", token=16).frames[-1].scene.by_key(), "nothing is there for C"


LAYOUTS = [(order, together, lanes) for order in list(permutations(AXES))[::23] for together in (False, True)
           for lanes in (1, 8)]


@pytest.mark.parametrize(("order", "together", "lanes"), LAYOUTS)
def test_nothing_leaves_the_picture_in_any_layout(order, together, lanes):
    flat = flattened(SNAPSHOT, 24, layout_axes(order, interleaved=together, inner_lanes=lanes), lanes)
    for frame in (made(flat).frames[-1], made(flat, token=32, lane=127, kind="V").frames[-1]):
        cards = [s for s in frame.scene.shapes if s["key"].startswith("axis/")]
        assert len(cards) == 5 + together + (lanes > 1)
        assert len({s["x"] for s in cards}) == len(cards)
        for s in frame.scene.shapes:
            assert s["x"] >= 0 and s["x"] + s.get("w", 0) <= 960 and s["y"] + s.get("h", 0) <= 484, s


def test_what_does_not_belong_together_is_no_recording():
    trace = follow(SNAPSHOT, **ASKED).to_dict()
    with pytest.raises(ValueError, match="not a trace"):
        address.recording(BASE, trace | {"checks": trace["checks"][::-1]})
    with pytest.raises(ValueError, match="not a trace"):
        address.recording(BASE | {"kind": "allocator"}, trace)
    with pytest.raises(ValueError, match="'Z'"):
        address.recording(BASE, trace | {"request_id": "Z"})
