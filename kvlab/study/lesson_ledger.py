"""What the lesson and the page on byte ledgers share: sheets of a live allocator, recordings, plots; it owns no rule.

The numbers come from `kvlab.memory.ledger`, the picture from `kvlab.views.ledger`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.contract import History, Json
from kvlab.memory import ledger
from kvlab.memory.allocator import Allocator
from kvlab.memory.ledger import from_snapshot, plain
from kvlab.study import occupancy, traces
from kvlab.study.occupancy import Occupancy
from kvlab.views import ledger as view
from kvlab.views.pool_words import asked
from kvlab.views.scene import Recording

Reserved = Mapping[str, int] | int | None


def sheet(snapshot: Json, title: str, why: str, *, digest: str = "", reserved: Reserved = None,
          group: int = 0) -> Json:
    """One cache group of an allocator's snapshot with all its ledgers, as `kvlab.views.ledger` draws it."""
    h, layout = from_snapshot(snapshot, reserved)[group], snapshot["groups"][group]
    ledgers = {"request_view": ledger.request_view(h), "unique": ledger.unique(h), "pool": ledger.pool(h),
               "savings": ledger.savings(h)}
    if reserved is not None and all(v.reserved is not None for v in h.requests):
        ledgers["rectangular"] = ledger.rectangular(h)
    first = layout["first_block_id"]
    return {
        "title": title, "why": why, "digest": digest, "block_size": h.block_size, "row_bytes": h.row_bytes,
        "pool": list(range(first, first + h.pool_blocks)), "valid_rows": {str(b): n for b, n in h.valid_rows.items()},
        "requests": [{"request": v.request, "tokens": v.tokens, "blocks": list(v.blocks)} for v in h.requests],
        "ledgers": plain(ledgers),
    }


def sheets(history: History, *, reserved: Reserved = None, group: int = 0) -> list[Json]:
    """A sheet for the start of a history and for each step that was committed in it."""
    out: list[Json] = []
    for step in history:
        if step.kind in ("start", "committed"):
            title = asked(step.op) if step.kind == "committed" else "An empty pool"
            out.append(sheet(step.committed, title[0].upper() + title[1:], "", digest=step.digest, reserved=reserved,
                             group=group))
    return [now | {"why": change(before, now)} for before, now in zip([out[0], *out], out, strict=False)]


LEDGERS = (("request_view", "capacity", "request views"), ("unique", "capacity", "distinct blocks"))


def change(before: Json, now: Json) -> str:
    """Which ledgers moved from one sheet to the next, and by how much: one sentence, each ledger for itself."""
    if before is now:
        return "Nothing is in use. Only the pool has bytes."
    parts = []
    for ledger_name, field, words in LEDGERS:
        moved = now["ledgers"][ledger_name][field]["bytes"] - before["ledgers"][ledger_name][field]["bytes"]
        sign = "+" if moved > 0 else "−"
        parts.append(f"{words} {sign}{view.said(abs(moved))}" if moved else f"{words} unchanged")
    said = ", ".join(parts) + ", pool unchanged."
    return said[0].upper() + said[1:]


def record(history: History, *, title: str, question: str, reserved: Reserved = None, group: int = 0) -> Recording:
    """All that was committed in a history, ledger by ledger."""
    return view.recording(sheets(history, reserved=reserved, group=group), title=title, question=question)


@dataclass(frozen=True, slots=True)
class Wish:
    """One request of a family with a common beginning: its length in tokens and what a rectangle would reserve."""

    name: str
    tokens: int
    reserved: int


def family(machine: Allocator, wishes: Sequence[Wish], *, share: bool = True) -> History:
    """Requests that all begin alike, on a real allocator: the longest is written, the others branch off and keep less.

    Without `share` each writes its own rows. Raises as the allocator does.
    """
    history = History(machine)
    longest = max(wishes, key=lambda w: w.tokens)
    for wish in [longest, *(w for w in wishes if w is not longest)]:
        if wish is longest or not share:
            machine.allocate(wish.name, wish.tokens)
        else:
            machine.fork(longest.name, wish.name)
            if wish.tokens < longest.tokens:
                machine.truncate(wish.name, wish.tokens)
    history.detach()
    return history


# ---------------------------------------------------------------- arrivals over time
OWN_ARRIVALS = ("Our own arrivals, drawn from a seeded model (kvlab.study.traces.EMBEDDED_MODEL), in the form of the "
                f"{traces.ATTRIBUTION}")
INKS = {occupancy.MAXIMUM: ("#d55e00", ":"), occupancy.POWER_OF_TWO: ("#cc79a7", "--"),
        occupancy.PAGED: ("#0072b2", "-")}


def credit(path: str | Path) -> str:
    """What must stand under every picture of some arrivals."""
    own = Path(path).expanduser().resolve() == traces.EMBEDDED.resolve()
    return OWN_ARRIVALS if own else f"{traces.ATTRIBUTION} (or your own file of that form)"


class Plot:
    """A still picture with its text twin: SVG in a notebook, words elsewhere; the same bytes for the same data."""

    def __init__(self, svg: str, words: str) -> None:
        self.svg, self.words = svg, words

    def __repr__(self) -> str:
        return self.words

    def _repr_svg_(self) -> str:
        return self.svg


def plot(found: Occupancy, source: str) -> Plot:
    """Bytes and shares of the three layouts over time, the paper-reported shares marked as such, `source` under it.

    Needs matplotlib (the extra `lab`).
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "kvlab", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(9.6, 6.4), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True)
        _bytes(top, found)
        _shares(bottom, found)
        figure.supxlabel(f"{source}\nAssumed: {found.assumptions.words()}", fontsize=8)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(out.getvalue(), _plot_words(found, source))


def _bytes(axes: Any, found: Occupancy) -> None:
    times, gib = [p.time for p in found.points], found.row_bytes / 2**30
    for name, (colour, dashes) in INKS.items():
        axes.plot(times, [p.reserved_rows[name] * gib for p in found.points], dashes, color=colour, label=name)
    live = [p.live_rows * gib for p in found.points]
    axes.fill_between(times, live, color="#929396", alpha=0.35, linewidth=0, label="live rows")
    axes.set(yscale="log", ylabel="GiB reserved (log scale)")
    axes.figure.legend(loc="outside upper center", fontsize=9, ncols=4, frameon=False)


def _shares(axes: Any, found: Occupancy) -> None:
    busy = [p for p in found.points if p.requests]
    for name, (colour, dashes) in INKS.items():
        axes.plot([p.time for p in busy], [100 * p.share(name) for p in busy], dashes, color=colour)
    low, high = occupancy.PAPER_REPORTED["three Orca variants"]
    vllm = occupancy.PAPER_REPORTED["vLLM"]
    axes.axhspan(low, high, color="#929396", alpha=0.25, linewidth=0)
    axes.axhline(vllm, color="#929396", linewidth=1)
    axes.annotate(f"paper-reported, own workload: three Orca variants {low} to {high} %", (0.3, (low + high) / 204),
                  xycoords="axes fraction", fontsize=8, va="center")
    axes.annotate(f"paper-reported, own workload: vLLM {vllm} %", (0.3, 0.88), xycoords="axes fraction", fontsize=8)
    axes.set(ylim=(0, 102), ylabel="% of reserved bytes live", xlabel="seconds")


def _plot_words(found: Occupancy, source: str) -> str:
    lines = [f"{r['layout']}: {r['peak_gib']:.1f} GiB reserved at its peak, {r['live_at_peak']:.1f} % of them live"
             for r in occupancy.rows_of(found)]
    return "\n".join([*lines, f"{source}.", f"Assumed: {found.assumptions.words()}."])
