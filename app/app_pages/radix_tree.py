"""A tree that owns memory: step through the article's trace or your own chats, predict, try what is forbidden."""

from __future__ import annotations

from typing import Any

import parts
import streamlit as st

from kvlab.reuse.eviction import ORDERS
from kvlab.reuse.radix_cache import RadixCache
from kvlab.study.lesson_ownership import Case
from kvlab.study.lesson_radix import POLICIES, PREDICTIONS, Tried, answers, malformed, on_trace, serve, stories
from kvlab.views.radix_names import names_of
from kvlab.views.scene import Recording

KEY = "radix."  # pages share one session, so this page's choices carry its name
STARTS = {"trace": "The trace", "chats": "Your chats"}
LABELS = {"normative": "kvlab (normative)", "sglang-0.5.11": "SGLang v0.5.11 (source-observed)"}
SIZES = [1, 2, 4]
NAMES = ["Anna", "Ben", "Clara", "Dora"]
CHATS = ["My dear Jane, I have a letter from London", "My dear Jane, I have a cold",
         "My dear Jane, I have a letter from Bath", "It is a truth universally acknowledged"]
DEFAULTS: dict[str, Any] = {"from": "trace", "order": "lru", "policy": "normative", "size": 1, "slots": 40,
                            "chat": CHATS, "runs": [], "f": ""}
LEAST, MOST = 4, 400  # slots
SHOWN = 6
LETTERS, LINKED = 300, 1500
OPENING = "Split after 3 tokens"
LABS = {"Malformed inputs": malformed, "Bugs of real engines": stories}
HOW_TO_READ = """
- **Capsule**: an edge. On each slot its token, under it the slot's number.
- **Padlock**: how many running requests stand on this edge.
- **Hatched**: computed, and nobody can find it yet.
- **Coloured border**: private to a request.
- **Round, with = or ≠**: a token that is asked for, above the one it is compared with.
- **Bottom row**: the free slots.
- **Cross**: refused. Nothing changed.
"""


# ---------------------------------------------------------------- where the page starts
def linked() -> dict[str, Any]:
    """What the page's address asks for; ValueError where it says what cannot be."""
    query = st.query_params
    out = DEFAULTS | {k: query[k] for k in ("from", "order", "policy", "f") if k in query}
    for name, known in (("from", STARTS), ("order", ORDERS), ("policy", POLICIES)):
        if out[name] not in known:
            raise ValueError(f"The link says {name}={out[name]!r}; it can be {', '.join(known)}.")
    out |= {name: _number(name, query[name]) for name in ("size", "slots") if name in query}
    if out["size"] not in SIZES:
        raise ValueError(f"The link says size={out['size']}; a slot can hold {', '.join(map(str, SIZES))} tokens.")
    if not LEAST <= out["slots"] <= MOST:
        raise ValueError(f"The link says slots={out['slots']}; it can be {LEAST} to {MOST}.")
    if "chat" in query:
        out["chat"] = [text[:LETTERS] for text in query.get_all("chat")[: len(NAMES)]]
    return out | {"runs": [name for name in query.get_all("runs") if name in NAMES]}


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"The link says {name}={text!r}, which is no whole number.") from None


def link_of(chosen: dict[str, Any]) -> dict[str, Any]:
    """The address that leads here: only what is not as the page opens anyway."""
    names = ["from", "order", "policy", "size"]
    if chosen["from"] == "chats" and sum(map(len, chosen["chat"])) <= LINKED:
        names += ["slots", "chat", "runs"]
    changed = {name: chosen[name] for name in names if chosen[name] != DEFAULTS[name]}
    return {name: value if isinstance(value, list) else str(value) for name, value in changed.items()}


# ---------------------------------------------------------------- the form
def controls(kept: dict[str, Any]) -> dict[str, Any]:
    """The choices beside the stage; each change plays everything again. What is out of sight keeps its value."""
    for key in ("from", "order", "policy", "size", "slots", "runs"):
        st.session_state.setdefault(KEY + key, kept[key])
    with st.sidebar:
        st.markdown("#### A tree that owns memory\nIs a radix tree just a faster dict? Step through it.")
        chosen = kept | {"from": st.segmented_control("Play", list(STARTS), format_func=STARTS.get, key=KEY + "from",
                                                      required=True)}
        if chosen["from"] == "chats":
            chosen |= chats(kept)
        chosen["order"] = st.selectbox("Which leaf goes first", list(ORDERS), key=KEY + "order",
                                       help="Only unlocked leaves may go. The order picks one.")
        chosen["policy"] = st.selectbox("How a use is noted", POLICIES, format_func=LABELS.get, key=KEY + "policy",
                                        help="Ours: on what was matched. SGLang: on the whole edge before its split.")
        chosen["size"] = st.segmented_control("Block size (tokens a slot)", SIZES, key=KEY + "size", required=True)
        with st.expander("How to read it"):
            st.markdown(HOW_TO_READ)
    return chosen


def chats(kept: dict[str, Any]) -> dict[str, Any]:
    """Up to four texts that begin one after another, the slots they share, and who still runs at the end."""
    for i, name in enumerate(NAMES):
        st.session_state.setdefault(KEY + name, kept["chat"][i] if i < len(kept["chat"]) else "")
    said = [st.text_area(name, max_chars=LETTERS, height=68, key=KEY + name) for name in NAMES]
    runs = st.multiselect("Still running, so locked", NAMES, key=KEY + "runs", placeholder="Nobody")
    slots = st.number_input("Slots in the pool", LEAST, MOST, key=KEY + "slots",
                            help="Set it low to see evictions, lower to see a refusal.")
    return {"chat": said, "runs": runs, "slots": int(slots)}


# ---------------------------------------------------------------- what is played
Rows = list[tuple[str, int, int, str]]


def play(chosen: dict[str, Any]) -> tuple[Tried, dict[int, str] | None, Rows]:
    """The cache after all of it, what token ids stand for, and of each chat: tokens, found, why it was refused."""
    shape = {"eviction": chosen["order"], "policy": chosen["policy"], "block_size": chosen["size"]}
    if chosen["from"] == "trace":
        return on_trace(**shape), None, []
    tried, pieces, rows = Tried(RadixCache(chosen["slots"], **shape)), {}, []
    for name, text in zip(NAMES, chosen["chat"], strict=False):
        if ids := parts.tokenizer().encode(text) if text.strip() else []:
            pieces |= {token: parts.tokenizer().decode([token]) for token in ids}
            before = len(tried.outcomes)
            found = serve(tried, name, ids, runs_on=name in chosen["runs"])
            rows.append((name, len(ids), found, next(filter(None, tried.outcomes[before:]), "")))
    return tried, pieces, rows


def stage(chosen: dict[str, Any], recording: Recording, asked: str) -> None:
    """The recording on the stage; it rests on the frame that was asked for, else on the first split."""
    titles = [frame.title for frame in recording.frames]
    first = next((n for n, title in enumerate(titles) if title.startswith(OPENING)), 0)
    if asked.isascii() and asked.isdigit():
        first = min(max(int(asked) - 1, 0), len(titles) - 1)
    parts.show(recording.to_dict(), link_of(chosen), first, seek=recording.id)


def hits(tried: Tried, rows: Rows) -> None:
    """What each chat found, and what it had to compute."""
    if rows:
        lines = [f"| {name} | {tokens} | {found} | {f'✕ `{no}`' if no else tokens - found} |"
                 for name, tokens, found, no in rows]
        st.markdown("\n".join(["| chat | tokens | found in the tree | computed |", "|---|--:|--:|--:|", *lines]))
        st.caption("A chat's last token is always computed: without it there are no logits for the next one.")
    elif not tried.outcomes:
        st.info("Type a chat in the sidebar, and the tree grows.", icon=":material/edit:")


def next_to_go(tried: Tried, pieces: dict[int, str] | None, order: str) -> None:
    """Who would be evicted now, in the machine's own order, and what the ledgers say about the rest."""
    edges, ledgers = tried.machine.ask({"ask": "edges"}), tried.machine.ask({"ask": "ledgers"})
    names = names_of([tried.machine.snapshot()], pieces)
    going = [names.say(edges[str(node)]["tokens"]) for node in tried.machine.ask({"ask": "victims"})]
    st.markdown("##### If room is needed after the last step")
    more = f", and {len(going) - SHOWN} more" if going[SHOWN:] else ""
    st.text(f"By {order}: first {', then '.join(going[:SHOWN])}{more}." if going else
            "No leaf is unlocked, so nothing may go.")
    st.caption(f"{ledgers['evictable']} tokens are evictable, {ledgers['leaf_ready']} of them in leaves, so that they "
               f"may go at once. {ledgers['protected']} are protected by a lock.")


# ---------------------------------------------------------------- predictions
def predictions() -> None:
    """Fields to fill in; the machine runs when the button is pressed, and grades."""
    st.markdown("##### Predict\nThe machine runs when you press the button, and grades you.")
    columns = st.columns(2, gap="medium")
    guesses = [columns[n % 2].number_input(p["ask"], 0, 99, None, key=f"{KEY}guess {p['key']}", placeholder=p["unit"])
               for n, p in enumerate(PREDICTIONS)]
    if st.button("Run the machine and grade", type="primary"):
        truth = answers()
        st.markdown("\n".join(f"{n}. {_mark(p, guess, truth[p['key']])}"
                              for n, (p, guess) in enumerate(zip(PREDICTIONS, guesses, strict=True), 1)))


def _mark(asked: dict[str, str], guess: int | None, answer: int) -> str:
    if guess is None:
        return "No guess yet."
    said = "✓ yes," if guess == answer else "✕ no,"
    return f"{said} the machine says **{answer}** {asked['unit']}. {asked['because']}"


# ---------------------------------------------------------------- the failure lab
@st.cache_data
def tree_cases(lab: str) -> list[Case]:
    return LABS[lab]()


def failure_lab() -> None:
    """Pick something forbidden; it is tried now, on a fresh machine."""
    st.markdown("##### Failure lab\nPick something forbidden. It is tried now, on a fresh machine of its own.")
    lab = st.segmented_control("Which", list(LABS), default=next(iter(LABS)), key=KEY + "lab", required=True,
                               label_visibility="collapsed")
    known = {case.id: case for case in tree_cases(lab)}
    case = known[st.selectbox("Try this", list(known), key=f"{KEY}case {lab}", format_func=lambda i: known[i].what)]
    parts.bounce(case, "" if lab == "Malformed inputs" else f"**In public**: `{case.id}`")


state = st.session_state
if KEY + "kept" not in state:
    state[KEY + "kept"] = dict(DEFAULTS)
    with parts.in_plain_words():
        state[KEY + "kept"] = linked()
    state[KEY + "first"] = state[KEY + "kept"]["f"]
chosen = state[KEY + "kept"] = controls(state[KEY + "kept"])
with parts.in_plain_words():
    tried, pieces, rows = play(chosen)
    title = "Eighteen operations on 24 slots" if chosen["from"] == "trace" else "Chats grow the tree"
    stage(chosen, tried.recording(title, pieces), state.pop(KEY + "first", ""))
    hits(tried, rows)
    next_to_go(tried, pieces, chosen["order"])
predictions()
failure_lab()
