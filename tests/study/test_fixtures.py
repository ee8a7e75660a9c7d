"""Every fixture holds, every reason is hit, and the runner itself can fail."""

from __future__ import annotations

import ast
import copy
import json
import re

import pytest

from kvlab.__main__ import main
from kvlab.reasons import REASONS
from kvlab.study import fixtures
from tests.support import ROOT

PATHS = fixtures.all_fixtures()
LOADED = [fixtures.load_fixture(p) for p in PATHS]
FIRST = next(f for f in LOADED if f["fixture"] == "loop5-ownership")
NEGATIVES = [pytest.param(f, n, id=n["id"]) for f in LOADED for n in f.get("negatives", ())]


@pytest.mark.parametrize("fixture", LOADED, ids=lambda f: f["fixture"])
def test_every_value_holds(fixture):
    session = fixtures.play(fixture)
    verdicts = [fixtures.check_value(session, v) for v in fixture["expect"]]
    assert verdicts
    assert [v for v in verdicts if not v.held] == []


@pytest.mark.parametrize(("fixture", "negative"), NEGATIVES)
def test_every_refusal_is_named_and_leaves_the_digest(fixture, negative):
    verdict = fixtures.check_negative(fixture, negative)
    assert verdict.held, verdict


def test_every_reason_in_the_code_is_hit_by_a_fixture_and_the_other_way_round():
    raised = set()
    for path in ROOT.glob("kvlab/**/*.py"):
        if path.name == "reasons.py" or "views" in path.parts:
            continue
        text = path.read_text()
        raised |= set(re.findall(r'(?:Rejected|_refuse)\(\s*"([a-z_]+)"', text))
        words = {n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        raised |= words & set(REASONS)
    hit = set(fixtures.reasons_hit(PATHS))
    assert raised - set(REASONS) == set()
    assert hit == set(REASONS)
    assert set(REASONS) - raised == set()


def test_a_planted_wrong_value_and_a_planted_wrong_reason_turn_red():
    fixture = copy.deepcopy(FIRST)
    fixture["expect"][5]["equals"] = "not this"
    fixture["negatives"][3]["reason"] = "double_free"
    counts = fixtures.report([(5, fixtures.check_fixture(fixture))])["5"]
    assert counts["golden"]["failed"] == [fixture["expect"][5]["id"]]
    assert counts["negatives"]["failed"] == [fixture["negatives"][3]["id"]]


def test_a_valid_operation_is_no_negative():
    fixture = copy.deepcopy(FIRST)
    negative = {"id": "x", "reason": "out_of_memory", "at": "base", "do": [{"op": {"op": "append", "request": "A"}}]}
    assert fixtures.check_negative(fixture, negative).got == "accepted"


@pytest.mark.parametrize(("text", "says"), [("{", "line 1"), ("{}", "a fixture needs"), (None, "expected a fixture")])
def test_a_file_that_is_no_fixture_is_named(tmp_path, text, says):
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(fixtures.FixtureError, match=says) as error:
        fixtures.load_fixture(path)
    assert str(path) in str(error.value)


def test_check_command(capsys, tmp_path):
    assert main(["check", "5", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["5"]["golden"]["held"] > 200
    broken = copy.deepcopy(FIRST)
    broken["expect"][0]["equals"] = -1
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(broken))
    assert main(["check", "--fixture", str(mine)]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert main(["check", "99"]) == 2
