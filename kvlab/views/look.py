"""The colour tokens and type scale of a still, resolved; it draws nothing. A test holds it equal to stage/look.css."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

Theme = Literal["light", "dark"]

SANS = "system-ui, sans-serif"
MONO = "ui-monospace, monospace"
WORDS, SMALL, LARGE = 13.5, 12.5, 14  # px: words, second lines (the floor), ids and letters

HUES = "ABCDEFG"
_LIGHT = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#d55e00", "#f0e442")  # Okabe-Ito
_DARK = ("#4aa5e0", "#2fbf93", "#e39ac2", "#f0b429", "#9bd6f7", "#f0813a", "#f5ec7a")


@dataclass(frozen=True, slots=True)
class Look:
    """Every colour of one theme as #rrggbb; the shares `mix` and `rim` say how hues are blended with ground and ink."""

    theme: Theme
    ground: str
    ink: str
    dim: str
    line: str
    rule: str
    wash: str
    grey: str
    held: str
    accent: str
    no: str
    on: str
    on_first: str
    mix: float
    rim: float
    hues: dict[str, str]

    def hue(self, owner: str) -> str:
        return self.hues[hue_name(owner)]

    def letter(self, owner: str) -> str:
        """The colour of an owner's letter on its own hue."""
        return self.on_first if hue_name(owner) == "A" else self.on

    def edge(self, owner: str) -> str:
        """The colour of an owner's border; the yellow hue is too light for one and borrows the dim ink."""
        return self.dim if hue_name(owner) == "G" else mix(self.hue(owner), self.ink, self.rim)

    def tint(self, owner: str, share: float | None = None) -> str:
        return mix(self.hue(owner), self.ground, self.mix if share is None else share)


def hue_name(owner: str) -> str:
    """One of seven hues for any owner: A..G, then from the start again. Hues repeat, letters do not."""
    n = 0
    for c in owner:
        n = (n * 26 + ord(c) + 6) % 7
    return HUES[(n + 6) % 7]


def mix(colour: str, base: str, share: float) -> str:
    """`share` of `colour` in `base`, blended in sRGB as CSS color-mix does; #rrggbb."""
    pairs = zip(_channels(colour), _channels(base), strict=True)
    return "#" + "".join(f"{int(a * share + b * (1 - share) + 0.5):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


@cache
def look(theme: Theme) -> Look:
    """The tokens of `theme`; ValueError for a theme that is neither light nor dark."""
    if theme not in ("light", "dark"):
        raise ValueError(f"theme is light or dark, not {theme!r}")
    dark = theme == "dark"
    ground, ink, accent = ("#0e1117", "#f1f3f6", "#b9a3ff") if dark else ("#ffffff", "#1b1f24", "#6941c6")
    return Look(
        theme=theme,
        ground=ground,
        ink=ink,
        dim=mix(ink, ground, 0.72),
        line=mix(ink, ground, 0.48),
        rule=mix(ink, ground, 0.15),
        wash=mix(ink, ground, 0.05),
        grey=mix(ink, ground, 0.17),
        held=mix(accent, ground, 0.24 if dark else 0.17),
        accent=accent,
        no="#ff8f85" if dark else "#b42318",
        on="#16181d",
        on_first="#16181d" if dark else "#ffffff",
        mix=0.34 if dark else 0.30,
        rim=1.0 if dark else 0.70,
        hues=dict(zip(HUES, _DARK if dark else _LIGHT, strict=True)),
    )
