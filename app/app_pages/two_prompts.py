"""Two prompts over one paged memory: type them, run the model, and step through every block that moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import parts
import streamlit as st

from kvlab.study.setup import Link, Setup

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
    model, tokenizer = parts.load(setup.model)
    from kvlab.study.conversation import play

    played = play(setup, model, tokenizer, lambda done, total: bar.progress(done / total, f"Pass {done} of {total}"))
    bar.empty()
    return {"setup": setup, "model_digest": model.digest, "recording": played.recording.to_dict(),
            "texts": played.texts}


def controls(start: Setup) -> Setup | None:
    """The form beside the stage; the setup to run when the button was pressed."""
    with st.sidebar, st.form("inputs", border=False):
        st.markdown("#### Two prompts, one memory\nThey begin alike. Who may write where?")
        prompts = [st.text_area(f"Prompt {name}", text, height=100, key=f"prompt{name}")
                   for name, text in zip("AB", (*start.prompts, start.prompts[0]), strict=False)]
        models = [*MODELS, *([start.model] if start.model not in MODELS else [])]
        model = st.selectbox("Model", models, models.index(start.model), accept_new_options=True,
                             format_func=lambda m: MODELS.get(m, m),
                             help="Or type the path of your own: a Llama-style GGUF file or a safetensors folder.")
        left, right = st.columns(2)
        sizes = sorted({*BLOCK_SIZES, start.block_size})
        block_size = left.selectbox("Block size (tokens)", sizes, sizes.index(start.block_size))
        new = right.number_input("New tokens", 1, 200, start.max_new_tokens)
        with st.expander("Sampling and memory"):
            temperature = st.slider("Temperature (0: greedy)", 0.0, 2.0, start.temperature, 0.1)
            top_k = st.number_input("Top-k (0: all)", 0, 1000, start.top_k)
            seed = st.number_input("Seed", 0, 2**31, start.seed)
            samples = st.number_input("Answers per prompt", 1, 4, start.samples)
            share = st.toggle("Share what the prompts begin with", start.share)
            chat = st.toggle("Ask as a chat message", start.chat, help="For models that have a chat form.")
            blocks = st.number_input("Blocks per group (0: enough)", 0, 4096, start.num_blocks or 0,
                                     help="Set it low to see a refusal.")
        if not st.form_submit_button("Run the model", type="primary", width="stretch"):
            return None
    return Setup(tuple(p for p in prompts if p.strip()) or ("",), str(model), int(block_size), int(new),
                 float(temperature), int(top_k), int(seed), int(samples), share, chat, int(blocks) or None)


def first_view() -> tuple[dict[str, Any], int]:
    """What a fresh page shows: the link's frame where the address is one, else the committed recording."""
    committed = opening()
    link = Link.from_query({k: st.query_params.get_all(k) for k in st.query_params})
    if link is None:
        return committed | {"setup": Setup(**_tuples(committed["setup"]))}, committed["frame"]
    same = link.recording == committed["recording"]["id"] and link.setup == Setup(**_tuples(committed["setup"]))
    shown = committed | {"setup": link.setup} if same else run(link.setup)
    frames = len(shown["recording"]["frames"])
    for sentence in link.mismatches(shown["model_digest"], shown["recording"]["id"], frames):
        st.warning(sentence, icon=":material/link_off:")
    return shown, min(link.frame, frames - 1)


def _tuples(setup: dict[str, Any]) -> dict[str, Any]:
    return setup | {"prompts": tuple(setup["prompts"])}


with parts.in_plain_words():
    if "shown" not in st.session_state:
        st.session_state.shown, st.session_state.frame = first_view()
    wanted = controls(st.session_state.shown["setup"])
    if wanted is not None:
        st.session_state.shown, st.session_state.frame = run(wanted), 0
    shown = st.session_state.shown
    parts.legend()
    link = Link(shown["setup"], shown["model_digest"], shown["recording"]["id"], 0).query()
    parts.show(shown["recording"], link, st.session_state.frame, seek=shown["recording"]["id"])
    st.markdown("##### What the model said")
    for column, (request, text) in zip(st.columns(max(2, len(shown["texts"]))), shown["texts"].items(), strict=False):
        column.markdown(f"**{request}**")
        column.text(text)
