"""The visualiser's frame: which pages there are. Run it with `streamlit run app`; it owns no machinery."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

st.set_page_config(page_title="kvlab", layout="wide")

# File: title in the menu, word in the address. The first one opens.
PAGES = {
    "two_prompts": ("Two prompts", "two-prompts"),
    "identity_gate": ("May I reuse these bytes?", "identity-gate"),
    "ledgers": ("Where did the memory go?", "ledgers"),
    "addresses": ("From a token to a byte", "addresses"),
    "ownership": ("Who may write here?", "ownership"),
    "prefix_chain": ("Have I computed this before?", "prefix-chain"),
    "radix_tree": ("A tree that owns memory", "radix-tree"),
    "replay": ("What would your traffic hit?", "replay"),
}

st.navigation(
    [st.Page(Path("app_pages", f"{name}.py"), title=title, url_path=word, default=name == next(iter(PAGES)))
     for name, (title, word) in PAGES.items()],
    position="top",
).run()
