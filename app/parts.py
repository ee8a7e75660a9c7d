"""What the pages share: the stage with its link and downloads, models that stay loaded, errors in plain words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import streamlit as st

from kvlab.contract import Rejected
from kvlab.reasons import REASONS
from kvlab.views import stage
from kvlab.views.scene import Recording

if TYPE_CHECKING:
    from kvlab.execution.model import Model
    from kvlab.execution.tokenizer import Tokenizer
    from kvlab.study.lesson_ownership import Case


@st.cache_resource(show_spinner="Loading the model …", max_entries=2)
def load(where: str) -> tuple[Model, Tokenizer]:
    """A model and its tokenizer, once per server: "austen", "smollm2", or a path; on the GPU where there is one."""
    import torch

    from kvlab.execution.model import load_model

    return load_model(where, device="cuda" if torch.cuda.is_available() else "cpu")


@st.cache_resource(show_spinner="Loading the tokenizer …")
def tokenizer() -> Tokenizer:
    """The embedded model's, without its weights."""
    from kvlab.study.trace_texts import named_tokenizer

    return named_tokenizer("austen")


@st.cache_resource
def stage_component() -> Any:
    return stage.component()


@contextmanager
def in_plain_words() -> Iterator[None]:
    """Show what went wrong as a message a person can act on, and go on; a refusal by the machine keeps its name."""
    from kvlab.execution.model_config import ModelFileError

    try:
        yield
    except Rejected as no:
        st.error(f"**{no.reason}**: {no.meaning} ({no.detail}) Nothing was changed.", icon=":material/block:")
    except (ModelFileError, ValueError) as error:
        st.error(str(error), icon=":material/error:")


def bounce(case: Case, story: str = "") -> None:
    """Something forbidden, tried now on a fresh machine: what is tried, its refusal, the digest before and after."""
    tried, at = case.attempt(), case.negative.get("at", "base")
    left, right = st.columns(2)
    if story:
        left.markdown(story)
    when = "at the start" if at == "base" else f"after “{at}”"
    left.caption(f"A snapshot, changed {when}, then loaded" if "patch" in case.negative else f"Asked {when}")
    left.code("\n".join(map(json.dumps, case.tried)), "json", wrap_lines=True)
    same = "= unchanged" if tried.before == tried.after else "→ changed"
    right.error(f"**{tried.reason}**: {REASONS[tried.reason]}", icon=":material/block:")
    right.markdown(f"State `{tried.before[:8]}` before, `{tried.after[:8]}` after: **{same}**")


LEGEND = """
- **Hollow**: a free block, `id@generation`.
- **Hatched, dashed**: staged. Nobody can read it yet.
- **Solid, with a letter**: published, filled up to its valid rows.
- **Two bands, ref 2**: one block, two owners.
- **Padlock**: a lease; its rows are being read.
- **Dotted**: the place that a staged block keeps in the queue.
- **Cross**: refused. Nothing changed.
"""


def legend() -> None:
    """How to read the stage, beside it."""
    with st.sidebar.expander("How to read it"):
        st.markdown(LEGEND)


@st.fragment
def show(recording: dict[str, Any], query: dict[str, Any], frame: int, seek: str,
         picked: Callable[[str], None] | None = None) -> None:
    """The stage, and under it the link and the downloads of the frame that it rests on.

    A fragment: stepping reruns only this, never the page. `query` are the link's parameters without the frame.
    `picked` gets the key of a shape that the reader chose on the stage; then the whole page runs again.
    """
    def choose() -> None:
        if key := st.session_state["stage"].picked:
            picked(key)
            st.session_state["stage_picked"] = True

    result = stage_component()(recording, frame, report=True, key="stage", seek=seek,
                               on_pick=choose if picked is not None else None)
    if st.session_state.pop("stage_picked", False):
        st.rerun()
    at = getattr(result, "frame", None)
    at = frame if at is None else min(int(at), len(recording["frames"]) - 1)
    st.query_params.from_dict(query | {"f": str(at + 1)})
    left, middle, right = st.columns([2, 1, 1], vertical_alignment="center")
    left.caption(f"Recording `{recording['id']}` · frame {at + 1} of {len(recording['frames'])} · "
                 "the page's address reopens this very frame")
    middle.download_button("Recording as JSON", json.dumps(recording, ensure_ascii=False), on_click="ignore",
                           file_name=f"kvlab-{recording['id']}.json", mime="application/json", width="stretch")
    right.download_button("Frame as SVG", lambda: _svg(recording, at), on_click="ignore",
                          file_name=f"kvlab-{recording['id']}-{at + 1}.svg", mime="image/svg+xml", width="stretch")


def _svg(recording: dict[str, Any], at: int) -> str:
    return Recording.from_dict(recording).frame(at).svg()
