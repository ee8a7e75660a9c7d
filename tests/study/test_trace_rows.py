"""Entries of a file: lines and elements of one JSON array, one at a time, where they stand and where they break."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.study import trace_rows
from kvlab.study.trace_rows import TraceError, TraceFile, entries


def read(path, layout="array"):
    with path.open("rb") as file:
        return list(entries(path, file, layout))


def written(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_elements_know_their_line_and_index(tmp_path):
    path = written(tmp_path, '\ufeff\n[\n{"a":\n 1}, [2]\n,\n{"b": "]"} ]\n\n')
    assert read(path) == [(3, 0, {"a": 1}), (4, 1, [2]), (6, 2, {"b": "]"})]
    assert read(written(tmp_path, " [ ] ")) == []


BROKEN = [('[{"a": 1}', ", or ] was expected, not the end of the file", 1, 1),
          ('[{"a": 1}\n{"a": 2}]', ", or ] was expected, not '{'", 2, 1),
          ('[\n{"a": 1},\n{"a" 2}, {"a": 3}]', "no JSON: Expecting ':'", 3, 1),
          ('[{"a": "', "no JSON: Unterminated string", 1, 0),
          ('[{"a": 1}, 3]', "an object or a list was expected, not '3'", 1, 1),
          ('[{"a": 1},]', "an object or a list was expected, not ']'", 1, 1),
          ('[{"a": 1}] x', "nothing more was expected", 1, 1),
          ('{"a": 1}', r"\[ was expected, not '{'", 1, 0),
          ("", r"\[ was expected, not the end of the file", 1, 0),
          ("[" + "[" * 100_000, "nested too deeply", 1, 0),
          (b'[{"a": "\xff"}]', "UTF-8", 1, None)]


@pytest.mark.parametrize("chunk", [trace_rows.CHUNK, 3])
@pytest.mark.parametrize(("text", "says", "line", "entry"), BROKEN, ids=[str(n) for n in range(len(BROKEN))])
def test_a_broken_array_says_where(tmp_path, monkeypatch, text, says, line, entry, chunk):
    monkeypatch.setattr(trace_rows, "CHUNK", chunk)
    with pytest.raises(TraceError, match=says) as error:
        read(written(tmp_path, text))
    assert (error.value.line, error.value.entry) == (line, entry)
    assert "nothing" in str(error.value)


LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREE = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
                    max_leaves=12)
ROWS = st.lists(st.lists(TREE, max_size=4) | st.dictionaries(st.text(), TREE, max_size=4), max_size=6)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, indent=st.sampled_from([None, 0, 2]), ascii_=st.booleans(), chunk=st.sampled_from([1, 2, 7, 64]))
def test_whatever_the_chunks_the_elements_are_those_of_json(tmp_path_factory, rows, indent, ascii_, chunk):
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    path.write_bytes(json.dumps(rows, indent=indent, ensure_ascii=ascii_).encode("utf-8", "surrogatepass"))
    normal, trace_rows.CHUNK = trace_rows.CHUNK, chunk
    try:
        found = read(path)
    finally:
        trace_rows.CHUNK = normal
    assert [value for _, _, value in found] == rows


def test_no_row_is_held_beyond_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_rows, "MOST", 40)
    monkeypatch.setattr(trace_rows, "CHUNK", 8)
    long = json.dumps(["x" * 100])
    for layout, text in (("array", f"[{long}]"), ("lines", f"[]\n{long}"), ("whole", long)):
        with pytest.raises(TraceError, match=r"more than|longer than"):
            read(written(tmp_path, text), layout)
    # Many rows that each keep the bound may be any number of bytes together.
    assert len(read(written(tmp_path, json.dumps([["x" * 20]] * 1000)))) == 1000


class Lines(TraceFile):
    def _begin(self, rows):
        return lambda raw: [json.loads(raw)]


def test_a_file_is_read_as_it_is_asked_for(tmp_path):
    path = written(tmp_path, "[1]\n" * 1000 + "broken")
    assert list(itertools.islice(Lines(path), 3)) == [[1]] * 3
    with pytest.raises(TraceError, match="line 1001: this is no JSON"):
        list(Lines(path))


def test_progress_grows_to_the_size_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_rows, "STEP", 100)
    said = []
    path = written(tmp_path, "[1]\n" * 1000)
    assert len(list(Lines(path, progress=lambda read, size: said.append((read, size))))) == 1000
    assert len(said) == 41 and said == sorted(said) and {size for _, size in said} == {4000}
    assert said[0] == (100, 4000) and said[-1] == (4000, 4000)
