"""Tokenizers: round trips, streams that never split a character, chat form, and BPE against a hand-written one."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.execution.catalog import resolve
from kvlab.execution.gguf_file import GgufFile
from kvlab.execution.tokenizer import ChatTemplateMissing, Tokenizer, load_tokenizer
from kvlab.execution.weights import open_model_files
from tests.execution import tiny
from tests.support import require

TEXT = "Dr. Müller paid 1,234.50 € — naïve, isn't it? 🙂👩‍👩‍👧\n\tdef f(x):  return x\n"


@cache
def austen() -> Tokenizer:
    return load_tokenizer(open_model_files(resolve("austen")))


@cache
def smollm2() -> Tokenizer:
    require("smollm2")
    return load_tokenizer(open_model_files(resolve("smollm2")))


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_text_survives_the_round_trip(text):
    assert austen().decode(austen().encode(text)) == text


@given(st.lists(st.integers(0, 1023), max_size=30))
@settings(max_examples=80, deadline=None)
def test_a_stream_says_what_decoding_at_once_says(ids):
    stream = austen().decode_stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == austen().decode(ids)


def test_a_stream_never_splits_a_character():
    ids, stream = austen().encode("a🙂b"), austen().decode_stream()
    parts = [stream.push(i) for i in ids]
    assert [p for p in parts if p] == ["a", "🙂", "b"] and len(ids) == 6
    assert stream.finish() == ""
    for i in ids[:3]:
        stream.push(i)
    assert stream.finish() == "\ufffd"
    assert stream.push(ids[0]) == "a"


def test_a_piece_shows_the_bytes_of_a_part_of_a_character():
    ids = austen().encode("é the")
    assert [austen().decode_piece(i) for i in ids] == ["\\xc3", "\\xa9", " the"]


def test_bos_is_explicit_and_refused_where_there_is_none():
    assert austen().bos_id == 0 and austen().encode("<|bos|>a") == austen().encode("a", bos=True)
    assert austen().encode("a") == austen().encode("a", bos=True)[1:]
    with pytest.raises(ValueError, match="no beginning-of-sequence token"):
        Tokenizer(austen()._inner).encode("a", bos=True)


def test_a_model_without_a_template_refuses_to_chat():
    with pytest.raises(ChatTemplateMissing):
        austen().chat([{"role": "user", "content": "hello"}])


def test_the_digest_names_the_vocabulary_and_the_special_ids(tmp_path):
    files = [open_model_files(tiny.write_gguf(tmp_path / f"{i}.gguf", tiny.random_tensors(i), **more)) for i, more in
             enumerate(({}, {}, {"tokenizer.ggml.eos_token_id": 5}, {"tokenizer.ggml.merges": tiny.MERGES[:-1]}))]
    digests = [load_tokenizer(f).digest for f in files]
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.parametrize(("pre", "twelve"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_a_gguf_tokenizer_splits_as_its_pre_tokeniser_says(tmp_path, pre, twelve):
    path = tiny.write_gguf(tmp_path / "m.gguf", tiny.random_tensors(), pre=pre,
                           **{"tokenizer.chat_template": "{{'<|im_start|>' + message['role']}}"})
    t = load_tokenizer(open_model_files(path))
    pieces = [t.decode_piece(i) for i in t.encode("<|im_start|>12 the")]
    assert pieces == ["<|im_start|>", *twelve, " the"]
    assert t.eos_ids == (0, 2) and t.bos_id is None
    assert t.chat([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_folder_names_its_special_tokens_and_template(tmp_path):
    folder = tiny.write_folder(tmp_path / "folder", tiny.random_tensors())
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<filler0>"}, "eos_token": "<filler1>", "add_bos_token": true,'
        ' "chat_template": "<|im_start|>"}')
    t, ids = load_tokenizer(open_model_files(folder)), {token: i for i, token in enumerate(tiny.vocabulary())}
    assert t.bos_id == ids["<filler0>"] and t.eos_ids == (0, 2, ids["<filler1>"])
    assert t.encode("a") == [t.bos_id, ids["a"]] and t.encode("a", bos=False) == [ids["a"]]
    assert t.chat([], answer=False) == ""


def test_smollm2_round_trips_and_splits_digits():
    t = smollm2()
    assert t.decode(t.encode(TEXT)) == TEXT
    assert [t.decode_piece(i) for i in t.encode("in 1234")] == ["in", " ", "1", "2", "3", "4"]
    assert t.vocab_size == 49152 and t.eos_ids == (0, 2)


def test_smollm2_chats_with_its_own_system_text():
    t = smollm2()
    text = t.chat([{"role": "user", "content": "Hi"}])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (f"<|im_start|>system\n{system}<|im_end|>\n"
                    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = t.encode(text)
    assert ids.count(1) == 3 and ids.count(2) == 2 and t.decode(ids) == text
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert t.chat(own, answer=False).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")


def test_smollm2_agrees_with_bpe_by_hand():
    t, pairs = smollm2(), GgufFile(resolve("smollm2")).metadata
    rank = {tuple(m.split(" ")): i for i, m in enumerate(pairs["tokenizer.ggml.merges"])}
    ids = {token: i for i, token in enumerate(pairs["tokenizer.ggml.tokens"])}

    def by_hand(piece: str) -> list[int]:
        parts = list(piece.replace(" ", "Ġ").replace("\n", "Ċ"))
        while len(parts) > 1:
            at = min(range(len(parts) - 1), key=lambda i: rank.get((parts[i], parts[i + 1]), len(rank)))
            if (parts[at], parts[at + 1]) not in rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [ids[p] for p in parts]

    text = "The airline's policy: passengers don't pay 25 dollars for a 2nd bag,\n unless it weighs > 23kg (50 lb)."
    words = r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    pieces = [p for part in re.split(r"(\d)", text) for p in ([part] if part.isdigit() else re.findall(words, part))]
    assert "".join(pieces) == text
    assert t.encode(text) == [i for p in pieces for i in by_hand(p)]
