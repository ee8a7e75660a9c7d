"""Each public format on a few rows of our own: what is read, how a bad row is named, how a file is recognised."""

from __future__ import annotations

import json

import pytest

from kvlab.study.trace_formats import FORMS, open_trace
from kvlab.study.trace_rows import TraceError
from kvlab.study.traced_request import TracedRequest
from tests.support import require


def written(tmp_path, *lines, name="mine", end="\n"):
    path = tmp_path / name
    path.write_bytes((end.join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end).encode())
    return path


def moon(at=0, count=700, output=5, ids=(0, 1), **more):
    return {"timestamp": at, "input_length": count, "output_length": output, "hash_ids": list(ids), **more}


def bailian(chat=0, parent=-1, at=0.5, turn=1, **more):
    return {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "input_length": 20, "output_length": 5,
            "type": "text", "turn": turn, "hash_ids": [7, 8], **more}


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def test_mooncake_rows(tmp_path):
    trace = open_trace(written(tmp_path, moon(27_000), moon(28_500, 512, 0, [0])))
    assert trace.form == "mooncake" and "512" in trace.title
    assert list(trace) == [TracedRequest(700, 5, at=0.0, block_ids=(0, 1), id_tokens=512),
                           TracedRequest(512, 0, at=1.5, block_ids=(0,), id_tokens=512)]


def test_bailian_sessions_go_back_to_the_first_chat(tmp_path):
    rows = [bailian(4), bailian(6, 4, 61.114, 2), bailian(9, 6, 62, 3), bailian(10, 2, 63, 7), bailian(11, 10, 63, 8)]
    trace = open_trace(written(tmp_path, *rows))
    assert trace.form == "bailian"
    found = list(trace)
    assert [r.session for r in found] == [4, 4, 4, 2, 2]  # chat 2 was before the trace began
    assert [r.turn for r in found] == [1, 2, 3, 7, 8]
    assert found[1] == TracedRequest(20, 5, at=61.114 - 0.5, session=4, turn=2, block_ids=(7, 8), id_tokens=16)


@pytest.mark.parametrize("rows", [["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:48.1805900,396,109"],
                                  ["2024-05-10 00:00:00.5+00:00,374,44", "2024-05-10 00:00:02+00:00,396,109"]])
def test_azure_rows_of_both_years(tmp_path, rows):
    trace = open_trace(written(tmp_path, AZURE, *rows, end="\r\n"))
    assert trace.form == "azure"
    assert list(trace) == [TracedRequest(374, 44, at=0.0), TracedRequest(396, 109, at=1.5)]


def test_burstgpt_columns_are_found_by_name(tmp_path):
    trace = open_trace(written(tmp_path, BURST, "5,ChatGPT,472,18,490,Conversation log", "45.5,GPT-4,8,0,8,API log"))
    assert trace.form == "burstgpt"
    assert list(trace) == [TracedRequest(472, 18, at=0.0), TracedRequest(8, 0, at=40.5)]
    later = written(tmp_path, BURST_3, "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log",
                    "19440112.0,,2,GPT-4,906,446,1352,API log")
    assert list(open_trace(later)) == [TracedRequest(906, 446, at=0.0, session="1722ac82"),
                                       TracedRequest(906, 446, at=2.0)]


B, Z = "9,ChatGPT,", "2024-05-10 00:00:05,"
BAD = [
    (moon(), moon(count=1025), "2 ids, and 1025 tokens are 3 blocks of 512"),
    (moon(), moon(count=0), "input_length is 0, not a whole number from 1"),
    (moon(), moon(count=700.0), "input_length is 700.0"),
    (moon(), moon(output=-1), "output_length is -1"),
    (moon(), moon(output=True), "output_length is True"),
    (moon(), moon(ids=(0, "1")), "no list of whole numbers"),
    (moon(5), moon(4), "earlier than the one before"),
    (moon(), moon("now"), "timestamp is 'now'"),
    (moon(), moon(float("nan")), "timestamp is nan"),
    (moon(), moon(10 ** 400), "timestamp is 1000"),
    (moon(), {"timestamp": 0, "hash_ids": []}, "input_length and output_length missing"),
    (moon(), [moon()], "a JSON object was expected"),
    (moon(), '{"timestamp": 0,', "no JSON: .* at character"),
    (moon(), "[" * 100_000, "nested too deeply"),
    (bailian(), bailian(hash_ids=[7]), "1 ids, and 20 tokens are 2 blocks of 16"),
    (bailian(), bailian(parent=-2), "parent_chat_id is -2"),
    (bailian(), bailian(chat=None), "chat_id is None"),
    (bailian(), bailian(turn=0), "turn is 0"),
    (bailian(), moon(), "chat_id and parent_chat_id and turn missing"),
    (f"{AZURE}\n{Z}7,1", f"{Z}7", "3 cells were expected, not 2"),
    (f"{BURST}\n{B}7,1,8,x", f"{B}7,1,8", "6 cells were expected, not 5"),
    (f"{BURST}\n{B}7,1,8,x", f"{B}0,0,0,x", "Request tokens is '0'"),
    (f"{BURST}\n{B}7,1,8,x", f"{B}7,1,9,x", "Total tokens is 9, and request and response have 8"),
    (f"{BURST}\n{B}7,1,8,x", "soon,ChatGPT,7,1,8,x", "Timestamp is 'soon'"),
    (f"{BURST}\n{B}7,1,8,x", "nan,ChatGPT,7,1,8,x", "Timestamp is 'nan'"),
]


@pytest.mark.parametrize(("good", "bad", "says"), BAD, ids=[f"{n}" for n in range(len(BAD))])
def test_a_bad_row_is_named_and_can_be_counted(tmp_path, good, bad, says):
    path = written(tmp_path, good, bad, bad)
    line = path.read_text().count("\n") - 1
    with pytest.raises(TraceError, match=says) as error:
        list(open_trace(path))
    assert error.value.line == line and f"line {line}: " in str(error.value)
    lenient = open_trace(path, skip_bad=True)
    for _ in range(2):
        assert len(list(lenient)) == 1
        assert lenient.skipped == 2 and lenient.first_skipped.line == line


def test_a_broken_first_row_does_not_hide_the_form(tmp_path):
    trace = open_trace(written(tmp_path, "{broken", "", moon()), skip_bad=True)
    assert trace.form == "mooncake" and len(list(trace)) == 1 and trace.skipped == 1
    with pytest.raises(TraceError, match="line 1: this is no JSON"):
        list(open_trace(written(tmp_path, "{broken", moon())))


UNKNOWN = ["", "a,b,c\n1,2,3", '{"a": 1}', "[1, 2]", "[]", '{"messages": "none"}', "\x00\x01", "[" * 100_000,
           '[{"hash_ids": []}]', "null"]


@pytest.mark.parametrize("text", UNKNOWN, ids=[f"{n}" for n in range(len(UNKNOWN))])
def test_an_unknown_file_is_told_the_known_forms(tmp_path, text):
    with pytest.raises(TraceError, match="no known form of trace") as error:
        open_trace(written(tmp_path, text))
    assert all(form.title in str(error.value) and form.example in str(error.value) for form in FORMS)


@pytest.mark.parametrize("form", FORMS[:4], ids=[form.form for form in FORMS[:4]])
def test_each_example_is_of_its_form(tmp_path, form):
    """What an unknown file is told is what the reader takes."""
    trace = open_trace(written(tmp_path, *form.example.split(", then ")))
    assert type(trace) is form and len(list(trace)) == 1


def test_a_missing_file_is_named(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(TraceError, match="readable file"):
            open_trace(path)


def test_progress_is_handed_on(tmp_path):
    said, path = [], written(tmp_path, moon())
    list(open_trace(path, progress=lambda read, size: said.append((read, size))))
    assert said == [(path.stat().st_size,) * 2]


def test_the_real_azure_file():
    rows = list(open_trace(require("azure")))
    assert len(rows) == 19_366 and max(r.prompt_tokens for r in rows) == 14_050
    assert not any(r.content_known for r in rows)


def test_the_real_mooncake_files():
    """Every id stands for one place behind one prefix, and for one number of tokens: that is why it may be split."""
    for file in ("conversation_first6000.jsonl", "synthetic.jsonl"):
        place = {}
        for request in open_trace(f"{require('mooncake')}/{file}"):
            before = None
            for n, block in enumerate(request.block_ids):
                here = (before, min(512, request.prompt_tokens - 512 * n))
                assert place.setdefault(block, here) == here
                before = block
