"""Three ledgers side by side: the ledgers' numbers, every byte of a table, motion, no overlap in a browser."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from typing import Any

import pytest

from kvlab.contract import History
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.study.lesson_ledger import Wish, family, record, sheet, sheets
from kvlab.views.ledger import board, recording, scene, size
from kvlab.views.scene import Recording
from kvlab.views.stage import source
from tests.browser import browser_page, serve
from tests.views.stage_page import CLASHES, LIST, PAGE, same

WORDS = {"title": "Three ledgers", "question": "Where did the memory go?"}


def machine(blocks: int, block_size: int = 16) -> Allocator:
    return Allocator(CacheLayoutManifest((CacheGroup("kv", 0, 32, 4, 128, 2, block_size, blocks, 100),)))


@cache
def article() -> History:
    return family(machine(8), [Wish("A", 33, 64), Wish("B", 25, 48), Wish("C", 16, 32)])


@cache
def crowd() -> History:
    """Nine requests over forty blocks, long tables, then most of them leave."""
    m = machine(40)
    history = History(m)
    m.allocate("A", 300)
    for i, name in enumerate("BCDEFGHI"):
        m.fork("A", name)
        m.truncate(name, 31 * i + 5)
    for name in "ABCDEF":
        m.release(name)
    return history


STORIES = {"article": article, "crowd": crowd}


def made(name: str) -> Recording:
    return record(STORIES[name](), reserved=512, **WORDS)


def last(name: str) -> dict[str, Any]:
    return made(name).frames[-1].scene.by_key()


def test_the_articles_three_requests() -> None:
    now = sheet(article().now.committed, "Now", "Three.", reserved={"A": 64, "B": 48, "C": 32})
    end = recording([now], **WORDS).frames[-1]
    assert {c["label"]: (c["value"], c["unit"]) for c in end.board} == {
        "rectangles reserve": (9, "MiB"), "request views": (6, "MiB"), "distinct blocks": (3, "MiB"),
        "pool": (8, "MiB"), "unused, as seen": (22, "rows"), "unused, in blocks": (15, "rows")}
    shapes = end.scene.by_key()
    assert [k for k in shapes if k.startswith("r.")] == ["r.A.0", "r.A.1", "r.A.2", "r.B.0", "r.B.1", "r.C.0"]
    assert [shapes[k]["fill"] for k in ("r.A.2", "r.B.1", "u.101", "u.102")] == [1, 9, 16, 1]
    assert shapes["h.B.1"]["label"] == "7 rows of A" and "h.C.0" not in shapes and "h.A.2" not in shapes
    assert shapes["u.100"]["refs"] == 3 and shapes["u.100"]["owners"] == ["A", "B", "C"]
    assert sum(k.startswith("p.") for k in shapes) == 8
    assert "Of the unused slots that B sees, 7 hold rows of another request." in end.twin


def test_every_cell_of_a_table_is_there_and_counts() -> None:
    """Fills of the views add up to live rows, fills of distinct blocks to valid rows: read off the picture."""
    for frame, now in zip(made("article").frames, sheets(article(), reserved=512), strict=True):
        shapes, ledgers = frame.scene.by_key(), now["ledgers"]
        view = [s for k, s in shapes.items() if k.startswith("r.")]
        assert sum(s["fill"] for s in view) * now["row_bytes"] == ledgers["request_view"]["logical"]["bytes"]
        assert sum(s["of"] - s["fill"] for s in view) == ledgers["request_view"]["tail_slots"]
        real = [s for k, s in shapes.items() if k.startswith("u.")]
        assert sum(s["fill"] for s in real) == ledgers["unique"]["rows"]
        hidden = [int(s["label"].split()[0]) for k, s in shapes.items() if k.startswith("h.")]
        assert sum(hidden) == sum(ledgers["request_view"]["hidden_rows"].values())


def test_no_cell_of_the_board_is_a_total() -> None:
    for now in sheets(crowd(), reserved=512):
        amounts = [now["ledgers"][n][f]["bytes"] for n, f in
                   (("rectangular", "reserved"), ("request_view", "capacity"), ("unique", "capacity"),
                    ("pool", "provisioned"))]
        assert [c["value"] for c in board(now)][:4] == [size(n)[0] for n in amounts]
    assert size(0) == (0, "B") and size(1023) == (1023, "B") and size(1536) == (1.5, "KiB")
    assert size(3 * 2**30) == (3, "GiB")


def test_more_than_fits_is_piled_and_nothing_is_lost() -> None:
    frame = next(f for f in made("crowd").frames if "I to" in f.title)
    shapes = frame.scene.by_key()
    assert shapes["pile.requests"]["label"] == "+5 more requests" and shapes["pile.A"]["label"] == "+16"
    assert shapes["pile.real"]["label"] == "+10 blocks" and shapes["pile.pool"]["label"] == "+26"
    assert sum(k.startswith("u.") for k in shapes) + 10 == 19 and sum(k.startswith("p.") for k in shapes) + 26 == 40


def test_blocks_come_from_the_pool_and_go_back_to_it() -> None:
    frames = made("article").frames
    arrival, branch = frames[1].scene.by_key(), frames[2].scene.by_key()
    pool = frames[0].scene.by_key()
    assert arrival["u.101"]["from"] == {k: pool["p.101"][k] for k in "xywh"}
    assert branch["r.B.1"]["from"] == {k: arrival["u.101"][k] for k in "xywh"}
    m = machine(8)
    history = History(m)
    m.allocate("A", 20)
    m.release("A")
    gone = record(history, **WORDS).frames[-1]
    assert gone.leave["u.100"] == {k: gone.scene.by_key()["p.100"][k] for k in "xywh"}
    assert gone.leave["r.A.0"] == gone.leave["u.100"] and not [c for c in gone.board if "rectangles" in c["label"]]


def test_a_view_is_pure_and_its_recording_survives_json() -> None:
    given = sheets(article(), reserved=512)
    kept = copy.deepcopy(given)
    one = recording(given, **WORDS)
    assert one.id == recording(given, **WORDS).id and given == kept
    assert Recording.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert scene(given[-1]).svg().startswith("<svg")
    for f in one.frames:
        assert f.why.endswith(".") and all(s.endswith(".") for s in f.twin)
    with pytest.raises(ValueError, match="at least one frame"):
        recording([], **WORDS)


def test_words_say_which_ledger_moved() -> None:
    said = [f.why for f in made("article").frames]
    assert said[1] == "Request views +3 MiB, distinct blocks +3 MiB, pool unchanged."
    assert said[2] == "Request views +3 MiB, distinct blocks unchanged, pool unchanged."
    assert re.match("Request views −1 MiB", said[3])


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_overlaps_and_the_still_is_the_resting_picture(theme: str) -> None:
    pages = {"index.html": PAGE, "stage.js": source()} | {f"{n}.json": json.dumps(made(n).to_dict()) for n in STORIES}
    with serve(pages) as base, browser_page(1280, 800) as page:
        for name in STORIES:
            page.goto("about:blank")
            page.goto(f"{base}/?r={name}&theme={theme}#0")
            page.wait_for_function("window.ready")
            for i in range(len(made(name).frames)):
                page.evaluate("i => stage.seek(i)", i)
                assert page.evaluate(CLASHES) == [], f"{name}, frame {i}"
            live = page.evaluate(LIST)
            pages["still.svg"] = made(name).frames[-1].svg(theme)
            page.goto(f"{base}/still.svg")
            same(live, page.evaluate(LIST), name)
