"""Loads the one front-end module of the stage, for JupyterLab and for Streamlit; it draws and decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.views.scene import Recording

# Inline modules have no relative imports: the parts are joined in this order, and only hosts.js exports.
PARTS = (
    "core.js",
    "shapes/draw.js",
    "shapes/block.js",
    "shapes/words.js",
    "shapes/lines.js",
    "shapes/radix.js",
    "shapes/memory.js",
    "kinds.js",
    "frames.js",
    "tween.js",
    "picture.js",
    "panel.js",
    "player.js",
    "hosts.js",
)

_HERE = Path(__file__).parent


@cache
def source() -> str:
    """The whole front-end module as one ES module: `mount`, and a default export that serves both hosts."""
    css = (_HERE / "look.css").read_text(encoding="utf-8")
    parts = [(_HERE / part).read_text(encoding="utf-8") for part in PARTS]
    return "\n".join([f"const CSS = {json.dumps(css)};", *parts])


@cache
def _widget_class() -> type:
    import anywidget
    import traitlets

    class StageWidget(anywidget.AnyWidget):
        """A stage in a notebook; `frame` and `picked` follow the reader, and setting `frame` moves the stage."""

        _esm = source()
        recording = traitlets.Dict().tag(sync=True)
        frame = traitlets.Int(0).tag(sync=True)
        picked = traitlets.Unicode(None, allow_none=True).tag(sync=True)

        def __repr__(self) -> str:
            shown = self.recording
            return f"StageWidget({shown['title']!r}, {shown['id']}, {len(shown['frames'])} frames)"

    return StageWidget


def widget(recording: Recording, frame: int = 0) -> Any:
    """An anywidget that plays `recording` in JupyterLab, at rest on `frame` (counted from 0).

    Traits: `recording` (plain dict), `frame` (at rest only), `picked` (key of a shape, or None). Its repr names title,
    id and number of frames and nothing that changes between runs. Needs the extra `lab`; ImportError without it.
    """
    return _widget_class()(recording=recording.to_dict(), frame=frame)


@cache
def component(name: str = "kvlab_stage") -> Callable[..., Any]:
    """The stage as a Streamlit component (components v2), registered under `name` once however often a page asks.

    Needs the extra `app`; raises ImportError without it.
    """
    import streamlit as st

    mount = st.components.v2.component(name, js=source())

    def stage(
        recording: Mapping[str, Any],
        frame: int = 0,
        report: bool = False,
        key: str | None = None,
        seek: str | int | None = None,
        on_pick: Callable[[], None] | None = None,
    ) -> Any:
        """Show `recording` (a `Recording.to_dict()`); returns Streamlit's result with `picked` and `frame`.

        `on_pick` is called before the rerun that a picked shape causes.

        `frame` is where a new recording begins. Later it counts only together with a new `seek` token: then the stage
        goes there. With `report` every frame at rest reruns the page and stands in `result.frame`.
        """
        # A list, not a dict: in a dict Streamlit looks for data frames, and imports pandas for it (seconds, once).
        data = [recording, frame, report, seek]
        return mount(data=data, key=key, on_picked_change=on_pick or _nothing, on_frame_change=_nothing)

    return stage


def _nothing() -> None:
    """Streamlit keeps a state only if something listens to it."""
