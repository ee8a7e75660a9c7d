"""The identity gate as a recording: producer beside consumer, and the checks between them, one after another.

Plain data only: a walk as `kvlab.study.gate_walk.walk` makes it. It compares nothing itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.views import shapes as draw
from kvlab.views.pool_sheet import clip
from kvlab.views.scene import Frame, Recording, Scene
from kvlab.views.shapes import GUTTER, VIEW, Shape

Json = Mapping[str, Any]

TOP, PITCH, HIGH = 76, 29, 22  # px: where the first row begins, from row to row, a row's height
CHECK_X, CHECK_W, SIGN_X = 302, 224, 541
OURS_X, THEIRS_X, REASON_X = 290, 562, 694

PHASES = {"authorised": "who may look", "concrete key": "where to look", "cache_abi_sha256": "what may be read"}
WORDS = {
    "authorised": "Before anything is looked up: may this caller look into this namespace at all?",
    "concrete key": "The index has one key a prefix: its tokens, their parents, a few extras. It names a candidate.",
    "cache_abi_sha256": "Do both mean the same thing by a row of K and V?",
    "cache_layout_sha256": "Do the consumer's addresses find the same scalars, of the same heads, in one dtype?",
    "model_generation": "Were the rows made by the weights that the consumer runs?",
    "adapter_identity": "Were they made by the same adapter? By its content, not by its name.",
    "weight_transform_identity": "Were the weights transformed in the same way, by smoothing or merging for example?",
    "position_contract_sha256": "Were the keys rotated for the positions at which the consumer wants them?",
    "covered_token_ids": "Are all the tokens that the rows cover the same? The consumer's prompt may go on.",
    "input_side_data_identity": "Placeholder tokens stand for pictures and embeddings. Are those the same?",
    "cache_isolation_namespace": "Does the entry belong to the namespace that the caller may look into?",
    "namespace_generation": "And to the present generation of it?",
    "cache_salt": "Were both given the same salt?",
    "publication_generation": "Was the entry published in the present generation of this cache?",
}


def fields(walk: Json) -> list[str]:
    """Every row of the picture, in the order of the gate."""
    return ["authorised", "concrete key", *walk["order"]]


def short(value: Any) -> str:
    """A field's value in a few characters: a digest by its first eight, token ids by their number and digest."""
    if value is None or value == [] or value == ():
        return "none"
    if isinstance(value, list | tuple):
        noun = "tokens" if isinstance(value[0], int) else "side inputs"
        return f"{len(value)} {noun if len(value) > 1 else noun[:-1]} {_print(value)}"
    text = str(value)
    return text[:8] if len(text) == 64 else clip(text, 16)


def _print(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:4]


def scene(walk: Json, made: int) -> Scene:
    """The gate after its first `made` checks. `walk`: see `recording`."""
    rows = [_row(walk, i, name, made) for i, name in enumerate(fields(walk))]
    return Scene(VIEW, (*_heads(walk, made), *(shape for row in rows for shape in row)))


def _heads(walk: Json, made: int) -> Iterator[Shape]:
    yield draw.lane("producer", 138, 34, "producer", walk["handle"], owner="A")
    yield draw.lane("consumer", THEIRS_X, 34, "consumer", f"{walk['request']}, for {walk['principal']}", owner="B")
    ended = made >= len(walk["checks"]) and walk["held"]
    yield draw.digest("digest", walk["digest_after"] if ended else walk["digest"], walk["digest"])
    for i, name in enumerate(fields(walk)):
        if name in PHASES:
            yield draw.label(f"phase.{name}", GUTTER, TOP + i * PITCH + 16, PHASES[name], "s d")


def _row(walk: Json, i: int, name: str, made: int) -> Iterator[Shape]:
    check, y = (walk["checks"][i] if i < made else None), TOP + i * PITCH
    ours, theirs = walk["values"][name]
    dim = "m s" if check else "m s d"
    refused = check is not None and not check["held"] and (name != "concrete key" or made == i + 1)
    said = f"{name}: {_said(check)}"
    yield draw.shape("chip", f"check.{name}", CHECK_X, y, w=CHECK_W, h=HIGH, label=name, mono=True,
                     hatch=0 if check else 1, refused=refused, says=said)
    yield draw.label(f"ours.{name}", OURS_X, y + 16, short(ours), f"{dim} e")
    yield draw.label(f"theirs.{name}", THEIRS_X, y + 16, short(theirs), dim)
    if check:
        yield draw.label(f"sign.{name}", SIGN_X, y + 16, _sign(check), "b l c ac" if check["held"] else "b l c nt")
    if check and not check["held"]:
        yield draw.shape("chip", "reason" if check["reason"] else "miss", REASON_X, y,
                         w=_wide(check["reason"] or "no candidate"), h=HIGH, label=check["reason"] or "no candidate",
                         mono=True, tone="no" if check["reason"] else None)


def _sign(check: Json) -> str:
    """Two values are equal or not; a caller may look or may not."""
    return ("✕✓" if check["field"] == "authorised" else "≠=")[check["held"]]


def _wide(word: str) -> float:
    return min(254, round((len(word) + 2) * 7.6) + 24)


def _said(check: Json | None) -> str:
    if check is None:
        return "not compared"
    return "equal" if check["held"] else f"different, {check['reason'] or 'so no candidate'}"


def recording(walk: Json, *, title: str, question: str, reasons: Mapping[str, str] | None = None) -> Recording:
    """The gate at work, a frame for every check really made.

    `walk`: {"handle", "principal", "request", "order": [field], "values": {row: [producer's, consumer's]},
    "checks": [{"field", "held", "reason", "detail"}], "held": does the consumer hold it in the end, "reads": index
    reads, "digest", "digest_after"}. `reasons`: a sentence for each refusal word.
    """
    reasons = reasons or {}
    frames = [Frame("A consumer asks for published rows", "Nothing is compared yet. Read both cards: which check "
                    "will stop it, if any?", "start", _board(walk, 0), _twin(walk, 0), scene(walk, 0))]
    for made, check in enumerate(walk["checks"], 1):
        frames.append(_frame(walk, made, check, reasons))
    if walk["checks"][-1]["held"]:
        frames.append(_last(walk))
    return Recording(title, question, VIEW, tuple(frames))


def _frame(walk: Json, made: int, check: Json, reasons: Mapping[str, str]) -> Frame:
    name, no = check["field"], bool(check["reason"])
    if no:
        said = "Refused before anything is looked up" if name == "authorised" else f"Refused by {name}"
        why = f"{reasons.get(check['reason'], '')} In detail: {check['detail']}.".strip()
    elif check["held"]:
        said, why = f"{name}: equal", WORDS[name]
    else:
        said = "The concrete key is another one: no candidate"
        why = "The index would not offer these rows. Ask the manifest all the same: what would it say?"
    return Frame(said, why, "refused" if no else "read", _board(walk, made), _twin(walk, made), scene(walk, made),
                 shake=f"check.{name}" if no else None)


def _last(walk: Json) -> Frame:
    made = len(walk["checks"])
    if walk["held"]:
        said, kind = "Every fact agrees: the rows are held for the consumer", "committed"
        why = f"{walk['request']} now holds {walk['handle']}. Nobody can take the rows away while it reads them."
    else:
        said, kind = "Every fact agrees", "read"
        why = "These rows may be read by this consumer. Nothing has changed."
    return Frame(said, why, kind, _board(walk, made), _twin(walk, made), scene(walk, made))


def _board(walk: Json, made: int) -> tuple[Json, ...]:
    done: Sequence[Json] = walk["checks"][:made]
    looked = any(c["field"] == "concrete key" for c in done)
    compared = sum(c["field"] in walk["order"] for c in done)
    return ({"label": "fields compared", "value": compared, "unit": f"of {len(walk['order'])}"},
            {"label": "index reads", "value": walk["reads"] if looked else 0},
            {"label": "differences found", "value": sum(not c["held"] for c in done[1:])})


def _twin(walk: Json, made: int) -> tuple[str, ...]:
    lines = [f"Producer: {walk['handle']}. Consumer: {walk['request']}, for {walk['principal']}."]
    for check in walk["checks"][:made]:
        ours, theirs = (short(v) for v in walk["values"][check["field"]])
        lines.append(f"{check['field']}: {ours} {_sign(check)} {theirs}.")
    left = len(fields(walk)) - made
    return (*lines, f"{left} not compared." if left else "All compared.")
