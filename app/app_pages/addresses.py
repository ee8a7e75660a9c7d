"""From a token to a byte: choose one number of a real run, follow it to its address, and read it from memory."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import parts
import streamlit as st

from kvlab.memory.address import AddressTrace, follow
from kvlab.memory.address_records import AddressSnapshot, read_snapshot
from kvlab.memory.address_sources import flattened, layout_axes
from kvlab.memory.layout import AXES
from kvlab.reasons import REASONS
from kvlab.views import address

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
REAL, ARTICLE = "Real run", "Article"
SHORT = dict(zip(AXES, ("layer", "slot", "token", "head", "lane"), strict=True))
ORDERS = {" · ".join(SHORT[axis] for axis in order): order for order in permutations(AXES)}
STORED = next(iter(ORDERS))
PACKED = [1, 2, 4, 8]
KEY = "addresses."  # pages share one session, so this page's choices carry its name
START: dict[str, Any] = {"run": REAL, "request": "A", "token": 20, "layer": 2, "kind": "K", "head": 1, "lane": 21,
                         "order": STORED, "together": False, "packed": 1}


@st.cache_resource(show_spinner="Running the model once …")
def real_run() -> Any:
    """The embedded model's run, kept as long as the server lives: its tensors are what is read."""
    from kvlab.execution.model import load_model
    from kvlab.study.address_run import AddressRun

    return AddressRun(*load_model("austen"))


@st.cache_data
def data(run: str) -> dict[str, Any]:
    """The chosen run's address snapshot and words, as committed; the page opens on it before any model is loaded."""
    if run == REAL:
        return json.loads((FIXTURES / "address_run.json").read_text())
    return {"snapshot": json.loads((FIXTURES / "loop4_addresses.json").read_text())["base"]}


def linked() -> dict[str, Any]:
    """What the page's address asks for, over what it opens on; ValueError where a number is none."""
    asked = {name: st.query_params[name] for name in START if name in st.query_params}
    for name in asked.keys() & {"token", "layer", "head", "lane", "packed"}:
        try:
            asked[name] = max(0, min(int(asked[name]), 10**6))
        except ValueError:
            raise ValueError(f"The link's {name} is {asked[name]!r}; it should be a whole number.") from None
    if "together" in asked:
        asked["together"] = asked["together"] == "True"
    allowed = {"run": (REAL, ARTICLE), "kind": ("K", "V"), "order": ORDERS, "packed": PACKED, "request": "ABC"}
    for name, values in allowed.items():
        if name in asked and asked[name] not in values:
            raise ValueError(f"The link's {name} is {asked[name]!r}, which there is not.")
    return START | asked


def controls() -> dict[str, Any]:
    """The choices beside the stage; every change is followed at once."""
    state = st.session_state
    with st.sidebar:
        st.markdown("#### From a token to a byte\nBlock 7: where is that?")
        run = st.segmented_control("Where", [REAL, ARTICLE], key=KEY + "run", required=True)
        requests = list(data(run)["snapshot"]["requests"])
        if state[KEY + "request"] not in requests:
            state[KEY + "request"] = "A"
        left, right = st.columns(2)
        left.segmented_control("Request", requests, key=KEY + "request", required=True)
        right.segmented_control("Tensor", ["K", "V"], key=KEY + "kind", required=True)
        left.number_input("Token", 0, 10**6, key=KEY + "token", help="Try 25 for request B.")
        right.number_input("Layer", 0, 10**6, key=KEY + "layer")
        left.number_input("Head", 0, 10**6, key=KEY + "head")
        right.number_input("Lane", 0, 10**6, key=KEY + "lane")
        if run == REAL:
            st.selectbox("Axes in memory, slowest first", list(ORDERS), key=KEY + "order")
            st.toggle("K and V in one tensor", key=KEY + "together")
            st.selectbox("Lanes packed together", PACKED, key=KEY + "packed", help="8 means vectors of 8 lanes, which "
                         "lie innermost. For vLLM's K cache choose layer · slot · head · lane · token, too.")
    return {name: state.get(KEY + name, START[name]) for name in START}


def coordinate(chosen: dict[str, Any]) -> dict[str, Any]:
    return {name: chosen[name] for name in ("request", "token", "layer", "kind", "head", "lane")}


def axes_of(chosen: dict[str, Any]) -> tuple[str, ...]:
    return layout_axes(ORDERS[chosen["order"]], interleaved=chosen["together"], inner_lanes=chosen["packed"])


def followed(chosen: dict[str, Any]) -> tuple[AddressSnapshot, AddressTrace]:
    """The chosen scalar's way in the chosen layout; the real run's tensors are drawn as if they began at byte 0."""
    snapshot = read_snapshot(data(chosen["run"])["snapshot"])
    if chosen["run"] == REAL:
        snapshot = flattened(snapshot, chosen["layer"], axes_of(chosen), chosen["packed"])
    return snapshot, follow(snapshot, **coordinate(chosen))


def outcome(chosen: dict[str, Any], trace: AddressTrace) -> None:
    """What came of it, in words: the refusal, or the scalar that really lies at the address."""
    if trace.refused:
        st.error(f"**{trace.refused}**: {REASONS[trace.refused]} ({trace.detail}.) Nothing was read.",
                 icon=":material/block:")
    elif chosen["run"] == ARTICLE:
        st.info(f"Byte **{trace.byte_address:,}**. The article's example has numbers only, no memory stands behind it.",
                icon=":material/calculate:")
    else:
        got = real_run().read(coordinate(chosen), axes_of(chosen), chosen["packed"])
        same = "the same number" if got.read == got.shown else "**another number**"
        word = data(REAL)["words"][trace.token]
        st.success(f"Token {trace.token} is `{word}`. At address `{got.address:#x}` of this process lie "
                   f"{trace.scalar_bytes} bytes: **{got.read:.6f}**. The tensor shows {same}.",
                   icon=":material/memory:")


def only_strides(chosen: dict[str, Any], trace: AddressTrace) -> None:
    """The chosen layout beside the stored one: what changed, and what did not."""
    _, plain = followed(chosen | {"order": STORED, "together": False, "packed": 1})
    rows = ["| layout | block | slot id | strides, in elements | byte offset |", "|---|---|---|---|---|"]
    for name, t in (("as the store keeps it", plain), ("as you chose", trace)):
        strides = " · ".join(f"{n:,}" for n in t.strides.values())
        rows.append(f"| {name} | {t.physical_ref.physical_block_id} | {t.slot_id} | {strides} | {t.byte_offset:,} |")
    st.markdown("\n".join(rows))
    st.caption("In the picture the tensors lie one behind another from byte 0 on, so that it is the same in every run.")


def choose(key: str) -> None:
    """What a reader picked on the stage: a row, a block of the table, a cache group, a head or a lane."""
    state = st.session_state
    now = {name: state[KEY + name] for name in START if KEY + name in state}
    groups = data(now["run"])["snapshot"]["groups"]
    group = next((g for g in groups if g["layer_start"] <= now["layer"] < g["layer_end"]), groups[0])
    size, (kind, _, name) = group["block_size"], key.partition("/")
    if kind == "row":
        state[KEY + "token"] = now["token"] // size * size + int(name)
    elif kind == "entry":
        state[KEY + "token"] = int(name) * size
    elif kind == "group":
        state[KEY + "layer"] = next(g["layer_start"] for g in groups if g["id"] == name)
    elif name == "kv_head_local":
        state[KEY + "head"] = (now["head"] + 1) % group["kv_heads_local"]
    elif name == "head_dim":
        state[KEY + "lane"] = (now["lane"] + 1) % group["head_dim"]


if KEY + "run" not in st.session_state:
    start, frame = START, None
    with parts.in_plain_words():
        start, frame = linked(), st.query_params.get("f", "")
    st.session_state.update({KEY + name: value for name, value in start.items()})
    st.session_state[KEY + "frame"] = max(0, int(frame) - 1) if frame and frame.isdigit() else None
choice = controls()
parts.legend()
with parts.in_plain_words():
    where, way = followed(choice)
    made = address.recording(where.to_dict(), way.to_dict(), title="From a token to a byte", reasons=REASONS,
                             question=f"Where is {way.kind} of token {way.token}?")
    last, asked = len(made.frames) - 1, st.session_state.pop(KEY + "frame", None)
    above = st.container()
    parts.show(made.to_dict(), {k: str(v) for k, v in choice.items()}, last if asked is None else min(asked, last),
               seek=made.id, picked=choose)
    if choice["run"] == REAL and not way.refused:
        only_strides(choice, way)
    with above:
        outcome(choice, way)
