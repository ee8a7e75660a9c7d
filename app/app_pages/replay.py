"""What would your traffic hit? A serving trace through a real index over real blocks; drag pool and block size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import parts
import streamlit as st

from kvlab.reuse.eviction import ORDERS
from kvlab.study import replay_report
from kvlab.study.draw_agents import AGENTS
from kvlab.study.geometries import KNOWN
from kvlab.study.replay import OBSERVED, Replayed, Setting, run
from kvlab.study.replay_report import LOST, share
from kvlab.study.replay_source import Source, blocks_in, row_bytes

OPENING: dict[str, Any] = {"file": "", "tok": "smollm2", "waves": 0, "m": "llama-3-8b", "tp": 1, "i": "radix",
                           "p": "normative", "e": "lru", "size": 16, "gib": 6.0, "n": 12}
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
POOLS = [0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 160.0]
CHOICES = {"i": tuple(OBSERVED), "e": tuple(ORDERS), "size": tuple(map(str, SIZES)), "gib": tuple(map(str, POOLS))}
MODELS = {key: g.name for key, g in KNOWN.items()} | {"austen": "Austen, small, embedded"}
INKS = {"referenced": "#d55e00", "unique": "#0072b2", "cached": "#009e73", "pool": "#929396"}
CREDIT = "Our own 518 requests of 72 agent chats, drawn from a seeded model; no row of anybody's traffic"
COUNTS = """
- **By tokens** (the figure above): found tokens over prompt tokens. It is the work that you save; engines print it so.
- **By requests**: how many found anything. One shared system prompt makes it nearly 100 % and saves little.
- **It reads 0 %** where prompts differ in their first block: a date or a name in front, another `cache_salt`, another
  adapter, a prompt shorter than a block, a trace that tells lengths only. Everything behind a changed block is new.
- **It falls when the pool is busy**: what is cached and what is in use share one pool.
"""


def begin() -> dict[str, Any]:
    """Where the controls start: the page's address over the opening; ValueError where it says what cannot be."""
    out = dict(OPENING)
    for key in OPENING.keys() & st.query_params.to_dict().keys():
        text, kind = st.query_params[key], type(OPENING[key])
        try:
            out[key] = kind(text)
        except ValueError:
            raise ValueError(f"The link says {key}={text!r}, which is no number. It opens without the link.") from None
        if key in CHOICES and str(out[key]) not in CHOICES[key]:
            raise ValueError(f"The link says {key}={text!r}, which this page cannot show. It opens without the link.")
    return out


def controls(at: dict[str, Any]) -> dict[str, Any]:
    """Everything that can be chosen, in the sidebar."""
    with st.sidebar:
        st.markdown("#### A trace through the machines\nWhat is found, what is computed again, and why?")
        chosen = {"file": st.text_input("Trace file (empty: our own agents)", at["file"], key="file", help=(
            "Mooncake, Qwen-Bailian, Azure, BurstGPT, ShareGPT form, or message lists. It is read on this machine."))}
        with st.expander("How the file is read"):
            chosen["tok"] = st.text_input("Tokenizer for text", at["tok"])
            chosen["waves"] = st.number_input("Sessions at a time (0: as in the file)", 0, 10_000, at["waves"])
        names = [*MODELS, *([at["m"]] if at["m"] not in MODELS else [])]
        chosen["m"] = st.selectbox("Model", names, names.index(at["m"]), accept_new_options=True,
                                   format_func=lambda m: MODELS.get(m, m), help="Or the path of a `config.json`.")
        chosen["gib"] = st.select_slider("Pool, GiB", POOLS, at["gib"], key="gib")
        chosen["size"] = st.select_slider("Block size, tokens", SIZES, at["size"], key="size")
        chosen["i"] = st.radio("Index", CHOICES["i"], CHOICES["i"].index(at["i"]), horizontal=True, key="i",
                               format_func={"prefix": "prefix chain", "radix": "radix tree"}.get)
        policies = ["normative", OBSERVED[chosen["i"]]]
        chosen["p"] = st.radio("Behaviour", policies, policies.index(at["p"]) if at["p"] in policies else 0,
                               help="Normative: the article's contract. The other: as that source was seen to behave.")
        chosen["e"] = st.selectbox("Eviction order", CHOICES["e"], CHOICES["e"].index(at["e"]), key="e",
                                   disabled=chosen["i"] == "prefix")
        chosen["n"] = st.number_input("Requests in flight", 1, 10_000, at["n"], key="n")
        chosen["tp"] = st.number_input("TP ranks", 1, 64, at["tp"])
    return chosen | ({"e": "lru"} if chosen["i"] == "prefix" else {})


@st.cache_resource(show_spinner="Reading the trace …", max_entries=2)
def read(source: Source, stamp: float) -> tuple[tuple, int, str]:
    """The requests, bad rows that were left out, and what kind of file it is. `stamp`: when the file was changed."""
    trace = source.open()
    return tuple(source.requests(trace)), trace.skipped, trace.title


@st.cache_data(show_spinner="Every request through the machines …", max_entries=64)
def played(source: Source, stamp: float, setting: Setting) -> Replayed:
    return run(read(source, stamp)[0], setting)


def changed(source: Source) -> float:
    path = Path(source.path).expanduser()
    return path.stat().st_mtime if path.exists() else 0.0


def waterfall(found: Replayed) -> None:
    """From the widest ceiling down to what was achieved, as a table that says why."""
    of, rows = found.prompt_tokens, ["| | tokens hit | |", "|---|--:|---|"]
    for (name, tokens), why in zip(replay_report.ceilings(found), ["", *LOST], strict=True):
        if why:
            rows.append(f"| − lost to **{why}** | {share(found.losses[why], of)} | {LOST[why]} |")
        rows.append(f"| {name} | **{share(tokens, of)}** | |")
    st.markdown("\n".join(rows))


def over_time(found: Replayed) -> None:
    """Bytes over the requests. The moments are the same as the report's."""
    gib = found.setting.block_bytes / 2**30
    lines = {name: [of(m) * gib for m in found.moments] for name, of in replay_report.USES.items()}
    lines["pool"] = [found.setting.pool_blocks * gib] * len(found.moments)
    st.line_chart({"requests": [m.requests for m in found.moments]} | lines, x="requests", y=list(lines),
                  color=[INKS[name] for name in lines], x_label="requests", y_label="GiB on one rank", height=300)
    st.caption("**referenced**: as often as a table names a block. **unique**: different blocks that requests in "
               "flight hold. **cached**: blocks that nobody holds and that could still be hit; dashboards say free.")


def what_if(source: Source, setting: Setting, chosen: dict[str, Any]) -> None:
    """The same trace at every pool size around the chosen one: achieved and best possible."""
    pools = [gib for gib in POOLS if chosen["gib"] / 4 <= gib <= chosen["gib"] * 4]
    settings = [replace(setting, pool_blocks=blocks_in(gib, setting.block_bytes)) for gib in pools]
    bar = st.progress(0.0, "The same trace at other pool sizes …")
    rows = []
    for n, one in enumerate(settings):
        rows.append(played(source, changed(source), one))
        bar.progress((n + 1) / len(settings))
    bar.empty()
    lines = {"this policy": [r.hit_tokens for r in rows], "best evictions": [r.optimal_hit_tokens for r in rows],
             "infinite cache": [r.ideal_hit_tokens for r in rows]}
    st.line_chart({"GiB": pools} | {name: [100 * v / r.prompt_tokens for v, r in zip(values, rows, strict=True)]
                                    for name, values in lines.items()}, x="GiB", y=list(lines),
                  color=["#0072b2", "#e69f00", "#929396"], x_label="pool, GiB", y_label="% of prompt tokens hit",
                  height=300)
    st.markdown("\n".join(["| pool, GiB | this policy | best evictions |", "|--:|--:|--:|"] + [
        f"| {gib:g} | {share(r.hit_tokens, r.prompt_tokens)} | {share(r.optimal_hit_tokens, r.prompt_tokens)} |"
        for gib, r in zip(pools, rows, strict=True)]))


def show(source: Source, setting: Setting, chosen: dict[str, Any]) -> None:
    requests, skipped, title = read(source, changed(source))
    if not requests:
        raise ValueError("There is no request in this trace.")
    found = played(source, changed(source), setting)
    of = found.prompt_tokens
    st.markdown("##### What would your traffic hit?")
    cells = st.columns(4)
    cells[0].metric("Hit, of prompt tokens", share(found.hit_tokens, of))
    cells[1].metric("Tokens computed again", f"{found.recomputed_tokens:,}")
    cells[2].metric("Blocks evicted", f"{found.evicted_blocks:,}")
    cells[3].metric("Requests with any hit", share(found.requests_hit, found.requests))
    st.caption(f"{title if chosen['file'] else CREDIT}. {found.requests:,} requests, {of:,} prompt tokens; pool: "
               f"{setting.pool_blocks:,} blocks of {setting.block_bytes:,} bytes; {found.seconds:.1f} s of machine.")
    if skipped:
        st.warning(f"{skipped:,} bad rows were left out.")
    if found.refused:
        st.warning(f"{found.refused:,} requests are larger than the whole pool and were refused.")
    if found.unknown:
        st.info(f"{found.unknown:,} requests tell lengths and no content: nothing of them can be hit.")
    else:
        waterfall(found)
    over_time(found)
    with st.expander("What does this hit rate count, and why is it 0 elsewhere?"):
        st.markdown(COUNTS)
    with st.expander("In words"):
        st.code(replay_report.words(found, title), language=None)
    if not found.unknown and st.button("What if the pool were smaller, or larger?", type="primary"):
        what_if(source, setting, chosen)


state = st.session_state
if "replay_begin" not in state:
    state.replay_begin = OPENING
    with parts.in_plain_words():
        state.replay_begin = begin()
chosen = controls(state.replay_begin)
st.query_params.from_dict({key: str(value) for key, value in chosen.items()})
with parts.in_plain_words():
    row = row_bytes(chosen["m"], int(chosen["tp"]))
    setting = Setting(chosen["i"], chosen["size"], blocks_in(chosen["gib"], chosen["size"] * row), chosen["p"],
                      chosen["e"], int(chosen["n"]), row)
    waves = int(chosen["waves"]) or None if chosen["file"] else None
    show(Source(chosen["file"].strip() or str(AGENTS), chosen["tok"].strip() or None, True, waves), setting, chosen)
