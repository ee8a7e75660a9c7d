"""The lesson's parts on byte ledgers: credit under every picture, the same bytes for the same data, one family."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from kvlab.contract import Rejected
from kvlab.memory.allocator import Allocator
from kvlab.study import occupancy
from kvlab.study.lesson_ledger import Wish, credit, family, plot, sheet
from kvlab.study.traces import EMBEDDED, AzureArrivals
from tests.memory.worlds import layout_of

WISHES = [Wish("A", 33, 64), Wish("B", 25, 48), Wish("C", 16, 32)]


@pytest.fixture(scope="module")
def found():
    return occupancy.run(AzureArrivals(EMBEDDED))


def test_a_plot_has_the_same_bytes_its_credit_and_no_date(found):
    one, two = (plot(found, credit(EMBEDDED)) for _ in range(2))
    svg = one._repr_svg_()
    assert svg == two._repr_svg_() and ElementTree.fromstring(svg) is not None
    for words in ("Our own arrivals", "CC-BY 4.0", "paper-reported, own workload: vLLM 96.3 %", "tokens/s"):
        assert words in svg
    assert "<dc:date>" not in svg and "matplotlib.org" not in repr(one)
    assert repr(one).count("\n") == 4 and "pages:" in repr(one)


def test_whose_arrivals_they_are():
    assert credit(EMBEDDED).startswith("Our own arrivals")
    assert credit("/somewhere/else.csv").startswith("Azure LLM inference trace 2023, CC-BY 4.0")


def test_a_family_shares_or_does_not():
    tables = {}
    for share in (True, False):
        end = family(Allocator(layout_of(((16, 8),))), WISHES, share=share).steps[-1].committed["requests"]
        assert {r: row["context"] for r, row in end.items()} == {"A": 33, "B": 25, "C": 16}
        tables[share] = {h for row in end.values() for h in row["tables"]["g0"]}
    assert (len(tables[True]), len(tables[False])) == (3, 6)


def test_a_rectangle_that_is_too_small_is_refused():
    machine = Allocator(layout_of(((16, 8),)))
    family(machine, WISHES)
    for reserved in (32, {"A": 64, "B": 24, "C": 32}):
        with pytest.raises(Rejected) as no:
            sheet(machine.snapshot(), "t", "w.", reserved=reserved)
        assert no.value.reason == "committed_exceeds_reserved"
    assert "rectangular" not in sheet(machine.snapshot(), "t", "w.")["ledgers"]
