"""The walk's recording over a real run: a frame a contract, one card lit, nothing touches, nothing is made up."""

from __future__ import annotations

import copy
import json
from itertools import combinations

import pytest

from kvlab.execution.model import load_model
from kvlab.study.contract_walk import follow
from kvlab.study.lesson_contracts import Chats, merged
from kvlab.views.contracts import ASKS, STAGES, card_of, recording, scene
from kvlab.views.scene import Recording
from kvlab.views.stage import source
from tests.browser import browser_page, serve
from tests.views.stage_page import CLASHES, LIST, PAGE, same

STORY = ("The two young ladies were walking in the garden before dinner, "
         "when they saw a gentleman coming up the road; and it was")


@pytest.fixture(scope="module")
def walk():
    world = Chats(*load_model("austen"), num_blocks=32, combine=merged)
    world.ask("A", STORY)
    world.go_on("A", " Mr. Darcy. He")
    made = follow(world, "A", "B", 39, " her brother, and she cried", 1)
    made["check"] = world.allocator.check()
    return json.loads(json.dumps(made))


@pytest.fixture(scope="module")
def made(walk):
    return recording(walk, title="One token", question="Where?")


def test_the_walk_says_what_the_run_did(walk):
    assert (walk["position"], walk["token"], walk["tokens"]) == (40, " brother", 46)
    assert walk["index"]["rows"] == walk["execution_reuse"]["shared"] == 32 and walk["execution_reuse"]["own"] == 15
    own, at = walk["ownership"], walk["address"]
    assert (own["rows"], own["written"], own["from_fill"], own["to_fill"]) == (7, 7, 14, 14)
    assert own["bytes"] == 7 * 2 * 4 * 2 * 32 * 4 and own["from"] != own["to"]
    assert at["block"] == own["to"] and at["row"] == 40 % 16
    assert at["slot"] == 16 * (int(own["to"].split("@")[0]) - 1000) + 8
    assert at["byte"] == 4 * (((2 * 32 * 16 + at["slot"]) * 2 + 1) * 32 + 5)
    assert walk["digest"] != walk["digest_after"]


def test_a_frame_a_contract_and_ownership_has_two(made):
    assert [card_of(s) for s in STAGES] == ["", "identity", "index", "ownership", "ownership", "address",
                                            "execution_reuse", ""]
    assert [f.kind for f in made.frames] == ["start", "staged", "staged", "staged", "committed", "staged", "staged",
                                             "committed"]
    for stage, frame in zip(STAGES, made.frames, strict=True):
        shapes = frame.scene.by_key()
        assert ("light" in shapes) == bool(card_of(stage))
        if card_of(stage):
            top = shapes[f"well.{card_of(stage)}"]["y"]
            assert shapes["light"]["y"] == top and top < shapes["token"]["y"] < top + shapes["light"]["h"]
    assert Recording.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_what_was_not_asked_yet_says_so(made):
    for n, frame in enumerate(made.frames):
        crossed = {card_of(s) for s in STAGES[: n + 1]}
        waiting = {key[5:] for key, s in frame.scene.by_key().items() if s.get("label") == "not asked yet"}
        assert waiting == set(ASKS) - crossed
        assert {c["label"]: c["value"] for c in frame.board}["contracts crossed"] == 5 - len(waiting)


def test_nothing_moves_in_the_digest_before_the_receipt(made):
    for n, frame in enumerate(made.frames):
        shown = frame.scene.by_key()["digest"]
        assert (shown["value"] != shown["prev"]) == (n >= STAGES.index("ownership"))
    staged, solid = (made.frames[STAGES.index(s)].scene.by_key()["copy"] for s in ("reserve", "ownership"))
    assert staged["hatch"] == 1 and "refs" not in staged and "hatch" not in solid and solid["refs"] == 1


def test_shapes_of_a_card_stand_apart_and_inside(made):
    for frame in made.frames:
        boxes = [s for s in frame.scene.shapes if s["kind"] in ("chip", "block", "slot")]
        for s in boxes:
            assert s["x"] >= 138 and s["x"] + s["w"] <= 950 and s["y"] + s["h"] + (19 if s.get("tag") else 0) <= 480
            if s["kind"] == "chip":
                assert len(s["label"]) * 7.4 < s["w"]
        for a, b in combinations(boxes, 2):
            apart = (a["x"] + a["w"] + 6 <= b["x"] or b["x"] + b["w"] + 6 <= a["x"]
                     or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"])
            assert apart, (a["key"], b["key"])
        sentence = frame.scene.by_key()["chat"]
        assert 2 + 8 * len(sentence["label"]) < 410


def test_words_are_sentences(made):
    for frame in made.frames:
        assert frame.title and frame.why.endswith(".") and all(line.endswith(".") for line in frame.twin)


@pytest.mark.parametrize(("contract", "fact"), [("identity", "compatible"), ("index", "named"), ("address", "same"),
                                                ("execution_reuse", "same")])
def test_a_way_that_did_not_hold_is_not_shown(walk, contract, fact):
    wrong = copy.deepcopy(walk)
    wrong[contract][fact] = False
    with pytest.raises(ValueError, match="did not hold"):
        recording(wrong, title="t", question="q")


def test_the_view_is_pure(walk):
    kept = copy.deepcopy(walk)
    one, other = (recording(walk, title="t", question="q") for _ in range(2))
    assert one.id == other.id and walk == kept and scene(walk, 3) == scene(walk, 3)


@pytest.mark.browser
def test_the_stage_shows_it_as_the_still_does(made):
    """Each frame at rest, mark by mark; no words clash, nothing is cut off, and it fits a laptop's screen."""
    pages = {"index.html": PAGE, "stage.js": source(), "walk.json": json.dumps(made.to_dict())}
    with serve(pages) as base, browser_page(1280, 800) as page:
        page.goto(f"{base}/?r=walk&theme=light#0")
        page.wait_for_function("window.ready")
        for i, frame in enumerate(made.frames):
            page.evaluate("i => stage.seek(i)", i)
            live = page.evaluate(LIST)
            page.evaluate("svg => { document.body.insertAdjacentHTML('afterbegin', `<p id=still>${svg}</p>`); }",
                          frame.svg())
            same(live, page.evaluate(LIST), f"frame {i}")
            page.evaluate("document.querySelector('#still').remove()")
            assert page.evaluate(CLASHES) == [], f"frame {i}"
        assert page.evaluate("document.documentElement.scrollHeight") <= 800
