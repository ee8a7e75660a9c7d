"""The prefix index as a picture: it agrees with the index, nothing overlaps, every frame has a twin."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import pytest

from kvlab.reasons import REASONS
from kvlab.study.prefix_walk import PrefixWalk
from kvlab.views import prefix
from kvlab.views.prefix import DONE, LOOKUP, REFUSED
from kvlab.views.prefix_columns import counts, walk
from kvlab.views.scene import Frame, Recording
from kvlab.views.shapes import VIEW
from kvlab.views.stage import source
from tests.browser import browser_page, serve
from tests.views.stage_page import CLASHES, LIST, PAGE, same

Json = dict[str, Any]
TOKENS = list(range(100, 166))


def edited(at: int, count: int = 48) -> list[int]:
    return [t + 1000 * (n == at) for n, t in enumerate(TOKENS[:count])]


def told() -> PrefixWalk:
    """A full hit, an edit, a shared start, a refusal, an eviction, releases, and somebody who takes cached blocks."""
    w = PrefixWalk(16, 10)
    w.start("Anna", TOKENS[:50])
    w.publish("Anna", TOKENS[:50])
    w.lookup("Ben", TOKENS[:48])
    w.lookup("Ben", edited(37))
    w.start("Ben", TOKENS[:50])
    w.lookup("Ben", TOKENS[:48], False)
    w.lookup("Clara", [])
    w.take("Zoe", 5000)
    w.refused({"op": "fly"})
    w.evict(["1001@1", "2001@1"])
    w.lookup("Dora", TOKENS[:50])
    w.release("Anna")
    w.release("Ben")
    w.take("Zoe", 144)
    w.lookup("Ben", TOKENS[:50])
    return w


def uneven() -> PrefixWalk:
    """One group runs out of a prompt's blocks before the other."""
    w = PrefixWalk(16, 6)
    w.start("Anna", TOKENS[:50])
    w.publish("Anna", TOKENS[:50])
    pools = w.cache.allocator.pools
    pools[1].keys.pop(1)  # what a group of its own lifetime would have lost: no operation of this allocator can
    w.release("Anna")
    w.lookup("Ben", TOKENS[:50])
    return w


def deep(**design: Any) -> PrefixWalk:
    row = list(range(300))
    w = PrefixWalk(16, 60, **design)
    w.start("Anna", row[:180])
    w.publish("Anna", row[:180])
    w.start("Ben", [*row[:150], 7, *row[151:170]])
    w.start("Clara", row[:180])
    w.release("Clara")
    return w


def crowd() -> PrefixWalk:
    w = PrefixWalk(16, 24)
    for name in ("Anna", "Ben", "Clara", "Dora", "Emma with a long name"):
        w.start(name, TOKENS[:50])
        w.publish(name, TOKENS[:50])
    return w


WALKS = {"told": told, "deep": deep, "tails": lambda: deep(partial_tails=True), "crowd": crowd,
         "blocks of 4": lambda: small(4), "blocks of 32": lambda: small(32), "one group": lambda: small(16, groups=1)}


def small(size: int, **design: Any) -> PrefixWalk:
    w = PrefixWalk(size, 40, **design)
    w.start("A", TOKENS)
    w.publish("A", TOKENS)
    w.start("B", edited(37))
    return w


@cache
def played(name: str) -> tuple[PrefixWalk, Recording]:
    made = WALKS[name]()
    pieces = {t: f" word{t % 7}" for t in TOKENS} if name == "told" else None
    return made, prefix.recording(made.steps, title="T", question="Q", pieces=pieces, reasons=REASONS)


def frames() -> Iterator[tuple[str, int, Frame]]:
    for name in WALKS:
        for i, frame in enumerate(played(name)[1].frames):
            yield name, i, frame


# ---------------------------------------------------------------- it agrees with the index
def test_what_the_picture_calls_a_hit_is_what_the_lookup_found() -> None:
    for name in WALKS:
        made, _ = played(name)
        for before, moment in zip(made.steps, made.steps[1:], strict=False):
            if moment.match is None:
                continue
            found, lengths = walk(before.state, moment.manifest, moment.tokens, moment.keys), moment.match["lengths"]
            size = before.state["allocator"]["groups"][0]["block_size"]
            assert found.hits == lengths["S_indexed"] // size, (name, moment.said)
            handles = moment.match["receipt"]["matched_group_handles"]
            for group, row in handles.items():
                whole = lengths["S_runtime"] // size
                assert [c.handles[group] for c in found.columns[:whole]] == row[:whole]


def test_the_four_rulers_say_what_the_machine_says() -> None:
    for name in WALKS:
        made, recording = played(name)
        asked = [m for m in made.steps if m.match is not None]
        verdicts = [f for f in recording.frames if " tokens taken, " in f.title]
        assert len(asked) == len(verdicts)
        for moment, frame in zip(asked, verdicts, strict=True):
            shapes = frame.scene.by_key()
            for word in ("S_sem", "S_indexed", "S_cap", "S_runtime"):
                assert shapes[f"l.{word}"]["label"] == f"{word} {moment.match['lengths'][word]:,}"


def test_longer_bars_are_longer() -> None:
    shapes = next(f for f in played("told")[1].frames if f.title.startswith("32 of 48")).scene.by_key()
    wide = [shapes[f"r.{word}"]["w"] for word in ("S_sem", "S_cap", "S_runtime")]
    assert wide == sorted(wide, reverse=True) and len(set(wide)) == 3


def test_an_edit_changes_every_key_from_its_block_on_and_the_token_is_marked() -> None:
    made = PrefixWalk(16, 20)
    made.start("Anna", TOKENS)
    made.publish("Anna", TOKENS)
    made.lookup("Ben", edited(20, 64))
    recording = made.record("T", "Q")
    last, miss = recording.frames[-1].scene.by_key(), recording.frames[-2].scene.by_key()
    assert [last[f"k{n}"]["label"][0] for n in range(4)] == ["=", "≠", "≠", "≠"]
    signs = [miss[f"t{i}"].get("mark") for i in range(16)]
    assert signs == ["="] * 4 + ["≠"] + [None] * 11
    assert "k2" not in miss, "behind the first miss nothing is hashed"
    assert "Token 20 is" in " ".join(recording.frames[-2].twin)


def test_a_group_that_lacks_a_block_stops_the_walk() -> None:
    made = uneven()
    titles = [f.title for f in made.record("T", "Q").frames]
    assert titles[-3:] == ["Block 0: found", "Block 1: the first miss", "16 of 50 tokens taken, 34 to compute"]
    assert "not in every group" in made.record("T", "Q").frames[-2].why


def test_an_orphan_is_shown_as_behind_and_not_as_changed() -> None:
    made, _ = played("told")
    at = next(n for n, m in enumerate(made.steps) if m.request == "Dora")
    frame = prefix.recording(made.steps[: at + 1], title="T", question="Q").frames[-1]
    assert [frame.scene.by_key()[f"k{n}"]["label"][0] for n in range(3)] == ["=", "≠", "·"]


def test_the_board_counts_the_pool() -> None:
    for name in WALKS:
        made, recording = played(name)
        pool = made.cache.allocator.pools[0]
        named = sum(pool.is_free(i) for i in pool.keys)
        told_ = counts(made.steps[-1].state)
        assert list(told_.values()) == [pool.num_blocks - pool.free_count, named, pool.free_count - named]
        assert [c["value"] for c in recording.frames[-1].board[:3]] == list(told_.values())


# ---------------------------------------------------------------- geometry
def boxes(s: Json) -> list[tuple[float, float, float, float]]:
    """What a shape covers: its body, the tag under a block, the sign under a query."""
    x, y, out = s["x"], s["y"], []
    if s["kind"] in ("block", "well", "query", "chip", "digest"):
        out.append((x, y, x + s["w"], y + s["h"]) if "w" in s else (x, y, x + 360, y + 20))
    if s["kind"] == "query" and s.get("mark"):
        out.append((x + s["w"] / 2 - 4, y + s["h"] + 6, x + s["w"] / 2 + 4, y + s["h"] + 17))
    if s["kind"] == "block" and s.get("tag"):
        out.append((x + 22, y + s["h"] + 3, x + 68, y + s["h"] + 19))
    if s["kind"] == "label":
        classes = s.get("cls", "").split()
        wide = (7.6 if "m" in classes else 6.3) * len(s["label"])
        left = x - wide / 2 if "c" in classes else x
        out.append((left, y - 9, left + wide, y + 2))
    if s["kind"] == "lane":
        most = max(len(s["label"]) * 7.2, len(s.get("sub", "")) * 6)
        out.append((x, y, x + most + 38 * ("owner" in s), y + 30))
    return out


def test_nothing_overlaps_and_nothing_leaves_the_picture() -> None:
    for name, i, f in frames():
        spread = [(s["key"], box) for s in f.scene.shapes for box in boxes(s)]
        for key, (x, y, right, bottom) in spread:
            assert x >= 0 and y >= 0 and right <= VIEW[0] and bottom <= VIEW[1], (name, i, f.title, key)
        for (a, p), (b, q) in combinations(spread, 2):
            apart = p[2] <= q[0] + 0.5 or q[2] <= p[0] + 0.5 or p[3] <= q[1] + 0.5 or q[3] <= p[1] + 0.5
            assert apart or a == b, (name, i, f.title, a, b)


def test_at_most_six_columns_and_the_focus_is_among_them() -> None:
    for name, i, f in frames():
        shapes = f.scene.by_key()
        columns = [int(k[1:]) for k in shapes if k[0] == "p" and k[1:].isdigit()]
        assert len(columns) <= 6, (name, i)
        if f.title.startswith("Block ") and name in ("deep", "tails", "blocks of 4"):
            assert int(f.title.split(":")[0].split()[1]) in columns, (name, i, f.title)


def test_the_walks_reach_what_the_layout_must_bear() -> None:
    made = [m for name in WALKS for m in played(name)[0].steps]
    assert {m.what for m in made} == {"start", LOOKUP, DONE, REFUSED}
    assert {m.op for m in made} >= {"start", "publish", "release", "allocate", "evict", "lookup"}
    keys = {s["key"] for _, _, f in frames() for s in f.scene.shapes}
    assert {"ask", "why", "nokey"} <= keys and any(k.startswith("w0.") for k in keys)
    assert any("rows of the last one are copied" in f.why for _, _, f in frames())


# ---------------------------------------------------------------- frames
def test_lookups_and_refusals_leave_the_digest_and_commits_move_it() -> None:
    for name, i, f in frames():
        shown = f.scene.by_key()["digest"]
        assert f.kind != "staged", "a lookup stages nothing"
        if f.kind in ("read", "refused"):
            assert shown["value"] == shown["prev"], (name, i, f.title)
        elif f.kind == "committed" and "nothing new" not in f.title:
            assert shown["value"] != shown["prev"], (name, i, f.title)


def test_a_refusal_has_its_word_and_shakes() -> None:
    no = [f for f in played("told")[1].frames if f.kind == "refused"]
    assert [f.scene.by_key()["why"]["label"] for f in no] == ["empty_prompt", "out_of_memory", "unknown_operation"]
    assert all(f.shake == "ask" and f.why.startswith(REASONS[f.scene.by_key()["why"]["label"]][:20]) for f in no)


def test_words_and_twins_are_sentences() -> None:
    for name, i, f in frames():
        assert f.title and f.why.endswith((".", "?")), (name, i, f.title, f.why)
        assert f.twin and all(line.endswith(".") for line in f.twin), (name, i, f.twin)
        assert len(f.title) < 90 and len(f.why) < 340, (name, i, f.why)


def test_the_view_is_pure_and_survives_json() -> None:
    for name in WALKS:
        made, recording = played(name)
        kept = copy.deepcopy(made.steps)
        prefix.recording(made.steps, title="T", question="Q")
        assert made.steps == kept
        assert Recording.from_dict(json.loads(json.dumps(recording.to_dict()))) == recording


def test_a_still() -> None:
    made = played("told")[0]
    shapes = prefix.scene(made.steps[2]).by_key()
    assert shapes["b0.1000@1"]["owners"] == ["A"] and prefix.scene(made.steps[2]).svg().startswith("<svg")


# ---------------------------------------------------------------- a real browser
@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 1000])
def test_no_words_clash_and_the_still_is_the_resting_picture(width: int) -> None:
    names = ("told", "tails", "crowd")
    pages = {"index.html": PAGE, "stage.js": source()}
    pages |= {f"{i}.json": json.dumps(played(name)[1].to_dict()) for i, name in enumerate(names)}
    with serve(pages) as base, browser_page(width, 800) as page:
        for i, name in enumerate(names):
            page.goto("about:blank")
            page.goto(f"{base}/?r={i}&theme=light#0")
            page.wait_for_function("window.ready")
            made = played(name)[1]
            for n in range(0, len(made.frames), 1 if name == "told" else 5):
                page.evaluate("n => stage.seek(n)", n)
                assert page.evaluate(CLASHES) == [], (name, n, made.frame(n).title)
                if n % 5:
                    continue
                live, svg = page.evaluate(LIST), made.frame(n).svg()
                page.evaluate("svg => document.body.insertAdjacentHTML('afterbegin', `<p id=still>${svg}</p>`)", svg)
                same(live, page.evaluate(LIST), f"{name} {n}")
                page.evaluate("document.querySelector('#still').remove()")
