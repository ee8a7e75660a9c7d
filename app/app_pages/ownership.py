"""Who may write here? Watch the article's trace, ask the allocator yourself, try what is forbidden, let many write."""

from __future__ import annotations

import string
from typing import Any

import parts
import streamlit as st

from kvlab.study import crowd
from kvlab.study.lesson_ownership import PLUGS, Bench, Case, article, fresh, in_words, malformed, step_of, stories
from kvlab.views.pool_words import amount

KEY = "ownership."  # pages share one session, so this page's choices carry its name
STARTS = {"trace": "The trace's end", "fresh": "Nothing"}
TITLES = {"trace": "Two groups, one copy-on-write", "fresh": "A fresh machine"}
OPENING = "Lease the source, copy its 2 valid rows"
LINKED = 1500  # characters of operations that still go into the page's address
OPERATIONS = {
    "append": "Append", "fork": "Fork", "truncate": "Truncate", "release": "Release", "cancel": "Cancel",
    "allocate": "Allocate a new request", "name": "Name full blocks", "touch": "Touch: find named blocks",
    "evict": "Evict: forget a name", "lease": "Lease blocks", "unlease": "End a lease",
    "compensate": "Compensate the last transaction", "plug": "Append, and pull the plug",
}
LABS = {"Malformed inputs": malformed, "Bugs of real engines": stories}


# ---------------------------------------------------------------- where the page starts
def linked() -> tuple[str, list[str]]:
    """The start and the operations that the page's address asks for; ValueError where it says what cannot be."""
    start, done = st.query_params.get("from", "trace"), st.query_params.get_all("do")
    if start not in STARTS:
        raise ValueError(f"The link starts from {start!r}; it can be {' or '.join(STARTS)}.")
    at_work(start, done)
    return start, done


def at_work(start: str, done: list[str]) -> Bench:
    """The bench after these operations; ValueError for one that is none."""
    bench = Bench(article()["base"], article()["trace"]) if start == "trace" else Bench(fresh())
    for text in done:
        bench.say(text)
    return bench


# ---------------------------------------------------------------- the form
def one_of(label: str, options: list[str], **more: Any) -> str:
    """A selectbox that keeps its choice as long as the machine still knows it."""
    key = KEY + label
    if st.session_state.get(key) not in options:
        st.session_state.pop(key, None)
    return st.selectbox(label, options, key=key, **more)


def new_name(bench: Bench) -> str:
    free = next((a for a in string.ascii_uppercase if a not in bench.everyone()), "R1")
    return st.text_input("New request", free, max_chars=12, key=f"{KEY}new {free}").strip()


def somebody(bench: Bench) -> str:
    live = bench.live
    return one_of("Request", bench.everyone(), format_func=lambda r: f"{r}, {amount(live[r], 'token')}" if r in live
                  else f"{r}, has ended")


def named_blocks(bench: Bench, word: str) -> str:
    """The touch or eviction of bundles that have, or once had, a cached identity."""
    now, ever = bench.named(), bench.ever_named()
    found = st.multiselect("Blocks", list(ever), list(ever)[:1], key=f"{KEY}{word} {'.'.join(ever)}",
                           format_func=lambda b: f"{b.replace('-', ' + ')}, #{ever[b]}{'' if b in now else ', gone'}")
    if word == "evict":
        return ".".join(["evict", *found]) if found else ""
    who, more = new_name(bench), st.number_input("Fresh tokens after the hit", 0, 999, 0, key=KEY + "more")
    return ".".join(["touch", who, str(more), *found]) if found else ""


def asked(bench: Bench) -> str:
    """The operation that the form's fields say, in the link's short words; "" where there is nothing to do it to."""
    word = st.selectbox("Operation", list(OPERATIONS), format_func=OPERATIONS.get, key=KEY + "operation")
    leases = list(bench.session.leases)
    if word == "compensate":
        return word
    if word in ("touch", "evict"):
        return named_blocks(bench, word) if bench.ever_named() else ""
    if word == "unlease":
        return f"unlease.{one_of('Lease', leases)}" if leases else ""
    if word == "allocate":
        return f"allocate.{new_name(bench)}.{st.number_input('Tokens', -1, 9999, 20, key=KEY + 'allocate')}"
    if not bench.everyone():
        return ""
    who = somebody(bench)
    match word:
        case "append":
            return f"append.{who}.{st.number_input('Tokens', -1, 9999, 1, key=KEY + 'append')}"
        case "truncate":
            return f"truncate.{who}.{st.number_input('Tokens to keep', -1, 9999, 16, key=KEY + 'truncate')}"
        case "fork":
            return f"fork.{who}.{new_name(bench)}"
        case "name":
            return f"name.{who}.{st.number_input('How many, from the first', 1, 99, 1, key=KEY + 'name')}"
        case "lease":
            return f"lease.{who}.{st.segmented_control('To', ['read', 'write'], key=KEY + 'kind', required=True)}"
        case "plug":
            names = [p.replace("_", " ").replace(":", " in ") for p in PLUGS]
            return f"plug.{who}.{names.index(one_of('Pull it after', names))}"
    return f"{word}.{who}"


def form(bench: Bench) -> None:
    """Choose and ask; undo and start over. Whatever is pressed, the page runs again with the new history."""
    state = st.session_state
    st.markdown("#### Who may write here?\nWatch the trace. Then ask the machine yourself.")
    start = st.segmented_control("From", list(STARTS), format_func=STARTS.get, key=KEY + "start", required=True)
    if start != state[KEY + "from"]:
        go(start, [])
    text = asked(bench)
    if not text:
        st.caption("There is nothing yet that this could be done to.")
    if st.button("Do it", type="primary", width="stretch", disabled=not text):
        with parts.in_plain_words():
            step_of(text)
            go(start, [*state[KEY + "done"], text])
    left, right = st.columns(2)
    if left.button("Undo", width="stretch", disabled=not state[KEY + "done"], help="Plays all but the last again."):
        go(start, state[KEY + "done"][:-1])
    if right.button("Start over", width="stretch", disabled=not state[KEY + "done"]):
        go(start, [])
    said = [f"{'✕' if reason else '✓'} {in_words(step_of(t))}" + (f": `{reason}`" if reason else "")
            for t, reason in zip(state[KEY + "done"], bench.outcomes[-len(state[KEY + "done"]):], strict=False)]
    if said:
        st.markdown("\n".join(f"{n}. {line}" for n, line in enumerate(said, 1)))


def go(start: str, done: list[str]) -> None:
    """Play these operations from this start, and run the page again on what comes of it."""
    at_work(start, done)
    st.session_state[KEY + "from"], st.session_state[KEY + "done"] = start, done
    st.rerun()


# ---------------------------------------------------------------- the stage
def played(bench: Bench, start: str, done: list[str]) -> None:
    """The whole history as one recording; the stage rests on what came of the last operation."""
    recording = bench.recording(TITLES[start])
    opening = [f.title for f in recording.frames]
    first = bench.frame(recording) if done else opening.index(OPENING) if OPENING in opening else 0
    asked_for = st.session_state.pop(KEY + "frame", "")
    if asked_for.isdigit():
        first = min(max(int(asked_for) - 1, 0), len(recording.frames) - 1)
    short = sum(map(len, done)) <= LINKED
    parts.show(recording.to_dict(), {"from": start} | ({"do": done} if done and short else {}), first,
               seek=recording.id)
    if not short:
        st.caption("So many operations do not fit into the page's address. It leads to the start only.")
    if done and done[-1].startswith("plug") and not bench.outcomes[-1]:
        st.info("This append has no such step, so nothing broke off, and it was published.", icon=":material/info:")


# ---------------------------------------------------------------- the failure lab
@st.cache_data
def ownership_cases(lab: str) -> list[Case]:
    return LABS[lab]()


def failure_lab() -> None:
    """Pick something forbidden; it is tried now, on a fresh machine."""
    st.markdown("##### Failure lab\nPick something forbidden. It is tried now, on a fresh machine of its own.")
    lab = st.segmented_control("Which", list(LABS), default=next(iter(LABS)), key=KEY + "lab", required=True,
                               label_visibility="collapsed")
    known = {case.id: case for case in ownership_cases(lab)}
    case = known[st.selectbox("Try this", list(known), key=f"{KEY}case {lab}", format_func=lambda i: " · ".join(
        filter(None, (known[i].engine, known[i].what))))]
    parts.bounce(case, case.engine and f"**In public** (`{case.id}`): {case.wrong}\n\n**Right**: {case.right}")


# ---------------------------------------------------------------- many writers
def many_writers() -> None:
    """Real threads on one real allocator, when asked for."""
    st.markdown("##### Many writers\nSix threads share one allocator. They copy and write their rows outside its lock, "
                "so anybody may publish in between.")
    if st.button("Let six threads write", type="primary"):
        with st.spinner("2,000 operations …"):
            st.session_state[KEY + "crowd"] = crowd.let_them_write(seed=st.session_state.get(KEY + "seed", 0))
        st.session_state[KEY + "seed"] = st.session_state.get(KEY + "seed", 0) + 1
    if KEY + "crowd" in st.session_state:
        judged(st.session_state[KEY + "crowd"])


def judged(seen: crowd.Crowded) -> None:
    """What the crowd did, and what held all the same."""
    left, middle, right = st.columns([3, 5, 5], gap="medium")
    left.markdown(counted("published", "receipts", seen.receipts))
    middle.markdown(counted("refused", "calls", seen.refusals))
    sign = {True: "✓", False: "✕ **not**"}
    right.markdown(
        f"{sign[seen.unbroken]} one unbroken chain of {sum(seen.receipts.values()):,} receipts, in epoch order\n\n"
        f"{sign[seen.in_time]} each published between its call and its return\n\n"
        f"{sign[seen.rows == seen.own]} {seen.own:,} of {seen.rows:,} live rows are what their writer wrote\n\n"
        f"{seen.met:,} of {seen.calls:,} calls saw somebody else publish while they ran.")
    st.caption("**Linearisable** means: each operation takes effect at one moment between its call and its return. So "
               "some order of one after another explains all of it; here it is the order of the epochs.")


def counted(what: str, unit: str, rows: dict[str, int]) -> str:
    return "\n".join([f"| {what} | {unit} |", "|---|--:|", *(f"| `{word}` | {n:,} |" for word, n in rows.items())])


state = st.session_state
if KEY + "from" not in state:
    state[KEY + "from"], state[KEY + "done"], state[KEY + "frame"] = "trace", [], ""
    with parts.in_plain_words():
        state[KEY + "from"], state[KEY + "done"] = linked()
        state[KEY + "frame"] = st.query_params.get("f", "")
state.setdefault(KEY + "start", state[KEY + "from"])
state.setdefault(KEY + "kind", "write")
bench = at_work(state[KEY + "from"], state[KEY + "done"])
with st.sidebar:
    form(bench)
parts.legend()
played(bench, state[KEY + "from"], state[KEY + "done"])
failure_lab()
many_writers()
