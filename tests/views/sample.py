"""Two small recordings made for the tests of the views: a short story with a window, and a gallery of every kind."""

from __future__ import annotations

import hashlib
from typing import Any

from kvlab.views import shapes as s
from kvlab.views.scene import Frame, Recording, Scene

ROWS = {"free": 78, "staged": 150, "A": 252, "D": 330, "C": 408}
COLUMN = [s.LEFT + i * s.PITCH for i in range(6)]
PILE = {"x": COLUMN[3], "y": ROWS["free"]}
GRID = [20 + 156 * i for i in range(6)]
PROMPT = "<img src=x onerror=window.pwned=1>"


def _state(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _lanes(*owners: str) -> list[s.Shape]:
    heads = [
        s.lane(f"lane.{o}", 2, ROWS[o] + 13, "10 tokens", f"table v{i + 1}", owner=o) for i, o in enumerate(owners)
    ]
    return [
        s.lane("lane.free", 2, ROWS["free"] + 11, "free queue", "next one first"),
        s.lane("lane.staged", 2, ROWS["staged"] + 11, "staged", "nobody can read it"),
        s.label("published", 2, 228, "published below", "s d"),
        s.rule("line", s.LEFT, 224, 3 * s.PITCH - 11),
        *(s.label(f"col{i}", COLUMN[i] + 60, 242, f"block {i}", "s d c") for i in range(3)),
        *heads,
    ]


def _table(owners: tuple[str, ...], tail: tuple[str, ...], **tail_more: Any) -> list[s.Shape]:
    def one(i: int, who: tuple[str, ...], **more: Any) -> s.Shape:
        rows = 4 if i < 2 else 2
        tag = {"tag": f"7be{i}"} if i < 2 else {}
        said = f"block {i} of {' and '.join(who)}, {rows} of 4 rows valid"
        more |= tag | {"refs": len(who), "says": said}
        return s.block(f"b{i}", COLUMN[i], ROWS["A"], label=f"{i}@1", of=4, fill=rows, owners=who, **more)

    return [one(0, owners), one(1, owners), one(2, tail, **tail_more)]


def _free(n: int, first: int, **more: Any) -> list[s.Shape]:
    blocks = [
        s.block(f"b{b}", COLUMN[i], ROWS["free"], label=f"{b}@7", of=4, says=f"block {b} is free")
        for i, b in enumerate(range(first, 6))
    ]
    return [*blocks, s.pile("more", PILE["x"], PILE["y"], f"+{n} free", **more)]


def _frame(kind: str, title: str, why: str, shapes: list[s.Shape], state: str, prev: str | None, **more: Any) -> Frame:
    board = ({"label": "free blocks", "value": more.pop("free")}, {"label": "K/V copied", "value": 0.5, "unit": "KiB"})
    twin = (f"{title}.", "Request A holds 10 tokens.")
    scene = Scene(s.VIEW, (*shapes, s.digest("digest", state, prev)))
    return Frame(title, why, kind, board, twin, scene, **more)


def story() -> Recording:
    """A forks into D; D reserves, is refused, copies, publishes; C shares from afar; a block leaves the window."""
    s0, s1, s2, s3 = (_state(i) for i in range(4))
    both, lanes = ("A", "D"), _lanes("A", "D")
    well = s.well("home", COLUMN[0], ROWS["free"], "3@7")
    tail = s.block("b3", COLUMN[0], ROWS["staged"], label="3@8", of=4, owners=("D",), hatch=1, says="block 3 is staged")
    rest = _free(5, 4)[:-1]
    rest = [b | {"x": COLUMN[i + 1]} for i, b in enumerate(rest)]
    pile = _free(5, 6)
    fly = s.rows(
        "fly", COLUMN[0] + 23, ROWS["staged"] + 4, "D", w=46, h=46, start={"x": COLUMN[2] + 23, "y": ROWS["A"] + 4}
    )
    flow = s.arrow("flow", COLUMN[2] + 27, ROWS["A"] - 1, COLUMN[0] + 128, ROWS["staged"] + 36)
    own = s.block("b3", COLUMN[2], ROWS["D"], label="3@8", of=4, fill=3, owners=("D",), refs=1, says="block 3 of D")
    links = [s.link(f"c{i}", COLUMN[i], ROWS["C"] + 16, f"{i}@1", "C") for i in range(2)]
    far = [*_lanes("A", "D", "C"), *_table(both, ("A",)), own, *links]
    frames = [
        _frame("start", "One request", f"Its prompt is {PROMPT}", [*_lanes("A"), *_table(("A",), ("A",)), *_free(5, 3)],
               s0, None, free=8),
        _frame("committed", "Fork A into D", "D gets the table, not the bytes.",
               [*lanes, *_table(both, both), *_free(5, 3)], s1, s0, free=8),
        _frame("staged", "D reserves a tail", "Block 3 is hatched and in nobody's table.",
               [*lanes, *_table(both, both), well, tail, *rest, *pile], s1, s1, free=8),
        _frame("refused", "A fault", "Half a bundle is not a state.",
               [*lanes, *_table(both, both), well, tail | {"refused": True}, *rest, *pile,
                s.reason("why", COLUMN[1] + 4, ROWS["staged"] + 14, "fault_after_partial_reservation")],
               s1, s1, free=8, shake="b3"),
        _frame("staged", "Copy two rows", "The source is leased while it is read.",
               [*lanes, *_table(both, both, badge=1), well, tail | {"fill": 2}, *rest, *pile, fly, flow],
               s1, s1, free=8),
        _frame("committed", "Publish", "Tables, length and counts become true together.",
               [*lanes, *_table(both, ("A",)), own, *rest, *pile], s2, s1, free=7),
        _frame("committed", "C shares A's first blocks", "Its row is not next to A: it shows the handles.",
               [*far, *rest, *pile], s3, s2, free=7),
        _frame("committed", "Look elsewhere", "Block 5 leaves the window for the pile.",
               [*far, *rest[:1], *_free(6, 6)], s3, s3, free=7, leave={"b5": PILE}),
    ]  # fmt: skip
    return Recording("Ownership, in small", "Who may write here?", s.VIEW, tuple(frames))


def gallery() -> Recording:
    """One frame with every kind of shape in every state that it draws differently."""
    shapes = (*_blocks(), *_words(), *_lines(), *_radix(), *_memory())
    scene = Scene(s.VIEW, shapes)
    frame = Frame("Every kind", PROMPT, "start", ({"label": "mode", "value": "chain"},), (PROMPT,), scene)
    return Recording("Gallery", "Is a still the stage at rest?", s.VIEW, (frame,))


def _blocks() -> list[s.Shape]:
    return [
        s.block("free", GRID[0], 48, label="7@2", of=16, tag="7be1", refused=True),
        s.block("part", GRID[1], 48, label="8@3", of=16, fill=5, owners="A", refs=1, badge=2, tag="c40d", says="b8"),
        s.block("late", GRID[2], 48, label="9@1", of=256, fill=40, owners="B", hatch=1),
        s.block("half", GRID[3], 48, label="9@2", of=1, fill=0.5, owners="G", hatch=0.4, refs=1),
        s.block("both", GRID[4], 48, label="1@9", of=16, fill=16, owners="CDE", lane=30, refs=3),
        s.block("grey", GRID[5], 48, label="2@9", of=16, hatch=1),
        s.well("well", GRID[0], 140, "7@1"),
        s.well("bare", GRID[1], 140),
        s.pile("pile", GRID[2], 140, "+21 free"),
        s.pile("mine", GRID[3], 140, "+9 blocks", owner="F"),
        s.link("link", GRID[5], 130, "1@9", "G"),
        s.link("hung", GRID[5], 160, "1@9", "H", hatch=1, refused=True),
    ]


def _words() -> list[s.Shape]:
    return [
        s.lane("lane", GRID[0], 206, "34 tokens", "table v6", owner="I"),
        s.lane("head", GRID[1], 206, "free queue"),
        s.label("said", GRID[2], 224, PROMPT, "m s"),
        s.label("mid", GRID[4] + 60, 224, "centred", "c b l d"),
        s.label("end", GRID[5] + 120, 224, "no & yes", "e nt"),
        s.rule("rule", GRID[0], 256, 276, "a rule"),
        s.rule("line", GRID[2], 256, 120),
        s.chip("note", GRID[3], 240, "a note", mono=False),
        s.reason("why", GRID[4] - 20, 240, "stale_block_generation"),
        s.chip("late writer", GRID[2], 262, "late", refused=True),
        s.digest("same", _state(1), _state(1), x=560),
        s.digest("first", _state(2), x=80),
    ]


def _lines() -> list[s.Shape]:
    return [
        s.edge("across", 20, 300, 120, 300),
        s.edge("down", 20, 300, 120, 350),
        s.edge("up", 20, 300, 120, 280),
        s.root("root", 14, 300),
        s.arrow("arrow", 140, 350, 200, 290),
        s.gate("gate", 226, 300, 44, "ready 8"),
        s.kernel("runs", 250, 330, "kernel"),
        s.kernel("stops", 250, 310, "wants row 8", refused=True),
        s.shape("rows", "landed", 290, 296, w=40, h=20, owner="E"),
        s.rows("fly", 320, 300, "D", w=40, h=40, start={"x": 300, "y": 280}),
    ]


def _radix() -> list[s.Shape]:
    return [
        s.pill("pill", 352, 296, w=180, label="node 2", badge=1),
        s.pill("split", 552, 296, w=70, refused=True, hatch=1),
        s.slot("free slot", 630, 303, "17"),
        s.slot("held", 360, 303, "3", 42),
        s.slot("private", 414, 303, "4", "the", owner="C", hatch=1),
        s.slot("owned", 468, 303, "5", "cat", owner="D", refused=True),
        s.query("eq", 680, 300, "the", "="),
        s.query("ne", 734, 300, 99, "≠"),
        s.query("open", 788, 300, "on"),
    ]


def _memory() -> list[s.Shape]:
    return [
        s.strip("strip", GRID[0], 400, 4, "rows 8–11 reserved"),
        s.strip("plain", 226, 400, 32, w=120, refused=True),
        s.brick("valid", 366, 400, "H0–H3", of=4, fill=2.5, grey=4, owner="B", base=8, note="in use"),
        s.brick("old", 566, 400, "H4–H7", of=4, grey=3, note="retained", base=0, refused=True),
        s.brick("tight", 766, 400, "H8–H23", of=16, fill=3, owner="G", base=0, w=150),
    ]
