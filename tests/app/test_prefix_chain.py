"""The page without a browser: it opens on Ben's first miss, every choice asks a real index, mistakes are messages."""

from __future__ import annotations

from functools import partial

import pytest

from kvlab.study.lesson_prefix import PREDICTIONS, answers, malformed
from kvlab.views.scene import Recording
from tests.app.pages import open_page, stage_of


@pytest.fixture
def page():
    return partial(open_page, "app_pages/prefix_chain.py")


def here(at):
    shown = stage_of(at)
    return Recording.from_dict(shown["recording"]).frame(shown["frame"])


def ben(at):
    """(tokens taken, tokens to compute), as the page says it."""
    said = next(m.value for m in at.markdown if m.value.startswith("Ben takes"))
    numbers = said.split("**")
    return int(numbers[1]), int(numbers[3])


def widget(at, name):
    kinds = [*at.segmented_control, *at.radio, *at.slider, *at.selectbox, *at.toggle, *at.text_area, *at.number_input]
    return next(w for w in kinds if w.key == f"prefix.{name}")


def choose(at, name, value):
    widget(at, name).set_value(value)
    return at.run()


def test_it_opens_on_the_first_miss_of_a_prompt_that_differs_at_37(page):
    at = page()
    frame = here(at)
    assert frame.title == "Block 2: the first miss" and ben(at) == (32, 32)
    shapes = frame.scene.by_key()
    assert [shapes[f"p{n}"]["mark"] for n in range(3)] == ["=", "=", "≠"]
    assert shapes["t5"]["mark"] == "≠" and "mark" not in shapes["t6"], "token 37 is the sixth of block 2"


@pytest.mark.parametrize(("at_place", "taken"), [(0, 0), (15, 0), (16, 16), (37, 32), (47, 32)])
def test_every_key_from_the_edit_on_is_another(page, at_place, taken):
    at = choose(page({"n": "48"}), "at 48", at_place)
    assert ben(at) == (taken, 48 - taken)
    table = next(m.value for m in at.markdown if "Anna's key" in m.value)
    assert (table.count("= same"), table.count("≠ other")) == (at_place // 16, 3 - at_place // 16)
    assert table.count("not the same") == 1


def test_the_same_again_is_all_there_and_computes_a_block(page):
    at = choose(page(), "from", "same")
    assert widget(at, "n same").value == 48
    assert ben(at) == (32, 16) and here(at).title == "32 of 48 tokens taken, 16 to compute"
    assert "logits are wanted" in here(at).why
    assert ben(choose(at, "logits", False)) == (48, 0)
    assert ben(choose(at, "policy", "vllm-0.23")) == (32, 16), "the runtime caps always"
    at = choose(choose(at, "policy", "normative"), "logits", True)
    assert ben(choose(at, "tails", True)) == (47, 1)
    assert "15 rows of the last one are copied" in here(at).why
    assert ben(choose(at, "n same", 64)) == (63, 1)


def test_own_prompts(page):
    at = choose(page(), "from", "own")
    assert ben(at)[0] % 16 == 0 and ben(at)[0] > 0
    at = choose(at, "Ben", "No")
    assert ben(at)[0] == 0
    at = choose(choose(at, "Anna", "Yes"), "Ben", "Yes")
    assert any("no key" in i.value for i in at.info)
    at = choose(at, "Ben", " ")
    assert not at.exception and any("Type a prompt" in e.value for e in at.error)


def test_a_long_prompt_shows_a_window(page):
    at = page({"from": "own", "p": ["She was in love. " * 23, "She was in love. " * 23]})
    frame = here(at)
    keys = [k for k in frame.scene.by_key() if k[0] == "p" and k[1:].isdigit()]
    assert frame.scene.by_key()["prompt"]["sub"].startswith("blocks ") and len(keys) == 6


def test_a_link_reopens_the_very_frame(page):
    first = page({"from": "same", "n": "48", "tails": "1", "f": "3"})
    assert stage_of(first)["frame"] == 2
    again = page({k: v for k, v in first.query_params.items() if k != "f"})
    assert stage_of(again)["recording"] == stage_of(first)["recording"]
    assert {k: v for k, v in again.query_params.items() if k != "f"} == {"from": "same", "n": "48", "tails": "1"}


@pytest.mark.parametrize("query", [{"from": "moon"}, {"n": "50"}, {"at": "99"}, {"at": "x"}, {"at": "64"},
                                   {"policy": "lru"}, {"tails": "yes"}, {"n": "²"}])
def test_mistakes_in_a_link_are_messages_and_the_page_opens(page, query):
    at = page(query)
    ((key, value),) = query.items()
    assert any(f"{key}={value!r}" in e.value or f"{key}={value}" in e.value for e in at.error)
    assert here(at).title == "Block 2: the first miss"


def test_predictions_are_graded_by_the_machine(page):
    at, truth = page(), answers()
    for n, p in enumerate(PREDICTIONS):
        widget(at, f"guess {p['key']}").set_value(truth[p["key"]] + (n == 0))
    next(b for b in at.button if "grade" in b.label).click()
    said = [m.value for m in at.run().markdown if "the machine says" in m.value]
    assert [("✓" in s, "✕" in s) for s in said] == [(n > 0, n == 0) for n in range(len(PREDICTIONS))]


def test_the_failure_lab_shows_the_reason_and_equal_digests(page):
    at = page()
    for case in malformed()[::7]:
        at = choose(at, "case", case.id)
        assert at.error[-1].value.startswith(f"**{case.negative['reason']}**")
        assert any("= unchanged" in m.value for m in at.markdown)
    at = choose(at, "lab", "Bugs of real engines")
    table = next(m.value for m in at.markdown if "public bug" in m.value)
    assert table.count("✓ held") == 7 and "✕" not in table
