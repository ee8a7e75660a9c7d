"""Readers for public serving traces, row by row; a bad row is named by its line, and nothing is repaired or guessed.

The embedded arrivals are our own: drawn from a seeded statistical model, never rows of somebody's file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EMBEDDED = FIXTURES / "arrivals.csv"
ATTRIBUTION = "Azure LLM inference trace 2023, CC-BY 4.0"
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A trace, or one row of it, is not in its public form: which file, which line (from 1), what is wrong."""

    def __init__(self, path: Path, line: int, wrong: str) -> None:
        self.path, self.line, self.wrong = path, line, wrong
        super().__init__(f"{path}: line {line}: {wrong}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: seconds after the first row, prompt and generated tokens. No words, no service time."""

    at: float
    context_tokens: int
    generated_tokens: int

    @property
    def final_tokens(self) -> int:
        return self.context_tokens + self.generated_tokens


class AzureArrivals:
    """The Azure LLM inference trace 2023, or any CSV of its form, read afresh at every iteration. O(1) memory.

    With `skip_bad`, rows that are wrong are left out: `skipped` counts those of the last pass, `first_skipped` is the
    first. Without, the first one raises `TraceError`. A missing file or header raises it either way.
    """

    def __init__(self, path: Path | str, *, skip_bad: bool = False) -> None:
        self.path, self.skip_bad = Path(path).expanduser(), skip_bad
        self.skipped = 0
        self.first_skipped: TraceError | None = None

    def __iter__(self) -> Iterator[Arrival]:
        self.skipped, self.first_skipped = 0, None
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                yield from self._rows(file)
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(self.path, 1, f"a readable CSV file was expected ({error})") from None

    def _rows(self, file: Iterable[str]) -> Iterator[Arrival]:
        begin: datetime | None = None
        last = 0.0
        for line, text in enumerate(file, 1):
            cells = tuple(text.strip().split(","))
            if line == 1:
                if cells != AZURE_COLUMNS:
                    raise TraceError(self.path, 1, f"the columns {','.join(AZURE_COLUMNS)} were expected")
                continue
            if cells == ("",):
                continue
            try:
                moment, context, generated = _azure_row(cells)
                begin = begin or moment
                at = (moment - begin).total_seconds()
                if at < last:
                    raise ValueError("the row is earlier than the one before it")
            except ValueError as error:
                self._bad(TraceError(self.path, line, str(error)))
                continue
            last = at
            yield Arrival(at, context, generated)

    def _bad(self, error: TraceError) -> None:
        if not self.skip_bad:
            raise error
        self.skipped += 1
        self.first_skipped = self.first_skipped or error


def _azure_row(cells: tuple[str, ...]) -> tuple[datetime, int, int]:
    if len(cells) != len(AZURE_COLUMNS):
        raise ValueError(f"{len(AZURE_COLUMNS)} cells were expected, not {len(cells)}")
    try:
        moment = datetime.fromisoformat(cells[0])
    except ValueError:
        raise ValueError(f"TIMESTAMP is {cells[0]!r}, no date and time") from None
    for name, cell in zip(AZURE_COLUMNS[1:], cells[1:], strict=True):
        if not (cell.isascii() and cell.isdigit() and int(cell) >= 1):
            raise ValueError(f"{name} is {cell!r}, not a whole number from 1 on")
    if moment.tzinfo is not None:
        raise ValueError(f"TIMESTAMP {cells[0]!r} has a time zone; the form has none")
    return moment, int(cells[1]), int(cells[2])


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
