"""The page without a browser: it opens on the committed run, runs the model, and answers mistakes in words."""

from __future__ import annotations

import json
from functools import partial

import pytest

from kvlab.study.setup import Link
from tests.app.pages import open_page, stage_of
from tests.support import FIXTURES

COMMITTED = json.loads((FIXTURES / "two_prompts.json").read_text())
page = partial(open_page, "streamlit_app.py")


def press(at):
    at.button[0].click()
    return at.run()


def test_it_opens_on_the_committed_recording_at_once():
    at = page()
    shown = stage_of(at)
    assert shown["recording"] == COMMITTED["recording"]
    assert shown["frame"] == COMMITTED["frame"]
    assert [t.value for t in at.text] == [said.strip() for said in COMMITTED["texts"].values()]


def test_a_run_shows_its_own_recording_and_words():
    at = page()
    at.text_area(key="promptA").set_value("She was in love with him, and thought so")
    at.text_area(key="promptB").set_value("She was in love with him, and he knew it")
    at.number_input[0].set_value(5)
    press(at)
    shown = stage_of(at)
    assert shown["recording"]["id"] != COMMITTED["recording"]["id"]
    assert shown["recording"]["title"] == "2 prompts, one memory"
    assert shown["frame"] == 0
    assert len(at.text) == 2 and not at.error


def test_a_link_reopens_the_very_frame():
    committed = Link.from_query({k: v if isinstance(v, list) else [v] for k, v in at_link().items()})
    at = page(at_link() | {"f": "12"})
    shown = stage_of(at)
    assert shown["recording"]["id"] == COMMITTED["recording"]["id"] == committed.recording
    assert shown["frame"] == 11
    assert not at.warning


def at_link():
    at = page()
    return {k: v for k, v in at.query_params.items() if k != "f"}


def test_a_link_to_another_run_makes_it_again():
    at = page({"p": ["My dear Lizzy, I hope so", "My dear Lizzy, I hope not"], "n": "3", "f": "4"})
    assert stage_of(at)["frame"] == 3
    assert not at.warning


def test_a_link_that_no_longer_matches_says_what():
    at = page(at_link() | {"d": "0123456789ab", "r": "ffffffffffffffff", "n": "3", "f": "400"})
    stage_of(at)
    said = " ".join(w.value for w in at.warning)
    assert all(word in said for word in ("model", "frames", "frame 400"))


@pytest.mark.parametrize(("query", "says"), [
    ({"p": ["one"], "b": "x"}, "block size"),
    ({"p": ["one"], "m": "/nowhere/model.gguf"}, "/nowhere/model.gguf"),
    ({"p": ["one and two and three and four"], "pool": "1", "b": "4"}, "out_of_memory"),
    ({"p": [" "]}, "prompt"),
    ({"p": ["so long a letter " * 200]}, "can hold"),
    ({"p": ["one"], "chat": "1"}, "plain text"),
])
def test_mistakes_are_messages_and_never_tracebacks(query, says):
    at = page(query)
    assert says in " ".join(e.value for e in at.error)
    assert stage_of(at)["recording"] == COMMITTED["recording"]


def test_a_link_with_unusual_values_still_fills_the_form():
    at = page({"p": ["one day", "one night", "one year"], "x": "5", "t": "3.5", "k": "5000", "s": str(2**40),
               "pool": "90", "n": "2", "b": "7"})
    assert not at.exception and not at.error
    assert len(at.text_area) == 3 and len(at.text) == 15


@pytest.mark.parametrize("query", [{"t": "nan"}, {"t": "-1"}, {"s": "-3"}, {"x": "0"}, {"x": "99"}, {"n": "100000"}])
def test_a_link_out_of_range_is_a_message(query):
    at = page({"p": ["one"]} | query)
    assert not at.exception and at.error


def test_too_small_a_pool_keeps_the_page():
    at = page()
    at.number_input[-1].set_value(1)
    press(at)
    assert not at.exception
    assert "out_of_memory" in at.error[0].value and "Nothing was changed" in at.error[0].value
    at.number_input[-1].set_value(0)
    press(at)
    assert not at.error and stage_of(at)
