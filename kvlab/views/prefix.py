"""A prefix index as a recording: moments in, frames out, a frame a step of each lookup; it holds no machine.

A moment is plain data: what was asked, the state after it, what came of it. Lookups change nothing and are in no
history, so whoever asks keeps the moments (`kvlab.study.prefix_walk.PrefixWalk` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.views.pool_sheet import letters
from kvlab.views.pool_words import amount
from kvlab.views.prefix_columns import HIT, MISS, Walk, counts, walk
from kvlab.views.prefix_picture import ASK, RULERS, SAID, Look, Words, picture
from kvlab.views.scene import Frame, Recording, Scene
from kvlab.views.shapes import VIEW

Json = Mapping[str, Any]
STARTS, LOOKUP, DONE, REFUSED = "start", "lookup", "done", "refused"


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that was asked of an index, in plain data.

    `what`: start (the first state), lookup (nothing changes), done (something was committed), refused. `said`: the
    operation or question, as a person would say it. `keys`: one for each full block of `tokens`. `match`:
    `PrefixMatch.to_dict()`, of a lookup or a start.
    """

    what: str
    said: str
    state: Json
    digest: str
    manifest: Json
    request: str = ""
    tokens: Sequence[int] = ()
    keys: Sequence[str] = ()
    op: str = ""
    receipt: Json | None = None
    match: Json | None = None
    reason: str = ""
    detail: str = ""


def scene(moment: Moment, *, pieces: Mapping[int, str] | None = None) -> Scene:
    """One still picture: all that an index has for a prompt, as `moment` left it. O(blocks)."""
    found = walk(moment.state, moment.manifest, moment.tokens, moment.keys)
    return picture(moment.state, found, words=Words(pieces or {}), letters=letters(_everyone([moment])),
                   look=_settled(moment, found), digest=moment.digest)


def recording(moments: Sequence[Moment], *, title: str, question: str, pieces: Mapping[int, str] | None = None,
              reasons: Mapping[str, str] | None = None) -> Recording:
    """Everything that was asked, step by step. `pieces`: token id -> text. `reasons`: refusal word -> sentence.

    O(moments x (blocks + published tokens)).
    """
    words, who, frames = Words(pieces or {}), letters(_everyone(moments)), []
    totals = {"asked": 0, "taken": 0}
    before: Moment | None = None
    for moment in moments:
        frames += _frames(moment, before, words, who, totals, reasons or {})
        before = moment
    return Recording(title, question, VIEW, tuple(frames))


def _everyone(moments: Sequence[Moment]) -> Iterator[str]:
    for moment in moments:
        yield from moment.state["allocator"]["requests"]
        if moment.request:
            yield moment.request


# ---------------------------------------------------------------- frames of one moment
def _frames(moment: Moment, before: Moment | None, words: Words, who: Mapping[str, str], totals: dict[str, int],
            reasons: Mapping[str, str]) -> Iterator[Frame]:
    old = before or moment
    base = walk(old.state, moment.manifest, moment.tokens, moment.keys)
    if moment.match is not None:
        probes = list(_probes(moment, base, words))
        for step in probes:
            look, title, why = step
            if step is probes[-1]:  # the verdict: only now is it known what is taken
                totals["asked"] += len(moment.tokens)
                totals["taken"] += moment.match["lengths"]["S_runtime"]
            scene = picture(old.state, base, words=words, letters=who, look=look, digest=old.digest,
                            digest_before=old.digest)
            yield Frame(title, why, "read", board(old, totals), twin(base, look, moment, words), scene)
    if moment.what == LOOKUP:
        return
    found = walk(moment.state, moment.manifest, moment.tokens, moment.keys)
    look = _settled(moment, found)
    title, why = _words(moment, found, reasons)
    made = picture(moment.state, found, words=words, letters=who, look=look, digest=moment.digest,
                   digest_before=None if before is None else before.digest)
    kind = {STARTS: "start", REFUSED: "refused"}.get(moment.what, "committed")
    yield Frame(title, why, kind, board(moment, totals), twin(found, look, moment, words), made,
                shake=ASK if moment.what == REFUSED else None)


def _probes(moment: Moment, found: Walk, words: Words) -> Iterator[tuple[Look, str, str]]:
    """The steps of one lookup, as its log has them (article 0x07F)."""
    who, told = moment.request, moment.match["lengths"]
    yield (Look(who, 0), f"May {who} look here?",
           "First the namespace, then generations and manifest. Nothing of the index has been read yet.")
    for n in range(found.probes):
        column = found.columns[n]
        here = " and ".join(f"{handle} in {group}" for group, handle in column.handles.items())
        parent = "the root" if n == 0 else f"key {found.columns[n - 1].key[:4]}"
        if column.mark == HIT:
            why = f"Hash {parent} with the tokens of block {n}: {column.key[:4]}. It answers: {here}."
        elif column.handles:
            why = f"Key {column.key[:4]}: {here}, but not in every group. A hit is one block in each, so this is none."
        else:
            why = (f"Hash {parent} with the tokens of block {n}: {column.key[:4]}. Nobody has it. The walk stops; "
                   "what stands behind is not looked up.")
        yield Look(who, n + 1, n), f"Block {n}: {'found' if column.mark == HIT else 'the first miss'}", why
    last = found.probes - 1 if found.columns else None
    yield (Look(who, None, last, lengths=told, tail=_tail(moment)), _verdict(told), _why(told, moment))


def _tail(moment: Moment) -> dict[str, str]:
    """The block of a matched tail, by group."""
    receipt = moment.match["receipt"]
    if not receipt["copy_valid_partial_rows"]:
        return {}
    return {g: handles[-1] for g, handles in receipt["matched_group_handles"].items()
            if len(handles) > len(moment.keys)}


def _verdict(told: Json) -> str:
    return f"{told['S_runtime']:,} of {told['S_prompt']:,} tokens taken, {told['S_recompute']:,} to compute"


def _why(told: Json, moment: Moment) -> str:
    rows = moment.match["receipt"]["copy_valid_partial_rows"]
    least = min(told["S_sem"], told["S_indexed"], told["S_cap"])
    if told["S_cap"] < told["S_prompt"] and told["S_indexed"] == told["S_prompt"]:
        first = (f"Everything is here, but the last token must be computed: its logits are wanted. So at most "
                 f"{told['S_cap']:,}.")
    elif told["S_indexed"] < told["S_sem"]:
        first = f"{told['S_sem']:,} tokens were computed before, and the index can find {told['S_indexed']:,} of them."
    else:
        first = f"The least of the three limits is {least:,}."
    if rows:
        return f"{first} Whole blocks are shared, and {amount(rows, 'row')} of the last one are copied."
    if told["S_runtime"] < least:
        return f"{first} Only whole blocks are taken: {told['S_runtime']:,}."
    return first


def _settled(moment: Moment, found: Walk) -> Look:
    """How the state stands when a moment is over."""
    rows = moment.state["allocator"]["requests"].get(moment.request)
    asked = moment.said if moment.what == REFUSED else ""
    told = moment.match["lengths"] if moment.match is not None and moment.what != REFUSED else None
    table = rows["tables"] if rows is not None and moment.op in ("start", "admit", "publish", "append") else None
    return Look(moment.request, None, None, table=table, lengths=told, asked=asked, reason=moment.reason)


# ---------------------------------------------------------------- words
def _words(moment: Moment, found: Walk, reasons: Mapping[str, str]) -> tuple[str, str]:
    if moment.what == REFUSED:
        why = reasons.get(moment.reason, "It may not be.")
        return f"Refused: {moment.said}", f"{why.rstrip('.')}. Nothing changed."
    if moment.what == STARTS:
        return moment.said, "No prompt has been asked for yet."
    if moment.op in ("start", "admit"):
        parts = moment.receipt["parts"][0]
        fresh, who = parts["new_bundles"], moment.request
        hits = moment.match["lengths"]["S_runtime"] if moment.match else 0
        first = "It shares the blocks that were found and gets" if hits else "It shares nothing and gets"
        if moment.match and moment.match["receipt"]["copy_valid_partial_rows"]:
            first = "It shares the whole blocks, copies the rows of the last one, and gets"
        return f"{who} starts", f"{first} {amount(fresh, 'fresh block')} in each group, in one transaction."
    if moment.op == "publish":
        new, twice = len(moment.receipt["published"]), len(moment.receipt["duplicates"])
        why = (f"{amount(new, 'full block')} can be found by others from now on." if new
               else "Every full block stands under its key already.")
        if twice:
            why = (f"{amount(new, 'full block')} get a key, and {twice} of those keys had a block already: the same "
                   "rows stand there twice. Tables only grow, so the copies are not merged.")
        return f"{moment.request} publishes {amount(new, 'block') if new else 'nothing new'}", why
    if moment.op in ("release", "cancel"):
        return f"{moment.request} ends", ("What nobody else holds is free now. A free block keeps its rows and its key "
                                          "until somebody takes it.")
    return moment.said, "The index follows: an entry lives as long as its block."


def board(moment: Moment, totals: Mapping[str, int]) -> tuple[Json, ...]:
    """The scoreboard: blocks of the first group, and what lookups have taken so far."""
    pool = counts(moment.state)
    rate = f"{totals['taken'] / totals['asked']:.0%}" if totals["asked"] else "–"
    return ({"label": "blocks in use", "value": pool["in use"]},
            {"label": "free, still cached", "value": pool["cached and free"]},
            {"label": "empty", "value": pool["empty"]},
            {"label": "tokens asked for", "value": totals["asked"]},
            {"label": "tokens taken", "value": totals["taken"]}, {"label": "hit rate, all asked", "value": rate})


def twin(found: Walk, look: Look, moment: Moment, words: Words) -> tuple[str, ...]:
    """The picture in sentences."""
    out = []
    for n, column in enumerate(found.columns[: look.seen]):
        out.append(f"Block {n}, key {column.key[:4]}: {SAID[column.mark]}"
                   + (f" ({', '.join(column.handles.values())})" if column.handles else "") + ".")
    if found.tail and look.seen is None:
        out.append(f"Then {amount(len(found.tail), 'token')} of a block that is not full.")
    if look.focus is not None and found.same is not None and look.focus < len(found.columns):
        size = len(found.columns[look.focus].tokens)
        at = found.same - look.focus * size
        if 0 <= at < size:
            token = words.text(found.columns[look.focus].tokens[at : at + 1]).strip() or "␣"
            out.append(f"Token {found.same} is “{token}”, {MISS} what was published.")
    if look.table is not None:
        out.append("Its table: " + "; ".join(f"{g}: {', '.join(row)}" for g, row in look.table.items()) + ".")
    if look.lengths is not None:
        out.append("; ".join(f"{name} {look.lengths[name]:,}, {what}" for name, what in RULERS) + ".")
    return tuple(out) or ("No key has been derived.",)
