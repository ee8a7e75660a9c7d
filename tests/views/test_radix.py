"""The radix cache as a picture: nothing overlaps, every slot has one place, splits part where they stand, words fit."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest

from kvlab.contract import History, Rejected
from kvlab.reasons import REASONS
from kvlab.reuse.radix_cache import RadixCache
from kvlab.study import fixtures
from kvlab.views import radix_grid as grid
from kvlab.views.radix import recording, scene
from kvlab.views.radix_beats import beats
from kvlab.views.radix_names import Names, spread
from kvlab.views.radix_words import FIRST, board_of
from kvlab.views.scene import Frame, Recording
from kvlab.views.shapes import VIEW
from kvlab.views.stage import source
from tests.browser import browser_page, serve
from tests.views.stage_page import CLASHES, LIST, PAGE, same

Json = dict[str, Any]
ARTICLE = fixtures.load_fixture(fixtures.FIXTURES / "loop7_radix.json")


def told(machine: RadixCache, ops: list[Json]) -> Json:
    """The history of some operations, refused ones included, through JSON as a file would hand it over."""
    history = History(machine)
    for op in ops:
        with suppress(Rejected):
            machine.apply(op)
    return json.loads(json.dumps(history.to_dict()))


def article() -> Json:
    refused = [{"op": "evict", "node": 2}, {"op": "lock", "request": "late", "node": 77},
               {"op": "match", "tokens": "10 11"}]
    ops = [step["op"] for step in ARTICLE["trace"] if "op" in step]
    return told(RadixCache.of(ARTICLE["base"]), [*ops[:13], *refused, *ops[13:]])


def walk(seed: int, steps: int, **shape: Any) -> Json:
    """Requests that come, grow, publish and go over a small vocabulary, so that edges split and trees get wide."""
    draw, ops, live = random.Random(seed), [], []
    size = shape.get("block_size", 1)
    for n in range(steps):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 14) * size)]
        kind = draw.choice(["insert", "insert", "match", "handoff", "extend", "publish", "finish", "cancel", "evict",
                            "lock", "reserve"])
        who = draw.choice(live) if live else "nobody"
        if kind == "handoff":
            live.append(f"r{n}")
            ops += [{"op": "match", "tokens": tokens}, {"op": "lock", "request": f"r{n}", "node": draw.randrange(6)}]
        elif kind == "lock":
            ops.append({"op": "handoff", "request": f"h{n}", "tokens": tokens})
        elif kind in ("extend", "publish"):
            ops.append({"op": kind, "request": who, "append": tokens[:4]})
        elif kind in ("finish", "cancel"):
            ops.append({"op": kind, "request": who})
        elif kind == "reserve":
            ops.append({"op": kind, "count": 2})
        else:
            ops.append({"op": kind, "tokens": draw.randrange(1, 9) if kind == "evict" else tokens})
    return told(RadixCache(**{"num_slots": 24} | shape), ops)


def deep(edges: int) -> Json:
    """One path of so many edges, then a question for all of it."""
    row = list(range(1, 2 * edges + 1))
    ops = [{"op": "insert", "tokens": row}]
    ops += [{"op": "match", "tokens": [*row[: 2 * i], 99]} for i in range(1, edges)]
    return told(RadixCache(4 * edges), [*ops, {"op": "match", "tokens": row}, {"op": "evict", "tokens": 3}])


HISTORIES = {
    "article": article, "walk": lambda: walk(1, 40), "blocks of 2": lambda: walk(2, 40, block_size=2, num_slots=20),
    "blocks of 4": lambda: walk(3, 40, block_size=4, num_slots=24, first_slot=100),
    "wide": lambda: walk(4, 90, num_slots=200), "deep": lambda: deep(16),
    "sglang": lambda: walk(5, 40, policy="sglang-0.5.11", eviction="lfu"),
}


@cache
def played(name: str) -> tuple[Json, Recording]:
    history = HISTORIES[name]()
    pieces = {i: f" word{i}" for i in range(5)} if name == "walk" else None
    return history, recording(history, title="T", question="Q", pieces=pieces, reasons=REASONS)


def frames() -> Iterator[tuple[str, int, Frame]]:
    for name in HISTORIES:
        for i, frame in enumerate(played(name)[1].frames):
            yield name, i, frame


# ---------------------------------------------------------------- geometry
def boxes(s: Json) -> list[tuple[float, float, float, float]]:
    """What a shape covers: its body, the words under a capsule, its padlock, the sign under a query."""
    x, y, out = s["x"], s["y"], []
    if s["kind"] in ("slot", "query", "chip", "pile", "digest"):
        out.append((x, y, x + s["w"], y + s["h"]))
    if s["kind"] == "query":
        out.append((x + s["w"] / 2 - 4, y + s["h"] + 6, x + s["w"] / 2 + 4, y + s["h"] + 17))
    if s["kind"] == "pill":
        out.append((x + 10, y + s["h"] + 7, x + 10 + 6.3 * len(s["label"]), y + s["h"] + 16))
        if s.get("badge"):
            out.append((x + s["w"] - 26, y - 9, x + s["w"] + 8, y + 6))  # its lower rim laps over a slot by design
    if s["kind"] == "label":
        wide = 6.3 * len(s["label"])
        left = x - wide / 2 if "c" in s.get("cls", "").split() else x
        out.append((left, y - 9, left + wide, y + 2))
    if s["kind"] == "lane":
        most = max(len(s["label"]) * 7.2, len(s.get("sub", "")) * 6.3)
        out.append((x, y, x + most + 38 * ("owner" in s), y + 30))
    return out


def test_nothing_overlaps_and_nothing_leaves_the_picture() -> None:
    for name, i, f in frames():
        spread_out = [(s["key"], box) for s in f.scene.shapes for box in boxes(s)]
        for key, (x, y, right, bottom) in spread_out:
            assert x >= 0 and y >= 0 and right <= VIEW[0] and bottom <= VIEW[1], (name, i, key)
        for (a, p), (b, q) in combinations(spread_out, 2):
            apart = p[2] <= q[0] + 0.5 or q[2] <= p[0] + 0.5 or p[3] <= q[1] + 0.5 or q[3] <= p[1] + 0.5
            assert apart or a == b, (name, i, f.title, a, b)


def test_capsules_hold_their_slots_and_stand_apart() -> None:
    for name, i, f in frames():
        pills = [s for s in f.scene.shapes if s["kind"] == "pill"]
        for a, b in combinations(pills, 2):
            assert (a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"]
                    or b["y"] + b["h"] <= a["y"]), (name, i, a["key"], b["key"])
        for s in f.scene.shapes:
            if s["kind"] == "slot" and "token" in s and "owner" not in s:
                assert any(p["x"] < s["x"] and s["x"] + s["w"] < p["x"] + p["w"] and p["y"] < s["y"]
                           and s["y"] + s["h"] < p["y"] + p["h"] for p in pills), (name, i, s["key"])


def test_the_walks_reach_what_the_layout_must_bear() -> None:
    """Otherwise the geometry above proves little."""
    keys = {s["key"] for _, _, f in frames() for s in f.scene.shapes}
    assert {"more", "stub", "pile", "ask", "why", "asks", "leases.more"} <= keys
    assert any(key.startswith("g.") for key in keys) and any(key.startswith("b") for key in keys)
    titles = " ".join(f.title for _, _, f in frames())
    assert all(word in titles for word in ("called off", "ends, its rows stay", "publishes", "Refused", "Reserve"))
    kinds = {b.what for name in HISTORIES for b in beats(played(name)[0])}
    assert kinds == {"start", "ask", "arrive", "split", "evict", "commit", "refused"}


# ---------------------------------------------------------------- every slot, and where it moves
def test_every_slot_of_a_small_pool_is_on_the_stage_in_every_frame() -> None:
    for name in ("article",):
        for frame in played(name)[1].frames:
            slots = sorted(int(s["label"]) for s in frame.scene.shapes if s["kind"] == "slot")
            assert slots == list(range(1, 25)), frame.title


def test_what_is_not_shown_is_counted() -> None:
    for name, i, f in frames():
        history, _ = played(name)
        shown = {s["label"] for s in f.scene.shapes if s["kind"] == "slot"}
        hidden = 0
        for s in f.scene.shapes:
            if s["key"].startswith("g.") or (re.match(r"b\d", s["key"])):
                hidden += int(s["label"][1:])
            elif s["key"] in ("more", "stub", "pile"):
                hidden += int(re.search(r"([\d,]+) (?:more )?slots?", s["says"])[1])
        of = next(iter(history["snapshots"].values()))["num_slots"]
        assert len(shown) + hidden == of, (name, i, f.title)


def test_a_split_starts_from_two_touching_halves_and_tokens_stay_still() -> None:
    _, made = played("article")
    for n, at in ((3, 3), (7, 1)):
        before, after = (made.frame(i).scene.by_key() for i in (n - 1, n))
        new, old = (after[k] for k in (("n2", "n1") if n == 3 else ("n3", "n1")))
        was = before["n1"]
        assert new["from"]["x"] == was["x"] and new["from"]["x"] + new["from"]["w"] == old["from"]["x"]
        assert old["from"]["x"] + old["from"]["w"] == was["x"] + was["w"]
        first = [s for s in after.values() if s["kind"] == "slot" and new["x"] < s["x"] < new["x"] + new["w"]
                 and s["y"] > new["y"]]
        inside = [s for s in first if "owner" not in s]
        assert len(inside) == at and all(before[s["key"]]["x"] == s["x"] for s in inside)


def test_a_long_edge_that_splits_lets_its_hidden_slots_come_from_the_cell_they_lay_in() -> None:
    row = list(range(1, 41))
    made = recording(told(RadixCache(50), [{"op": "insert", "tokens": row}, {"op": "match", "tokens": row[:20]}]),
                     title="T", question="Q")
    before, after = made.frame(-2).scene.by_key(), made.frame(-1).scene.by_key()
    gap = before["g.1"]
    came = [s for s in after.values() if s["kind"] == "slot" and s["key"] not in before]
    assert came and all(s["from"]["x"] + s["from"]["w"] / 2 == gap["x"] for s in came)
    assert 0 < after["n2"]["from"]["w"] < before["n1"]["w"]


def test_evicted_slots_glide_home_and_duplicates_go_back() -> None:
    _, made = played("article")
    titles = [f.title for f in made.frames]
    kept = made.frame(titles.index("Keep 11, 12, give 7 to 10 back")).scene.by_key()
    assert all(kept[f"s{i}"]["y"] == grid.FREE_Y and "token" not in kept[f"s{i}"] for i in (7, 8, 9, 10))
    assert all("owner" not in kept[f"s{i}"] and kept[f"s{i}"]["token"] == str(t) for i, t in ((11, 30), (12, 31)))
    one, two = (made.frame(titles.index(t)) for t in ("Evict 3 tokens: first [60]", "Evict 3 tokens: then [50 51]"))
    assert one.kind == "staged" and two.kind == "committed"
    assert one.scene.by_key()["s20"]["y"] == grid.FREE_Y and "n7" in one.scene.by_key()
    assert two.scene.by_key()["s15"]["y"] == grid.FREE_Y and "n7" not in two.scene.by_key()


def test_a_pool_that_is_not_shown_whole_takes_slots_from_its_pile() -> None:
    made = recording(told(RadixCache(100), [{"op": "insert", "tokens": list(range(1, 60))},
                                            {"op": "evict", "tokens": 1}]), title="T", question="Q")
    last = made.frames[-1]
    assert last.scene.by_key()["pile"]["label"] == "+88 more"
    assert set(last.leave) >= {"s1"} and all(rect["y"] == grid.FREE_Y for rect in last.leave.values())


# ---------------------------------------------------------------- state, words, board
def test_the_digest_moves_with_commits_only() -> None:
    for name, i, f in frames():
        shown = f.scene.by_key()["digest"]
        if f.kind in ("staged", "refused"):
            assert shown["value"] == shown["prev"], (name, i)
        elif f.kind == "committed":
            assert shown["value"] != shown["prev"], (name, i)
    for name in HISTORIES:
        history, made = played(name)
        commits = [s["digest"][:12] for s in history["steps"] if s["kind"] == "committed"]
        assert [f.scene.by_key()["digest"]["value"] for f in made.frames if f.kind == "committed"] == commits


def test_the_board_is_the_machines_own_ledger() -> None:
    """In slots, beside what the machine answers in tokens."""
    for name in ("article", "blocks of 2", "wide"):
        for snapshot in played(name)[0]["snapshots"].values():
            machine, size = RadixCache.of(snapshot), snapshot["block_size"]
            ours, pool, ledgers = board_of(snapshot), *(machine.ask({"ask": w}) for w in ("pool", "ledgers"))
            assert [ours[k] for k in ("tree", "private", "free")] == [pool[k] for k in ("tree", "private", "free")]
            assert [ours[k] * size for k in ("protected", "evictable", "leaf-ready")] == list(ledgers.values())


def test_totals_count_what_was_found_and_what_was_computed_twice() -> None:
    last = {c["label"]: c["value"] for c in played("article")[1].frames[-1].board}
    assert last["recomputed"] == 6  # golden L7: duplicate input slots released
    found = sum(b.receipt["matched"] for b in beats(played("article")[0])
                if b.what == "commit" and b.receipt["operation"] in ("match", "handoff"))
    assert last["tokens matched"] == found == 3 + 6 + 6 + 6 + 3 + 6


def test_a_lock_is_on_every_node_of_the_path_and_in_the_words() -> None:
    _, made = played("article")
    frame = next(f for f in made.frames if f.title.startswith("req-chat-b is running"))
    shapes = frame.scene.by_key()
    assert {k: shapes[k].get("badge") for k in ("n1", "n2", "n3", "n4", "n5")} == {
        "n1": 1, "n2": 2, "n3": 2, "n4": 1, "n5": 1}
    assert shapes["lease.req-chat-b"]["sub"] == "nodes 4 · 3 · 2" and "the count is 2" in frame.why


def test_a_refusal_rings_its_edge_or_what_was_asked() -> None:
    no = [f for f in played("article")[1].frames if f.kind == "refused"]
    assert [f.title for f in no] == ["Refused: evict node 2", "Refused: lock node 77 for late", "Refused: match"]
    assert [f.shake for f in no] == ["n2", "ask", "ask"]
    assert [f.scene.by_key()["why"]["label"] for f in no] == ["internal_node_eviction", "unknown_node",
                                                              "invalid_token"]
    assert all(f.why.startswith(REASONS[f.scene.by_key()["why"]["label"]]) for f in no)


def test_query_marks_agree_with_the_machines_answer() -> None:
    for name in ("article", "blocks of 2", "walk"):
        history, made = played(name)
        for beat, frame in zip(beats(history), made.frames, strict=True):
            if not beat.query or beat.brought:
                continue
            signs = [s for s in frame.scene.shapes if s["kind"] == "query"]
            equal = sum(int(s["token"][1:]) if re.fullmatch(r"\+\d+", s["token"]) else 1
                        for s in signs if s.get("mark") == "=")
            assert equal * beat.before["block_size"] == beat.receipt["matched"], frame.title
            assert sum(s.get("mark") == "≠" for s in signs) <= 1


def test_words_and_twins_are_sentences() -> None:
    for name, i, f in frames():
        assert f.title and f.why.endswith((".", "?")), (name, i, f.title, f.why)
        assert all(line.endswith(".") for line in f.twin) and "Slots: " in f.twin[-1], (name, i)
        assert len(f.title) < 90 and len(f.why) < 340, (name, i, f.why)
    assert set(FIRST) == {"lru", "lfu", "fifo", "mru", "filo", "priority", "segmented-lru"}


def test_names() -> None:
    assert spread([1, 2, 3, 4, 11, 12]) == "1 to 4, 11, 12" and spread([]) == "none"
    assert spread(list(range(0, 40, 2))).endswith("13 more")
    words = Names({1: " Mr", 2: ".\n"}, wide=True)
    assert words.block([1, 2]) == "Mr.⏎" and words.say([1, 2]) == "“Mr.”" and words.block([7]) == "?"
    assert Names().block([123456]) == "1234…" and Names().say([1, 2]) == "[1 2]"


# ---------------------------------------------------------------- purity, stability
def test_the_view_is_pure_and_survives_json() -> None:
    for name in HISTORIES:
        history, made = played(name)
        kept = copy.deepcopy(history)
        recording(history, title="T", question="Q")
        assert history == kept
        assert Recording.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_rows_keep_their_order_when_an_edge_splits_or_goes() -> None:
    """A row moves down or up, and never past another one that stays: but the branch that is asked for comes first."""
    for name in ("article", "walk", "sglang"):
        for one, two in pairwise(played(name)[1].frames):
            old, new = one.scene.by_key(), two.scene.by_key()
            if "asks" in new:
                continue
            both = [k for k in old if k in new and old[k]["kind"] == "pill"]
            for a, b in combinations(both, 2):
                if old[a]["y"] < old[b]["y"]:
                    assert new[a]["y"] <= new[b]["y"], (name, two.title, a, b)


def test_a_still_scene_and_another_history() -> None:
    snapshot = played("article")[0]["snapshots"][played("article")[0]["steps"][-1]["digest"]]
    assert scene(snapshot).by_key()["n4"]["badge"] == 1 and scene(snapshot).svg().startswith("<svg")
    with pytest.raises(ValueError, match="radix"):
        recording({"kvlab": "history/1", "snapshots": {"a": {"kind": "allocator"}}, "steps": []}, title="", question="")


# ---------------------------------------------------------------- a real browser
@pytest.mark.browser
def test_no_words_clash_and_the_still_is_the_resting_picture() -> None:
    names = ("article", "walk", "wide", "deep")
    pages = {"index.html": PAGE, "stage.js": source()}
    pages |= {f"{i}.json": json.dumps(played(name)[1].to_dict()) for i, name in enumerate(names)}
    with serve(pages) as base, browser_page(1280, 800) as page:
        for i, name in enumerate(names):
            page.goto("about:blank")
            page.goto(f"{base}/?r={i}&theme=light#0")
            page.wait_for_function("window.ready")
            made = played(name)[1]
            for n in range(0, len(made.frames), 2 if name == "article" else 9):
                page.evaluate("n => stage.seek(n)", n)
                assert page.evaluate(CLASHES) == [], (name, n)
                if n % 6:
                    continue
                live = page.evaluate(LIST)
                svg = made.frame(n).svg()
                page.evaluate("svg => document.body.insertAdjacentHTML('afterbegin', `<p id=still>${svg}</p>`)", svg)
                same(live, page.evaluate(LIST), f"{name} {n}")
                page.evaluate("document.querySelector('#still').remove()")
