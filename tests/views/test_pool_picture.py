"""One picture of a pool: nothing overlaps, nothing is missing, the window and the shared bodies are right."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import combinations, pairwise, product
from typing import Any

import pytest

from kvlab.contract import History
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.views import shapes as grid
from kvlab.views.pool import recording, scene
from kvlab.views.pool_grid import Window, follow, shelves, stands
from kvlab.views.pool_picture import picture
from kvlab.views.pool_sheet import letters
from kvlab.views.stage import source
from tests.browser import browser_page, serve
from tests.views.histories import WORDS, allocator, conversation, frames, played, states
from tests.views.stage_page import CLASHES, PAGE

Json = Mapping[str, Any]
BODIES = ("block", "pile", "link")


# ---------------------------------------------------------------- geometry
def boxes(s: Json) -> list[tuple[float, float, float, float]]:
    """What a shape covers: its body, and the tag and padlock that a block wears outside of it."""
    x, y, out = s["x"], s["y"], []
    if s["kind"] in (*BODIES, "chip"):
        out.append((x, y, x + s["w"], y + s["h"]))
    if s.get("tag"):
        out.append((x + 22, y + s["h"] + 3, x + 68, y + s["h"] + 19))
    if s.get("badge"):
        out.append((x + s["w"] - 26, y - 9, x + s["w"] + 8, y + 9))
    if s["kind"] == "label":
        wide, classes = 6.1 * len(s["label"]), s.get("cls", "").split()
        left = x - wide if "e" in classes else x - wide / 2 if "c" in classes else x
        out.append((left, y - 9, left + wide, y + 2))
    return out


def test_nothing_overlaps_and_nothing_leaves_the_picture() -> None:
    for name, i, f in frames():
        spread = [(s["key"], box) for s in f.scene.shapes for box in boxes(s)]
        for key, (x, y, right, bottom) in spread:
            assert x >= 0 and y >= 0 and right <= grid.VIEW[0] and bottom <= grid.VIEW[1], (name, i, key)
        for (a, p), (b, q) in combinations(spread, 2):
            apart = p[2] <= q[0] + 0.5 or q[2] <= p[0] + 0.5 or p[3] <= q[1] + 0.5 or q[3] <= p[1] + 0.5
            assert apart or a == b, (name, i, f.title, a, b)


def test_the_walks_reach_what_the_layout_must_bear() -> None:
    """Otherwise the geometry above proves little."""
    seen = [s for _, _, f in frames() for s in f.scene.shapes]
    keys = {s["key"].split(".")[0] for s in seen}
    assert {"pile", "heap", "l", "ask", "why", "fly", "flow"} <= keys
    assert any(s["key"] == "lane.more" for s in seen) and any(s.get("badge") for s in seen)
    assert any(s.get("label", "").endswith(" before") and "," in s["label"] for s in seen)
    assert any(len(s.get("owners", ())) == 3 for s in seen)
    tables = [r["tables"] for s, _ in states() for r in s["requests"].values()]
    assert max(len(t) for groups in tables for t in groups.values()) > 36
    assert max(len(s["requests"]) for s, _ in states()) >= 7


def test_every_free_block_is_in_the_queue_in_its_order_or_in_the_pile() -> None:
    for snapshot, groups in states():
        view = picture(snapshot, groups=groups)
        shown = view.scene.by_key()
        for shelf in shelves(snapshot, groups):
            keys = [f"b.{shelf.group}.{b}" for b in snapshot["free"][shelf.group]]
            queue = [shown[k]["x"] for k in keys if k in shown]
            pile = shown.get(f"pile.{shelf.group}")
            hidden = int(re.search(r"\d+", pile["label"])[0]) if pile else 0
            assert set(keys) <= view.where.keys() and len(queue) + hidden == len(keys)
            assert [k in shown for k in keys] == [True] * len(queue) + [False] * hidden
            assert queue == [shelf.x + c * grid.PITCH for c in range(len(queue))]


def test_every_place_of_a_table_in_the_window_holds_its_block_or_a_link_to_it() -> None:
    for snapshot, groups in states():
        view = picture(snapshot, groups=groups)
        shown = view.scene.by_key()
        for shelf, request in product(shelves(snapshot, groups), filter(None, view.window.rows)):
            first, table = view.window.first[request, shelf.group], snapshot["requests"][request]["tables"][shelf.group]
            assert 0 <= first < len(table)
            y = shown[f"lane.r.{request}"]["y"] - 13
            for column, handle in enumerate(table[first : first + shelf.columns]):
                body = shown[f"b.{shelf.group}.{handle.partition('@')[0]}"]
                link = shown.get(f"l.{shelf.group}.{request}.{first + column}", body)
                assert body["label"] == handle == link["label"] and link["x"] == shelf.x + column * grid.PITCH
                assert link["y"] <= y + 16 < link["y"] + link["h"] and body["refs"] >= len(body["owners"])


# ---------------------------------------------------------------- the window
def test_the_window_slides_only_where_what_changes_would_fall_outside() -> None:
    history, _ = conversation(tokens=40, block_size=4)
    made = recording(history, **WORDS)
    for before, after in pairwise(made.frames):
        old, new = before.scene.by_key(), after.scene.by_key()
        slid = [k for k, s in new.items() if k in old and s["kind"] == "block" and s["y"] == old[k]["y"] >= 252
                and s["x"] != old[k]["x"]]  # fmt: skip
        assert not slid or "reserve" in after.title, (after.title, slid)
        assert all(new[k]["x"] < old[k]["x"] for k in slid)


def test_rows_that_stand_in_line_slide_together_where_they_can() -> None:
    machine = allocator(block_size=4)
    machine.allocate("A", 12)
    machine.allocate("B", 11)
    machine.allocate("C", 4)
    before = machine.snapshot()
    on = shelves(before)
    window = follow(Window(), before, on)
    assert {window.first[r, "g0"] for r in "ABC"} == {0}
    staged = machine.stage({"op": "append", "request": "A"}).staged()
    window = follow(window, machine.snapshot(), on, before, staged)
    assert [window.first[r, "g0"] for r in "ABC"] == [1, 1, 0]
    heads = picture(machine.snapshot(), staged, window=window).scene.by_key()
    assert heads["col.g0.0.2"]["label"] == "block 3" and heads["col.g0.2.0"]["label"] == "block 0"
    assert not [k for k in heads if k.startswith("col.g0.1")]


def test_a_request_keeps_its_row_and_what_it_just_wrote_is_in_sight() -> None:
    history, _ = conversation(tokens=30, block_size=4)
    window, last = Window(), None
    for snapshot in history["snapshots"].values():
        on = shelves(snapshot)
        now = follow(window, snapshot, on, last)
        for request in set(now.rows) & set(window.rows) - {None}:
            assert now.rows.index(request) == window.rows.index(request)
        for request, shelf in product(snapshot["requests"], on):
            count = len(snapshot["requests"][request]["tables"][shelf.group])
            if last is None or snapshot["requests"][request] != last["requests"].get(request):
                assert 0 <= now.first[request, shelf.group] - max(0, count - shelf.columns) <= 1
        window, last = now, snapshot


def test_a_hidden_request_that_changes_takes_the_row_of_the_one_that_rested_longest() -> None:
    machine = allocator()
    for request in "ABCD":
        machine.allocate(request, 8)
    before = machine.snapshot()
    on = shelves(before)
    window = follow(Window(), before, on)
    assert window.rows == ("A", "B", "C") and window.hidden(before) == ["D"]
    for request in ("A", "C"):
        machine.append(request)
        window, before = follow(window, machine.snapshot(), on, before), machine.snapshot()
    machine.append("D")
    assert follow(window, machine.snapshot(), on, before).rows == ("A", "D", "C")
    still = scene(machine.snapshot(), window=follow(window, machine.snapshot(), on, before))
    assert still.by_key()["lane.more"]["label"] == "1 more request: B"


def test_a_reader_may_page_through_a_long_table() -> None:
    machine = allocator(block_size=4)
    machine.allocate("A", 32)
    first = {("A", "g0"): 2, ("A", "g1"): 5}
    shapes = scene(machine.snapshot(), window=Window(("A", None, None), first)).by_key()
    assert shapes["line.g0"]["label"] == "‹ blocks 0–1 before · blocks 5–7 after ›"
    assert shapes["line.g1"]["label"] == "‹ blocks 0–4 before"
    assert shapes["b.g0.1002"]["x"] == grid.LEFT and "b.g0.1005" not in shapes
    assert [shapes[f"col.g0.0.{c}"]["label"] for c in range(3)] == ["block 2", "block 3", "block 4"]


# ---------------------------------------------------------------- bodies, links, letters
def test_neighbours_share_one_body_and_a_distant_owner_gets_a_link() -> None:
    machine = allocator()
    machine.allocate("A", 20)
    machine.fork("A", "B")
    shared = scene(machine.snapshot()).by_key()["b.g0.1000"]
    assert shared["owners"] == ["A", "B"] and shared["h"] == grid.BLOCK_H + grid.LANE and shared["refs"] == 2
    machine.release("B")
    machine.allocate("B", 5)
    machine.fork("A", "C")
    shapes = scene(machine.snapshot()).by_key()
    assert shapes["b.g0.1000"]["owners"] == ["A"] and shapes["b.g0.1000"]["refs"] == 2
    link = shapes["l.g0.C.0"]
    assert link["label"] == "1000@1" and link["owner"] == "C" and link["x"] == shapes["b.g0.1000"]["x"]


def test_a_block_found_at_another_place_of_a_table_is_not_one_body() -> None:
    machine = allocator()
    machine.allocate("A", 40)
    machine.apply({"op": "cache_full", "request": "A", "blocks": [1], "keys": ["aa"]})
    handles = [t[1] for t in machine.snapshot()["requests"]["A"]["tables"].values()]
    machine.apply({"op": "touch", "request": "B", "blocks": [handles]})
    snapshot = machine.snapshot()
    window = follow(Window(), snapshot, shelves(snapshot))
    window = Window(window.rows, window.first | {("A", "g0"): 1}, window.recent)
    spots = {s.block: s for s in stands(shelves(snapshot)[0], snapshot, window)}
    assert spots[int(handles[0].split("@")[0])].seats == (0,)


def test_the_arrow_of_a_copy_does_not_cross_what_stands_between() -> None:
    machine = allocator()
    machine.allocate("A", 5)
    machine.fork("A", "B")
    txn = machine.stage({"op": "append", "request": "B"})
    txn.copy()
    shapes = picture(machine.snapshot(), txn.staged(), flow=True).scene.by_key()
    up, body, copied = shapes["flow.g0"], shapes["b.g0.1000"], shapes["b.g0.1001"]
    assert up["x"] == up["x2"] == body["x"] + 27 and copied["y"] + copied["h"] < up["y2"] < up["y"] < body["y"]
    assert shapes["fly.g0.0"]["from"] == {"x": body["x"] + 23, "y": body["y"] + 4}


def test_more_than_three_owners_show_three_bands_and_the_whole_count() -> None:
    machine = allocator()
    machine.allocate("A", 20)
    for child in "BCDE":
        machine.fork("A", child)
    block = scene(machine.snapshot()).by_key()["b.g0.1000"]
    assert block["owners"] == ["A", "B", "C"] and block["refs"] == 5 and "A and B and C and D and E" in block["says"]


def test_letters_are_unique_their_own_where_they_can_be_and_fixed_where_asked() -> None:
    assert letters(["chat", "B", "x", "A"]) == {"B": "B", "A": "A", "chat": "C", "x": "D"}
    assert letters(["one", "two"], {"two": "A"}) == {"two": "A", "one": "B"}
    many = letters(f"r{i}" for i in range(60))
    assert len(set(many.values())) == 60 and many["r26"] == "AA"


def test_groups_whose_blocks_differ_in_size_have_windows_of_their_own() -> None:
    wide, fine = CacheGroup("g0", 0, 2, 1, 8, 4, 16, 16, 0), CacheGroup("g1", 2, 3, 1, 8, 4, 8, 32, 500)
    machine = Allocator(CacheLayoutManifest((wide, fine)))
    history = History(machine)
    machine.allocate("A", 40)
    machine.fork("A", "B")
    machine.append("B")
    machine.append("A", 3)
    shapes = scene(machine.snapshot()).by_key()
    assert [shapes[f"col.{g}.0.0"]["label"] for g in ("g0", "g1")] == ["block 0", "block 3"]
    said = {f.title: f.why for f in recording(history.to_dict(), **WORDS).frames}
    assert said["B appends token 40"].startswith("Table, length and counts become true together: B has its own tail")
    assert said["A appends 3 tokens"].startswith("A alone owns its tail 2@1, so the next row is written in place.")


# ---------------------------------------------------------------- a real browser
@pytest.mark.browser
def test_no_words_clash_in_a_real_browser() -> None:
    """With the browser's own fonts: the letters' widths are only guessed above."""
    names = ("article", "4 tokens", "one of two groups")
    pages = {"index.html": PAGE, "stage.js": source()}
    pages |= {f"{i}.json": json.dumps(played(name).to_dict()) for i, name in enumerate(names)}
    with serve(pages) as base, browser_page(1280, 800) as page:
        for i, name in enumerate(names):
            page.goto("about:blank")
            page.goto(f"{base}/?r={i}&theme=light#0")
            page.wait_for_function("window.ready")
            for n in range(0, len(played(name).frames), 3):
                page.evaluate("n => stage.seek(n)", n)
                clashes = [c for c in page.evaluate(CLASHES) if not re.fullmatch(r"spills: \w", c)]  # a pile's letter
                assert not clashes, (name, n, clashes)
