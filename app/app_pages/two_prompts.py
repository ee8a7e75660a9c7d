"""Two prompts over one paged memory: type them, run the model, and step through every block that moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import parts
import streamlit as st

from kvlab.study.setup import NAMES, Link, Setup

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODELS = {"austen": "Austen, small, embedded", "smollm2": "SmolLM2-135M-Instruct"}
BLOCK_SIZES = [4, 8, 16, 32]


@st.cache_data
def opening() -> dict[str, Any]:
    """The committed run that the page opens on: {setup, model_digest, recording, texts}."""
    return json.loads((FIXTURES / "two_prompts.json").read_text())


def run(setup: Setup) -> dict[str, Any]:
    """Run the model on a setup, with a progress bar; the same form as `opening`."""
    bar = st.progress(0.0, "Loading the model …")
    try:
        model, tokenizer = parts.load(setup.model)
        from kvlab.study.conversation import play

        played = play(setup, model, tokenizer, lambda done, of: bar.progress(done / of, f"Pass {done} of {of}"))
    finally:
        bar.empty()
    return {"setup": setup, "model_digest": model.digest, "recording": played.recording.to_dict(),
            "texts": played.texts}


def controls(start: Setup) -> Setup | None:
    """The form beside the stage; the setup to run when the button was pressed."""
    with st.sidebar, st.form("inputs", border=False):
        st.markdown("#### Two prompts, one memory\nThey begin alike. Who may write where?")
        texts = start.prompts if len(start.prompts) > 1 else start.prompts * 2
        prompts = [st.text_area(f"Prompt {name}", text, height=100, key=f"prompt{name}")
                   for name, text in zip(NAMES, texts, strict=False)]
        models = [*MODELS, *([start.model] if start.model not in MODELS else [])]
        model = st.selectbox("Model", models, models.index(start.model), accept_new_options=True,
                             format_func=lambda m: MODELS.get(m, m),
                             help="Or type the path of your own: a Llama-style GGUF file or a safetensors folder.")
        left, right = st.columns(2)
        sizes = sorted({*BLOCK_SIZES, start.block_size})
        block_size = left.selectbox("Block size (tokens)", sizes, sizes.index(start.block_size))
        new = right.number_input("New tokens", 1, 200, start.max_new_tokens)
        with st.expander("Sampling and memory"):
            temperature = st.number_input("Temperature (0: greedy)", 0.0, None, start.temperature, 0.1)
            top_k = st.number_input("Top-k (0: all)", 0, None, start.top_k)
            seed = st.number_input("Seed", 0, None, start.seed)
            samples = st.number_input("Answers per prompt", 1, None, start.samples)
            share = st.toggle("Share what the prompts begin with", start.share)
            chat = st.toggle("Ask as a chat message", start.chat, help="For models that have a chat form.")
            blocks = st.number_input("Blocks per group (0: enough)", 0, None, start.num_blocks or 0,
                                     help="Set it low to see a refusal.")
        if not st.form_submit_button("Run the model", type="primary", width="stretch"):
            return None
    return Setup(tuple(p for p in prompts if p.strip()) or ("",), str(model), int(block_size), int(new),
                 float(temperature), int(top_k), int(seed), int(samples), share, chat, int(blocks) or None)


def committed_view() -> tuple[dict[str, Any], int]:
    """The committed run, at the frame where its copy is in flight."""
    data = opening()
    setup = Setup(**data["setup"] | {"prompts": tuple(data["setup"]["prompts"])})
    return data | {"setup": setup}, data["frame"]


def linked_view(committed: dict[str, Any]) -> tuple[dict[str, Any], int] | None:
    """The run and frame that the page's address names, made again where it is not the committed one; None without."""
    link = Link.from_query({k: st.query_params.get_all(k) for k in st.query_params})
    if link is None:
        return None
    same = link.recording == committed["recording"]["id"] and link.setup == committed["setup"]
    shown = committed if same else run(link.setup)
    frames = len(shown["recording"]["frames"])
    for sentence in link.mismatches(shown["model_digest"], shown["recording"]["id"], frames):
        st.warning(sentence, icon=":material/link_off:")
    return shown, min(link.frame, frames - 1)


state, wanted = st.session_state, None
if "shown" not in state:
    state.shown, state.frame = committed_view()
    with parts.in_plain_words():
        state.shown, state.frame = linked_view(state.shown) or (state.shown, state.frame)
with parts.in_plain_words():
    wanted = controls(state.shown["setup"])
if wanted is not None:
    with parts.in_plain_words():
        state.shown, state.frame = run(wanted), 0
parts.legend()
recording = state.shown["recording"]
link = Link(state.shown["setup"], state.shown["model_digest"], recording["id"], 0).query()
parts.show(recording, link, state.frame, seek=recording["id"])
st.markdown("##### What the model said")
for column, (request, text) in zip(st.columns(max(2, len(state.shown["texts"]))), state.shown["texts"].items(),
                                   strict=False):
    column.markdown(f"**{request}**")
    column.text(text)
