"""The public trace formats: which one a file is, seen from its content, and a reader of `TracedRequest`s for each.

Nothing is repaired, sorted or guessed, and no file is fetched. Formats: Mooncake (FAST'25 traces), Azure LLM inference
2023 and 2024, BurstGPT (6 or 8 columns), Qwen-Bailian usage traces, ShareGPT form, message lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kvlab.execution.tokenizer import Tokenizer
from kvlab.study.trace_rows import Entry, Progress, TraceError, TraceFile, entries
from kvlab.study.trace_texts import LIST_KEYS, MessageTrace, ShareGptTrace, TextTrace
from kvlab.study.traced_request import TracedRequest
from kvlab.study.traces import AZURE_COLUMNS, Clock, azure_parser, csv_cells, header_cells, whole_number

Parse = Callable[[Any], Iterable[TracedRequest]]
BURST_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
LOOKS = 20
"""Rows looked at to recognise a file: the first may be broken."""


def _fields(raw: bytes, names: tuple[str, ...]) -> tuple[Any, ...]:
    row = json.loads(raw)
    if not isinstance(row, dict):
        raise ValueError("a JSON object was expected")
    if missing := [name for name in names if name not in row]:
        raise ValueError(f"{' and '.join(missing)} missing")
    return tuple(row[name] for name in names)


def _count(name: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}, not a whole number from {least} on")
    return value


def _seconds(name: str, value: Any, unit: float = 1.0) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise ValueError(f"{name} is {value!r}, not a number from 0 on")
    return value / unit


def _ids(ids: Any, prompt_tokens: int, id_tokens: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError("hash_ids is no list of whole numbers")
    if len(ids) != (due := -(-prompt_tokens // id_tokens)):
        raise ValueError(f"hash_ids has {len(ids)} ids, and {prompt_tokens} tokens are {due} blocks of {id_tokens}")
    return tuple(ids)


class MooncakeTrace(TraceFile[TracedRequest]):
    """Rows with the ids of 512-token blocks; `timestamp` in ms. An id names its block and all before it."""

    form, title, id_tokens = "mooncake", "Mooncake trace (JSON lines, ids of 512-token blocks)", 512
    example = '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}'

    def _begin(self, rows: Iterator[Entry]) -> Parse:
        clock = Clock()

        def parse(raw: bytes) -> Iterable[TracedRequest]:
            moment, prompt, output, ids = _fields(raw, ("timestamp", "input_length", "output_length", "hash_ids"))
            known = _ids(ids, _count("input_length", prompt, 1), self.id_tokens)
            return (TracedRequest(prompt, _count("output_length", output, 0), block_ids=known,
                                  id_tokens=self.id_tokens, at=clock.at(_seconds("timestamp", moment, 1000))),)

        return parse


class BailianTrace(TraceFile[TracedRequest]):
    """Rows with the ids of 16-token blocks; `timestamp` in seconds. An id names its block only, not what is before it.

    `session` is the first chat id of a request's line of parents; finding it needs one number a row of memory.
    """

    form, title, id_tokens = "bailian", "Qwen-Bailian usage trace (JSON lines, ids of 16-token blocks)", 16
    example = ('{"chat_id": 2, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 20, "output_length": 5, '
               '"type": "text", "turn": 1, "hash_ids": [7, 8]}')

    def _begin(self, rows: Iterator[Entry]) -> Parse:
        clock, roots = Clock(), {}
        names = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "turn", "hash_ids")

        def parse(raw: bytes) -> Iterable[TracedRequest]:
            chat, parent, moment, prompt, output, turn, ids = _fields(raw, names)
            chat, parent = _count("chat_id", chat, 0), _count("parent_chat_id", parent, -1)
            known = _ids(ids, _count("input_length", prompt, 1), self.id_tokens)
            output, turn = _count("output_length", output, 0), _count("turn", turn, 1)
            at = clock.at(_seconds("timestamp", moment))
            roots[chat] = session = chat if parent < 0 else roots.get(parent, parent)
            return (TracedRequest(prompt, output, at=at, session=session, turn=turn, block_ids=known,
                                  id_tokens=self.id_tokens),)

        return parse


class AzureTrace(TraceFile[TracedRequest]):
    """Arrivals and lengths; what the prompts held is not traced."""

    form, title = "azure", "Azure LLM inference trace, 2023 or 2024 (CSV)"
    example = f"{','.join(AZURE_COLUMNS)}, then 2024-05-10 00:00:00.009930+00:00,2162,5"

    def _begin(self, rows: Iterator[Entry]) -> Parse:
        arrival = azure_parser(self.path, rows)

        def parse(raw: bytes) -> Iterable[TracedRequest]:
            row = arrival(raw)
            return (TracedRequest(row.context_tokens, row.generated_tokens, at=row.at),)

        return parse


class BurstTrace(TraceFile[TracedRequest]):
    """Arrivals and lengths, found by column name: BurstGPT_1 and _2 have 6 columns, _3 a session id as well.

    `Timestamp` in seconds. A response of 0 tokens is a call that failed; a request of 0 tokens is a bad row.
    """

    form, title = "burstgpt", "BurstGPT (CSV)"
    example = f"{','.join(BURST_COLUMNS)}, then 5,ChatGPT,472,18,490,Conversation log"

    def _begin(self, rows: Iterator[Entry]) -> Parse:
        columns = header_cells(self.path, rows, BURST_COLUMNS, exact=False)
        where = [columns.index(name) for name in ("Timestamp", "Request tokens", "Response tokens", "Total tokens")]
        chat = columns.index("Session ID") if "Session ID" in columns else None
        clock = Clock()

        def parse(raw: bytes) -> Iterable[TracedRequest]:
            cells = csv_cells(raw)
            if len(cells) != len(columns):
                raise ValueError(f"{len(columns)} cells were expected, not {len(cells)}")
            moment, *counts = (cells[i] for i in where)
            prompt, output, total = map(whole_number, BURST_COLUMNS[2:5], counts, (1, 0, 1))
            if total != prompt + output:
                raise ValueError(f"Total tokens is {total}, and request and response have {prompt + output}")
            return (TracedRequest(prompt, output, at=clock.at(_burst_seconds(moment)),
                                  session=(cells[chat] or None) if chat is not None else None),)

        return parse


def _burst_seconds(cell: str) -> float:
    try:
        return _seconds("Timestamp", float(cell))
    except ValueError:
        raise ValueError(f"Timestamp is {cell!r}, not a number from 0 on") from None


FORMS: tuple[type[TraceFile[TracedRequest]], ...] = (
    MooncakeTrace, BailianTrace, AzureTrace, BurstTrace, ShareGptTrace, MessageTrace)


def open_trace(path: Path | str, *, tokenizer: str | Path | Tokenizer | None = None, skip_bad: bool = False,
               progress: Progress | None = None) -> TraceFile[TracedRequest]:
    """The reader for the trace at `path`, whose form is recognised from its content; its `form` and `title` name it.

    `tokenizer` (a model's name or path, or the object) is needed for forms of text and unused by the others.
    TraceError for a file that cannot be read, is of no known form (the message lists them), or holds text with no
    tokenizer named; ModelFileError and ChatTemplateMissing as `named_tokenizer` and `ChatPieces` raise them.
    """
    where = Path(path).expanduser()
    reader, layout = _recognise(where)
    if not issubclass(reader, TextTrace):
        return reader(where, skip_bad=skip_bad, progress=progress)
    if tokenizer is None:
        raise TraceError(where, 1, f'these are {reader.title}: name a tokenizer for their text, such as "smollm2"')
    return reader(where, tokenizer, layout=layout, skip_bad=skip_bad, progress=progress)


def _recognise(path: Path) -> tuple[type[TraceFile], str]:
    line, why = 1, "no known form of trace"
    try:
        with path.open("rb") as file:
            array = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
            try:
                if array and (found := _recognise_array(path)):
                    return found
            except TraceError as error:
                line, why = error.line, f"{why}, and as a JSON array: {error.wrong}"
            file.seek(0)
            for number, _, raw in islice(entries(path, file, "lines"), LOOKS):
                if reader := _recognise_line(raw, number):
                    return reader, "lines"
    except OSError as error:
        raise TraceError(path, 1, f"a readable file was expected ({error})") from None
    raise TraceError(path, line, f"{why}. Known are:" + "".join(f"\n  {f.title}\n    {f.example}" for f in FORMS))


def _recognise_line(raw: bytes, line: int) -> type[TraceFile] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        cells = raw.decode("utf-8", "replace").strip().split(",")
        if line == 1 and tuple(cells) == AZURE_COLUMNS:
            return AzureTrace
        return BurstTrace if line == 1 and set(BURST_COLUMNS) <= set(cells) else None
    return _recognise_value(value)


def _recognise_value(value: Any) -> type[TraceFile] | None:
    if isinstance(value, list):
        return MessageTrace if value and isinstance(value[0], dict) and "role" in value[0] else None
    if not isinstance(value, dict):
        return None
    if "hash_ids" in value:
        return BailianTrace if "chat_id" in value else MooncakeTrace
    if "conversations" in value:
        return ShareGptTrace
    return MessageTrace if any(isinstance(value.get(key), list) for key in LIST_KEYS) else None


def _recognise_array(path: Path) -> tuple[type[TraceFile], str] | None:
    """A file that begins with [: an array of entries, one conversation over several lines, or lists on lines."""
    with path.open("rb") as file:
        for _, entry, value in islice(entries(path, file, "array"), LOOKS):
            if entry == 0 and isinstance(value, dict) and "role" in value:
                file.seek(0)
                return MessageTrace, "lines" if _is_json(next(entries(path, file, "lines"))[2]) else "whole"
            if (reader := _recognise_value(value)) and issubclass(reader, TextTrace):
                return reader, "array"
    return None


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True
