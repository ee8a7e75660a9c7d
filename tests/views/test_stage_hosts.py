"""What Python hands to the two hosts: a module without imports, a widget with a stable repr, a component."""

from __future__ import annotations

import json
from pathlib import Path

import kvlab.views.stage as stage
from tests.views.sample import story

FOLDER = Path(stage.__file__).parent


def test_source_is_every_part_once_and_imports_nothing() -> None:
    parts = {str(p.relative_to(FOLDER)) for p in FOLDER.rglob("*.js")}
    assert sorted(stage.PARTS) == sorted(parts)
    lines = stage.source().splitlines()
    assert not [line for line in lines if line.startswith("import")]
    assert [line for line in lines if line.startswith("export")] == [
        "export { mount };",
        "export default arg => (arg && arg.parentElement ? streamlit(arg) : { render });",
    ]


def test_recordings_never_become_markup() -> None:
    assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(") if word in stage.source()]


def test_parts_are_readable() -> None:
    for part in [*FOLDER.rglob("*.js"), *FOLDER.rglob("*.css")]:
        lines = part.read_text(encoding="utf-8").splitlines()
        assert len(lines) < 200 and max(map(len, lines)) <= 120, part.name


def test_widget_has_a_repr_that_a_notebook_can_keep() -> None:
    recording = story()
    first, second = stage.widget(recording), stage.widget(recording, frame=3)
    assert repr(first) == repr(second) == f"StageWidget('Ownership, in small', {recording.id}, 8 frames)"
    assert (second.frame, second.picked) == (3, None)
    assert second.recording == json.loads(json.dumps(recording.to_dict()))


def _page() -> None:
    import streamlit as st

    from kvlab.views.stage import component
    from tests.views.sample import story

    result = component("kvlab_test")(story().to_dict(), frame=2, report=True, key="one", seek="a")
    st.write(f"picked {result.picked}, frame {result.frame}")


def test_component_sends_the_recording_once_with_its_frame() -> None:
    from streamlit.testing.v1 import AppTest

    at = AppTest.from_function(_page, default_timeout=30).run()
    assert not at.exception
    sent = json.loads(at.get("bidi_component")[0].proto.json)
    assert sent == [story().to_dict(), 2, True, "a"]
    assert at.markdown[0].value == "picked None, frame None"
