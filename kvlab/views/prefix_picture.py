"""Draws one picture of a prompt over a prefix index: its blocks, their chained keys, who answers, four lengths.

It reads plain snapshots (`PrefixCache.snapshot()`), never a live machine, and chooses no sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.views import shapes as draw
from kvlab.views.pool_sheet import clip, layers
from kvlab.views.prefix_columns import BEHIND, HIT, MISS, Walk, holders, keys_by_handle, valid_rows
from kvlab.views.scene import Scene
from kvlab.views.shapes import BLOCK_W, GUTTER, LEFT, PITCH, VIEW, Shape

Json = Mapping[str, Any]
MOST = 6
TOKENS_Y, PROMPT_Y, KEYS_Y, GROUP_Y, GROUP_PITCH, RULER_Y, RULER_PITCH, FREE_Y = 38, 98, 162, 204, 82, 371, 24, 478
KEY_W, TOKEN_W, TOKEN_PITCH, MOST_TOKENS, BAR_H = 88, 47, 50.75, 16, 19
ASK, WHY = "ask", "why"
RULERS = (("S_sem", "published before"), ("S_indexed", "found in every group"), ("S_cap", "may be taken"),
          ("S_runtime", "taken"))
"""The four lengths by the names of `PrefixLengths.to_dict()`, and what each is (article 0x07A)."""


@dataclass(frozen=True, slots=True)
class Words:
    """Token ids in words. `pieces`: token id -> text; without it ids speak for themselves."""

    pieces: Mapping[int, str] = field(default_factory=dict)

    def text(self, tokens: Sequence[int]) -> str:
        if not self.pieces:
            return " ".join(map(str, tokens))
        return "".join(self.pieces.get(t, "?") for t in tokens).replace("\n", "⏎")

    def fit(self, tokens: Sequence[int], most: int) -> str:
        return clip(self.text(tokens).strip() or "␣", most)


@dataclass(frozen=True, slots=True)
class Look:
    """What of a moment is in the picture.

    `seen`: how many columns were probed so far; None once all is known. `focus`: the column whose tokens are shown one
    by one. `table`: the request's own blocks by group, where it has been admitted. `lengths`: the four, when said.
    """

    request: str
    seen: int | None = None
    focus: int | None = None
    table: Mapping[str, Sequence[str]] | None = None
    tail: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] | None = None
    asked: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Sheet:
    """All that the drawing functions read. `first` is the leftmost column in sight."""

    state: Json
    walk: Walk
    words: Words
    letters: Mapping[str, str]
    look: Look
    first: int

    @property
    def size(self) -> int:
        return self.state["allocator"]["groups"][0]["block_size"]

    @property
    def count(self) -> int:
        """Columns of the prompt, the one of a partial tail included."""
        return len(self.walk.columns) + bool(self.walk.tail)

    def tokens(self, n: int) -> tuple[int, ...]:
        return self.walk.columns[n].tokens if n < len(self.walk.columns) else self.walk.tail

    @property
    def columns(self) -> list[tuple[int, float]]:
        """Number and x of each column in sight."""
        end = min(self.count, self.first + MOST)
        return [(n, LEFT + (n - self.first) * PITCH) for n in range(self.first, end)]

    def probed(self, n: int) -> bool:
        return n < len(self.walk.columns) and (self.look.seen is None or n < self.look.seen)


def picture(state: Json, found: Walk, *, words: Words, letters: Mapping[str, str], look: Look,
            digest: str | None = None, digest_before: str | None = None) -> Scene:
    """The picture of one moment. More columns than six: a window around the focus. O(blocks of the state)."""
    count = len(found.columns) + bool(found.tail)
    middle = found.probes - 1 if look.focus is None else look.focus
    sheet = Sheet(state, found, words, letters, look, max(0, min(middle - MOST + 2, count - MOST)))
    made = [*_tokens(sheet), *_prompt(sheet), *_keys(sheet), *_groups(sheet), *_rulers(sheet), *_free(sheet),
            *_refusal(sheet)]
    made += [draw.digest("digest", digest, digest_before, label="index")] if digest else []
    return Scene(VIEW, tuple(made))


# ---------------------------------------------------------------- the prompt
def _tokens(sheet: Sheet) -> Iterator[Shape]:
    """The tokens of one block, one by one, with signs up to the first that differs from what was published."""
    n = sheet.look.focus
    if n is None or sheet.look.asked or n >= sheet.count:
        return
    tokens, start = sheet.tokens(n), n * sheet.size
    last = start + len(tokens) - 1
    yield draw.lane("tokens", GUTTER, TOKENS_Y, f"block {n}", f"tokens {start} to {last}")
    same = sheet.walk.same
    shown = tokens[:MOST_TOKENS]
    for i, token in enumerate(shown):
        at = start + i
        mark = "" if same is None or at > same else HIT if at < same else MISS
        yield draw.query(f"t{i}", LEFT + i * TOKEN_PITCH, TOKENS_Y, sheet.words.fit([token], 4), mark, w=TOKEN_W, h=28)


def _prompt(sheet: Sheet) -> Iterator[Shape]:
    total = sum(len(sheet.tokens(n)) for n in range(sheet.count))
    end = sheet.first + len(sheet.columns)
    sub = f"{total:,} tokens" if sheet.count <= MOST else f"blocks {sheet.first}–{end - 1}"
    owner = sheet.letters.get(sheet.look.request)
    yield draw.lane("prompt", GUTTER, PROMPT_Y + 3, clip(sheet.look.request, 10), sub, owner=owner)
    for n, x in sheet.columns:
        tokens, where = sheet.tokens(n), n * sheet.size
        mark = sheet.walk.columns[n].mark if sheet.probed(n) else ""
        says = f"block {n}, tokens {where} to {where + len(tokens) - 1}: {sheet.words.text(tokens)}"
        yield draw.shape("query", f"p{n}", x, PROMPT_Y, w=BLOCK_W, h=32, token=sheet.words.fit(tokens, 12),
                         mark=None if mark in ("", BEHIND) else mark, says=says)


# ---------------------------------------------------------------- keys
def _keys(sheet: Sheet) -> Iterator[Shape]:
    """A key for each block that was hashed so far, and the line from its parent's."""
    shown = [(n, x) for n, x in sheet.columns if sheet.probed(n)]
    yield draw.lane("keys", GUTTER, KEYS_Y - 1, "keys", "each of all before it")
    for n, x in shown:
        column, left = sheet.walk.columns[n], x + (BLOCK_W - KEY_W) / 2
        if n:
            start = left - PITCH + KEY_W if n > sheet.first else LEFT - 8
            yield draw.edge(f"e{n}", start, KEYS_Y + 13, left, KEYS_Y + 13)
        sign = MISS if column.mark == BEHIND and not column.entry else column.mark
        yield draw.chip(f"k{n}", left, KEYS_Y, f"{sign} {column.key[:4]}", mono=True, w=KEY_W,
                        says=f"key {column.key[:12]} of block {n}: {SAID[column.mark]}")
    if sheet.walk.tail and sheet.look.seen is None and not sheet.look.tail:
        for n, x in sheet.columns:
            if n == len(sheet.walk.columns):
                yield draw.label("nokey", x + BLOCK_W / 2, KEYS_Y + 17, "not full: no key", "d s c")


SAID = {HIT: "every group has it", MISS: "the first that some group lacks", BEHIND: "behind the first miss"}


# ---------------------------------------------------------------- blocks
def _groups(sheet: Sheet) -> Iterator[Shape]:
    named = keys_by_handle(sheet.state)
    for g, group in enumerate(sheet.state["allocator"]["groups"][:2]):
        y = GROUP_Y + g * GROUP_PITCH
        under = layers(group["layer_start"], group["layer_end"])
        yield draw.lane(f"g{g}", GUTTER, y + 12, group["group_id"], under)
        for n, x in sheet.columns:
            handle = _handle(sheet, n, group["group_id"])
            if handle:
                yield _block(sheet, g, handle, x, y, named)
            elif sheet.probed(n):
                yield draw.well(f"w{g}.{n}", x, y, "behind" if _behind(sheet, n) else "not here")


def _handle(sheet: Sheet, n: int, group: str) -> str:
    """Which block stands in a column: the request's own once it is admitted, else the one that answers its key."""
    if sheet.look.table is not None:
        table = sheet.look.table[group]
        return table[n] if n < len(table) else ""
    if n == len(sheet.walk.columns):
        return sheet.look.tail.get(group, "")
    return sheet.walk.columns[n].handles.get(group, "") if sheet.probed(n) else ""


def _behind(sheet: Sheet, n: int) -> bool:
    return sheet.walk.columns[n].mark == BEHIND


def _block(sheet: Sheet, g: int, handle: str, x: float, y: float, named: Mapping[str, str]) -> Shape:
    who = [sheet.letters[r] for r in holders(sheet.state, g, handle)]
    key, rows = named.get(handle), valid_rows(sheet.state, g, handle)
    shown = who[:2]
    held = f"in the table of {' and '.join(who)}" if who else "in no table"
    says = f"block {handle}, {held}, {rows} of {sheet.size} rows valid" + (f", key {key[:4]}" if key else ", no key")
    return draw.block(f"b{g}.{handle}", x, y, label=handle, of=sheet.size, fill=rows if who else 0, owners=shown,
                      h=54, lane=54 / max(1, len(shown)), refs=len(who) or None, tag=key[:4] if key else None,
                      says=says)


# ---------------------------------------------------------------- lengths and what is free
def _rulers(sheet: Sheet) -> Iterator[Shape]:
    """The four lengths under the columns, each to its own scale: a column is a block."""
    told = sheet.look.lengths
    if told is None:
        return
    for i, (name, what) in enumerate(RULERS):
        y = RULER_Y + i * RULER_PITCH
        yield draw.label(f"l.{name}", GUTTER, y + 14, f"{name} {told[name]:,}", "m s b")
        wide = _reach(sheet, told[name])
        inside = wide >= 180
        if wide > 0:
            yield draw.shape("chip", f"r.{name}", LEFT, y, w=wide, h=BAR_H, label=what if inside else "",
                             says=f"{name}, {what}: {told[name]} tokens")
        if not inside:
            yield draw.label(f"x.{name}", LEFT + wide + 10 * (wide > 0), y + 14, what, "s d")


def _reach(sheet: Sheet, tokens: int) -> float:
    """How far a length reaches from the left edge of the first column in sight, in px."""
    inside = max(0, tokens - sheet.first * sheet.size)
    whole, rest = divmod(inside, sheet.size)
    whole, rest = (MOST, 0) if whole >= MOST else (whole, rest)
    return whole * PITCH - (PITCH - BLOCK_W if whole and not rest else 0) + rest * BLOCK_W / sheet.size


def _free(sheet: Sheet) -> Iterator[Shape]:
    """Which blocks of the first group are taken next, and which of them still answer to a key."""
    group = sheet.state["allocator"]["groups"][0]
    queue, named = sheet.state["allocator"]["free"][group["group_id"]], keys_by_handle(sheet.state)
    column = sheet.state["allocator"]["blocks"][group["group_id"]]
    shown = []
    for block in queue[:MOST + 1]:
        handle = f"{block}@{column['generation'][block - group['first_block_id']]}"
        shown.append(handle + (f" #{named[handle][:4]}" if handle in named else ""))
    more = f" and {len(queue) - len(shown)} more" if len(queue) > len(shown) else ""
    text = "  ".join(shown) + more if queue else "none"
    yield draw.label("freehead", GUTTER, FREE_Y, f"next in {group['group_id']}", "s b")
    yield draw.label("free", LEFT, FREE_Y, text, "m s d")


# ---------------------------------------------------------------- a refusal
def _refusal(sheet: Sheet) -> Iterator[Shape]:
    if not sheet.look.reason:
        return
    chip = draw.chip(ASK, LEFT, TOKENS_Y, clip(sheet.look.asked, 44), refused=True)
    yield chip
    yield draw.reason(WHY, LEFT + chip["w"] + 18, TOKENS_Y, sheet.look.reason)


