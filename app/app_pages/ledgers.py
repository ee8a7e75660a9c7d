"""Where did the memory go? Drag lengths and block size, see every byte in three ledgers; then a service over time."""

from __future__ import annotations

from typing import Any

import parts
import streamlit as st

from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.study import lesson_ledger, occupancy, traces
from kvlab.study.geometries import KNOWN, cost_line, find, row_geometry
from kvlab.study.lesson_ledger import Wish
from kvlab.views.pool_words import amount

NAMES = "ABCDE"
OPENING: dict[str, Any] = {"m": "llama-3-8b", "tp": 2, "size": 16, "A": 33, "B": 25, "C": 16, "D": 0, "E": 0,
                           "share": 1, "pool": 8, "most": 128, "file": ""}
RANGES = {"tp": (1, 64), "size": (1, 128), "share": (0, 1), "pool": (1, 4096), "most": (1, 4096),
          **dict.fromkeys(NAMES, (0, 128))}
SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
MODELS = {key: g.name for key, g in KNOWN.items()} | {"austen": "Austen, small, embedded"}
QUESTION = "Where did the memory go?"


def begin() -> dict[str, Any]:
    """Where the controls start: the page's address over the opening; ValueError where it says what cannot be."""
    out = OPENING | {k: st.query_params[k] for k in ("m", "file") if k in st.query_params}
    for key, (least, most) in RANGES.items():
        text = st.query_params.get(key, str(OPENING[key]))
        fits = text.isascii() and text.isdigit() and least <= int(text) <= most
        if not fits or (key == "size" and int(text) not in SIZES):
            raise ValueError(f"The link says {key}={text!r}, which this page cannot show. It opens without the link.")
        out[key] = int(text)
    text = st.query_params.get("f", "")
    return out | ({"frame": int(text) - 1} if text.isascii() and text.isdigit() and int(text) else {})


def controls(at: dict[str, Any]) -> dict[str, Any]:
    """Everything that can be dragged, in the sidebar."""
    with st.sidebar:
        st.markdown("#### Three ledgers, one memory\nWho uses it, and how much is that?")
        names = [*MODELS, *([at["m"]] if at["m"] not in MODELS else [])]
        chosen = {"m": st.selectbox("Model", names, names.index(at["m"]), accept_new_options=True,
                                    format_func=lambda m: MODELS.get(m, m),
                                    help="Or type the path of a `config.json`, or of a folder with one.")}
        left, right = st.columns(2)
        chosen["tp"] = left.number_input("TP ranks", 1, 64, at["tp"])
        chosen["size"] = right.select_slider("Block size", SIZES, at["size"], key="size")
        for name in NAMES:
            chosen[name] = st.slider(f"Tokens of {name}", 0, 128, at[name], key=f"tokens{name}")
        with st.expander("Memory"):
            chosen["share"] = int(st.toggle("They begin alike, and share it", bool(at["share"])))
            chosen["pool"] = st.number_input("Blocks in the pool", 1, 4096, at["pool"])
            chosen["most"] = st.number_input("A rectangle reserves (tokens)", 1, 4096, at["most"])
    return chosen


def record(chosen: dict[str, Any]) -> dict[str, Any]:
    """The requests on a real allocator, as a recording in plain data; raises as the machine does."""
    row = row_geometry(find(chosen["m"]), chosen["tp"])
    group = CacheGroup("kv", 0, row.layers, row.kv_heads, row.head_dim, row.k_bytes, block_size=chosen["size"],
                       num_blocks=chosen["pool"], first_block_id=100)
    wishes = [Wish(name, chosen[name], chosen["most"]) for name in NAMES if chosen[name]]
    if not wishes:
        raise ValueError("Nobody has a token. Drag one of the lengths above 0.")
    history = lesson_ledger.family(Allocator(CacheLayoutManifest((group,))), wishes, share=bool(chosen["share"]))
    title = f"{len(wishes)} requests on one rank"
    return lesson_ledger.record(history, title=title, question=QUESTION, reserved=chosen["most"]).to_dict()


@st.cache_data(show_spinner=False, max_entries=8)
def replay(path: str, rate: float, size: int, most: int, model: str, tp: int) -> dict[str, Any]:
    """Arrivals through the three layouts; the same call answers from the cache."""
    arrivals = traces.AzureArrivals(path or traces.EMBEDDED, skip_bad=True)
    assumed = occupancy.Assumptions(decode_rate=rate, block_size=size, max_length=most)
    found = occupancy.run(arrivals, assumed, find(model), tp)
    gib, points = found.row_bytes / 2**30, found.points
    return {"rows": occupancy.rows_of(found), "requests": found.requests, "skipped": arrivals.skipped,
            "words": assumed.words(), "seconds": [p.time for p in points],
            "gib": {name: [p.reserved_rows[name] * gib for p in points] for name in occupancy.LAYOUTS},
            "live": [p.live_rows * gib for p in points]}


def over_time(chosen: dict[str, Any]) -> None:
    """The second half of the page: a service's arrivals in three layouts, when asked for."""
    st.markdown("##### A chat service over time, in three layouts")
    with st.form("replay"):
        left, middle, right = st.columns([3, 1, 1], vertical_alignment="bottom")
        start = st.session_state.ledgers_begin["file"]
        path = left.text_input("A file of arrivals (empty: our own 600, embedded)", start,
                               help="The CSV of the Azure LLM inference trace 2023, or any file of its form.")
        rate = middle.number_input("Tokens/s for each", 0.1, 1000.0, 30.0, 5.0)
        most = right.number_input("Maximum length", 1, 1_048_576, 16_384)
        pressed = st.form_submit_button("Replay the arrivals", type="primary")
    if pressed:
        with parts.in_plain_words(), st.spinner("Every request through the allocator …"):
            st.session_state.ledgers_replayed = (path.strip(), replay(path.strip(), rate, chosen["size"], int(most),
                                                               chosen["m"], chosen["tp"]))
    if "ledgers_replayed" in st.session_state:
        chart(*st.session_state.ledgers_replayed)


def chart(path: str, shown: dict[str, Any]) -> None:
    """Bytes over time, the shares at the peak, and whose arrivals and whose figures these are."""
    lines = {name.removeprefix("rectangles, "): rows for name, rows in shown["gib"].items()} | {"live": shown["live"]}
    inks = [*(ink for ink, _ in lesson_ledger.INKS.values()), "#929396"]
    st.line_chart({"seconds": shown["seconds"]} | lines, x="seconds", y=list(lines), color=inks, x_label="seconds",
                  y_label="GiB on one rank", height=320)
    table = ["| layout | GiB at its peak | % live at its peak | % live over the time |", "|---|--:|--:|--:|"]
    table += [f"| {r['layout']} | {r['peak_gib']:.1f} | {r['live_at_peak']:.1f} | {r['live_over_time']:.1f} |"
              for r in shown["rows"]]
    st.markdown("\n".join(table))
    low, high = occupancy.PAPER_REPORTED["three Orca variants"]
    left_out = f" Left out, unreadable: {amount(shown['skipped'], 'row')}." if shown["skipped"] else ""
    st.caption(f"{amount(shown['requests'], 'request')}.{left_out} {lesson_ledger.credit(path or traces.EMBEDDED)}. "
               f"Assumed: {shown['words']}.")
    st.caption(f"**Paper-reported**, for its own workload, not measured here: token states take {low} to {high} % of "
               f"the K/V memory in three Orca variants and {occupancy.PAPER_REPORTED['vLLM']} % in vLLM "
               "(PagedAttention, figure 2).")


state = st.session_state
if "ledgers_begin" not in state:
    state.ledgers_begin = OPENING
    with parts.in_plain_words():
        state.ledgers_begin = begin()
chosen = controls(state.ledgers_begin)
with parts.in_plain_words():
    state.ledgers = record(chosen)
parts.legend()
if "ledgers" in state:
    with parts.in_plain_words():
        st.caption(cost_line(chosen["m"], chosen["tp"]))
    query, last = {key: str(value) for key, value in chosen.items()}, len(state.ledgers["frames"]) - 1
    linked = state.setdefault("ledgers_linked", state.ledgers["id"]) == state.ledgers["id"]
    frame = min(state.ledgers_begin.get("frame", last), last) if linked else last
    parts.show(state.ledgers, query, frame, seek=state.ledgers["id"])
over_time(chosen)
