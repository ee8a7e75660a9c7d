"""Text <-> token ids for the models that kvlab runs, and their chat form; it owns no model and no memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvlab.contract import digest_of
from kvlab.execution.gguf_file import GgufFile
from kvlab.execution.model_config import ModelFileError
from kvlab.execution.weights import FolderFiles, GgufFiles, read_json

# llama.cpp's names of pre-tokenisers that split off every digit, then split like GPT-2
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2 = {"gpt-2", "default"}
_CONTROL, _USER_DEFINED = 3, 4

_BOS = ("<|bos|>", "<s>", "<|begin_of_text|>")
_EOS = ("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>")
_UNFINISHED = "\ufffd"


class ChatTemplateMissing(ValueError):  # noqa: N818 - what it says is the whole message
    """The model has no chat form that kvlab knows; give it plain text."""


def _gpt2_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in -> the byte it stands for (GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTES = _gpt2_alphabet()


class Tokenizer:
    """A tokenizer with the model's special tokens.

    `bos_id` begins a text, None where the model has no such token; `eos_ids` end an answer. `chat_template` is
    the model's own template source, from which only the ChatML form and its default system text are taken.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, bos_id: int | None = None, eos_ids: Iterable[int] = (),
                 adds_bos: bool = False, chat_template: str = "") -> None:
        self._inner = inner
        self.bos_id, self.eos_ids, self.adds_bos = bos_id, tuple(sorted(set(eos_ids))), adds_bos
        self._template = chat_template
        self.vocab_size = inner.get_vocab_size()

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the whole tokenizer and its special ids."""
        return digest_of([self._inner.to_str(), self.bos_id, self.eos_ids, self.adds_bos, self._template])

    def encode(self, text: str, bos: bool | None = None) -> list[int]:
        """Token ids of `text`; special tokens in it are recognised. `bos` None: as the model wants it.

        ValueError for `bos=True` where the model has no beginning-of-sequence token.
        """
        ids = self._inner.encode(text, add_special_tokens=False).ids
        if not (self.adds_bos if bos is None else bos):
            return ids
        if self.bos_id is None:
            raise ValueError("the model has no beginning-of-sequence token")
        return [self.bos_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included. Bytes that are no UTF-8 become U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def decode_piece(self, token: int) -> str:
        """One token for display: its text, or its bytes as `\\xf0\\x9f` where it holds part of a character."""
        text = self.decode([token])
        if _UNFINISHED not in text:
            return text
        return "".join(f"\\x{_BYTES[c]:02x}" if c in _BYTES else c for c in self._inner.id_to_token(token) or "")

    def decode_stream(self) -> DecodeStream:
        """A decoder for ids that arrive one by one."""
        return DecodeStream(self)

    def chat(self, messages: Sequence[Mapping[str, str]], answer: bool = True) -> str:
        """Messages `{role, content}` as ChatML text; with `answer`, open for the assistant to write.

        A default system text in the model's template opens the chat where `messages` brings none.
        ChatTemplateMissing where the model was not trained on ChatML.
        """
        if "<|im_start|>" not in self._template or self._inner.token_to_id("<|im_start|>") is None:
            raise ChatTemplateMissing("this model has no ChatML template; give it plain text")
        turns = [(m["role"], m["content"]) for m in messages]
        default = re.search(r"<\|im_start\|>system(?:\\n|\n)([^{}'\"]+?)<\|im_end\|>", self._template)
        if default and (not turns or turns[0][0] != "system"):
            turns.insert(0, ("system", default[1]))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return text + "<|im_start|>assistant\n" * answer


class DecodeStream:
    """Turns ids into text as they arrive and never splits a character: what is unfinished waits."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._shown = 0  # ids whose text has been given out; they stay one round as context

    def push(self, token: int) -> str:
        """The text that became certain with `token`, often empty."""
        self._ids.append(token)
        text = self._fresh()
        if not text or text.endswith(_UNFINISHED):
            return ""
        del self._ids[: self._shown]
        self._shown = len(self._ids)
        return text

    def finish(self) -> str:
        """What is left, with U+FFFD for the bytes of a character that never came to its end."""
        text = self._fresh()
        self._ids, self._shown = [], 0
        return text

    def _fresh(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._shown])) :]


def load_tokenizer(files: GgufFiles | FolderFiles) -> Tokenizer:
    """The tokenizer beside or inside a model's files. ModelFileError where it is missing or unsupported."""
    if isinstance(files, GgufFiles):
        return _from_gguf(files.file)
    return _from_folder(files.path, files.config.vocab)


def _from_gguf(file: GgufFile) -> Tokenizer:
    pairs = file.metadata
    if (kind := pairs.get("tokenizer.ggml.model")) != "gpt2":
        raise ModelFileError(file.path, f"a byte-level BPE tokenizer (tokenizer.ggml.model gpt2), not {kind!r}")
    pre = pairs.get("tokenizer.ggml.pre", "default")
    if pre not in _SINGLE_DIGITS | _GPT2:
        known = ", ".join(sorted(_SINGLE_DIGITS | _GPT2))
        raise ModelFileError(file.path, f"a supported tokenizer.ggml.pre ({known}), not {pre!r}")
    tokens, merges = pairs["tokenizer.ggml.tokens"], pairs.get("tokenizer.ggml.merges")
    if not merges:
        raise ModelFileError(file.path, "the key tokenizer.ggml.merges")
    ids = {token: i for i, token in enumerate(tokens)}
    try:
        inner = tokenizers.Tokenizer(models.BPE(ids, [tuple(m.split(" ", 1)) for m in merges]))
    except Exception as error:  # the package raises bare Exception for a merge outside the vocabulary
        raise ModelFileError(file.path, f"merges of listed tokens: {error}") from None
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, split]) if pre in _SINGLE_DIGITS else split
    inner.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, pairs.get("tokenizer.ggml.token_type", ()), strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            inner.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
    ends = [pairs.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    return Tokenizer(
        inner, bos_id=pairs.get("tokenizer.ggml.bos_token_id"),
        eos_ids=[i for i in (*ends, *map(ids.get, _EOS)) if i is not None],
        adds_bos=bool(pairs.get("tokenizer.ggml.add_bos_token", False)),
        chat_template=str(pairs.get("tokenizer.chat_template", "")),
    )


def _from_folder(folder: Path, vocab: int) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(path, "a tokenizer in the form of the tokenizers package")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise ModelFileError(path, f"a readable tokenizer.json: {error}") from None
    if inner.get_vocab_size() > vocab:
        raise ModelFileError(path, f"at most {vocab} tokens (vocab_size in config.json), not {inner.get_vocab_size()}")
    extra = folder / "tokenizer_config.json"
    settings = read_json(extra) if extra.is_file() else {}
    stated = _as_list(read_json(folder / "config.json").get("eos_token_id"))
    named = [_content(settings.get("eos_token")), *_EOS]
    bos = [_content(settings.get("bos_token")), *_BOS]
    return Tokenizer(
        inner, bos_id=next((i for i in map(inner.token_to_id, bos) if i is not None), None),
        eos_ids=[*stated, *(i for i in map(inner.token_to_id, named) if i is not None)],
        adds_bos=bool(settings.get("add_bos_token", False)),
        chat_template=str(settings.get("chat_template") or ""),
    )


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value] if value is not None else []


def _content(token: Any) -> str:
    """A special token in tokenizer_config.json: a string, or an object that holds one."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
