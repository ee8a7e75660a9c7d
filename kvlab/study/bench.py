"""Measurements as ratios of one run, one row each, and bench.json; no test asserts any of them.

A row compares ours with a peer or a limit measured side by side, because absolute numbers do not travel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.memory.kv_store import Memory
    from kvlab.serving.engine import LanguageModel

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: `ratio` is ours over theirs; it holds where `ratio` is on the right side of `target`.

    `better` says which side: "higher" or "lower". A row without numbers says in `note` why there are none.
    """

    name: str
    unit: str = ""
    ours: float | None = None
    against: str = ""
    theirs: float | None = None
    target: float | None = None
    better: str = "higher"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.ours is not None and self.theirs else None

    @property
    def holds(self) -> bool | None:
        if self.ratio is None or self.target is None:
            return None
        return self.ratio >= self.target if self.better == "higher" else self.ratio <= self.target


def interleaved(ours: Callable[[], float], theirs: Callable[[], float], rounds: int = 5,
                pick: Callable[[list[float]], float] = median) -> tuple[float, float]:
    """Two measurements taken in turn, so that a slow moment of the machine hits both: their medians, or as `pick` says.

    For work of microseconds take `min`: a busy neighbour only ever adds to it.
    """
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return pick([p[0] for p in pairs]), pick([p[1] for p in pairs])


# ---------------------------------------------------------------- decoding
def decode_rate(model: LanguageModel, memory: Memory, prompt: list[int], tokens: int) -> float:
    """Tokens per second of greedy single-sequence decoding after a prompt, prefill excluded."""
    from kvlab.serving.engine import Engine

    engine = Engine(model, memory)
    logits = engine.extend({"A": prompt})["A"]
    began = time.perf_counter()
    for _ in range(tokens):
        logits = engine.extend({"A": [int(logits.argmax())]})["A"]
    took = time.perf_counter() - began
    memory.release("A")
    return tokens / took


def decode() -> Iterator[Row]:
    """SmolLM2 over paged memory against the same model over a contiguous cache."""
    import torch

    from kvlab.execution.model import load_model
    from kvlab.execution.model_config import ModelFileError
    from kvlab.memory.allocator import Allocator
    from kvlab.memory.kv_store import PagedMemory, PagedStore, RectangularMemory
    from kvlab.memory.layout import quarter_split

    torch.set_num_threads(min(2, os.cpu_count() or 1))
    try:
        model, tokenizer = load_model("smollm2")
    except ModelFileError as missing:
        yield Row("decode, SmolLM2, paged / contiguous", note=str(missing))
        return
    c, prompt, tokens = model.config, tokenizer.encode("It is a truth universally acknowledged, that " * 20), 40
    layout = quarter_split(c.layers, c.kv_heads, c.head_dim, 4, block_size=16, num_blocks=64)

    def paged() -> float:
        return decode_rate(model, PagedMemory(Allocator(layout, audit="chain", queue_seed=1), PagedStore(layout)),
                           prompt, tokens)

    def contiguous() -> float:
        memory = RectangularMemory(c.layers, c.kv_heads, c.head_dim, slots=1, max_length=1024)
        return decode_rate(model, memory, prompt, tokens)

    ours, theirs = interleaved(paged, contiguous)
    yield Row("decode, SmolLM2, paged", "tokens/s", ours, "the same model over a contiguous cache", theirs, 0.9)
    yield Row("decode, SmolLM2, one sequence", "tokens/s", ours, "floor", 15.0, 1.0)


# ---------------------------------------------------------------- the app
@contextmanager
def _server(port: int) -> Iterator[str]:
    command = [sys.executable, "-m", "streamlit", "run", "app", "--server.headless=true", f"--server.port={port}",
               "--server.address=127.0.0.1", "--browser.gatherUsageStats=false"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/_stcore/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


STEP = """async button => {
  const began = performance.now(); button.click();
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - began; }"""


def app() -> Iterator[Row]:
    """The page in a real browser: until its first recording stands, and until a step's first picture."""
    import shutil

    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        yield Row("app", note="not here: the playwright package")
        return
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        yield Row("app", note="not here: a Chromium browser")
        return
    flags = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--no-first-run", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with _server(8599) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        began = time.perf_counter()
        page.goto(address)
        page.wait_for_selector(".kvs[data-rest]", timeout=60_000)
        ready = time.perf_counter() - began
        steps = []
        for _ in range(9):
            steps.append(page.locator(".kvs .next").evaluate(STEP))
            page.wait_for_timeout(700)
        browser.close()
    yield Row("app, first recording on the page", "s", ready, "limit", 3.0, 1.0, "lower", "first visit, server cold")
    yield Row("app, a step until its first picture", "ms", median(steps), "limit", 50.0, 1.0, "lower")


def allocator() -> Iterator[Row]:
    """The bookkeeping of the ownership contract beside other engines' cores."""
    from kvlab.study import bench_memory

    yield from bench_memory.allocator()


def index() -> Iterator[Row]:
    """The prefix chain: looking a prompt up, its hashing included."""
    from kvlab.study import bench_index

    yield from bench_index.index()


def radix() -> Iterator[Row]:
    """The radix tree: matching, evicting, growing; chats that come turn by turn."""
    from kvlab.study import bench_radix, bench_turns

    yield from bench_radix.radix()
    yield from bench_turns.turns()


def replay() -> Iterator[Row]:
    """Whole traces through both indexes."""
    from kvlab.study import bench_replay

    yield from bench_replay.replay()


BENCHES: dict[str, Callable[[], Iterator[Row]]] = {
    "decode": decode, "allocator": allocator, "index": index, "radix": radix, "replay": replay, "app": app}


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def main(only: str, out: Path) -> int:
    """Run the benches whose name contains `only`, print the table, write it to `out`; always 0."""
    rows = [row for name, bench in BENCHES.items() if only in name for row in bench()]
    print(f"{'measurement':<40}{'ours':>9}  {'unit':<10}{'peer or limit':>14}{'ratio':>8}{'target':>9}  holds")
    for row in rows:
        sign = "≥" if row.better == "higher" else "≤"
        target = f"{sign} {row.target:g}" if row.target is not None else "–"
        holds = {True: "yes", False: "NO", None: "–"}[row.holds]
        print(f"{row.name:<40}{_cell(row.ours):>9}  {row.unit:<10}{_cell(row.theirs):>14}{_cell(row.ratio):>8}"
              f"{target:>9}  {holds}" + (f"  ({row.against or row.note})" if row.against or row.note else ""))
    table = [asdict(row) | {"ratio": row.ratio, "holds": row.holds} for row in rows]
    out.write_text(json.dumps(table, indent=1) + "\n")
    return 0
