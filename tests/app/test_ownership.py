"""The page without a browser: it opens on the article's trace, asks the real machine, answers mistakes in words."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from kvlab.study.lesson_ownership import malformed, stories
from kvlab.views.scene import Recording
from tests.app.pages import open_page, stage_of
from tests.support import ROOT


@pytest.fixture
def page():
    return partial(open_page, "app_pages/ownership.py")


def texts(recording):
    """Title and why of every frame: what stays the same in a difference is left out there."""
    return [(f["title"], f["why"], f["kind"]) for f in recording["frames"]]


def here(at):
    shown = stage_of(at)
    return texts(shown["recording"])[shown["frame"]]


def press(at, label):
    next(b for b in at.button if b.label == label).click()
    return at.run()


def choose(at, **fields):
    """Set fields of the form by the end of their key, one after another, as a person does."""
    for name, value in fields.items():
        name = name.replace("_", " ")
        kinds = [*at.selectbox, *at.number_input, *at.text_input, *at.segmented_control, *at.multiselect]
        next(w for w in kinds if str(w.key).endswith(name)).set_value(value)
        at.run()
    return at


def test_it_opens_on_the_articles_whole_trace(page):
    at = page()
    titles = [title for title, _, _ in texts(stage_of(at)["recording"])]
    assert here(at)[0] == "Lease the source, copy its 2 valid rows"
    wanted = ["Fork A into D", "D appends: reserve in g0 first", "Rolled back, to the byte", "Write row 2",
              "D appends token 34", "Truncate D to 32 tokens", "Publish F: 16 tokens", "Cancel D", "Release A",
              "G finds 16 tokens in the cache", "Forget #c40d"]
    assert [t for t in titles if t in wanted] == wanted
    late = next(f for f in texts(stage_of(at)["recording"]) if f[0].startswith("Refused: write into F's tail"))
    assert "given to somebody else" in late[1] and late[2] == "refused"
    assert all(e.value.startswith("**half_bundle_publication**") for e in at.error), "the lab's first case only"


def test_the_page_opens_without_torch():
    code = ("import sys; sys.path.insert(0, 'app'); from streamlit.testing.v1 import AppTest; "
            "at = AppTest.from_file('app/app_pages/ownership.py', default_timeout=120).run(); "
            "assert not at.exception; sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


def test_each_press_appends_and_the_stage_goes_there(page):
    at = choose(page(), Request="G")
    press(at, "Do it")
    assert here(at) == ("G appends token 16", "1001@5 and 2001@9 turn solid in G's table. "
                        "The older blocks stay as they are.", "committed")
    choose(at, operation="fork")
    press(at, "Do it")
    assert here(at)[0] == "Fork G into B"
    assert at.query_params["do"] == ["append.G.1", "fork.G.B"]
    press(at, "Undo")
    assert here(at)[0] == "G appends token 16"
    press(at, "Start over")
    assert here(at)[0].startswith("Lease the source")


def test_a_refusal_is_a_frame_with_its_reason_and_the_same_digest(page):
    at = choose(page(), Request="A", operation="release")
    press(at, "Do it")
    assert here(at)[0] == "Refused: release A" and here(at)[2] == "refused"
    shown = stage_of(at)
    digest = Recording.from_dict(shown["recording"]).frame(shown["frame"]).scene.by_key()["digest"]
    assert digest["value"] == digest["prev"]
    assert any("`unknown_request`" in m.value for m in at.sidebar.markdown)


def test_a_lease_outlasts_its_request(page):
    at = page({"do": ["lease.F.write", "cancel.F", "allocate.H.40"]})
    assert "out_of_memory" in " ".join(m.value for m in at.sidebar.markdown)
    press(choose(at, operation="unlease"), "Do it")
    press(choose(at, operation="allocate", allocate=40), "Do it")
    assert here(at)[:1] == ("Publish B: 40 tokens",)


def test_the_plug_and_the_successor_that_undoes(page):
    at = choose(page({"do": ["append.G.1"]}), operation="plug", Request="G")
    choose(at, Pull_it_after="reserve every group unpublished in g0")
    press(at, "Do it")
    assert here(at)[0] == "Refused: append 1 token to G" and "broke off" in here(at)[1]
    press(choose(at, operation="compensate"), "Do it")
    assert here(at)[0] == "Truncate G to 16 tokens: compensate"


def test_a_fresh_machine_from_nothing_to_a_hit(page):
    at = choose(page(), start="fresh")
    assert here(at)[0] == "Every block is free"
    assert any("nothing yet" in c.value for c in at.sidebar.caption)
    for fields in ({"operation": "allocate", "allocate": 40}, {"operation": "name", "name": 2},
                   {"operation": "release"}, {"operation": "touch", "more": 3}, {"operation": "evict"}):
        press(choose(at, **fields), "Do it")
        assert here(at)[2] == "committed", fields
    assert at.query_params["do"][3].startswith("touch.B.3.1000@1-2000@1")


def test_a_link_reopens_the_very_history_and_frame(page):
    first = page({"from": "fresh", "do": ["allocate.A.33", "fork.A.B", "append.B.1"], "f": "4"})
    assert stage_of(first)["frame"] == 3
    again = page({k: v for k, v in first.query_params.items() if k != "f"})
    assert stage_of(again)["recording"] == stage_of(first)["recording"] and here(again)[0] == "B appends token 33"


@pytest.mark.parametrize(("query", "says"), [
    ({"from": "moon"}, "moon"), ({"do": ["alocate.A.1"]}, "alocate.A.1"), ({"do": ["append.A.x"]}, "append.A.x"),
    ({"do": ["unlease.7"]}, "no lease 7"), ({"from": "fresh", "do": ["compensate"]}, "nothing to undo"),
    ({"do": ["plug.A.99"]}, "plug.A.99"), ({"do": ["touch.T.0.1000"]}, "touch.T.0.1000"),
])
def test_mistakes_in_a_link_are_messages_and_the_trace_opens(page, query, says):
    at = page(query)
    assert says in " ".join(e.value for e in at.error if "**" not in e.value)
    assert here(at)[0].startswith("Lease the source")


def test_a_name_that_is_none_is_a_message_and_changes_nothing(page):
    at = choose(page(), operation="allocate")
    next(t for t in at.text_input if t.label == "New request").set_value("a.b")
    press(at, "Do it")
    assert not at.exception and "a.b" in at.sidebar.error[0].value
    assert here(at)[0].startswith("Lease the source")


def test_every_operation_of_the_form_can_be_pressed(page):
    at = page()
    for word in ("append", "fork", "truncate", "release", "cancel", "allocate", "name", "touch", "evict", "lease",
                 "unlease", "compensate", "plug"):
        choose(at, operation=word)
        if word in ("name", "lease"):
            choose(at, Request="G")  # whom the trace has left with a full block
        if word == "lease":
            choose(at, kind="read")
        press(at, "Do it")
        assert not at.exception, word
    assert len(at.query_params["do"]) == 13


@pytest.mark.parametrize(("lab", "cases"), [("Malformed inputs", malformed()), ("Bugs of real engines", stories())])
def test_the_failure_lab_shows_the_reason_and_equal_digests(page, lab, cases):
    at = choose(page(), lab=lab)
    for case in cases[::9]:
        choose(at, **{f"case {lab}": case.id})
        assert at.error[-1].value.startswith(f"**{case.negative['reason']}**")
        assert any("= unchanged" in m.value for m in at.markdown)
        assert not case.engine or any(case.id in m.value and case.wrong in m.value for m in at.markdown)


def test_six_threads_write_and_one_order_explains_it(page):
    at = press(page(), "Let six threads write")
    said = next(m.value for m in at.markdown if "unbroken chain" in m.value)
    assert said.count("✓") == 3 and "✕" not in said
    assert any("Linearisable" in c.value for c in at.caption)
