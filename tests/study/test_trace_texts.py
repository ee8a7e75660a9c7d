"""Conversations as requests: prompts and outputs in the chat form, tool calls, bad entries by line and index."""

from __future__ import annotations

import itertools
import json
from array import array

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvlab.execution.model_config import ModelFileError
from kvlab.execution.tokenizer import ChatTemplateMissing, Tokenizer
from kvlab.study.trace_formats import open_trace
from kvlab.study.trace_rows import TraceError
from kvlab.study.trace_texts import MessageTrace, ShareGptTrace, named_tokenizer
from tests.support import require

MARKS = ["<|im_start|>", "<|im_end|>", "<s>"]
DEFAULT = "{% '<|im_start|>system\nBe kind.<|im_end|>\n' %}"


def bytewise(template="<|im_start|>", **more):
    """One token a byte, and ChatML's marks."""
    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(letters, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(MARKS)
    return Tokenizer(inner, chat_template=template, **more)


TOKENS = bytewise()


def said(packed, tokenizer=TOKENS):
    return tokenizer.decode(array("I", packed).tolist())


def written(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    return path


def user(text):
    return {"role": "user", "content": text}


def answer(text, *calls):
    calls = [{"id": "c", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


CHAT = [user("Hi"), answer("Hello"), user("Ünd?"), answer(None, ("find", '{"x": 1}'), ("stop", "{}")),
        {"role": "tool", "content": "found", "name": "find"}, answer("Done", ("stop", "{}"))]
SHARE = {"id": "q_0", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
OPEN = "<|im_start|>assistant\n"
HI, HELLO = "<|im_start|>user\nHi<|im_end|>\n", "Hello<|im_end|>\n"


def test_every_answer_is_a_request_whose_prompt_is_all_before_it(tmp_path):
    trace = open_trace(written(tmp_path, json.dumps(CHAT)), tokenizer=TOKENS)
    assert trace.form == "messages"
    first, second, third = trace
    assert (said(first.prompt), said(first.output)) == (HI + OPEN, HELLO)
    assert said(second.prompt) == HI + OPEN + HELLO + "<|im_start|>user\nÜnd?<|im_end|>\n" + OPEN
    call = json.dumps({"name": "find", "arguments": '{"x": 1}'})
    stop = '\n<tool_call>{"name": "stop", "arguments": "{}"}</tool_call><|im_end|>\n'
    assert said(second.output) == f"\n<tool_call>{call}</tool_call>{stop}"
    assert said(third.output) == "Done" + stop
    assert third.prompt.startswith(second.prompt + second.output)
    assert [(r.session, r.turn, r.at) for r in (first, second, third)] == [(0, 1, None), (0, 2, None), (0, 3, None)]
    assert all(r.prompt_tokens * 4 == len(r.prompt) and r.output_tokens * 4 == len(r.output) for r in trace)


LAYOUTS = {
    "lists on lines": "\n".join(json.dumps(CHAT) for _ in range(2)),
    "objects on lines": "\n".join(json.dumps({"messages": CHAT}) for _ in range(2)),
    "tau-bench": "\n".join(json.dumps({"task_id": 3, "traj": CHAT}) for _ in range(2)),
    "array of lists": json.dumps([CHAT, CHAT]),
    "array of objects, indented": json.dumps([{"messages": CHAT}] * 2, indent=1),
    "ShareGPT array": json.dumps([SHARE, SHARE]),
    "ShareGPT array, indented": json.dumps([SHARE, SHARE], indent=2),
    "ShareGPT on lines": "\n".join([json.dumps(SHARE)] * 2),
    "one conversation, indented": json.dumps(CHAT, indent=1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_may_be_laid_out_in_several_ways(tmp_path, layout):
    trace = open_trace(written(tmp_path, LAYOUTS[layout]), tokenizer=TOKENS)
    rows = list(trace)
    assert trace.form == ("sharegpt" if layout.startswith("ShareGPT") else "messages")
    assert {r.session for r in rows} == ({0} if layout.startswith("one") else {0, 1})
    assert (said(rows[0].prompt), said(rows[0].output)) == (HI + OPEN, HELLO)
    assert rows == list(trace)


@pytest.mark.parametrize("form", [ShareGptTrace, MessageTrace])
def test_each_example_is_of_its_form(tmp_path, form):
    trace = open_trace(written(tmp_path, form.example), tokenizer=TOKENS)
    assert type(trace) is form and len(list(trace)) == 1


def test_the_template_brings_its_system_text_and_the_tokenizer_its_first_token(tmp_path):
    own = bytewise(DEFAULT, bos_id=TOKENS.encode("<s>")[0], adds_bos=True)
    row = next(iter(open_trace(written(tmp_path, json.dumps(CHAT)), tokenizer=own)))
    assert said(row.prompt, own) == "<s><|im_start|>system\nBe kind.<|im_end|>\n" + HI + OPEN
    assert said(row.prompt, own) == "<s>" + own.chat([user("Hi")])
    chat = [{"role": "system", "content": "Short."}, *CHAT]
    row = next(iter(open_trace(written(tmp_path, json.dumps(chat)), tokenizer=own)))
    assert said(row.prompt, own) == "<s><|im_start|>system\nShort.<|im_end|>\n" + HI + OPEN


def share(*turns):
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


BAD = [
    (CHAT, [user("Hi")], "no assistant's message"),
    (CHAT, [], "no assistant's message"),
    (CHAT, [user(None), answer("x")], 'message 0: "content" is no text'),
    (CHAT, [user("a"), answer(None)], 'message 1: "content" is no text'),
    (CHAT, [user([{"type": "text", "text": "a"}]), answer("x")], 'message 0: "content" is no text'),
    (CHAT, [{"content": "a"}, answer("x")], 'message 0: a "role"'),
    (CHAT, ["a", answer("x")], 'message 0: a "role"'),
    (CHAT, [user("a") | {"tool_calls": [1]}, answer("x")], "message 0: \"tool_calls\""),
    (CHAT, [answer("a") | {"tool_calls": {"name": "x"}}], "message 0: \"tool_calls\""),
    (CHAT, [answer("a") | {"tool_calls": [{"function": {"name": "x"}}]}], "message 0: a tool call without"),
    (CHAT, [user("\ud800"), answer("x")], "message 0 has half a character"),
    (CHAT, {"text": "a"}, "a list of messages was expected"),
    (SHARE, share(("human", "a")), "no assistant's message"),
    (SHARE, share(("parrot", "a"), ("gpt", "b")), 'message 0: "from" is \'parrot\''),
    (SHARE, share(("human", 3), ("gpt", "b")), 'message 0: "value" is no text'),
    (SHARE, {"id": "x"}, 'a list "conversations" was expected'),
]


@pytest.mark.parametrize(("good", "bad", "says"), BAD, ids=[f"{n}" for n in range(len(BAD))])
def test_a_bad_entry_is_named_by_line_and_index(tmp_path, good, bad, says):
    rows = [json.dumps(row) for row in (good, bad, good)]
    for text, line, entry in (("\n".join(rows), 2, None), ("[\n" + ",\n".join(rows) + "]", 3, 1)):
        path = written(tmp_path, text)
        with pytest.raises(TraceError, match=says) as error:
            list(open_trace(path, tokenizer=TOKENS))
        assert (error.value.line, error.value.entry) == (line, entry)
        lenient = open_trace(path, tokenizer=TOKENS, skip_bad=True)
        assert {r.session for r in lenient} == {0, 2} and lenient.skipped == 1
        assert f"line {line}{'' if entry is None else ', entry 1'}: " in str(lenient.first_skipped)


def test_a_break_in_an_array_ends_it_even_when_bad_rows_are_skipped(tmp_path):
    path = written(tmp_path, json.dumps([SHARE, SHARE])[:-9])
    with pytest.raises(TraceError, match=r"entry 1: .*nothing behind it"):
        list(open_trace(path, tokenizer=TOKENS, skip_bad=True))


def test_a_bad_first_element_does_not_hide_the_form(tmp_path):
    trace = open_trace(written(tmp_path, json.dumps([{}, SHARE])), tokenizer=TOKENS, skip_bad=True)
    assert trace.form == "sharegpt" and len(list(trace)) == 1 and trace.first_skipped.entry == 0


def test_text_needs_a_tokenizer_with_a_chat_form(tmp_path):
    path = written(tmp_path, json.dumps([SHARE]))
    with pytest.raises(TraceError, match="name a tokenizer"):
        open_trace(path)
    with pytest.raises(ChatTemplateMissing):
        open_trace(path, tokenizer="austen")
    with pytest.raises(ModelFileError):
        open_trace(path, tokenizer="nobody's model")


def test_sessions_are_tokenised_as_they_are_asked_for(tmp_path):
    path = written(tmp_path, json.dumps(CHAT) + "\nbroken")
    assert next(iter(open_trace(path, tokenizer=TOKENS))).turn == 1


def test_tau_bench_is_tokenised_as_one_text():
    """Piece by piece gives the ids of the whole text, so that a prompt's ids are what a server would see."""
    require("smollm2")
    trace = open_trace(require("tau-bench"), tokenizer="smollm2")
    rows = list(itertools.takewhile(lambda row: row.session < 3, trace))
    tokenizer = named_tokenizer("smollm2")
    assert len(rows) > 20
    for row in rows:
        whole = array("I", row.prompt + row.output).tolist()
        assert tokenizer.encode(tokenizer.decode(whole)) == whole
