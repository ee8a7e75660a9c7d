"""Conversations in text as requests in token ids: every assistant message is one request; it runs no model.

A prompt is all earlier messages and the opening of the answer, an output is the answer with its end token, both in the
chat form of a named tokenizer. A tool call is `<tool_call>` + its name and arguments as JSON + `</tool_call>` on a new
line of the answer; arguments stay the string that the file has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvlab.execution.catalog import resolve
from kvlab.execution.tokenizer import Tokenizer, load_tokenizer
from kvlab.execution.weights import open_model_files
from kvlab.reuse.token_keys import TOKEN_BYTES, pack
from kvlab.study.trace_rows import Entry, Progress, TraceFile
from kvlab.study.traced_request import TracedRequest

Messages = list[tuple[str, str]]
ROLE_OF = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
           "bard": "assistant", "assistant": "assistant", "system": "system", "tool": "tool", "observation": "tool"}
"""ShareGPT's names of speakers -> roles."""
LIST_KEYS = ("messages", "traj")
"""Where an object of a message-list file keeps its list: the usual name, and tau-bench's."""


def named_tokenizer(name: str | Path | Tokenizer) -> Tokenizer:
    """A tokenizer by its model's name or path (`kvlab.execution.catalog`). ModelFileError where there is none."""
    return name if isinstance(name, Tokenizer) else load_tokenizer(open_model_files(resolve(name)))


class ChatPieces:
    """A tokenizer's chat form, message by message, so that a session's tokens only grow.

    A special token spelled out in a message becomes that token, as `Tokenizer.encode` has it. ChatTemplateMissing where
    the tokenizer has no chat form.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A system message in front keeps the template from putting its default one before every piece.
        self._front = [{"role": "system", "content": ""}]
        self._skip = len(tokenizer.chat(self._front, answer=False))
        self._opening = tokenizer.chat(self._front)[self._skip :]
        self.answer = self._packed(self._opening)
        self._begin = pack(tokenizer.encode(""))
        self._default = self._packed(tokenizer.chat([], answer=False))

    def _packed(self, text: str) -> bytes:
        return pack(self._tokenizer.encode(text, bos=False))

    def begin(self, role: str) -> bytes:
        """What stands before the first message: a beginning-of-sequence token, the template's own system text."""
        return self._begin + (b"" if role == "system" else self._default)

    def message(self, role: str, text: str) -> bytes:
        return self._packed(self._text(role, text))

    def output(self, text: str) -> bytes:
        """An answer without its opening, which was part of the prompt."""
        return self._packed(self._text("assistant", text).removeprefix(self._opening))

    def _text(self, role: str, text: str) -> str:
        return self._tokenizer.chat([*self._front, {"role": role, "content": text}], answer=False)[self._skip :]


class TextTrace(TraceFile[TracedRequest]):
    """A file of conversations. `session` counts its entries from 0; there are no arrivals. O(one session) memory."""

    def __init__(self, path: Path | str, tokenizer: str | Path | Tokenizer, *, layout: str = "lines",
                 skip_bad: bool = False, progress: Progress | None = None) -> None:
        super().__init__(path, skip_bad=skip_bad, progress=progress)
        self.layout = layout
        self.pieces = ChatPieces(named_tokenizer(tokenizer))

    def _begin(self, rows: Iterator[Entry]) -> Callable[[Any], Iterable[TracedRequest]]:
        session = -1

        def parse(raw: Any) -> Iterable[TracedRequest]:
            nonlocal session
            session += 1
            messages = self.messages(json.loads(raw) if isinstance(raw, bytes) else raw)
            _check_text(messages)
            if not any(role == "assistant" for role, _ in messages):
                raise ValueError("there is no assistant's message, so nobody asked for anything")
            return requests_of(messages, self.pieces, session)

        return parse

    @staticmethod
    def messages(value: Any) -> Messages:
        """Role and text of every message, or ValueError."""
        raise NotImplementedError


def _check_text(messages: Messages) -> None:
    for n, said in enumerate(messages):
        try:
            "".join(said).encode()
        except UnicodeEncodeError:
            raise ValueError(f"message {n} has half a character (a lone surrogate), which is no text") from None


class ShareGptTrace(TextTrace):
    form, title = "sharegpt", "conversations in ShareGPT form (JSON)"
    example = '[{"id": "a", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}]'

    @staticmethod
    def messages(value: Any) -> Messages:
        if not isinstance(value, dict) or not isinstance(value.get("conversations"), list):
            raise ValueError('an object with a list "conversations" was expected')
        out = []
        for n, said in enumerate(value["conversations"]):
            speaker, text = (said.get("from"), said.get("value")) if isinstance(said, dict) else (None, None)
            if speaker not in ROLE_OF:
                raise ValueError(f'message {n}: "from" is {speaker!r}, not one of {", ".join(ROLE_OF)}')
            if not isinstance(text, str):
                raise ValueError(f'message {n}: "value" is no text')
            out.append((ROLE_OF[speaker], text))
        return out


class MessageTrace(TextTrace):
    form, title = "messages", "message lists (JSON or JSON lines)"
    example = '[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]'

    @staticmethod
    def messages(value: Any) -> Messages:
        if isinstance(value, dict):
            value = next((value[key] for key in LIST_KEYS if key in value), None)
        if not isinstance(value, list):
            raise ValueError(f"a list of messages was expected, or an object with one ({' or '.join(LIST_KEYS)})")
        return [_message(n, said) for n, said in enumerate(value)]


def _message(n: int, said: Any) -> tuple[str, str]:
    role, content = (said.get("role"), said.get("content")) if isinstance(said, dict) else (None, None)
    if not isinstance(role, str) or not role:
        raise ValueError(f'message {n}: a "role" was expected')
    calls = said.get("tool_calls") or []
    if content is None and role == "assistant" and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(f'message {n}: "content" is no text')
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise ValueError(f'message {n}: "tool_calls" is no list in an assistant\'s message')
    return role, content + "".join(_call(n, call) for call in calls)


def _call(n: int, call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not {"name", "arguments"} <= set(function):
        raise ValueError(f'message {n}: a tool call without a "function" that has a "name" and "arguments"')
    said = json.dumps({"name": function["name"], "arguments": function["arguments"]})
    return f"\n<tool_call>{said}</tool_call>"


def requests_of(messages: Messages, pieces: ChatPieces, session: int) -> Iterator[TracedRequest]:
    """One request for each assistant's message, its prompt all before it; made only as they are asked for."""
    text, turn = pieces.begin(messages[0][0]), 0
    for role, said in messages:
        if role != "assistant":
            text += pieces.message(role, said)
            continue
        turn += 1
        prompt, output = text + pieces.answer, pieces.output(said)
        yield TracedRequest(len(prompt) // TOKEN_BYTES, len(output) // TOKEN_BYTES, session=session, turn=turn,
                            prompt=prompt, output=output)
        text = prompt + output
