"""The primitives of a still and how they are inked: rectangles, words, paths, hatching; it knows no kind of shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.views.look import LARGE, MONO, SMALL, WORDS, Look, hue_name

Shape = Mapping[str, Any]
Prim = tuple[str, dict[str, Any], str | None]


def num(value: float) -> str:
    """A number as it stands in a drawing: two decimals at most, none where it is whole."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


@dataclass(frozen=True, slots=True)
class Pen:
    """Draws primitives in one look; `prefix` names the hatch patterns of this drawing."""

    look: Look
    prefix: str

    def rect(self, x: float, y: float, w: float, h: float, fill: str, **more: Any) -> list[Prim]:
        """One rectangle, or nothing where it has no area."""
        if w <= 0 or h <= 0:
            return []
        return [("rect", {"x": x, "y": y, "width": w, "height": h, "fill": fill, **_css(more)}, None)]

    def body(self, s: Shape, rx: float, stroke: str | None = None, **more: Any) -> list[Prim]:
        """The outline of a thing: ground inside, a border of 1.5 px, dashed as far as the thing is staged."""
        more = {"fill": self.look.ground, "stroke_width": 1.5} | more
        return self.rect(0, 0, s["w"], s["h"], rx=rx, stroke=stroke or self.look.line, **more, **self.dash(s))

    def dots(self, x: float, y: float, w: float, h: float, rx: float) -> list[Prim]:
        return self.rect(
            x, y, w, h, "none", rx=rx, stroke=self.look.line, stroke_width=1.5,
            stroke_dasharray="1.5 4.5", stroke_linecap="round",
        )  # fmt: skip

    def thin(self, x: float, y: float, w: float, h: float, rx: float) -> list[Prim]:
        return self.rect(x, y, w, h, "none", rx=rx, stroke=self.look.rule, stroke_width=1.5)

    def path(self, d: str, fill: str = "none", **more: Any) -> list[Prim]:
        return [("path", {"d": d, "fill": fill, **_css(more)}, None)] if d else []

    def circle(self, cx: float, cy: float, r: float, fill: str, **more: Any) -> list[Prim]:
        return [("circle", {"cx": cx, "cy": cy, "r": r, "fill": fill, **_css(more)}, None)]

    def words(self, x: float, y: float, words: Any, cls: str = "", fill: str = "", halo: float = 0) -> list[Prim]:
        """One line of text. `cls` holds one-letter words: m mono, b bold, s small, l large, d dim, e end, c centred;
        `ac` and `nt` are the accent and the colour of a refusal. `halo` is the width of the ground around it."""
        kinds, look = cls.split(), self.look
        for name, colour in (("d", look.dim), ("ac", look.accent), ("nt", look.no)):
            fill = colour if name in kinds else fill
        size = LARGE if "l" in kinds else SMALL if "s" in kinds else WORDS
        attrs: dict[str, Any] = {"x": x, "y": y, "font-size": size, "fill": fill or look.ink}
        attrs |= {"font-family": MONO} if "m" in kinds else {}
        attrs |= {"font-weight": 600} if "b" in kinds else {}
        attrs |= {"text-anchor": "end"} if "e" in kinds else {"text-anchor": "middle"} if "c" in kinds else {}
        if halo:
            attrs |= {"paint-order": "stroke", "stroke": look.ground, "stroke-width": halo, "stroke-linejoin": "round"}
        return [("text", attrs, str(words))]

    def letter(self, x: float, y: float, owner: str, cls: str = "b c") -> list[Prim]:
        return self.words(x, y, owner, cls, self.look.letter(owner))

    def stripe(self, owner: str, x: float, y: float, h: float) -> list[Prim]:
        """An owner's hue with its letter: 16 px wide."""
        return [
            *self.rect(x, y, 16, h, self.look.hue(owner), rx=4),
            *self.letter(x + 8, y + h / 2 + 4.5, owner),
        ]

    def dash(self, s: Shape) -> dict[str, Any]:
        hatch = s.get("hatch", 0)
        return {"stroke_dasharray": f"5 {num(4 * hatch)}"} if hatch > 0.02 else {}

    def hatching(self, s: Shape, owner: str | None, x: float, y: float, w: float, h: float, rx: float) -> list[Prim]:
        hatch = s.get("hatch", 0)
        if hatch <= 0.02:
            return []
        return self.rect(x, y, w, h, self.pattern(owner), rx=rx, opacity=round(hatch, 2))

    def pattern(self, owner: str | None) -> str:
        return f"url(#{self.prefix}-{hue_name(owner) if owner else 'n'})"

    def lock(self, x: float, y: float, count: Any) -> list[Prim]:
        """A padlock and how many hold it."""
        ground = self.look.ground
        bow = f"M{num(x + 9.7)} {num(y + 8)}v-1.6a2.3 2.3 0 0 1 4.6 0v1.6"
        return [
            *self.rect(x, y, 34, 18, self.look.ink, rx=9),
            *self.rect(x + 8, y + 8, 8, 6, ground, rx=1.5),
            *self.path(bow, stroke=ground, stroke_width=1.4),
            *self.words(x + 23, y + 13.5, count, "m s b c", ground),
        ]

    def refusal(self, s: Shape, rx: float) -> list[Prim]:
        """A ring, and a cross where the ring turns: a refusal never speaks by colour alone."""
        at, no = -4.5 + rx * 0.293, self.look.no
        a, b = num(at - 3), num(at + 3)
        return [
            *self.rect(-4.5, -4.5, s["w"] + 9, s["h"] + 9, "none", rx=rx, stroke=no, stroke_width=2),
            *self.circle(at, at, 7.5, no),
            *self.path(
                f"M{a} {a}L{b} {b}M{b} {a}L{a} {b}",
                stroke=self.look.ground,
                stroke_width=2,
                stroke_linecap="round",
            ),
        ]


def _css(more: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in more.items()}
