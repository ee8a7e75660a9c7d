"""The bench's own arithmetic and its paths; no speed is asserted."""

from __future__ import annotations

import json

from kvlab.execution.model import load_model
from kvlab.memory.kv_store import RectangularMemory
from kvlab.study import bench
from kvlab.study.bench import Row


def test_a_row_holds_on_the_right_side_of_its_target():
    assert Row("x", ours=9.0, theirs=10.0, target=0.9).holds is True
    assert Row("x", ours=8.9, theirs=10.0, target=0.9).holds is False
    assert Row("x", ours=2.0, theirs=3.0, target=1.0, better="lower").holds is True
    assert Row("x", ours=4.0, theirs=3.0, target=1.0, better="lower").holds is False
    assert Row("x", note="not here").holds is None


def test_interleaved_takes_turns_and_medians():
    turns = []

    def taking(name, values):
        def one():
            turns.append(name)
            return values.pop()
        return one

    assert bench.interleaved(taking("a", [3.0, 1.0, 2.0]), taking("b", [5.0, 9.0, 7.0]), rounds=3) == (2.0, 7.0)
    assert turns == ["a", "b"] * 3


def test_decode_rate_decodes_and_releases():
    model, tokenizer = load_model("austen")
    c = model.config
    memory = RectangularMemory(c.layers, c.kv_heads, c.head_dim, slots=1, max_length=64)
    assert bench.decode_rate(model, memory, tokenizer.encode("It is a truth"), 5) > 0
    assert memory.slot == {}


def test_the_table_is_printed_and_written(monkeypatch, tmp_path, capsys):
    rows = {"one": lambda: iter([Row("one", "s", 1.0, "limit", 2.0, 1.0, "lower")]),
            "two": lambda: iter([Row("two", note="not here: a peer")])}
    monkeypatch.setattr(bench, "BENCHES", rows)
    assert bench.main("", tmp_path / "bench.json") == 0
    said = capsys.readouterr().out
    assert "yes" in said and "not here: a peer" in said
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [r["name"] for r in written] == ["one", "two"] and written[0]["ratio"] == 0.5
    assert bench.main("two", tmp_path / "bench.json") == 0
    assert "one" not in capsys.readouterr().out.split("holds")[1]
