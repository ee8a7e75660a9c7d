"""The visualiser's frame: which pages there are. Run it with `streamlit run app`; it owns no machinery."""

from __future__ import annotations

import streamlit as st

st.set_page_config(page_title="kvlab", layout="wide")

st.navigation(
    [st.Page("app_pages/two_prompts.py", title="Two prompts", url_path="two-prompts", default=True)],
    position="top",
).run()
