"""Writes a scene as one still, standalone SVG file with resolved colours; it lays nothing out and moves nothing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from kvlab.views.kinds import primitives
from kvlab.views.look import HUES, SANS, WORDS, Look, Theme, look
from kvlab.views.pen import Pen, Prim, Shape, num

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def document(view: tuple[int, int], shapes: Sequence[Shape], theme: Theme, title: str, desc: str) -> str:
    """A standalone `<svg>` of `view` (width, height in px), the same bytes for the same input.

    `shapes` come in drawing order. A transient shape is not drawn: at rest it is gone. ValueError for an unknown theme.
    """
    colours = look(theme)
    pen = Pen(colours, prefix=_prefix(shapes, theme))
    body = "\n".join(_group(s, primitives(s, pen)) for s in shapes if not s.get("transient"))
    w, h = view
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" '
        f'font-family="{SANS}" font-size="{WORDS}">'
    )
    parts = [
        head,
        f"<title>{_escape(title)}</title>",
        f"<desc>{_escape(desc)}</desc>",
        *_patterns(pen, body),
        f'<rect width="{w}" height="{h}" fill="{colours.ground}"/>',
        body,
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _prefix(shapes: Sequence[Shape], theme: Theme) -> str:
    """Several stills may stand in one page, so each names its patterns after its own content."""
    content = json.dumps([theme, [dict(s) for s in shapes]], sort_keys=True)
    return "h" + hashlib.sha256(content.encode()).hexdigest()[:8]


def _group(s: Shape, prims: Sequence[Prim]) -> str:
    drawn = "".join(_element(*prim) for prim in prims)
    return f'<g transform="translate({num(s["x"])},{num(s["y"])})">{drawn}</g>'


def _element(tag: str, attrs: dict[str, Any], words: str | None) -> str:
    written = "".join(f' {name}="{_escape(_value(value))}"' for name, value in attrs.items())
    return f"<{tag}{written}/>" if words is None else f"<{tag}{written}>{_escape(words)}</{tag}>"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else num(value)


def _escape(words: str) -> str:
    """Words of a recording come from prompts: they stay words, and the file stays XML."""
    plain = _NOT_XML.sub("\ufffd", words)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _patterns(pen: Pen, body: str) -> list[str]:
    used = [o for o in ("n", *HUES) if f"url(#{pen.prefix}-{o})" in body]
    return ["<defs>" + "".join(_pattern(pen, o) for o in used) + "</defs>"] if used else []


def _pattern(pen: Pen, o: str) -> str:
    colours: Look = pen.look
    stroke, opacity = (colours.line, 0.45) if o == "n" else (colours.hues[o], 0.75)
    return (
        f'<pattern id="{pen.prefix}-{o}" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><path d="M0 0V7" stroke="{stroke}" stroke-width="2.4" '
        f'opacity="{opacity}"/></pattern>'
    )
