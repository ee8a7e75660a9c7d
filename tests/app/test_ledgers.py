"""The page without a browser: it opens on the article's requests, follows its sliders, answers mistakes in words."""

from __future__ import annotations

from functools import partial

import pytest

from kvlab.study.occupancy import PAPER_REPORTED
from tests.app.pages import open_page, stage_of
from tests.support import ROOT


@pytest.fixture
def page():
    return partial(open_page, "app_pages/ledgers.py")


def figures(at):
    last = stage_of(at)["recording"]["frames"][-1]["board"]
    return {cell["label"]: (cell["value"], cell.get("unit")) for cell in last}


def captions(at):
    return " ".join(c.value for c in at.caption)


ARTICLE = {"rectangles reserve": (24, "MiB"), "request views": (6, "MiB"), "distinct blocks": (3, "MiB"),
           "pool": (8, "MiB"), "unused, as seen": (22, "rows"), "unused, in blocks": (15, "rows")}


def test_it_opens_on_the_articles_three_requests_with_a_cost_line(page):
    at = page()
    shown = stage_of(at)
    assert shown["frame"] == len(shown["recording"]["frames"]) - 1
    assert figures(at) == ARTICLE
    assert "Llama-3-8B, TP 2: one token costs 65,536 bytes" in captions(at)
    assert not at.error and not at.get("vega_lite_chart")


def test_a_length_and_the_block_size_move_the_ledgers(page):
    at = page()
    at.slider(key="tokensA").set_value(48)
    at.run()
    assert figures(at)["unused, in blocks"] == (0, "rows") and figures(at)["distinct blocks"] == (3, "MiB")
    at.select_slider(key="size").set_value(64)
    at.run()
    assert figures(at)["distinct blocks"] == (4, "MiB") and figures(at)["unused, in blocks"] == (16, "rows")


def test_without_sharing_views_and_blocks_agree(page):
    at = page({"share": "0"})
    assert figures(at)["distinct blocks"] == figures(at)["request views"] == (6, "MiB")


def test_a_link_reopens_the_same_picture(page):
    first = page({"A": "50", "B": "20", "m": "qwen2.5-7b", "tp": "4", "size": "8", "pool": "9"})
    again = page(dict(first.query_params))
    assert stage_of(again)["recording"] == stage_of(first)["recording"]
    earlier = page(dict(first.query_params) | {"f": ["3"]})
    assert stage_of(earlier)["frame"] == 2 and stage_of(again)["frame"] == stage_of(first)["frame"] > 2
    earlier.slider(key="tokensB").set_value(5)
    earlier.run()
    assert stage_of(earlier)["frame"] == len(stage_of(earlier)["recording"]["frames"]) - 1
    assert "Qwen2.5-7B, TP 4" in captions(again)


@pytest.mark.parametrize(("query", "says"), [
    ({"A": "x"}, "A='x'"), ({"size": "7000"}, "size"), ({"size": "5"}, "5"), ({"share": "-1"}, "share"),
    ({"m": "/no/such/config.json"}, "/no/such/config.json"),
    ({"m": "smollm2", "tp": "2"}, "cannot be split"), ({"pool": "2"}, "out_of_memory"),
    ({"most": "20"}, "committed_exceeds_reserved"), ({"A": "0", "B": "0", "C": "0"}, "Nobody has a token"),
])
def test_mistakes_are_messages_and_never_tracebacks(page, query, says):
    at = page(query)
    assert not at.exception
    assert says in " ".join(e.value for e in at.error)


def test_a_mistake_keeps_the_last_good_picture(page):
    at = page()
    good = stage_of(at)["recording"]
    for name in "ABC":
        at.slider(key=f"tokens{name}").set_value(0)
    at.run()
    assert at.error and stage_of(at)["recording"] == good


def test_the_embedded_arrivals_in_three_layouts(page):
    at = page()
    at.button[-1].click()
    at.run()
    assert not at.exception and not at.error
    assert len(at.get("vega_lite_chart")) == 1
    said = captions(at)
    assert "600 requests" in said and "Our own arrivals" in said and "CC-BY 4.0" in said
    assert "Paper-reported" in said and str(PAPER_REPORTED["vLLM"]) in said
    table = next(m.value for m in at.markdown if m.value.startswith("| layout"))
    assert all(name in table for name in ("maximum length", "power of two", "| pages |"))


def test_a_file_of_ones_own_with_its_credit_and_its_bad_rows(page, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,10,2\nbroken\n")
    at = page({"file": str(path)})
    at.button[-1].click()
    at.run()
    said = captions(at)
    assert "1 request." in said and "unreadable: 1 row." in said and "Our own" not in said


def test_a_file_that_is_no_trace_is_named(page, tmp_path):
    for path in (tmp_path / "nowhere.csv", ROOT / "README.md"):
        at = page({"file": str(path)})
        at.button[-1].click()
        at.run()
        assert not at.exception and str(path) in at.error[0].value
