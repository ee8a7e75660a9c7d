"""One small constructor a shape kind, in the recording schema, and the grid they stand on; it draws nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Shape = dict[str, Any]

VIEW = (960, 484)  # px; one picture size for every recording
LEFT, RIGHT, GUTTER = 138, 950, 2  # where content starts and ends, where row labels start
BLOCK_W, BLOCK_H, PITCH, LANE = 120, 54, 131, 78  # a block, its pitch in a row, and the pitch of rows
SLOT_W, SLOT_H, FREE_SLOT = 51, 44, 32
BRICK_W, BRICK_H = 190, 62
LINK_H, CHIP_H, GROUP_GAP = 22, 26, 46

# kind -> (fields it must have, fields it may have), besides key, kind, x, y and those that every kind may have
FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    kind: (frozenset(must.split()), frozenset(may.split()))
    for kind, must, may in (
        ("block", "w h label of fill owners lane", "refs tag badge"),
        ("well", "w h", "label"),
        ("pile", "w h label", "owner"),
        ("link", "w h label owner", ""),
        ("lane", "label", "owner sub"),
        ("label", "label", "cls"),
        ("rule", "w", "label"),
        ("chip", "w h label", "tone mono"),
        ("digest", "label value", "prev"),
        ("edge", "x2 y2", ""),
        ("arrow", "x2 y2", ""),
        ("rows", "w h owner", ""),
        ("gate", "h label", ""),
        ("kernel", "label", ""),
        ("slot", "w h label", "token owner"),
        ("query", "w h token", "mark"),
        ("pill", "w h", "label badge"),
        ("root", "", ""),
        ("strip", "w h of", "label"),
        ("brick", "w h label of fill", "grey note owners base"),
    )
}
COMMON = frozenset({"w", "h", "says", "refused", "hatch", "from", "transient"})
NUMBERS = frozenset({"x", "y", "w", "h", "x2", "y2", "fill", "grey", "hatch", "of", "lane"})


def shape(kind: str, key: str, x: float, y: float, /, **fields: Any) -> Shape:
    """A shape of `kind`; fields that are None, False or an empty hatch are left out, as the schema asks.

    Every kind takes `says` (makes it pickable, focusable and named; needs w and h), `refused`, `hatch` 0..1,
    `start` (written `from`: where a motion into this frame starts) and `transient`. ValueError for a field that the
    kind does not have, or lacks.
    """
    if "start" in fields:
        fields["from"] = fields.pop("start")
    kept = {name: v for name, v in fields.items() if v is not None and v is not False and (name != "hatch" or v)}
    made = {"key": key, "kind": kind, "x": x, "y": y, **kept}
    check(made)
    return made


def check(s: Mapping[str, Any]) -> None:
    """ValueError, with the key of the shape, where it is not one of the recording schema."""
    key, kind = s.get("key"), s.get("kind")
    if not isinstance(key, str) or not key:
        raise ValueError(f"a shape needs a key, a word, not {key!r}")
    if kind not in FIELDS:
        raise ValueError(f"shape {key}: unknown kind {kind!r}")
    must, may = FIELDS[kind]
    must = must | {"key", "kind", "x", "y"} | ({"w", "h"} if "says" in s else set())
    missing, unknown = must - s.keys(), s.keys() - must - may - COMMON
    if missing or unknown:
        raise ValueError(f"shape {key} ({kind}): missing {sorted(missing)}, unknown {sorted(unknown)}")
    for name in NUMBERS & s.keys():
        _number(key, name, s[name])
    for name, value in s.get("from", {}).items():
        _number(key, f"from.{name}", value)
    if kind == "digest":
        int(s["value"] + s.get("prev", ""), 16)


def _number(key: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"shape {key}: {name} is a finite number, not {value!r}")


def block(
    key: str,
    x: float,
    y: float,
    *,
    label: str,
    of: int,
    fill: float = 0,
    owners: Sequence[str] = (),
    w: float = BLOCK_W,
    h: float | None = None,
    lane: float = LANE,
    **more: Any,
) -> Shape:
    """A physical block: `fill` of `of` rows valid, `label` id@generation; also refs, tag (four hex digits), badge.

    Without `h` it stands as high as its owners' rows are apart: one band an owner, `lane` px from row to row.
    """
    high = BLOCK_H + max(0, len(owners) - 1) * lane if h is None else h
    return shape(
        "block", key, x, y, w=w, h=high, lane=lane, label=label, fill=fill, of=of, owners=list(owners), **more
    )  # fmt: skip


def well(
    key: str, x: float, y: float, label: str = "", *, w: float = BLOCK_W, h: float = BLOCK_H, **more: Any
) -> Shape:
    """An empty logical place, dotted; `label` is the committed handle of a staged block."""
    return shape("well", key, x, y, w=w, h=h, label=label or None, **more)


def pile(key: str, x: float, y: float, label: str, *, w: float = BLOCK_W, h: float = BLOCK_H, **more: Any) -> Shape:
    """A card for blocks that are not shown one by one, such as "+21 free"; `owner` where they are one request's."""
    return shape("pile", key, x, y, w=w, h=h, label=label, **more)


def link(
    key: str, x: float, y: float, label: str, owner: str, *, w: float = BLOCK_W, h: float = LINK_H, **more: Any
) -> Shape:
    """A thin cell with the handle of a body that stands in another owner's row."""
    return shape("link", key, x, y, w=w, h=h, label=label, owner=owner, **more)


def lane(key: str, x: float, y: float, label: str, sub: str = "", *, owner: str | None = None, **more: Any) -> Shape:
    """The head of a row: who, and in a second line what they hold."""
    return shape("lane", key, x, y, label=label, sub=sub or None, owner=owner, **more)


def label(key: str, x: float, y: float, label: str, cls: str = "", **more: Any) -> Shape:
    """Words whose baseline starts at x, y. `cls`: d dim, s small, m mono, b bold, l large, e end, c centred, ac, nt."""
    return shape("label", key, x, y, label=label, cls=cls or None, **more)


def rule(key: str, x: float, y: float, w: float, label: str = "", **more: Any) -> Shape:
    """A thin line across, with words at its right end."""
    return shape("rule", key, x, y, w=w, label=label or None, **more)


def chip(
    key: str,
    x: float,
    y: float,
    label: str,
    *,
    no: bool = False,
    mono: bool = False,
    w: float | None = None,
    **more: Any,
) -> Shape:
    """Something said beside the picture; `no` is a refusal and brings its cross. Without `w` it fits its words."""
    fits = round((len(label) + 2 * no) * (7.6 if mono else 7.4)) + 26
    return shape("chip", key, x, y, w=w or fits, h=CHIP_H, label=label, mono=mono, tone="no" if no else None, **more)


def reason(key: str, x: float, y: float, word: str) -> Shape:
    """The reason of a refusal, a snake_case word, as it stands beside the thing that was refused."""
    return chip(key, x, y, word, no=True, mono=True)


def digest(
    key: str, value: str, prev: str | None = None, *, label: str = "state", x: float = 576, y: float = 6
) -> Shape:
    """The committed digest (hex), and the one before it: the picture says whether anything changed."""
    return shape("digest", key, x, y, w=350, h=22, label=label, value=value[:12], prev=prev[:12] if prev else None)


def edge(key: str, x: float, y: float, x2: float, y2: float, **more: Any) -> Shape:
    """A connection of a tree, from x, y to x2, y2 in the coordinates of the picture."""
    return shape("edge", key, x, y, x2=x2, y2=y2, **more)


def arrow(key: str, x: float, y: float, x2: float, y2: float, **more: Any) -> Shape:
    """One arrow a group is the limit: use it where motion cannot tell it."""
    return shape("arrow", key, x, y, x2=x2, y2=y2, **more)


def rows(key: str, x: float, y: float, owner: str, *, w: float, h: float, start: Mapping[str, float]) -> Shape:
    """K/V rows that fly from `start` to x, y and dissolve there; nothing of them is left at rest."""
    return shape("rows", key, x, y, w=w, h=h, owner=owner, start=dict(start), transient=True)


def gate(key: str, x: float, y: float, h: float, label: str, **more: Any) -> Shape:
    """The mapped frontier of a virtual slot."""
    return shape("gate", key, x, y, h=h, label=label, **more)


def kernel(key: str, x: float, y: float, label: str, **more: Any) -> Shape:
    """The kernel, a triangle with its tip at x, y; `refused` where it may not run."""
    return shape("kernel", key, x, y, w=14, h=12, label=label, **more)


def slot(
    key: str,
    x: float,
    y: float,
    label: str,
    token: str | int | None = None,
    *,
    owner: str | None = None,
    w: float | None = None,
    h: float | None = None,
    **more: Any,
) -> Shape:
    """One KV slot: free without a token, private with an owner, held by the tree with a token alone."""
    free = token is None
    size = {"w": w or (FREE_SLOT if free else SLOT_W), "h": h or (FREE_SLOT if free else SLOT_H)}
    return shape("slot", key, x, y, **size, label=label, token=None if free else str(token), owner=owner, **more)


def query(key: str, x: float, y: float, token: str | int, mark: str = "", *, w: float = 48, h: float = 36) -> Shape:
    """A query token above the slot it is compared with; `mark` is "=" or "≠" or nothing yet."""
    return shape("query", key, x, y, w=w, h=h, token=str(token), mark=mark or None)


def pill(key: str, x: float, y: float, *, w: float, h: float = SLOT_H + 14, label: str = "", **more: Any) -> Shape:
    """The capsule of a radix edge around its slots; `badge` is its lock count."""
    return shape("pill", key, x, y, w=w, h=h, label=label or None, **more)


def root(key: str, x: float, y: float) -> Shape:
    """The root of a radix tree, a ring with its centre at x, y."""
    return shape("root", key, x, y)


def strip(
    key: str, x: float, y: float, of: int, label: str = "", *, w: float = BRICK_W, h: float = BRICK_H, **more: Any
) -> Shape:
    """Reserved virtual addresses of `of` rows: nothing stands behind them."""
    return shape("strip", key, x, y, w=w, h=h, of=of, label=label or None, **more)


def brick(
    key: str,
    x: float,
    y: float,
    label: str,
    *,
    of: int,
    fill: float = 0,
    grey: float = 0,
    owner: str | None = None,
    note: str = "",
    base: int | None = None,
    w: float = BRICK_W,
    h: float = BRICK_H,
    **more: Any,
) -> Shape:
    """A mapped bundle of `of` rows: `fill` are valid, `grey` hold old bytes, `base` is the number of the first."""
    owners = [owner] if owner else []
    return shape(
        "brick", key, x, y, w=w, h=h, label=label, of=of, fill=fill, grey=grey, owners=owners, note=note or None,
        base=base, **more,
    )  # fmt: skip
