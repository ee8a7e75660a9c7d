"""Recordings survive their plain form, stills are deterministic files, and every colour pair can be read."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from kvlab.views import shapes as s
from kvlab.views.kinds import KINDS
from kvlab.views.look import HUES, Look, hue_name, look
from kvlab.views.scene import Frame, Recording, Scene
from tests.views.sample import PILE, PROMPT, gallery, story

SVG = "{http://www.w3.org/2000/svg}"


def _one_frame(*shapes: dict, **more: object) -> Frame:
    return Frame("t", "w", "start", (), (), Scene(s.VIEW, shapes), **more)


@pytest.mark.parametrize("recording", [story(), gallery()], ids=["story", "gallery"])
def test_plain_form_gives_back_the_recording(recording: Recording) -> None:
    plain = json.loads(json.dumps(recording.to_dict()))
    again = Recording.from_dict(plain)
    assert again == recording
    assert again.id == recording.id == plain["id"]
    assert len(plain["id"]) == 16 and int(plain["id"], 16) >= 0


def test_later_frames_hold_only_what_changed() -> None:
    frames = story().to_dict()["frames"]
    assert "shapes" in frames[0] and all("shapes" not in f for f in frames[1:])
    fault = frames[3]
    assert fault["set"]["b3"] == {"refused": True}
    assert set(fault["set"]) == {"b3", "why"}
    assert fault["shake"] == "b3"
    rolled_on = frames[4]
    assert rolled_on["set"]["b3"] == {"fill": 2, "refused": None}
    assert rolled_on["del"] == ["why"]
    assert frames[7]["leave"] == {"b5": PILE} and frames[7]["del"] == ["b5"]


def test_id_is_the_content_and_not_the_order_of_drawing() -> None:
    recording = story()
    turned = [replace(f, scene=Scene(f.scene.view, f.scene.shapes[::-1])) for f in recording.frames]
    assert replace(recording, frames=tuple(turned)).id == recording.id
    assert replace(recording, title="other").id != recording.id
    with pytest.raises(ValueError, match="its content is"):
        Recording.from_dict(recording.to_dict() | {"title": "other"})


def test_five_hundred_frames_stay_small() -> None:
    frames = []
    for i in range(500):
        blocks = [
            s.block(f"b{b}", 138 + (b % 6) * 131, 78 + (b // 6) * 78, label=f"{b}@{i // 30}", of=16, fill=(i + b) % 17,
                    owners=["A"] if (i + b) % 5 else [], says=f"block {b} holds {(i + b) % 17} of 16 rows")
            for b in range(30)
        ]  # fmt: skip
        board = tuple({"label": name, "value": i} for name in ("epoch", "free blocks", "K/V copied"))
        twin = tuple(f"Request {r} holds {i} tokens in {i // 16} blocks." for r in "ABC")
        frames.append(
            Frame(f"Step {i}", "One more row is written.", "committed", board, twin, Scene(s.VIEW, tuple(blocks)))
        )
    recording = Recording("long", "how large?", s.VIEW, tuple(frames))
    assert len(json.dumps(recording.to_dict())) < 2_000_000


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_still_is_one_standalone_file(theme: str) -> None:
    scene = gallery().frame(0).scene
    drawn = scene.svg(theme, "Every kind", "said")
    assert drawn == Scene(scene.view, scene.shapes[::-1]).svg(theme, "Every kind", "said")
    assert not any(word in drawn for word in ("var(", "color-mix", "<img", "<script", "style=", "href"))
    tree = ET.fromstring(drawn)
    assert tree.tag == SVG + "svg" and tree.get("viewBox") == "0 0 960 484"
    assert [child.text for child in tree[:2]] == ["Every kind", "said"]
    assert PROMPT in [t.text for t in tree.iter(SVG + "text")]
    patterns = {p.get("id") for p in tree.iter(SVG + "pattern")}
    used = {e.get("fill")[5:-1] for e in tree.iter() if (e.get("fill") or "").startswith("url(")}
    assert used and used == patterns


def test_still_survives_words_that_are_not_xml() -> None:
    drawn = Scene(s.VIEW, (s.label("a", 0, 0, 'tab\t bell\x07 "quoted" \ud800'),)).svg()
    assert [t.text for t in ET.fromstring(drawn).iter(SVG + "text")] == ['tab\t bell\ufffd "quoted" \ufffd']


def test_still_of_a_frame_is_titled_and_described() -> None:
    frame = story().frame(1)
    tree = ET.fromstring(frame.svg("dark"))
    assert tree[0].text == "Fork A into D" and tree[1].text == " ".join(frame.twin)
    assert "block 0 of A and D" in frame.scene.svg()
    with pytest.raises(ValueError, match="light or dark"):
        frame.svg("sepia")


def test_transient_rows_are_not_in_a_still() -> None:
    fly = s.rows("fly", 0, 0, "D", w=40, h=40, start={"x": 9, "y": 9})
    assert Scene(s.VIEW, (fly,)).svg() == Scene(s.VIEW, ()).svg()


def test_every_kind_is_in_the_schema_and_in_the_gallery() -> None:
    assert set(s.FIELDS) == set(KINDS) == {shape["kind"] for shape in gallery().frame(0).scene.shapes}


def test_frame_in_words() -> None:
    assert story().frame(4).text().splitlines() == [
        "Copy two rows [staged]",
        "The source is leased while it is read.",
        "free blocks 8 · K/V copied 0.5 KiB",
        "Copy two rows.",
        "Request A holds 10 tokens.",
    ]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([s.root("a", 0, 0), s.root("a", 1, 1)], r"one key: \['a'\]"),
        ([{"key": "a", "kind": "blob", "x": 0, "y": 0}], "unknown kind 'blob'"),
        ([{"key": "a", "kind": "gate", "x": 0, "y": 0, "label": ""}], r"missing \['h'\]"),
        ([{"key": "a", "kind": "root", "x": 0, "y": 0, "colour": "red"}], r"unknown \['colour'\]"),
        ([{"key": "a", "kind": "root", "x": float("nan"), "y": 0}], "x is a finite number"),
        ([{"key": "a", "kind": "root", "x": "0);url(", "y": 0}], "x is a finite number"),
        ([{"key": "a", "kind": "root", "x": 0, "y": 0, "says": "root"}], r"missing \['h', 'w'\]"),
        ([{"key": "", "kind": "root", "x": 0, "y": 0}], "needs a key"),
    ],
)
def test_scene_refuses_what_the_stage_could_not_draw(shapes: list[dict], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scene(s.VIEW, tuple(shapes))


def test_frames_and_recordings_refuse_what_makes_no_sense() -> None:
    a, root = _one_frame(s.root("a", 0, 0)), s.root("a", 0, 0)
    with pytest.raises(ValueError, match="shakes 'b'"):
        _one_frame(root, shake="b")
    with pytest.raises(ValueError, match="frame kind"):
        replace(a, kind="done")
    with pytest.raises(ValueError, match="board cell"):
        replace(a, board=({"label": "x", "price": 3},))
    with pytest.raises(ValueError, match="at least one frame"):
        Recording("t", "q", s.VIEW, ())
    with pytest.raises(ValueError, match="size never changes"):
        Recording("t", "q", (960, 500), (a,))
    for leave in ({"a": PILE}, {"b": PILE}):
        with pytest.raises(ValueError, match="does not leave"):
            Recording("t", "q", s.VIEW, (a, replace(a, leave=leave)))


def test_hues_repeat_after_seven_owners() -> None:
    names = [chr(65 + i) for i in range(26)] + ["AA", "AB"]
    assert "".join(map(hue_name, names)) == (HUES * 4)[:28]


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    """The ratio of WCAG 2, 1 to 21."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


# ink, dim, accent, no and line on ground; ink and dim on held; ink on grey; then letters and rims of A..G
TABLE = {
    "light": (
        (16.6, 6.5, 6.6, 6.6, 3.1, 12.8, 5.1, 11.7),
        (5.2, 5.2, 5.8, 7.9, 7.7, 4.6, 13.4),
        (7.5, 5.5, 5.0, 3.9, 4.0, 6.1, 6.5),
    ),
    "dark": (
        (17.0, 9.1, 8.8, 8.6, 4.6, 10.7, 5.7, 10.7),
        (6.6, 7.6, 8.2, 9.5, 11.3, 6.7, 14.5),
        None,
    ),
}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_table(theme: str) -> None:
    c: Look = look(theme)
    tokens, letters, rims = TABLE[theme]
    on_ground = [contrast(v, c.ground) for v in (c.ink, c.dim, c.accent, c.no, c.line)]
    held = [contrast(c.ink, c.held), contrast(c.dim, c.held)]
    assert [*on_ground, *held, contrast(c.ink, c.grey)] == pytest.approx(tokens, abs=0.07)
    assert [contrast(c.letter(o), c.hue(o)) for o in HUES] == pytest.approx(letters, abs=0.06)
    if rims:
        assert [contrast(c.edge(o), c.ground) for o in HUES] == pytest.approx(rims, abs=0.06)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_written_can_be_read(theme: str) -> None:
    c: Look = look(theme)
    assert min(contrast(c.letter(o), c.hue(o)) for o in HUES) >= 4.5
    assert min(contrast(c.ink, c.tint(o)) for o in HUES) >= 6.2
    assert min(contrast(c.ink, c.tint(o, 0.42)) for o in HUES) >= 4.5
    assert min(contrast(c.edge(o), c.ground) for o in HUES) >= 3
    assert min(contrast(c.dim, base) for base in (c.ground, c.wash, c.held)) >= 5.0
    assert min(contrast(c.ground, base) for base in (c.accent, c.no, c.ink)) >= 4.5
