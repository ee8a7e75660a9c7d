"""How tokens, blocks and slots of a radix cache are written: ids, or the words they stand for; it draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvlab.views.pool_sheet import clip
from kvlab.views.shapes import SLOT_W

WIDE = 81  # px of a slot that holds words
SAID = 44  # characters of an edge that a sentence repeats
PARTS = 8


def amount(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def spread(ids: Sequence[int]) -> str:
    """Ids in order, runs of three and more as `1 to 6`; after eight parts the rest is counted."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    parts = [p for run in runs for p in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(parts) > PARTS:
        parts = [*parts[: PARTS - 1], f"{len(parts) - PARTS + 1} more"]
    return ", ".join(parts) or "none"


@dataclass(frozen=True, slots=True)
class Names:
    """Token ids in words. `pieces`: what a token id stands for; without it ids speak for themselves.

    `slot_w`: px of a slot, wide enough for `fits` characters.
    """

    pieces: Mapping[int, str] = field(default_factory=dict)
    wide: bool = False

    @property
    def slot_w(self) -> int:
        return WIDE if self.wide else SLOT_W

    @property
    def fits(self) -> int:
        return 8 if self.wide else 5

    def block(self, tokens: Sequence[int]) -> str:
        """A block's tokens, as long as a slot is wide."""
        if not self.pieces:
            words = " ".join(map(str, tokens))
            return words if len(words) <= self.fits else f"{words[: self.fits - 1].split()[0]}…"
        text = "".join(self.pieces.get(t, "?") for t in tokens).replace("\n", "⏎")
        return clip(text.strip() or "␣", self.fits)

    def say(self, tokens: Sequence[int]) -> str:
        """Tokens in a sentence: `[10 11 12]`, or their text in quotes, cut where it is long."""
        if not self.pieces:
            shown = [str(t) for t in tokens]
            if len(shown) > 10:
                shown = [*shown[:4], f"… {len(shown) - 6} more …", *shown[-2:]]
            return f"[{' '.join(shown)}]"
        text = "".join(self.pieces.get(t, "?") for t in tokens).replace("\n", " ").strip()
        return f"“{clip(text, SAID)}”" if text else f"[{amount(len(tokens), 'token')}]"


def names_of(states: Sequence[Mapping], pieces: Mapping[int, str] | None) -> Names:
    """Names for a history: wide slots where a block's tokens do not fit into a narrow one."""
    if pieces:
        return Names(dict(pieces), wide=True)
    longest = max((len(str(t)) for s in states for n in s["nodes"].values() for t in n["tokens"]), default=1)
    blocks = max((s["block_size"] for s in states), default=1)
    return Names(wide=(longest + 1) * blocks - 1 > 5)
