"""Every value of the article that a loop states or derives is asserted: by a fixture, or by name in a test."""

from __future__ import annotations

import json

import pytest

from kvlab.study import fixtures
from tests.support import FIXTURES, ROOT

GOLDEN = json.loads((FIXTURES / "golden.json").read_text())
IN_FIXTURES = {v["id"] for path in fixtures.all_fixtures() for v in fixtures.load_fixture(path)["expect"]}
IN_TESTS = "\n".join(path.read_text() for path in ROOT.glob("tests/**/test_golden_l*.py"))
NEGATIVES = {2: 20, 3: 14, 4: 22, 5: 22, 6: 22, 7: 18}


@pytest.mark.parametrize("loop", ["L1", "L2", "L3", "L4", "L5", "L6", "L7"])
def test_no_value_is_left_out(loop):
    wanted = [name for name, row in GOLDEN.items() if name.split(".")[0] == loop and row["basis"] != "reconstructed"]
    assert wanted
    assert [name for name in wanted if name not in IN_FIXTURES and f'"{name}"' not in IN_TESTS] == []


@pytest.mark.parametrize(("loop", "count"), NEGATIVES.items())
def test_the_articles_malformed_cases_are_all_there(loop, count):
    found = [n for path in fixtures.all_fixtures() if path.name.startswith(f"loop{loop}_")
             for n in fixtures.load_fixture(path)["negatives"]]
    assert len({n["id"] for n in found}) == len(found) >= count
