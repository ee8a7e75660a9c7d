"""The page without a browser: it opens on a real scalar, follows every choice, and refuses in words."""

from __future__ import annotations

from functools import partial

import pytest

from tests.app.pages import open_page, stage_of

page = partial(open_page, "app_pages/addresses.py")


def last(at):
    return stage_of(at)["recording"]["frames"][-1]


def test_it_opens_on_a_real_scalar():
    at = page()
    shown = stage_of(at)
    assert shown["frame"] == 12 == len(shown["recording"]["frames"]) - 1
    assert "the same number" in at.success[0].value and "0x" in at.success[0].value
    assert not at.error


@pytest.mark.parametrize(("changes", "reason"), [
    ({"token": 46}, "outside_request_context"), ({"layer": 4}, "layer_out_of_range"),
    ({"head": 2}, "head_out_of_range"), ({"lane": 32}, "lane_out_of_range"),
])
def test_a_refusal_is_a_message_with_its_reason(changes, reason):
    at = page()
    for key, value in changes.items():
        at.number_input(key=f"addresses.{key}").set_value(value)
    at.run()
    assert reason in at.error[0].value and "Nothing was read" in at.error[0].value
    assert last(at)["kind"] == "refused"
    at.number_input(key=f"addresses.{next(iter(changes))}").set_value(0)
    at.run()
    assert not at.error and at.success


def test_bens_token_25_is_there_and_not_his():
    at = page({"request": "B", "token": "25"})
    assert "outside_request_context" in at.error[0].value
    assert any("is written" in sentence for sentence in last(at)["twin"])
    at = page({"request": "B", "token": "24"})
    assert at.success and not at.error


def test_every_layout_reads_the_same_number():
    at = page()
    read = at.success[0].value.split("**")[1]
    offsets = set()
    for order in at.selectbox(key="addresses.order").options[::17]:
        for together in (False, True):
            for packed in (1, 4):
                at.selectbox(key="addresses.order").set_value(order)
                at.toggle(key="addresses.together").set_value(together)
                at.selectbox(key="addresses.packed").set_value(packed)
                at.run()
                assert not at.exception
                assert at.success[0].value.split("**")[1] == read and "the same number" in at.success[0].value
                offsets.add(next(c["value"] for c in last(at)["board"] if c["label"] == "byte offset"))
    assert len(offsets) > 10


def test_the_articles_example():
    at = page({"run": "Article", "token": "16", "layer": "24", "head": "1", "lane": "5"})
    assert "4,311,843,082" in at.info[0].value
    assert last(at)["title"] == "Byte 4,311,843,082"


def test_a_link_reopens_the_same_recording():
    at = page({"token": "33", "kind": "V", "packed": "8"})
    first = stage_of(at)["recording"]["id"]
    again = page({k: (v[0] if isinstance(v, list) else v) for k, v in at.query_params.items() if k != "f"})
    assert stage_of(again)["recording"]["id"] == first
    assert [stage_of(page({"f": f}))["frame"] for f in ("4", "999", "x")] == [3, 12, 12]


@pytest.mark.parametrize(("query", "says"), [
    ({"token": "many"}, "whole number"), ({"request": "Z"}, "'Z'"), ({"order": "diagonal"}, "diagonal"),
    ({"packed": "3"}, "3"), ({"kind": "Q"}, "'Q'"), ({"run": "mine"}, "mine"),
])
def test_a_wrong_link_leaves_the_page_usable(query, says):
    at = page(query)
    assert says in at.error[0].value
    assert stage_of(at) and at.success


def test_request_c_is_only_in_the_example():
    at = page({"request": "C"})
    assert not at.exception and stage_of(at) and at.success
