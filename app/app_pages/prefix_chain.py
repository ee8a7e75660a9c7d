"""Have I computed this before? Change one token and watch the keys, ask for what is all there, predict, break it."""

from __future__ import annotations

from typing import Any

import parts
import streamlit as st

from kvlab.study import lesson_prefix
from kvlab.study.lesson_ownership import Case
from kvlab.study.lesson_prefix import OBSERVED, POLICIES, QUESTION
from kvlab.study.prefix_walk import PrefixWalk
from kvlab.views.scene import Recording

KEY = "prefix."  # pages share one session, so this page's choices carry its name
STARTS = {"edit": "One token changed", "same": "The same again", "own": "Your own prompts"}
SIZES = (48, 64)
BLOCK = 16
STORY = ("The two young ladies were walking in the garden before dinner, when they saw a gentleman coming up the road; "
         "and it was Mr. Darcy. He was tall and proud, and she did not like him at all, and so they went home")
ANNA = ("My dear Jane, I have a letter from London, and it is a very long one, for she has seen everybody in town "
        "and heard it all")
BEN = ANNA.replace("heard it all", "nobody was at home")
OTHERS = (" she", " not")  # words that may stand in for a token: the first that is another one
LETTERS = 400  # characters of one own prompt
DEFAULTS: dict[str, Any] = {"from": "edit", "n": 64, "at": 37, "policy": "normative", "tails": False, "logits": True,
                            "p": [ANNA, BEN], "f": ""}
HOW_TO_READ = """
- **Round, on top**: the tokens of one block, `=` or `≠` what was published.
- **Round, below**: the prompt, a block each. `≠` is the first block that is not found.
- **Keys in a line**: each is made of the one before it and its block's tokens.
- **g0, g1**: cache groups. A hit is one block in *each* group.
- **Dotted**: nobody has it. **Hollow with a tag**: free, and still found by its key.
- **Bars**: four lengths in tokens. A column is a block.
- **Next in g0**: which free blocks are taken first, and so lose their key first.
- **Cross**: refused. Nothing changed.
"""
ANSWERS = (
    ("Why does a 100 % hit still compute a block?", "The next word needs the last token's hidden state, and a cache "
     "holds K and V only. So one token must be computed, and a hit is whole blocks: 47 becomes 32."),
    ("Why is my hit rate 0?", "A salt, a clock or a name at the front changes every key. A prompt shorter than a block "
     "has no key. And ask of what the rate is: requests that hit anything, or tokens."),
    ("Usage is 0 %, and it still hits?", "Yes. A free block keeps its rows and its key until somebody takes it."),
    ("Which block goes first?", "The one that has been free the longest. vLLM v0.23.0 gives a prompt back tail first "
     "(source-observed), so that what is left is a prefix. In table order the head goes first, and the rest are "
     "orphans: rows with a key that no walk reaches."),
    ("Why only full blocks?", "A full block is never written again, so its key stays true. Switch partial tails on: "
     "rows of a block that still grows are found too, and copied."),
    ("Two equal prompts in one step?", "Both compute. A block is found when its rows are written, and copies are not "
     "merged."),
    ("A hash collision: a stranger's rows?", "Not behind a witness: the tokens themselves are compared. And a salt is "
     "part of the first key, so tenants do not meet."),
)


# ---------------------------------------------------------------- what the address asks for
def linked() -> dict[str, Any]:
    """The choices that the page's address makes; ValueError where it says what cannot be."""
    get, told = st.query_params.get, dict(DEFAULTS)
    for key, known in (("from", STARTS), ("policy", POLICIES)):
        told[key] = get(key, DEFAULTS[key])
        if told[key] not in known:
            raise ValueError(f"The link says {key}={told[key]!r}; it can be {', '.join(known)}.")
    told["n"] = whole("n", min(SIZES), max(SIZES))
    if told["n"] not in SIZES:
        raise ValueError(f"The link says n={told['n']}; it can be {' or '.join(map(str, SIZES))}.")
    told["at"] = whole("at", 0, told["n"] - 1)
    for key in ("tails", "logits"):
        text = get(key, str(int(DEFAULTS[key])))
        if text not in ("0", "1"):
            raise ValueError(f"The link says {key}={text!r}; it is 0 or 1.")
        told[key] = text == "1"
    if "p" in st.query_params:
        texts = [text[:LETTERS] for text in st.query_params.get_all("p")]
        told["p"] = [*texts, "", ""][:2]
    told["f"] = get("f", "")
    return told


def whole(key: str, least: int, most: int) -> int:
    text = st.query_params.get(key, str(DEFAULTS[key]))
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ValueError(f"The link says {key}={text!r}; it is a whole number from {least} to {most}.")
    return int(text)


# ---------------------------------------------------------------- the form
def controls(start: dict[str, Any]) -> dict[str, Any]:
    """The choices beside the stage; each change asks a fresh index."""
    chosen = dict(start)
    with st.sidebar:
        st.markdown(f"#### Have I computed this before?\n{QUESTION} Step through it.")
        chosen["from"] = st.radio("Ben sends", list(STARTS), list(STARTS).index(start["from"]), key=KEY + "from",
                                  format_func=STARTS.get)
        if chosen["from"] == "own":
            chosen["p"] = [st.text_area(who, text, max_chars=LETTERS, height=96, key=KEY + who)
                           for who, text in zip(("Anna", "Ben"), start["p"], strict=True)]
        else:
            first = start["n"] if start["from"] == chosen["from"] else min(SIZES)
            chosen["n"] = st.segmented_control("Tokens", SIZES, default=first, key=f"{KEY}n {chosen['from']}",
                                               required=True)
        if chosen["from"] == "edit":
            chosen["at"] = st.slider("Another token at place", 0, chosen["n"] - 1, min(start["at"], chosen["n"] - 1),
                                     key=f"{KEY}at {chosen['n']}")
        chosen |= designs(start)
        with st.expander("How to read it"):
            st.markdown(HOW_TO_READ)
    return chosen


def designs(start: dict[str, Any]) -> dict[str, Any]:
    """Policy, partial tails, logits. What vLLM was not seen to do cannot be chosen with it."""
    policy = st.selectbox("Policy", list(POLICIES), list(POLICIES).index(start["policy"]), format_func=POLICIES.get,
                          key=KEY + "policy")
    ours = policy != OBSERVED
    tails = st.toggle("Partial tails", start["tails"], key=KEY + "tails", disabled=not ours,
                      help="The article's second design: rows of a block that is not full are found, and copied.")
    logits = st.toggle("Ben wants logits", start["logits"], key=KEY + "logits", disabled=not ours,
                       help="Without logits, as for a score, nothing must be computed.")
    return {"policy": policy, "tails": tails and ours, "logits": logits or not ours}


# ---------------------------------------------------------------- what is played
def prompts(chosen: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Anna's tokens and Ben's. ValueError where one of them says nothing."""
    encode = parts.tokenizer().encode
    if chosen["from"] == "own":
        anna, ben = (encode(text) if text.strip() else [] for text in chosen["p"])
        if not anna or not ben:
            raise ValueError("Type a prompt for Anna and one for Ben on the left.")
        return anna, ben
    anna = encode(STORY)[: chosen["n"]]
    ben = list(anna)
    if chosen["from"] == "edit":
        at = chosen["at"]
        ben[at] = next(token for word in OTHERS if (token := encode(word)[0]) != ben[at])
    return anna, ben


def play(chosen: dict[str, Any], anna: list[int], ben: list[int]) -> PrefixWalk:
    """Anna runs and publishes, then Ben starts; on a fresh index of this design."""
    room = 2 * (max(len(anna), len(ben)) // BLOCK + 2)
    walk = PrefixWalk(BLOCK, room, policy=chosen["policy"], partial_tails=chosen["tails"], tokenizer=parts.tokenizer())
    walk.start("Anna", anna)
    walk.publish("Anna", anna)
    walk.start("Ben", ben, chosen["logits"])
    return walk


def opening(recording: Recording, first: str) -> int:
    """The frame of the link, else Ben's first miss, else what his lookup comes to."""
    titles = [frame.title for frame in recording.frames]
    if first.isascii() and first.isdigit():
        return min(max(int(first) - 1, 0), len(titles) - 1)
    begun = titles.index("May Ben look here?")
    return next((n for n in range(begun, len(titles)) if "first miss" in titles[n]), len(titles) - 2)


def stage(chosen: dict[str, Any], recording: Recording, first: str) -> None:
    """The recording under its link."""
    mine = {"edit": ("n", "at"), "same": ("n",), "own": ("p",)}[chosen["from"]]
    query = {key: chosen[key] if isinstance(chosen[key], list) else str(int(chosen[key]) if isinstance(
        chosen[key], bool) else chosen[key]) for key in ("from", *mine, "policy", "tails", "logits")
        if chosen[key] != DEFAULTS[key]}
    parts.show(recording.to_dict(), query, opening(recording, first), seek=recording.id)


def told(walk: PrefixWalk, anna: list[int], ben: list[int]) -> None:
    """The keys of both prompts, and what came of Ben's lookup."""
    own = walk.steps[-1].match["lengths"]
    st.markdown(f"Ben takes **{own['S_runtime']}** of {own['S_prompt']} tokens and computes "
                f"**{own['S_recompute']}**, in {own['new_block_bundles']} fresh "
                f"{'block' if own['new_block_bundles'] == 1 else 'blocks'} a group.")
    one, other = (walk.cache.ask({"ask": "keys", "tokens": tokens}) for tokens in (anna, ben))
    if not one and not other:
        st.info(f"Neither prompt fills a block of {BLOCK} tokens, so there is no key.", icon=":material/info:")
        return
    lines = ["| block | tokens | Anna's key | Ben's key | |", "|--:|---|---|---|---|"]
    for n in range(max(len(one), len(other))):
        a, b = (keys[n] if n < len(keys) else "" for keys in (one, other))
        same = "= same" if a == b else "≠ other" if a and b else ""
        own_tokens = [tokens[n * BLOCK : (n + 1) * BLOCK] for tokens in (anna, ben)]
        lines.append(f"| {n} | {'the same' if own_tokens[0] == own_tokens[1] else 'not the same'} "
                     f"| {shown(a)} | {shown(b)} | {same} |")
    st.markdown("\n".join(lines))
    st.caption("A block behind a change may hold the same tokens, and its key is another all the same: its rows depend "
               "on everything before it.")


def shown(key: str) -> str:
    return f"`{key[:8]}`" if key else "not full"


# ---------------------------------------------------------------- predictions
def predictions() -> None:
    """Questions with a number each; grading runs the index at that moment."""
    st.markdown("##### Predict\nA request has run 66 tokens, in blocks of 16. Answer first. The machine runs when you "
                "press the button, and grades you.")
    asked = lesson_prefix.PREDICTIONS
    with st.form(KEY + "quiz"):
        guesses = {p["key"]: st.number_input(f"{n}. {p['ask']}", 0, 999, None, key=KEY + "guess " + p["key"],
                                             placeholder=p["unit"]) for n, p in enumerate(asked, 1)}
        pressed = st.form_submit_button("Run the machine and grade", type="primary")
    if not pressed:
        return
    truth = lesson_prefix.answers()
    for n, p in enumerate(asked, 1):
        guess, right = guesses[p["key"]], truth[p["key"]]
        if guess is None:
            st.markdown(f"{n}. No guess yet.")
        else:
            sign = "✓ yes," if guess == right else "✕ no,"
            st.markdown(f"{n}. {sign} the machine says **{right}** {p['unit']}. {p['because']}")


# ---------------------------------------------------------------- the failure lab
@st.cache_data
def chain_cases() -> list[Case]:
    return lesson_prefix.malformed()


@st.cache_data(show_spinner="Playing them …")
def bugs() -> list[tuple[str, str, str, bool]]:
    return lesson_prefix.bugs()


def failure_lab() -> None:
    """Pick something forbidden; it is tried now, on a fresh machine."""
    st.markdown("##### Failure lab\nPick something forbidden. It is tried now, on a fresh machine of its own.")
    labs = ("Malformed inputs", "Bugs of real engines")
    lab = st.segmented_control("Which", labs, default=labs[0], key=KEY + "lab", required=True,
                               label_visibility="collapsed")
    if lab == labs[1]:
        st.markdown("\n".join(["| public bug | what people saw | what holds here | now |", "|---|---|---|---|",
                               *(f"| `{bug}` | {saw} | {here} | {'✓ held' if held else '✕ **did not hold**'} |"
                                 for bug, saw, here, held in bugs())]))
        return
    known = {case.id: case for case in chain_cases()}
    case = known[st.selectbox("Try this", list(known), key=KEY + "case", format_func=lambda i: known[i].what)]
    parts.bounce(case)


state = st.session_state
if KEY + "start" not in state:
    state[KEY + "start"] = dict(DEFAULTS)
    with parts.in_plain_words():
        state[KEY + "start"] = linked()
    state[KEY + "first"] = state[KEY + "start"]["f"]
chosen = controls(state[KEY + "start"])
with parts.in_plain_words():
    anna, ben = prompts(chosen)
    walk = play(chosen, anna, ben)
    recording = walk.record(f"{STARTS[chosen['from']]}, in blocks of {BLOCK}", QUESTION)
    stage(chosen, recording, state.pop(KEY + "first", ""))
    told(walk, anna, ben)
with st.expander("Questions people ask, in short"):
    st.markdown("\n\n".join(f"**{question}** {answer}" for question, answer in ANSWERS))
predictions()
failure_lab()
