"""Scenes, frames and recordings: what a reader sees, as plain data; they know no machine and own no layout.

A recording is the schema that the stage plays: the first frame holds its shapes, later ones keyed differences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvlab.views import shapes as schema
from kvlab.views import svg
from kvlab.views.kinds import layer
from kvlab.views.look import Theme

Shape = Mapping[str, Any]
Kind = Literal["start", "read", "committed", "staged", "refused"]
FRAME_KINDS = ("start", "read", "committed", "staged", "refused")


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture: `view` (width, height in px) and its keyed shapes, kept in drawing order (layer, then key).

    Shapes are mappings in the recording schema, made by `kvlab.views.shapes`. Numbers are kept to three decimals; treat
    the shapes as read-only. ValueError where two have one key, or where one does not fit the schema.
    """

    view: tuple[int, int]
    shapes: tuple[Shape, ...]

    def __post_init__(self) -> None:
        plain = [_plain(s) for s in self.shapes]
        for s in plain:
            schema.check(s)
        keys = [s["key"] for s in plain]
        if len(set(keys)) < len(keys):
            raise ValueError(f"two shapes have one key: {sorted({k for k in keys if keys.count(k) > 1})}")
        object.__setattr__(self, "view", tuple(self.view))
        object.__setattr__(self, "shapes", tuple(sorted(plain, key=_drawing_order)))

    def svg(self, theme: Theme = "light", title: str = "kvlab", desc: str | None = None) -> str:
        """The still picture: a standalone SVG file with resolved colours, the same bytes for the same scene.

        Without `desc` it is described by what its shapes say. ValueError for an unknown theme.
        """
        spoken = " ".join(f"{s['says'].rstrip('.')}." for s in self.shapes if "says" in s)
        return svg.document(self.view, self.shapes, theme, title, spoken if desc is None else desc)

    def by_key(self) -> dict[str, Shape]:
        return {s["key"]: s for s in self.shapes}


def _drawing_order(s: Shape) -> tuple[int, bytes]:
    return layer(s), s["key"].encode("utf-16-be", "surrogatepass")  # as JavaScript compares strings


def _plain(value: Any) -> Any:
    """The JSON form: lists, dicts without nulls, numbers to three decimals and whole ones as integers."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and abs(value) < 2**53:
        short = round(value, 3)
        return int(short) if short == int(short) else short
    return value


@dataclass(frozen=True, slots=True)
class Frame:
    """One rest of a recording: what happened, why, what it cost, and the picture.

    `board`: cells {label, value, unit?}; the stage computes what changed. `twin`: the frame in sentences. `shake`: the
    key of what was refused. `leave`: key of a shape of the frame before that is not here any more -> where it goes
    ({x, y, ...}) instead of fading. ValueError for an unknown kind, a cell without a value, a shake that is not there.
    """

    title: str
    why: str
    kind: Kind
    board: tuple[Mapping[str, Any], ...]
    twin: tuple[str, ...]
    scene: Scene
    shake: str | None = None
    leave: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in FRAME_KINDS:
            raise ValueError(f"frame kind is one of {', '.join(FRAME_KINDS)}, not {self.kind!r}")
        if self.shake is not None and all(s["key"] != self.shake for s in self.scene.shapes):
            raise ValueError(f"frame {self.title!r} shakes {self.shake!r}, which is not in its scene")
        for c in self.board:
            if not {"label", "value"} <= c.keys() <= {"label", "value", "unit"}:
                raise ValueError(f"a board cell has label, value and perhaps unit, not {sorted(c)}")
        object.__setattr__(self, "board", tuple(_plain(c) for c in self.board))
        object.__setattr__(self, "twin", tuple(self.twin))
        object.__setattr__(self, "leave", _plain(self.leave))

    def svg(self, theme: Theme = "light") -> str:
        """The still picture, titled with the frame's title and described by its sentences."""
        return self.scene.svg(theme, self.title, " ".join(self.twin))

    def text(self) -> str:
        """The frame in words, a line each: title and kind, why, the scoreboard, the sentences."""
        board = " · ".join(" ".join(filter(None, (c["label"], _figure(c["value"]), c.get("unit")))) for c in self.board)
        return "\n".join(line for line in (f"{self.title} [{self.kind}]", self.why, board, *self.twin) if line)


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class Recording:
    """What a reader plays: frames over one view. `id` is the digest of the content (16 hex digits of SHA-256).

    ValueError for no frame, for a scene of another size, or for a `leave` of a shape that did not leave.
    """

    title: str
    question: str
    view: tuple[int, int]
    frames: tuple[Frame, ...] = field(repr=False)
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "view", tuple(self.view))
        object.__setattr__(self, "frames", tuple(self.frames))
        if not self.frames:
            raise ValueError("a recording has at least one frame")
        for i, f in enumerate(self.frames):
            if f.scene.view != self.view:
                raise ValueError(f"frame {i} is {f.scene.view}, the recording is {self.view}: the size never changes")
        _check_leaves(self.frames)
        content = json.dumps(self._content(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        object.__setattr__(self, "id", digest[:16])

    def frame(self, i: int) -> Frame:
        """Frame `i`, counted from 0; IndexError past the end."""
        return self.frames[i]

    def to_dict(self) -> dict[str, Any]:
        """The plain form that the stage plays: O(shapes) for the first frame, O(changes) for every later one."""
        return {"id": self.id} | self._content()

    def _content(self) -> dict[str, Any]:
        first = self.frames[0]
        out = [_head(first) | {"shapes": [dict(s) for s in first.scene.shapes]}]
        for before, after in zip(self.frames, self.frames[1:], strict=False):
            out.append(_head(after) | difference(before.scene, after.scene))
        return {"title": self.title, "question": self.question, "view": list(self.view), "frames": out}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recording:
        """The inverse of `to_dict`. ValueError where `data` has an id that is not the digest of its content."""
        view = tuple(data["view"])
        frames, shapes = [], {}
        for f in data["frames"]:
            shapes = {s["key"]: s for s in f["shapes"]} if "shapes" in f else _follow(shapes, f)
            frames.append(_frame(f, Scene(view, tuple(shapes.values()))))
        made = cls(data["title"], data["question"], view, tuple(frames))
        if data.get("id", made.id) != made.id:
            raise ValueError(f"the recording says it is {data['id']}, its content is {made.id}")
        return made


def _check_leaves(frames: Sequence[Frame]) -> None:
    before: Iterable[str] = ()
    for i, f in enumerate(frames):
        here = f.scene.by_key()
        for key in f.leave:
            if key in here or key not in before:
                raise ValueError(f"frame {i}: {key!r} does not leave here")
        before = here


def _head(f: Frame) -> dict[str, Any]:
    head = {"title": f.title, "why": f.why, "kind": f.kind, "board": [dict(c) for c in f.board], "twin": list(f.twin)}
    head |= {"shake": f.shake} if f.shake is not None else {}
    return head | ({"leave": dict(f.leave)} if f.leave else {})


def _frame(f: Mapping[str, Any], scene: Scene) -> Frame:
    extra = {"shake": f.get("shake"), "leave": f.get("leave", {})}
    return Frame(f["title"], f["why"], f["kind"], tuple(f["board"]), tuple(f["twin"]), scene, **extra)


def difference(before: Scene, after: Scene) -> dict[str, Any]:
    """`{set: {key: changed fields}, del: [key]}`; a field that is gone is set to None."""
    old, new = before.by_key(), after.by_key()
    changed = {}
    for key, s in new.items():
        was = old.get(key, {})
        change = {name: v for name, v in s.items() if name != "key" and (name not in was or was[name] != v)}
        change |= {name: None for name in was if name not in s}
        if change:
            changed[key] = change
    return {"set": changed, "del": [key for key in old if key not in new]}


def _follow(shapes: Mapping[str, Shape], f: Mapping[str, Any]) -> dict[str, Shape]:
    gone = set(f.get("del", ()))
    now = {key: s for key, s in shapes.items() if key not in gone}
    for key, change in f.get("set", {}).items():
        now[key] = {**now.get(key, {}), **change, "key": key}  # a field set to None is dropped by the scene
    return now
