"""The article's Loop 3 values: nearly all stand in the fixture, these are the ones a fixture cannot say."""

from __future__ import annotations

import json

import pytest

from kvlab.contract import Rejected
from kvlab.memory.books import Books
from kvlab.study import fixtures
from kvlab.study.occupancy import PAPER_REPORTED
from tests.support import FIXTURES

FIXTURE = fixtures.load_fixture(FIXTURES / "loop3_ledgers.json")
GOLDEN = {name: row for name, row in json.loads((FIXTURES / "golden.json").read_text()).items()
          if name.startswith("L3.")}
HERE = {"L3.frag.not_additive", "L3.negative.refs_as_unique", "L3.negative_count", "L3.orca.token_state_share",
        "L3.vllm.token_state_share"}


def test_every_value_of_the_loop_is_asserted_somewhere():
    assert {v["id"] for v in FIXTURE["expect"]} | HERE == set(GOLDEN)


def leaves(value):
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in leaves(v)]
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, list) else [value]


def test_the_fixture_expects_what_the_article_says():
    """Every number that the article gives under an id is one that the fixture expects under that id."""
    for name, row in GOLDEN.items():
        if name not in HERE:
            said = [leaf for v in FIXTURE["expect"] if v["id"] == name for leaf in leaves(v["equals"])]
            assert [leaf for leaf in leaves(row["expected"]) if leaf not in said] == [], name


def test_fragmentation_is_not_additive():
    books, additive = Books(FIXTURE["base"]), True
    for other in ("rectangular.slack", "request_view.tail", "unique.tail", "pool.free"):
        with pytest.raises(Rejected):
            books.ask({"ask": "add", "terms": [other, "fragmentation.out_of_reach"]})
        additive = False
    assert additive is GOLDEN["L3.frag.not_additive"]["expected"]["additive"]


def test_fourteen_refusals_and_the_one_that_the_article_names():
    reasons = [n["reason"] for n in FIXTURE["negatives"]]
    assert len(set(reasons)) == len(reasons) == GOLDEN["L3.negative_count"]["expected"]
    six = next(n for n in FIXTURE["negatives"] if n.get("patch", [{}])[0].get("value") == 6)
    verdict = fixtures.check_negative(FIXTURE, six)
    assert verdict.held and verdict.got == GOLDEN["L3.negative.refs_as_unique"]["expected"]


def test_what_the_paper_reports_is_quoted_right_and_marked_as_such():
    orca, vllm = GOLDEN["L3.orca.token_state_share"], GOLDEN["L3.vllm.token_state_share"]
    assert orca["source_reported"] and vllm["source_reported"]
    assert list(PAPER_REPORTED["three Orca variants"]) == orca["expected"]
    assert PAPER_REPORTED["vLLM"] == vllm["expected"]
