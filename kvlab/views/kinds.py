"""Draws every kind of shape as a still, number for number as its twin in stage/shapes; a test holds the two equal."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvlab.views.pen import Pen, Prim, Shape, num


def block(s: Shape, p: Pen) -> list[Prim]:
    """A physical block: owner stripes with letters, fill to its valid rows, row ticks, handle id@generation."""
    owners, low, halo = s["owners"], s["h"] - 13, 5 * s.get("hatch", 0)
    used = bool(owners or s["fill"])
    border = p.look.edge(owners[0]) if len(owners) == 1 else p.look.dim if owners else None
    out = p.body(s, 8, border)
    out += p.hatching(s, owners[0] if owners else None, 4, 4, s["w"] - 8, s["h"] - 8, 5)
    for i in range(len(owners)):
        out += _band(s, p, i)
    out += p.path(_ticks(s["of"], s["w"] - 27, 23, s["h"] - 8, 4), stroke=p.look.line, stroke_width=1)
    out += p.words(28, 23, s["label"], "m l b" + ("" if owners else " d"), halo=halo)
    state = f"{_whole(s['fill'])}/{s['of']}" if used else "free"
    out += p.words(28, low, state, "s" if used else "s d", halo=halo)
    if "refs" in s:
        out += p.words(s["w"] - 9, low, f"ref {s['refs']}", "s e" + (" b" if s["refs"] > 1 else ""), halo=halo)
    if s.get("tag"):
        out += p.thin(22, s["h"] + 3, 46, 16, 3) + p.words(45, s["h"] + 15, "#" + s["tag"], "m s d c")
    if s.get("badge"):
        out += p.lock(s["w"] - 26, -9, s["badge"])
    return out


def _band(s: Shape, p: Pen, i: int) -> list[Prim]:
    owner, n, solid = s["owners"][i], len(s["owners"]), 1 - s.get("hatch", 0)
    top = i * s["lane"] + 1 if i else 4
    bottom = min((i + 1) * s["lane"] - 1 if i < n - 1 else s["h"] - 4, s["h"] - 4)
    h = bottom - top
    if h <= 0:
        return []
    out = p.rect(23, top, (s["w"] - 27) * s["fill"] / s["of"], h, p.look.tint(owner), rx=2)
    out += p.rect(4, top, 16, h, p.look.hue(owner), rx=4, fill_opacity=round(solid, 2))
    if h > 14 and solid > 0.5:
        out += p.letter(12, top + h / 2 + 4.5, owner)
    elif h > 14:
        out += p.words(12, top + h / 2 + 4.5, owner, "b c", halo=4)
    return out


def _ticks(of: int, room: float, x: float, y: float, long: float) -> str:
    """At most sixteen ticks: a block of 256 rows still shows its sixteenths."""
    step = math.ceil(of / 16)
    return "".join(f"M{num(x + room * i / of)} {num(y)}v{long}" for i in range(step, of, step))


def _whole(value: float) -> int:
    return math.floor(value + 0.5)


def well(s: Shape, p: Pen) -> list[Prim]:
    """An empty logical place, or the place a staged block still holds in the committed state."""
    out = p.dots(1, 1, s["w"] - 2, s["h"] - 2, 7)
    if s.get("label"):
        out += p.words(s["w"] / 2, s["h"] / 2 + 4.5, s["label"], "m s d c")
    return out


def pile(s: Shape, p: Pen) -> list[Prim]:
    """A card that stands for many blocks that the picture does not show one by one."""
    w, h, owner = s["w"] - 8, s["h"] - 8, s.get("owner")
    stroke, left = (p.look.edge(owner), 20) if owner else (p.look.line, 0)
    out: list[Prim] = []
    for x, y in ((8, 0), (4, 4), (0, 8)):
        out += p.rect(x, y, w, h, p.look.ground, rx=8, stroke=stroke, stroke_width=1.5)
    if owner:
        out += p.stripe(owner, 4, 12, h - 8)
    return out + p.words(left + (w - left) / 2, 8 + h / 2 + 4.5, s["label"], "s c" if owner else "s c d")


def link(s: Shape, p: Pen) -> list[Prim]:
    """The same body seen from a row that is not next to it: one body, and here its handle."""
    return [
        *p.body(s, 6, p.look.edge(s["owner"])),
        *p.hatching(s, s["owner"], 21, 3, s["w"] - 24, s["h"] - 6, 3),
        *p.stripe(s["owner"], 3, 3, s["h"] - 6),
        *p.words(25, s["h"] / 2 + 4.5, s["label"], "m s", halo=5 * s.get("hatch", 0)),
    ]


def lane(s: Shape, p: Pen) -> list[Prim]:
    """A row of the page: who, and what they hold."""
    owner, out = s.get("owner"), []
    if owner:
        out += p.rect(0, 0, 28, 28, p.look.hue(owner), rx=7) + p.letter(14, 19.5, owner, "b l c")
    x = 38 if owner else 0
    out += p.words(x, 12, s["label"], "b")
    return out + (p.words(x, 28, s["sub"], "s d") if s.get("sub") else [])


def label(s: Shape, p: Pen) -> list[Prim]:
    return p.words(0, 0, s["label"], s.get("cls", ""), halo=4)


def rule(s: Shape, p: Pen) -> list[Prim]:
    out = p.path(f"M0 0H{num(s['w'])}", stroke=p.look.rule, stroke_width=1.5)
    return out + (p.words(s["w"], -6, s["label"], "s d e") if s.get("label") else [])


def chip(s: Shape, p: Pen) -> list[Prim]:
    """Anything said beside the picture: a reason for refusal, a fault, a note."""
    no = s.get("tone") == "no"
    cls = "c" + (" m s" if s.get("mono") else "") + (" nt b" if no else "")
    frame = p.body(s, s["h"] / 2, p.look.no if no else None)
    return frame + p.words(s["w"] / 2, s["h"] / 2 + 4.5, ("✕ " if no else "") + s["label"], cls)


def digest(s: Shape, p: Pen) -> list[Prim]:
    """The committed state as a fingerprint: before, = or →, after."""
    prev, value = s.get("prev"), s["value"]
    out = p.words(-14, 17, s["label"], "s d e") + _print(p, prev or value, 0, bool(prev))
    if not prev:
        return out
    same = prev == value
    out += p.words(141, 17.5, "=" if same else "→", "l b c ac" if same else "l b c")
    out += _print(p, value, 162, False)
    return out + p.words(292, 17, "unchanged" if same else "new state", "s ac b" if same else "s d")


def _print(p: Pen, value: str, x: float, old: bool) -> list[Prim]:
    out: list[Prim] = []
    for i, c in enumerate(value[:12]):
        h = 3 + int(c, 16) * 0.95
        out += p.rect(x + i * 5, 18 - h, 3.5, h, p.look.line if old else p.look.ink)
    return out + p.words(x + 66, 17, value[:6], "m d" if old else "m b")


def edge(s: Shape, p: Pen) -> list[Prim]:
    """A connection: across, down, across, with round corners, so that trees read as trees."""
    dx, dy = s["x2"] - s["x"], s["y2"] - s["y"]
    mid = min(18, dx / 2)
    r = max(0, min(9, abs(dy) / 2, mid))
    turn = math.copysign(r, dy)
    d = f"M0 0H{num(dx)}"
    if abs(dy) >= 0.01:
        a, m, q, b, c, e = map(num, (mid - r, mid, turn, dy - turn, mid + r, dy))
        d = f"M0 0H{a}Q{m} 0 {m} {q}V{b}Q{m} {e} {c} {e}H{num(dx)}"
    return p.path(d, stroke=p.look.line, stroke_width=1.5)


def arrow(s: Shape, p: Pen) -> list[Prim]:
    dx, dy = s["x2"] - s["x"], s["y2"] - s["y"]
    long = math.hypot(dx, dy) or 1
    ux, uy = dx / long, dy / long
    hx, hy = dx - ux * 9, dy - uy * 9
    head = ((hx - uy * 5, hy + ux * 5), (hx + uy * 5, hy - ux * 5))
    left, right = (f"L{num(x)} {num(y)}" for x, y in head)
    return [
        *p.path(f"M0 0L{num(hx)} {num(hy)}", stroke=p.look.accent, stroke_width=2, stroke_dasharray="5 4"),
        *p.path(f"M{num(dx)} {num(dy)}{left}{right}Z", p.look.accent),
    ]


def rows(s: Shape, p: Pen) -> list[Prim]:
    """K/V rows on their way from one block to another."""
    return p.rect(0, 0, s["w"], s["h"], p.look.tint(s["owner"], 0.70), rx=2)


def gate(s: Shape, p: Pen) -> list[Prim]:
    """The mapped frontier of a slot: a kernel may run up to it and not one row further."""
    line = p.path(f"M0 -5V{num(s['h'] + 5)}", stroke=p.look.accent, stroke_width=2.5, stroke_linecap="round")
    return line + p.words(0, -10, s["label"], "s b c ac", halo=4)


def kernel(s: Shape, p: Pen) -> list[Prim]:
    no = s.get("refused")
    return [
        *p.path("M0 0l-7 12h14z", p.look.no if no else p.look.ink),
        *p.words(12, 12, ("✕ " if no else "") + s["label"], "s b nt" if no else "s b"),
    ]


def slot(s: Shape, p: Pen) -> list[Prim]:
    """One KV slot: the token it holds, its slot id underneath; the cell is free, private or tree-owned in its life."""
    token, owner, halo = s.get("token"), s.get("owner"), 5 * s.get("hatch", 0)
    has = token is not None
    border = p.look.edge(owner) if owner else p.look.dim if has else None
    out = p.body(s, 7, border, fill=p.look.held if has and not owner else p.look.ground)
    out += p.hatching(s, owner, 3, 3, s["w"] - 6, s["h"] - 6, 4)
    if has:
        out += p.words(s["w"] / 2, s["h"] / 2 - 1, token, "m l b c", halo=halo)
    return out + p.words(s["w"] / 2, s["h"] - 7 if has else s["h"] / 2 + 4.5, s["label"], "m s d c", halo=halo)


def query(s: Shape, p: Pen) -> list[Prim]:
    """A query token has no slot: it is only being compared. The sign under it says how the comparison went."""
    mark, no = s.get("mark"), s.get("mark") == "≠"
    frame = p.body(s, s["h"] / 2, p.look.no if no else p.look.accent if mark else None)
    out = frame + p.words(s["w"] / 2, s["h"] / 2 + 5, s["token"], "m l b c")
    return out + (p.words(s["w"] / 2, s["h"] + 17, mark, "b l c nt" if no else "b l c ac") if mark else [])


def pill(s: Shape, p: Pen) -> list[Prim]:
    """A radix edge: the capsule around its slots."""
    out = p.body(s, 13, fill=p.look.wash)
    out += p.words(10, s["h"] + 16, s["label"], "s d") if s.get("label") else []
    return out + (p.lock(s["w"] - 26, -9, s["badge"]) if s.get("badge") else [])


def root(s: Shape, p: Pen) -> list[Prim]:
    dot = p.circle(0, 0, 6, p.look.ground, stroke=p.look.line, stroke_width=1.5)
    return dot + p.words(0, 22, "root", "s d c")


def strip(s: Shape, p: Pen) -> list[Prim]:
    """Reserved virtual addresses: dotted, ruled, and backed by nothing."""
    out = p.dots(0, 0, s["w"], s["h"], 8)
    out += p.path(_ticks(s["of"], s["w"], 0, s["h"] - 6, 6), stroke=p.look.line, stroke_width=1)
    return out + (p.words(s["w"] / 2, s["h"] / 2 + 4.5, s["label"], "s d c") if s.get("label") else [])


def brick(s: Shape, p: Pen) -> list[Prim]:
    """A physical page bundle: a cell per row. Valid rows carry the owner; grey rows are old bytes nobody may read."""
    owner, wide = next(iter(s.get("owners", ())), None), (s["w"] - 10) / s["of"]
    border = p.look.edge(owner) if owner else p.look.dim
    out = p.rect(0, 0, s["w"], s["h"], p.look.ground, rx=6, stroke=border, stroke_width=2)
    out += p.words(8, 16, s["label"], "m s b")
    out += p.words(s["w"] - 8, 16, s["note"], "s d e") if s.get("note") else []
    for i in range(s["of"]):
        out += _cell(s, p, owner, i, 6.5 + i * wide, wide - 3)
    return out


def _cell(s: Shape, p: Pen, owner: str | None, i: int, x: float, w: float) -> list[Prim]:
    valid, old = (min(1, max(0, s.get(field, 0) - i)) for field in ("fill", "grey"))
    y, h, look = 23, s["h"] - 28, p.look
    out = p.thin(x, y, w, h, 3)
    if old > 0:
        out += p.rect(x, y, w * old, h, look.grey, rx=3)
        out += p.rect(x, y, w * old, h, p.pattern(None), rx=3, opacity=0.6)
    if valid > 0:
        out += p.rect(x, y, w * valid, h, look.tint(owner or "A", 0.42), rx=3)
        out += p.rect(x, y + h - 4, w * valid, 4, look.hue(owner or "A"), rx=2)
    if "base" in s and w >= 19:
        tone = " b" if valid > 0 else "" if old > 0 else " d"
        out += p.words(x + w / 2, y + h / 2 + 3, s["base"] + i, "m s c" + tone)
    return out


KINDS: dict[str, Callable[[Shape, Pen], list[Prim]]] = {
    draw.__name__: draw
    for draw in (
        block, well, pile, link, lane, label, rule, chip, digest, edge, arrow, rows, gate, kernel,
        slot, query, pill, root, strip, brick,
    )
}  # fmt: skip
_LAYER = {
    "rule": 0, "strip": 0, "well": 1, "edge": 1, "pill": 2, "lane": 2, "root": 2, "label": 3,
    "block": 4, "slot": 4, "brick": 4, "pile": 4, "link": 4, "arrow": 5,
}  # fmt: skip
_RING = {"block": 11, "well": 11, "pile": 11, "strip": 11, "link": 9, "slot": 9, "pill": 16, "brick": 10}


def layer(s: Shape) -> int:
    """Which of seven layers a shape lies on; within a layer shapes lie in the order of their keys."""
    return _LAYER.get(s["kind"], 6)


def primitives(s: Shape, p: Pen) -> list[Prim]:
    """What a shape is drawn with, refusal included, relative to its own x and y."""
    out = KINDS[s["kind"]](s, p)
    if s.get("refused") and s["kind"] != "kernel" and s.get("w") and s.get("h"):
        out += p.refusal(s, _RING.get(s["kind"], s["h"] / 2 + 4.5))
    return out
