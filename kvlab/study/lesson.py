"""The parts that every lesson shares: a small world to act in, tables and stills, predictions, the failure lab.

It holds no answer: whatever it shows or grades, it gets by running a machine at that moment. Needs the extra `lab`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import ipywidgets as widgets
import torch
from torch import Tensor

from kvlab.contract import Event, History, Json, Machine, Rejected
from kvlab.execution.model import Model
from kvlab.execution.tokenizer import Tokenizer
from kvlab.memory.allocator import Allocator
from kvlab.memory.block_pool import index_of
from kvlab.memory.kv_store import Memory, PagedMemory, PagedStore, RectangularMemory
from kvlab.memory.layout import CacheLayoutManifest, quarter_split
from kvlab.reasons import REASONS
from kvlab.serving.engine import Engine
from kvlab.study import fixtures
from kvlab.views import pool
from kvlab.views.scene import Frame, Recording, Scene

QUEUE_SEED = 5
"""Shuffles the free queues of a lesson's world, so that no block id can be guessed from its place."""


# ---------------------------------------------------------------- a world to act in
class World:
    """A few chats over one K/V memory: read text, branch, speak, leave. Greedy, so a run repeats word for word."""

    def __init__(self, model: Model, tokenizer: Tokenizer, memory: Memory) -> None:
        self.tokenizer, self.memory = tokenizer, memory
        self.engine = Engine(model, memory, eos=tokenizer.eos_ids, device=model.device)
        self.logits: dict[str, Tensor] = {}
        self.said: dict[str, list[int]] = {}

    def read(self, request: str, text: str) -> int:
        """Run the model over more text of one chat, a new one too; returns its length in tokens by now."""
        self.logits |= self.engine.extend({request: self.tokenizer.encode(text)})
        return self.memory.length(request)

    def branch(self, parent: str, child: str) -> None:
        """A second chat goes on from where the first one stands."""
        self.memory.fork(parent, child)
        self.logits[child] = self.logits[parent]

    def speak(self, *requests: str, tokens: int = 1) -> None:
        """Each of some chats says its likeliest next token, `tokens` times, in one batch a time."""
        for _ in range(tokens):
            chosen = {r: [int(self.logits[r].argmax())] for r in requests}
            for request, ids in chosen.items():
                self.said.setdefault(request, []).extend(ids)
            self.logits |= self.engine.extend(chosen)

    def reply(self, request: str) -> str:
        """What a chat has said so far."""
        return self.tokenizer.decode(self.said.get(request, []))

    def leave(self, request: str) -> None:
        self.memory.release(request)


class PagedWorld(World):
    """A world over paged memory that remembers its history. Freed blocks are filled with NaN."""

    def __init__(self, model: Model, tokenizer: Tokenizer, *, num_blocks: int, block_size: int = 16) -> None:
        self.layout = layout_of(model, num_blocks=num_blocks, block_size=block_size)
        self.allocator = Allocator(self.layout, queue_seed=QUEUE_SEED)
        self.store = PagedStore(self.layout, model.dtype, model.device)
        super().__init__(model, tokenizer, PagedMemory(self.allocator, self.store))
        self.allocator.observers.append(self.store.poison)
        self.history = History(self.allocator)

    def rows(self, request: str) -> list[Tensor]:
        """All K and V rows that a chat's published table reaches: `[2, layers, tokens, kv_heads, head_dim]` a group."""
        live, out = self.allocator.requests[request], []
        for k, v, table in zip(self.store.k, self.store.v, live.tables, strict=True):
            pair = torch.stack([k, v])[:, :, [index_of(word) for word in table]]
            out.append(pair.flatten(2, 3)[:, :, : live.context])
        return out

    def recording(self, title: str, question: str) -> Recording:
        """All that has happened so far, to be played by a stage."""
        notes = {epoch: {"computed": note["computed"],
                         "pieces": {r: self.tokenizer.decode(ids) for r, ids in note["tokens"].items()}}
                 for epoch, note in self.engine.notes.items()}
        return pool.recording(self.history.to_dict(), title=title, question=question, notes=notes, reasons=REASONS)


def layout_of(model: Model, *, num_blocks: int, block_size: int = 16) -> CacheLayoutManifest:
    """The two cache groups that lessons use: three quarters of the model's layers and one quarter."""
    c, width = model.config, torch.empty(0, dtype=model.dtype).element_size()
    return quarter_split(c.layers, c.kv_heads, c.head_dim, width, block_size=block_size, num_blocks=num_blocks)


def copying_world(model: Model, tokenizer: Tokenizer, *, chats: int, max_length: int) -> World:
    """A world over rectangles of `max_length` rows each: a branch copies every row of its parent."""
    c = model.config
    return World(model, tokenizer, RectangularMemory(c.layers, c.kv_heads, c.head_dim, slots=chats,
                                                     max_length=max_length, dtype=model.dtype, device=model.device))


def break_off(machine: Machine, step: str, group: str, work: Callable[[], object]) -> bool:
    """Do some work on a machine and break it off right after one step, as a lost process would; True if it broke."""
    def pull_the_plug(event: Event) -> None:
        if (event.kind, event.step, event.group) == ("staged", step, group):
            raise Rejected("fault_after_partial_reservation", f"after {step}")

    machine.observers.append(pull_the_plug)
    try:
        work()
    except Rejected as no:
        if no.reason != "fault_after_partial_reservation":
            raise
        return True
    finally:
        machine.observers.remove(pull_the_plug)
    return False


# ---------------------------------------------------------------- what a cell shows
class Table:
    """Rows under column names. In a notebook a table, everywhere else aligned text; both say the same."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.columns, self.rows = list(columns), [[_cell(value) for value in row] for row in rows]

    def __repr__(self) -> str:
        grid = [self.columns, *self.rows]
        wide = [max(len(row[i]) for row in grid) for i in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip() for row in grid]
        return "\n".join([lines[0], "  ".join("-" * w for w in wide), *lines[1:]])

    def _repr_html_(self) -> str:
        head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in self.columns)
        body = "".join(f"<tr>{''.join(map(_td, row))}</tr>" for row in self.rows)
        return (f'<div style="max-height:26em;overflow:auto"><table><thead><tr>{head}</tr></thead>'
                f"<tbody>{body}</tbody></table></div>")


def _td(cell: str) -> str:
    side = "right" if re.fullmatch(r"[\d,.]+( [KM]iB)?", cell) else "left"
    return f'<td style="text-align:{side}">{escape(cell)}</td>'


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Comparison:
    """Two texts, one above the other, marked from the first character on where they differ."""

    def __init__(self, **texts: str) -> None:
        (self.left, self.right), (one, other) = texts.keys(), texts.values()
        self.texts = (one, other)
        pairs = enumerate(zip(one, other, strict=False))
        self.same = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))

    def __repr__(self) -> str:
        names = [name.replace("_", " ") for name in (self.left, self.right)]
        wide = max(map(len, names))
        lines = [f"{name:<{wide}}  {text!r}" for name, text in zip(names, self.texts, strict=True)]
        equal = self.texts[0] == self.texts[1]
        return "\n".join([*lines, "the same" if equal else " " * (wide + 3 + self.same) + "^ different from here"])

    def _repr_html_(self) -> str:
        rows = []
        for name, text in zip((self.left, self.right), self.texts, strict=True):
            said, changed = escape(text[: self.same]), escape(text[self.same :])
            changed = f"<b><u>{changed}</u></b>" if changed else " (the same)"
            rows.append(f'<tr><td style="text-align:left">{escape(name.replace("_", " "))}</td>'
                        f'<td style="text-align:left">{said}{changed}</td></tr>')
        return f"<table><tbody>{''.join(rows)}</tbody></table>"


class Stills:
    """Frames of a recording as one picture, each under its title; the text twin is its repr.

    They stand one under another, as wide as the page allows: side by side their smallest words could not be read.
    What is empty below the last row of a picture is cut off.
    """

    def __init__(self, *frames: Frame) -> None:
        self.frames = frames

    def __repr__(self) -> str:
        return "\n\n".join(frame.text() for frame in self.frames)

    def _repr_svg_(self) -> str:
        parts, y, width = [], 0, max(f.scene.view[0] for f in self.frames)
        for frame in self.frames:
            shown = _height(frame.scene)
            parts.append(f'<text x="2" y="{y + 20}" font-weight="600" fill="#1b1f24">{escape(frame.title)}</text>')
            parts.append(f'<svg y="{y + 30}" width="{width}" height="{shown}">{frame.svg()}</svg>')
            y += 30 + shown
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="100%" '
                f'font-family="system-ui, sans-serif" font-size="15">\n'
                f'<rect width="{width}" height="{y}" fill="#ffffff"/>\n{"".join(parts)}</svg>\n')


def _height(scene: Scene) -> int:
    """How much of a picture is used, in px from its top, with a margin."""
    return min(scene.view[1], max(math.ceil(s["y"] + s.get("h", 20)) for s in scene.shapes) + 24)


# ---------------------------------------------------------------- predictions
@dataclass(frozen=True, slots=True)
class Question:
    """One thing to predict. `because` is shown with the grade: the rule in words, never the value."""

    key: str
    ask: str
    because: str
    unit: str = ""


class Predictions(widgets.VBox):
    """Questions with fields to type in. Grading runs the machine at that moment; no answer is stored anywhere.

    `run()` gives the truth by question key: a whole number, or several in any order. A field left empty is not
    revealed. Its repr does not change with what is typed.
    """

    def __init__(self, questions: Sequence[Question], run: Callable[[], Mapping[str, int | Sequence[int]]]) -> None:
        self.questions, self.run = tuple(questions), run
        self.fields = {q.key: widgets.Text(placeholder=q.unit or "your guess", layout={"width": "11em"})
                       for q in questions}
        self.marks = {q.key: widgets.HTML() for q in questions}
        self.button = widgets.Button(description="Run the machine and grade",
                                     layout={"width": "max-content", "margin": "10px 2px"})
        self.button.on_click(lambda _: self.grade())
        asked = [widgets.VBox([widgets.HTML(f"<b>{n}.</b> {escape(q.ask)}"),
                               widgets.HBox([self.fields[q.key], self.marks[q.key]])])
                 for n, q in enumerate(self.questions, 1)]
        super().__init__([*asked, self.button])

    def grade(self) -> dict[str, bool]:
        """Run the machine, mark every field that has a guess, return the marks by key."""
        truth, right = self.run(), {}
        for q in self.questions:
            guess, answer = self.fields[q.key].value, truth[q.key]
            if not guess.strip():
                self.marks[q.key].value = "No guess yet."
                continue
            right[q.key] = read_guess(guess, answer) == _numbers(answer)
            said = "✓ yes," if right[q.key] else "✗ no,"
            shown = ", ".join(f"{n:,}" if isinstance(answer, int) else str(n) for n in _numbers(answer))
            self.marks[q.key].value = escape(f"{said} the machine says {shown} {q.unit}".rstrip() + f". {q.because}")
        return right

    def __repr__(self) -> str:
        return f"Predictions({len(self.questions)} questions, not graded)"


def _numbers(answer: int | Sequence[int]) -> list[int]:
    return [answer] if isinstance(answer, int) else sorted(answer)


def read_guess(guess: str, answer: int | Sequence[int]) -> list[int]:
    """The numbers of a guess, sorted; for one number `4,096`, `4096` and `4 KiB` are the same. [] if unreadable.

    Where several are asked for, a generation behind an @ does not count.
    """
    if not isinstance(answer, int):
        return sorted(int(n) for n in re.findall(r"(?<![@\d])\d+", guess))
    found = re.fullmatch(r"\s*(\d{1,3}(?:[,_' ]\d{3})+|\d+)(\.\d+)?\s*(KiB|MiB)?[a-z ]*", guess, re.IGNORECASE)
    if not found:
        return []
    scale = {"": 1, "kib": 1024, "mib": 1024**2}[(found[3] or "").lower()]
    value = float(re.sub(r"\D", "", found[1]) + (found[2] or "")) * scale
    return [int(value)] if value.is_integer() else []


# ---------------------------------------------------------------- the failure lab
@dataclass(frozen=True, slots=True)
class Bounce:
    """One forbidden thing that was really tried: what it was, the word it was refused with, the two digests."""

    id: str
    what: str
    reason: str
    meaning: str
    before: str
    after: str

    @property
    def unchanged(self) -> bool:
        return self.before == self.after


def bounce(fixture: Json, negative: Json) -> Bounce:
    """Try one of a fixture's negatives on a fresh machine. ValueError if it is accepted."""
    tried = fixtures.attempt(fixture, negative)
    if not tried.reason:
        raise ValueError(f"{negative['id']} was accepted")
    return Bounce(negative["id"], negative["what"], tried.reason, REASONS[tried.reason], tried.before, tried.after)


def refusals(fixture: Json) -> Table:
    """Every negative of a fixture, tried now: what it was, the reason's word, whether the digest stayed."""
    tried = [bounce(fixture, negative) for negative in fixture["negatives"]]
    return Table(["what is tried", "refused with", "digest"],
                 [[b.what, f"✗ {b.reason}", "= unchanged" if b.unchanged else "→ CHANGED"] for b in tried])


class FailureLab(widgets.VBox):
    """Pick a forbidden thing and watch it bounce off a fresh machine."""

    def __init__(self, fixture: Json) -> None:
        self.fixture, self.negatives = fixture, {n["id"]: n for n in fixture["negatives"]}
        self.pick = widgets.Dropdown(options=[(n["what"], n["id"]) for n in fixture["negatives"]],
                                     description="Try this:", layout={"width": "40em"})
        self.outcome = widgets.HTML()
        self.pick.observe(lambda change: self.show(), names="value")
        super().__init__([self.pick, self.outcome])
        self.show()

    def show(self) -> Bounce:
        """Try the picked one and show what came of it."""
        b = bounce(self.fixture, self.negatives[self.pick.value])
        sign = "= unchanged" if b.unchanged else "→ CHANGED"
        self.outcome.value = (f"<div>✗ <b>refused: <code>{b.reason}</code></b></div><div>{escape(b.meaning)}</div>"
                              f"<div>digest <code>{b.before[:12]}</code> before, <code>{b.after[:12]}</code> after: "
                              f"<b>{sign}</b></div>")
        return b

    def __repr__(self) -> str:
        return f"FailureLab({self.fixture['fixture']!r}, {len(self.negatives)} cases)"
