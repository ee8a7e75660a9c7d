"""Three byte ledgers side by side: what requests see, what distinct blocks hold, what the pool provides; never a total.

Plain data in, scenes out: a sheet is {"title", "why", "digest", "block_size", "row_bytes", "pool": [block id],
"valid_rows": {block id: rows}, "requests": [{"request", "tokens", "blocks"}], "ledgers": {ledger: its record}}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.views import shapes
from kvlab.views.pool_sheet import letters
from kvlab.views.pool_words import amount
from kvlab.views.scene import Frame, Recording, Scene
from kvlab.views.shapes import VIEW, Shape

Json = Mapping[str, Any]
Place = dict[str, float]

TOP, LANES, LANE = 88, 5, 76  # the first row, how many requests have one of their own, and their pitch
VIEW_X, VIEW_W, VIEW_PITCH, VIEW_MOST = 92, 76, 82, 4
REAL_X, REAL_W, REAL_H, REAL_PITCH, REAL_MOST = 440, 116, 62, 122, 10
POOL_X, POOL_W, POOL_PITCH, POOL_MOST = 710, 76, 82, 15
ROW = 70  # pitch of rows of distinct and of pooled blocks
BANDS = 3  # owners that a distinct block can show, each with its letter


def size(count: float) -> tuple[float, str]:
    """Bytes as a number and its unit, at most two decimals."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return round(count / step, 2), unit
    return count, "B"


def said(count: float) -> str:
    number, unit = size(count)
    return f"{number:,g} {unit}"


@dataclass(frozen=True, slots=True)
class _Page:
    """A sheet with the letters of its requests, and where each block of the pool and of the middle ledger stands."""

    sheet: Json
    names: Mapping[str, str]
    pool: Mapping[int, Place]
    real: Mapping[int, Place]

    @property
    def of(self) -> int:
        return self.sheet["block_size"]

    def rows(self, block: int) -> int:
        return self.sheet["valid_rows"][str(block)]

    def home(self, block: int) -> Place | None:
        return self.real.get(block) or self.pool.get(block)


def _grid(ids: Sequence[int], x: float, columns: int, pitch: float, w: float, h: float) -> dict[int, Place]:
    return {block: {"x": x + i % columns * pitch, "y": TOP + i // columns * ROW, "w": w, "h": h}
            for i, block in enumerate(ids)}


def _page(sheet: Json, names: Mapping[str, str]) -> _Page:
    used = list(dict.fromkeys(block for r in sheet["requests"] for block in r["blocks"]))
    shown = used if len(used) <= REAL_MOST else used[: REAL_MOST - 1]
    stock = sheet["pool"]
    if len(stock) > POOL_MOST:  # those in use first: a window keeps what the other ledgers show
        stock = ([b for b in stock if b in set(used)] + [b for b in stock if b not in set(used)])[: POOL_MOST - 1]
    real = _grid(sorted(shown), REAL_X, 2, REAL_PITCH, REAL_W, REAL_H)
    return _Page(sheet, names, _grid(stock, POOL_X, 3, POOL_PITCH, POOL_W, shapes.BLOCK_H), real)


def _heads(page: _Page) -> Iterator[Shape]:
    view, real, pool = (page.sheet["ledgers"][name] for name in ("request_view", "unique", "pool"))
    texts = (
        (2, "Request views", f"{view['references']} references, {said(view['capacity']['bytes'])}"),
        (REAL_X, "Distinct blocks", f"{len(real['ids'])} blocks, {said(real['capacity']['bytes'])}"),
        (POOL_X, "Pool", f"{pool['blocks']} blocks, {said(pool['provisioned']['bytes'])}"),
    )
    for i, (x, head, sub) in enumerate(texts):
        yield shapes.label(f"head.{i}", x, 56, head, "b")
        yield shapes.label(f"sub.{i}", x, 74, sub, "s d")
    row = said(page.sheet["row_bytes"])
    yield shapes.label("row", 2, 24, f"A block has {amount(page.of, 'row')} of K and V, {row} each.", "s d")


def _view(page: _Page) -> Iterator[Shape]:
    """A lane a request; a cell is its own view of a block, filled as far as it can see."""
    requests = page.sheet["requests"]
    shown = requests if len(requests) <= LANES else requests[: LANES - 1]
    for i, r in enumerate(shown):
        y, owner = TOP + i * LANE, page.names[r["request"]]
        yield shapes.lane(f"lane.{r['request']}", 2, y + 13, f"{r['tokens']:,}", "tokens", owner=owner)
        yield from _cells(page, r, y)
    if len(shown) < len(requests):
        label = f"+{len(requests) - len(shown)} more requests"
        yield shapes.pile("pile.requests", VIEW_X, TOP + len(shown) * LANE, label, w=2 * VIEW_PITCH)


def _cells(page: _Page, r: Json, y: float) -> Iterator[Shape]:
    name, blocks, owner = r["request"], r["blocks"], page.names[r["request"]]
    cut = len(blocks) - VIEW_MOST
    for j, block in enumerate(blocks):
        if cut > 0 and 1 <= j <= cut + 1:
            continue
        x = VIEW_X + (j if not j or cut <= 0 else j - cut) * VIEW_PITCH
        seen = min(page.of, r["tokens"] - j * page.of)
        yield shapes.block(
            f"r.{name}.{j}", x, y, label=str(block), of=page.of, fill=seen, owners=[owner], w=VIEW_W,
            h=shapes.BLOCK_H, says=f"block {block} as {name} sees it: {seen} of {page.of} rows",
        )  # fmt: skip
        hidden = page.rows(block) - seen
        other = _whose(page, r, block)
        if hidden and other:
            label = f"{amount(hidden, 'row')} of {page.names[other]}"
            wide = 31 + 7.6 * len(label)
            yield shapes.link(f"h.{name}.{j}", x + VIEW_W - wide, y + shapes.BLOCK_H + 1, label, page.names[other],
                              w=wide, h=20)
    if cut > 0:
        yield shapes.pile(f"pile.{name}", VIEW_X + VIEW_PITCH, y, f"+{cut + 1}", w=VIEW_W)


def _whose(page: _Page, mine: Json, block: int) -> str | None:
    """Somebody else who sees the rows of a block that this request does not."""
    owners = [r for r in page.sheet["requests"] if block in r["blocks"] and r["tokens"] > mine["tokens"]]
    return max(owners, key=lambda r: r["tokens"])["request"] if owners else None


def _real(page: _Page) -> Iterator[Shape]:
    """Each distinct block once, with a band for every owner."""
    for block, at in page.real.items():
        owners = [page.names[r["request"]] for r in page.sheet["requests"] if block in r["blocks"]]
        bands, rows = owners[:BANDS], page.rows(block)
        yield shapes.block(
            f"u.{block}", at["x"], at["y"], label=str(block), of=page.of, fill=rows, owners=bands, w=REAL_W, h=REAL_H,
            lane=REAL_H / len(bands), refs=len(owners),
            says=f"block {block}: {rows} of {page.of} rows valid, {len(owners)} references",
        )  # fmt: skip
    more = len(page.sheet["ledgers"]["unique"]["ids"]) - len(page.real)
    if more:
        x, y = REAL_X + REAL_PITCH, TOP + (REAL_MOST // 2 - 1) * ROW
        yield shapes.pile("pile.real", x, y, f"+{more} blocks", w=REAL_W)


def _pool(page: _Page) -> Iterator[Shape]:
    """Every provisioned block: in use by somebody, or idle and ready for the next one."""
    used = {block for r in page.sheet["requests"] for block in r["blocks"]}
    for block, at in page.pool.items():
        live = block in used
        first = next((page.names[r["request"]] for r in page.sheet["requests"] if block in r["blocks"]), None)
        yield shapes.block(
            f"p.{block}", at["x"], at["y"], label=str(block), of=page.of, fill=page.rows(block) if live else 0,
            owners=[first] if first else [], w=POOL_W, h=shapes.BLOCK_H,
            says=f"block {block} of the pool is {'in use' if live else 'idle'}",
        )  # fmt: skip
    more = len(page.sheet["pool"]) - len(page.pool)
    if more:
        x, y = POOL_X + 2 * POOL_PITCH, TOP + (POOL_MOST // 3 - 1) * ROW
        yield shapes.pile("pile.pool", x, y, f"+{more}", w=POOL_W)


def _moving(page: _Page, before: _Page | None, made: Sequence[Shape], old: Mapping[str, Shape]) -> Iterator[Shape]:
    """New cells come from where their block stood: a distinct block from the pool, a view from the distinct block."""
    for s in made:
        if before is not None and s["key"] not in old and s["key"][:2] in ("u.", "r."):
            block = int(s["label"])
            start = before.home(block) if s["key"][0] == "r" else before.pool.get(block)
            if start:
                s = {**s, "from": dict(start)}
        yield s


def _leaving(page: _Page, old: Mapping[str, Shape], new: Mapping[str, Shape]) -> dict[str, Place]:
    """Cells that are gone go back where their block still stands."""
    out = {}
    for key, s in old.items():
        if key not in new and key[:2] in ("u.", "r."):
            block = int(s["label"])
            goal = page.home(block) if key[0] == "r" else page.pool.get(block)
            if goal:
                out[key] = dict(goal)
    return out


def _scene(page: _Page, before: _Page | None, old: Mapping[str, Shape]) -> Scene:
    made = [*_heads(page), *_view(page), *_real(page), *_pool(page)]
    if digest := page.sheet.get("digest"):
        made.append(shapes.digest("digest", digest, before.sheet["digest"] if before else None))
    return Scene(VIEW, tuple(_moving(page, before, made, old)))


def scene(sheet: Json) -> Scene:
    """One sheet as a still picture. Five requests, ten distinct and fifteen pooled blocks are drawn, the rest piled."""
    return _scene(_page(sheet, letters(r["request"] for r in sheet["requests"])), None, {})


def recording(sheets: Sequence[Json], *, title: str, question: str) -> Recording:
    """Sheets as the frames of a recording, the first one its start. ValueError without any. O(sheets x blocks)."""
    names = letters(r["request"] for sheet in sheets for r in sheet["requests"])
    frames: list[Frame] = []
    before, old = None, {}
    for n, sheet in enumerate(sheets):
        page = _page(sheet, names)
        drawn = _scene(page, before, old)
        new = drawn.by_key()
        kind = "committed" if n else "start"
        frames.append(Frame(sheet["title"], sheet["why"], kind, board(sheet), tuple(twin(sheet)), drawn,
                            leave=_leaving(page, old, new)))
        before, old = page, new
    return Recording(title, question, VIEW, tuple(frames))


def board(sheet: Json) -> tuple[Json, ...]:
    """Each ledger's own figure beside the others. No cell is a sum of two of them."""
    ledgers = sheet["ledgers"]
    view, real = ledgers["request_view"], ledgers["unique"]
    figures = [("request views", view["capacity"]), ("distinct blocks", real["capacity"]),
               ("pool", ledgers["pool"]["provisioned"])]
    if "rectangular" in ledgers:
        figures.insert(0, ("rectangles reserve", ledgers["rectangular"]["reserved"]))
    cells = [dict(zip(("label", "value", "unit"), (label, *size(a["bytes"])), strict=True)) for label, a in figures]
    cells += [{"label": "unused, as seen", "value": view["tail_slots"], "unit": "rows"},
              {"label": "unused, in blocks", "value": real["tail_slots"], "unit": "rows"}]
    return tuple(cells)


def twin(sheet: Json) -> Iterator[str]:
    """The frame in sentences, a ledger each."""
    ledgers = sheet["ledgers"]
    view, real, pool = ledgers["request_view"], ledgers["unique"], ledgers["pool"]
    yield (f"Request views: {view['references']} references to blocks, {view['slots']} slots, of which "
           f"{view['tail_slots']} show no row to their request.")
    for name, hidden in view["hidden_rows"].items():
        if hidden:
            yield f"Of the unused slots that {name} sees, {hidden} hold rows of another request."
    yield (f"Distinct blocks: {len(real['ids'])}, with {real['rows']} valid rows in {real['slots']} slots; "
           f"{real['tail_slots']} hold nothing.")
    yield f"Pool: {pool['blocks']} blocks, {pool['live']} in use and {pool['idle']} idle."
    yield "These answer three questions. Their sum answers none."
