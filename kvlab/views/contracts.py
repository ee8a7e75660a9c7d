"""One token's way through the five contracts as a recording: a card a contract, the present one lit; it runs nothing.

Plain data only: a walk as `kvlab.study.contract_walk.follow` makes it (articles 0x00B and 0x00C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvlab.views import shapes as draw
from kvlab.views.scene import Frame, Recording, Scene
from kvlab.views.shapes import GUTTER, LEFT, RIGHT, VIEW, Shape

Json = Mapping[str, Any]

TOP, PITCH, HIGH = 44, 87, 80  # px: where the first card begins, from card to card, a card's height
TOKEN_X, OUTSIDE_X, FACT_X, GAP = 152, 418, 258, 12
MIDDLE = 25  # px from a card's top to a chip or the token in it

ASKS = {
    "identity": "same meaning?",
    "index": "which blocks?",
    "ownership": "who may write?",
    "address": "which byte?",
    "execution_reuse": "work done once?",
}
"""The five cards in the order in which a token crosses them, each with its question in two words."""

STAGES = ("", "identity", "index", "reserve", "ownership", "address", "execution_reuse", "text")
"""The frames, in order. Ownership takes two: reserved and unseen, then published."""


def card_of(stage: str) -> str:
    """The card that a stage stands on; "" where the token is outside of all."""
    return "ownership" if stage == "reserve" else stage if stage in ASKS else ""


def scene(walk: Json, at: int) -> Scene:
    """The picture after stage `at` of `STAGES`."""
    return Scene(VIEW, tuple(_shapes(walk, at)))


def _shapes(walk: Json, at: int) -> Iterator[Shape]:
    stage, crossed = STAGES[at], {card_of(s) for s in STAGES[1 : at + 1]}
    yield draw.label("chat", GUTTER, 20, _sentence(walk, at), "b")
    published = at >= STAGES.index("ownership")
    yield draw.digest("digest", walk["digest_after"] if published else walk["digest"], walk["digest"])
    for n, (name, asks) in enumerate(ASKS.items()):
        y = TOP + n * PITCH
        yield draw.lane(f"lane.{name}", GUTTER, y + 27, name.replace("_", " "), asks)
        yield draw.well(f"well.{name}", LEFT, y, "" if name in crossed else "not asked yet", w=RIGHT - LEFT, h=HIGH)
        if name in crossed:
            yield from CARDS[name](walk, y, stage)
    yield from _token(walk, card_of(stage))


def _token(walk: Json, card: str) -> Iterator[Shape]:
    """The token, and the light on the card where it stands: both move from card to card."""
    word, place, y = walk["token"].strip(), str(walk["position"]), TOP
    if card:
        y += list(ASKS).index(card) * PITCH
        yield draw.pill("light", LEFT, y, w=RIGHT - LEFT, h=HIGH, says=f"{card.replace('_', ' ')}: {ASKS[card]}")
        yield draw.gate("here", LEFT, y + 6, HIGH - 12, "")
    x, y, high = (TOKEN_X, y + 18, draw.SLOT_H) if card else (OUTSIDE_X, 1, draw.SLOT_H - 4)
    yield draw.slot("token", x, y, place, word, owner=walk["chat"], w=88, h=high, says=f"token {place}, {word}")


def _sentence(walk: Json, at: int) -> str:
    said = walk["said"] if STAGES[at] == "text" else ""
    return f"{walk['chat']}: …{walk['line'].strip()}{said}"


def _chips(key: str, y: float, words: Sequence[str], x: float = FACT_X) -> Iterator[Shape]:
    for n, word in enumerate(words):
        made = draw.chip(f"{key}.{n}", x, y + MIDDLE + 2, word)
        yield made
        x += made["w"] + GAP


def _identity(walk: Json, y: float, stage: str) -> Iterator[Shape]:
    facts = walk["identity"]
    yield from _chips("identity", y, (f"weights {facts['model']}", f"adapter {facts['adapter']}",
                                      f"{facts['facts']} facts compared, all equal"))


def _index(walk: Json, y: float, stage: str) -> Iterator[Shape]:
    x = FACT_X
    for n, (key, bundle) in enumerate(zip(walk["index"]["keys"], walk["index"]["blocks"], strict=True)):
        yield draw.block(f"found.{n}", x, y + 3, label=bundle[0], of=16, fill=16, owners=[walk["parent"]], tag=key,
                         says=f"block {bundle[0]}, found by its key {key}")
        x += draw.PITCH
    yield from _chips("index", y, (f"{walk['index']['rows']} rows found, nothing computed",), x + GAP)


def _ownership(walk: Json, y: float, stage: str) -> Iterator[Shape]:
    own, staged = walk["ownership"], stage == "reserve"
    owners = [walk["parent"], walk["chat"]] if staged else [walk["parent"]]
    old = draw.block("tail", FACT_X, y + 13, label=own["from"], of=16, fill=own["from_fill"], owners=owners, h=54,
                     lane=54 / len(owners), refs=len(owners), says=f"{own['from']}: the tail that both chats name")
    new = draw.block("copy", FACT_X + 2 * draw.PITCH, y + 13, label=own["to"], of=16, refs=None if staged else 1,
                     fill=own["rows"] if staged else own["to_fill"], owners=[walk["chat"]], hatch=int(staged),
                     says=f"{own['to']}: {'reserved' if staged else 'published'}, {walk['chat']}'s alone")
    yield from (old, new)
    yield draw.arrow("moves", FACT_X + draw.BLOCK_W + 14, y + 40, FACT_X + 2 * draw.PITCH - 14, y + 40)
    words = f"{own['rows']} rows copied" + (", nobody sees it yet" if staged else f", {own['written']} written")
    yield from _chips("ownership", y, (words,), FACT_X + 3 * draw.PITCH + GAP)
    if staged:
        yield draw.rows("flying", new["x"] + 23, new["y"] + 4, walk["parent"], w=42, h=46,
                        start={"x": old["x"] + 23, "y": old["y"] + 4})


def _address(walk: Json, y: float, stage: str) -> Iterator[Shape]:
    at = walk["address"]
    yield from _chips("address", y, (f"{at['block']}, row {at['row']}", f"slot {at['slot']:,}",
                                     f"byte {at['byte']:,} of {at['group']}'s K", f"holds {at['value']}"))


def _execution(walk: Json, y: float, stage: str) -> Iterator[Shape]:
    run = walk["execution_reuse"]
    yield from _chips("execution", y, (f"{run['shared']} shared rows: (m, l, u)", f"{run['own']} own rows: (m, l, u)",
                                       "merged: the exact row"))


CARDS: dict[str, Callable[[Json, float, str], Iterator[Shape]]] = {
    "identity": _identity, "index": _index, "ownership": _ownership, "address": _address,
    "execution_reuse": _execution,
}


# ---------------------------------------------------------------- words
def recording(walk: Json, *, title: str, question: str) -> Recording:
    """The walk as frames: the prompt, a frame a contract (ownership has two), the text.

    ValueError where the walk is of something that did not hold, for then there is no such way to show.
    """
    if not (walk["identity"]["compatible"] and walk["index"]["named"] and walk["address"]["same"]
            and walk["execution_reuse"]["same"]):
        raise ValueError("a contract did not hold on this way")
    frames = [_frame(walk, at) for at in range(len(STAGES))]
    return Recording(title, question, VIEW, tuple(frames))


def _frame(walk: Json, at: int) -> Frame:
    stage = STAGES[at]
    title, why = WORDS[stage](walk)
    kind = "start" if not stage else "committed" if stage in ("ownership", "text") else "staged"
    twin = (f"{walk['chat']} goes on from {walk['parent']}'s chat: {walk['line'].strip()!r}.",
            *(f"{WORDS[s](walk)[0]}." for s in STAGES[1 : at + 1]), *_left(at))
    return Frame(title, why, kind, _board(walk, at), twin, scene(walk, at))


def _left(at: int) -> tuple[str, ...]:
    crossed = {card_of(s) for s in STAGES[: at + 1]}
    left = [name.replace("_", " ") for name in ASKS if name not in crossed]
    return (f"Not asked yet: {', '.join(left)}.",) if left else ()


def _board(walk: Json, at: int) -> tuple[Json, ...]:
    crossed = {card_of(s) for s in STAGES[1 : at + 1]} - {""}
    own, done = walk["ownership"], at >= STAGES.index("ownership")
    return ({"label": "contracts crossed", "value": len(crossed), "unit": f"of {len(ASKS)}"},
            {"label": "rows found", "value": walk["index"]["rows"] if at >= STAGES.index("index") else 0},
            {"label": "K/V copied", "value": own["bytes"] if done else 0, "unit": "bytes"},
            {"label": "rows written", "value": own["written"] if done else 0})


def _asked(walk: Json) -> tuple[str, str]:
    return (f"{walk['chat']} types a line, and one of its tokens is {walk['token'].strip()!r}",
            f"It is token {walk['position']} of the chat. Follow it: its K and V rows must go somewhere, and be found.")


def _same(walk: Json) -> tuple[str, str]:
    return (f"Identity: {walk['parent']}'s rows mean the same to {walk['chat']}",
            "Same weights, no adapter, same tokens at the same positions. Only now may they be read at all.")


def _which(walk: Json) -> tuple[str, str]:
    found = walk["index"]
    return (f"Index: {len(found['keys'])} keys lead to {len(found['blocks'])} full blocks",
            f"{found['rows']} rows need no computing. The index holds full blocks only, so the tail comes otherwise.")


def _reserved(walk: Json) -> tuple[str, str]:
    own = walk["ownership"]
    return (f"Ownership: a block is reserved, {own['rows']} rows are copied into it",
            f"The tail {own['from']} has two owners, so {walk['chat']} may not write there. The digest has not moved.")


def _published(walk: Json) -> tuple[str, str]:
    own = walk["ownership"]
    return (f"Ownership: {own['to']} is {walk['chat']}'s, and the receipt says so",
            f"One transaction: {own['written']} rows written, table, length and counts published at once.")


def _where(walk: Json) -> tuple[str, str]:
    at = walk["address"]
    return (f"Address: one scalar of the token is byte {at['byte']:,}",
            f"K, layer {at['layer']}, head {at['head']}, lane {at['lane']}. {at['checks']} checks passed, and the byte "
            "was really read: it holds what the tensor shows.")


def _once(walk: Json) -> tuple[str, str]:
    run = walk["execution_reuse"]
    low, high = run["weight"]
    return (f"Execution reuse: {run['shared']} shared rows and {run['own']} own rows, merged",
            f"Here the shared rows get {low} to {high} % of a head's weight. The merge keeps that, to the last digit "
            "that matters.")


def _text(walk: Json) -> tuple[str, str]:
    return (f"Text: {walk['chat']}'s next token is {walk['said']!r}",
            "Five contracts, one token. Each answered another question, and none could answer for another.")


WORDS: dict[str, Callable[[Json], tuple[str, str]]] = dict(
    zip(STAGES, (_asked, _same, _which, _reserved, _published, _where, _once, _text), strict=True))
