"""Arrivals and lengths from CSV traces, row by row; a bad row is named by its line, nothing is repaired or guessed.

What prompts hold is not here: `kvlab.study.trace_formats` reads the traces that say it. The embedded arrivals are our
own: drawn from a seeded statistical model, never rows of somebody's file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from kvlab.study.trace_rows import Entry, TraceError, TraceFile

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EMBEDDED = FIXTURES / "arrivals.csv"
ATTRIBUTION = "Azure LLM inference trace 2023, CC-BY 4.0"
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: seconds after the first row, prompt and generated tokens. No words, no service time."""

    at: float
    context_tokens: int
    generated_tokens: int

    @property
    def final_tokens(self) -> int:
        return self.context_tokens + self.generated_tokens


class AzureArrivals(TraceFile[Arrival]):
    """The Azure LLM inference trace of 2023 or of 2024, or any CSV of their form, read afresh at every iteration.

    Both have the same columns; in 2024 every TIMESTAMP has a time zone. O(1) memory; errors as `TraceFile` has them.
    """

    def _begin(self, rows: Iterator[Entry]) -> Callable[[bytes], Iterable[Arrival]]:
        parse = azure_parser(self.path, rows)
        return lambda raw: (parse(raw),)


def azure_parser(path: Path, rows: Iterator[Entry]) -> Callable[[bytes], Arrival]:
    """What reads the rows of an Azure trace, once it has taken the header from them. TraceError for another header."""
    header_cells(path, rows, AZURE_COLUMNS)
    clock, begin = Clock(), None

    def parse(raw: bytes) -> Arrival:
        nonlocal begin
        moment, context, generated = _azure_row(csv_cells(raw))
        first = begin or moment
        if (moment.tzinfo is None) != (first.tzinfo is None):
            raise ValueError(f"TIMESTAMP {moment} and the first row must both have a time zone, or neither")
        at = clock.at((moment - first).total_seconds())
        begin = first
        return Arrival(at, context, generated)

    return parse


class Clock:
    """Seconds after a trace's first row. A row that is earlier than the one before it is a ValueError."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0

    def at(self, seconds: float) -> float:
        first = seconds if self._first is None else self._first
        since = seconds - first
        if since < self._last:
            raise ValueError("the row is earlier than the one before it")
        self._first, self._last = first, since
        return since


def csv_cells(raw: bytes) -> tuple[str, ...]:
    """The cells of one line; no public trace quotes any."""
    return tuple(raw.decode("utf-8").strip().split(","))


def header_cells(path: Path, rows: Iterator[Entry], columns: tuple[str, ...], exact: bool = True) -> tuple[str, ...]:
    """Take the first line and return its cells; TraceError where they are not `columns` (or do not hold them all)."""
    line, _, raw = next(rows, (1, None, b""))
    try:
        cells = csv_cells(raw)
    except UnicodeDecodeError as error:
        raise TraceError(path, line, f"a readable CSV file was expected ({error})") from None
    if line != 1 or not (cells == columns if exact else set(columns) <= set(cells)):
        raise TraceError(path, 1, f"the columns {','.join(columns)} were expected")
    return cells


def whole_number(name: str, cell: str, least: int) -> int:
    if not (cell.isascii() and cell.isdigit() and int(cell) >= least):
        raise ValueError(f"{name} is {cell!r}, not a whole number from {least} on")
    return int(cell)


def _azure_row(cells: tuple[str, ...]) -> tuple[datetime, int, int]:
    if len(cells) != len(AZURE_COLUMNS):
        raise ValueError(f"{len(AZURE_COLUMNS)} cells were expected, not {len(cells)}")
    try:
        moment = datetime.fromisoformat(cells[0])
    except ValueError:
        raise ValueError(f"TIMESTAMP is {cells[0]!r}, no date and time") from None
    context, generated = (whole_number(*pair, 1) for pair in zip(AZURE_COLUMNS[1:], cells[1:], strict=True))
    return moment, context, generated


# ---------------------------------------------------------------- the embedded arrivals
EMBEDDED_MODEL: Mapping[str, float] = {
    "seed": 302, "rows": 600, "rate": 5.5, "context_median": 1000, "context_sigma": 0.9, "context_most": 8000,
    "generated_median": 130, "generated_sigma": 0.95, "generated_most": 1000,
}
"""Poisson arrivals at `rate` a second, log-normal lengths in tokens, cut at their most: a chat service in outline."""


def draw_arrivals(model: Mapping[str, float] = EMBEDDED_MODEL) -> Iterator[str]:
    """The lines of `fixtures/arrivals.csv`: the file is this model, not a recording of anybody's traffic."""
    draw, moment = random.Random(int(model["seed"])), datetime(2026, 1, 5, 9)
    yield ",".join(AZURE_COLUMNS)
    for _ in range(int(model["rows"])):
        lengths = [min(int(model[f"{kind}_most"]), max(1, round(draw.lognormvariate(
            math.log(model[f"{kind}_median"]), model[f"{kind}_sigma"])))) for kind in ("context", "generated")]
        yield f"{moment:%Y-%m-%d %H:%M:%S.%f},{lengths[0]},{lengths[1]}"
        moment += timedelta(seconds=round(draw.expovariate(model["rate"]), 6))
