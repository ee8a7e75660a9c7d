"""The page of the radix tree without a browser: it opens on the trace, plays chats, grades, refuses, and reopens."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvlab.reuse.eviction import ORDERS
from kvlab.study.lesson_radix import PREDICTIONS, answers, malformed, stories
from kvlab.views.scene import Recording
from tests.app.pages import open_page, stage_of
from tests.support import ROOT

PAGE = "app_pages/radix_tree.py"


def page(**query):
    return open_page(PAGE, query)


def recording(at):
    return Recording.from_dict(stage_of(at)["recording"])


def titles(at):
    return [frame.title for frame in recording(at).frames]


def here(at):
    return recording(at).frames[stage_of(at)["frame"]]


def choose(at, **fields):
    """Set fields of the form by their key, one after another, as a person does."""
    for name, value in fields.items():
        kinds = [*at.selectbox, *at.number_input, *at.text_area, *at.segmented_control, *at.multiselect]
        next(w for w in kinds if w.key == f"radix.{name.replace('_', ' ')}").set_value(value)
        at.run()
    return at


def said(at):
    return " ".join(m.value for m in (*at.markdown, *at.caption, *at.text))


def test_it_opens_at_once_on_the_split_of_the_articles_trace():
    at = page()
    assert here(at).title == "Split after 3 tokens, where it stands" and len(titles(at)) == 27
    assert not at.warning and all(e.value.startswith("**") for e in at.error), "the lab's first case only"
    assert dict(at.query_params) == {"f": "4"} or dict(at.query_params) == {"f": ["4"]}
    assert "are protected by a lock" in said(at)


def test_the_page_opens_without_torch():
    code = ("import sys; sys.path.insert(0, 'app'); from streamlit.testing.v1 import AppTest; "
            f"at = AppTest.from_file('app/{PAGE}', default_timeout=120).run(); "
            "assert not at.exception; sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("order", list(ORDERS))
def test_every_order_plays_and_says_its_name(order):
    at = page(**{"from": "chats", "slots": "24", "order": order, "policy": "sglang-0.5.11"})
    assert f"By {order}: first" in said(at)
    assert any(f"({order})" in frame.why for frame in recording(at).frames)


def test_an_order_changes_who_goes():
    evicted = [t for t in titles(page()) if t.startswith("Evict")]
    assert evicted != [t for t in titles(choose(page(), order="mru")) if t.startswith("Evict")]


@pytest.mark.parametrize("size", [2, 4])
def test_larger_blocks_match_less(size):
    one, more = page(), choose(page(), size=size)
    found = [{c["label"]: c["value"] for c in recording(at).frames[-1].board}["tokens matched"] for at in (one, more)]
    assert found[1] < found[0] and found[1] % size == 0


def test_chats_are_found_locked_and_evicted():
    at = choose(page(), **{"from": "chats"})
    assert not at.exception and "| Anna | 13 | 0 | 13 |" in said(at) and "| Clara | 13 | 10 | 3 |" in said(at)
    assert not any(t.startswith("Evict") for t in titles(at))
    choose(at, slots=24)
    assert any(t.startswith("Evict") for t in titles(at))
    choose(at, runs=["Anna", "Ben", "Clara"])
    refused = [f for f in recording(at).frames if f.kind == "refused"]
    assert len(refused) == 1 and "Dora" in refused[0].title, "everything else is locked, so she does not fit"
    assert "No leaf is unlocked" in said(at)


def test_what_a_reader_types_is_played_and_kept_out_of_sight():
    at = choose(page(), **{"from": "chats"})
    choose(at, Ben="My dear Jane, I have a letter from London")
    assert "| Ben | 13 | 12 | 1 |" in said(at)
    choose(at, **{"from": "trace"})
    choose(at, **{"from": "chats"})
    assert "| Ben | 13 | 12 | 1 |" in said(at)


def test_no_chat_at_all_is_an_empty_tree_and_a_hint():
    at = choose(page(), **{"from": "chats"})
    for name in ("Anna", "Ben", "Clara", "Dora"):
        choose(at, **{name: "  "})
    assert titles(at) == ["An empty tree"] and "Type a chat" in at.info[0].value


def test_a_chat_longer_than_the_pool_is_a_refusal_on_the_stage():
    at = page(**{"from": "chats", "slots": "8"})
    no = [f for f in recording(at).frames if f.kind == "refused"]
    assert no and all(f.scene.by_key()["why"]["label"] == "out_of_memory" for f in no) and not at.exception


def test_a_link_reopens_the_very_recording_and_frame():
    first = page(**{"from": "chats", "order": "lfu", "policy": "sglang-0.5.11", "size": "2", "slots": "30",
                    "chat": ["To be, or not to be", "To be, or not to be: that is"], "runs": ["Ben"], "f": "5"})
    assert stage_of(first)["frame"] == 4
    again = open_page(PAGE, {k: v if len(v) > 1 else v[0] for k, v in first.query_params.items()})
    assert stage_of(again)["recording"] == stage_of(first)["recording"] and stage_of(again)["frame"] == 4


@pytest.mark.parametrize(("query", "says"), [
    ({"from": "moon"}, "moon"), ({"order": "random"}, "random"), ({"policy": "vllm"}, "vllm"),
    ({"size": "3"}, "size=3"), ({"size": "x"}, "'x'"), ({"slots": "9999"}, "9999"), ({"slots": "-1"}, "-1"),
])
def test_mistakes_in_a_link_are_messages_and_the_trace_opens(query, says):
    at = page(**query)
    assert says in " ".join(e.value for e in at.error if "**" not in e.value)
    assert here(at).title.startswith("Split after 3 tokens")


@pytest.mark.parametrize("frame", ["0", "999", "x", "²"])
def test_a_frame_that_is_none_opens_all_the_same(frame):
    assert not page(f=frame).exception


def test_predictions_are_graded_by_the_machine():
    at, truth = page(), answers()
    first, second, *_ = (p["key"] for p in PREDICTIONS)
    choose(at, **{f"guess {first}": truth[first], f"guess {second}": truth[second] + 1})
    next(b for b in at.button if b.label.startswith("Run the machine")).click()
    at.run()
    marks = said(at)
    assert f"1. ✓ yes, the machine says **{truth[first]}**" in marks
    assert f"2. ✕ no, the machine says **{truth[second]}**" in marks and marks.count("No guess yet") == 4


@pytest.mark.parametrize(("lab", "cases"), [("Malformed inputs", malformed()), ("Bugs of real engines", stories())])
def test_the_failure_lab_shows_the_reason_and_equal_digests(lab, cases):
    at = choose(page(), lab=lab)
    for case in cases[::7]:
        choose(at, **{f"case {lab}": case.id})
        assert at.error[-1].value.startswith(f"**{case.negative['reason']}**")
        assert "= unchanged" in said(at)
