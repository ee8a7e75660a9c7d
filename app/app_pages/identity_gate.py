"""May I reuse these bytes?: change what a consumer is, and watch which check of the gate stops it, and why."""

from __future__ import annotations

from typing import Any

import parts
import streamlit as st

from kvlab.contract import Json
from kvlab.study import fixtures
from kvlab.study.gate_walk import played, walk

NAMESPACE = "prod/a"
WHO = {"alice": "Alice, of tenant a, authorised", "amy": "Amy, of tenant a, not yet authorised",
       "bob": "Bob, of tenant b"}
RECORDS = {"g0/1000@3": "16 tokens of text", "g0/1001@4": "a picture and an embedding row among 16 tokens"}
PROMPT = ("The two young ladies were walking in the garden before dinner, "
          "when they saw a gentleman coming up the road; and it was")
HOW_TO_READ = """
- **Dashed**: not compared yet. **Solid**: compared.
- **= and ≠**: what the comparison gave.
- **Cross and ring**: refused here. The rest is never compared.
- **Values** are digests by their first eight digits, or short words.
- **State**: the gate's digest before and after. A refusal leaves it as it was.
"""


@st.cache_data
def published() -> Json:
    """The gate of the Loop 2 fixture with its two published records, as a snapshot."""
    trace = fixtures.load_fixture(fixtures.FIXTURES / "loop2_identity.json")
    return fixtures.play(trace, "publish p2").machine.snapshot()


def edits(snapshot: Json, record: str) -> dict[str, Json]:
    """What may differ, by a short name for the link: the change that it makes to the record's own manifest."""
    made = snapshot["records"][record]["manifest"]
    layouts = {layout["manifest_id"]: digest for digest, layout in snapshot["layouts"].items()}
    tokens, sides = made["covered_token_ids"], made["input_side_data_identity"]
    out: dict[str, Json] = {f"layout: {name.removeprefix('l2-')}": {"cache_layout_sha256": digest}
                            for name, digest in layouts.items() if digest != made["cache_layout_sha256"]}
    out |= {
        "another cache ABI": {"cache_abi_sha256": "0" * 64},
        "other weights": {"model_generation": "weights-2"},
        "another adapter": {"adapter_identity": "adapter 2"},
        "transformed weights": {"weight_transform_identity": "smoothed"},
        "16 positions further on": {"position_contract_sha256": "1" * 64},
        "one token inside": {"covered_token_ids": [*tokens[:7], tokens[7] + 1, *tokens[8:]]},
        "a longer prompt": {"covered_token_ids": [*tokens, 1, 2, 3]},
        "another namespace": {"cache_isolation_namespace": "prod/b"},
        "a later namespace generation": {"namespace_generation": 2},
        "another salt": {"cache_salt": "salt-b"},
        "a later publication generation": {"publication_generation": 2},
        "another tokenizer version": {"tokenizer_revision": "tok-2"},
        "another chat template": {"chat_template_revision": "chat-2"},
        "another temperature": {"sampling_and_stopping_policy": "temperature 0.8"},
    }
    for side in sides:
        name = "another picture" if side["kind"] == "multimodal" else "another embedding row"
        out[name] = {"input_side_data_identity": [s | {"identity": "another"} if s is side else s for s in sides]}
    return out


def from_link() -> tuple[str, str, list[str]]:
    """Who asks, for which record, and what differs, as the page's address says; a mistake in it is said in words."""
    who, record = st.query_params.get("who", "alice"), st.query_params.get("record", "g0/1000@3")
    differs = st.query_params.get_all("d") if "who" in st.query_params else ["layout: rank1"]
    known_who, known_record = who in WHO, record in RECORDS
    who, record = who if known_who else "alice", record if known_record else "g0/1000@3"
    known = [d for d in differs if d in edits(published(), record)]
    if not (known_who and known_record and len(known) == len(differs)):
        st.warning("The link names something that this page does not have. What it does have is shown.",
                   icon=":material/link_off:")
    return who, record, known


def controls(start: tuple[str, str, list[str]]) -> tuple[str, str, list[str]]:
    """The choices beside the stage."""
    with st.sidebar:
        st.markdown("#### May I reuse these bytes?\nSomebody asks for published rows. Which check stops them?")
        who = st.radio("Who asks?", list(WHO), list(WHO).index(start[0]), format_func=WHO.get, key="identity who")
        record = st.radio("For which rows?", list(RECORDS), list(RECORDS).index(start[1]), format_func=RECORDS.get,
                          key="identity record")
        options = list(edits(published(), record))
        differs = st.multiselect("What differs from the producer?", options, [d for d in start[2] if d in options],
                                 key=f"identity differs {record}", placeholder="Nothing: the same in everything",
                                 help="Choose several: the first in the gate's order wins.")
        with st.expander("How to read it"):
            st.markdown(HOW_TO_READ)
    return who, record, differs


def merged(record: str, differs: list[str]) -> Json:
    """All chosen changes as one; where two change the same field, the later one counts, and the page says so."""
    change: Json = {}
    for name in differs:
        made = edits(published(), record)[name]
        if made.keys() & change.keys():
            st.warning(f"Two of your choices change the same field. “{name}” counts.", icon=":material/info:")
        change |= made
    return change


def verdict(made: Json) -> None:
    """What the key says, what the manifest says, and the digest on both sides."""
    key, manifest, digest = st.columns(3)
    asked = {c["field"]: c for c in made["checks"]}
    last = made["checks"][-1]
    found = "concrete key" in asked and asked["concrete key"]["held"]
    key.markdown("**The key says**\n\n" + ("not asked" if "concrete key" not in asked else
                                           "✓ here is a candidate" if found else "no candidate: a miss"))
    manifest.markdown("**The manifest says**\n\n" + (
        f"✕ `{last['reason']}`" if len(asked) > 1 and last["reason"] else "not asked" if len(asked) == 1 else
        "✓ may be reused"))
    before, after = made["digest"][:6], made["digest_after"][:6]
    digest.markdown("**The state**\n\n" + (f"unchanged: `{before}` = `{after}`" if before == after else
                                           f"held for the consumer: `{before}` → `{after}`"))


@st.cache_data(show_spinner="Two adapters, one cache …")
def harm(prompt: str) -> dict[str, Any]:
    """Anna's answer, Ben's, and Ben's on her rows; the real model, real rows."""
    model, tokenizer = parts.load("austen")
    from kvlab.execution.adapters import seeded_adapter, with_adapter
    from kvlab.study.lesson_identity import SharedCache

    voices = {name: with_adapter(model, seeded_adapter(model, seed=seed, rank=4, scale=0.4))
              for name, seed in (("Anna", 5), ("Ben", 1))}
    tokens = len(tokenizer.encode(prompt))
    if not 1 <= tokens <= 400:
        raise ValueError(f"The prompt has {tokens} tokens; this demonstration takes 1 to 400.")
    cache = SharedCache(voices, tokenizer, num_blocks=96)
    said = {"Anna": cache.answer("A", "Anna", prompt, 14), "Ben": cache.answer("B", "Ben", prompt, 14),
            "Ben, on Anna's rows": cache.answer("C", "Ben", prompt, 14, reuse="A")}
    return {"said": said, "taken": (tokens - 1) // 16 * 16, "of": tokens}


def show_harm() -> None:
    """The run that the gate is there to prevent."""
    st.markdown("##### What happens without the gate\nTwo adapters on the real model. Both are asked the same. "
                "In the third column Ben is given the rows that Anna's adapter made.")
    prompt = st.text_input("Prompt", PROMPT, key="identity prompt")
    if not st.button("Run both adapters on one cache", type="primary"):
        return
    with parts.in_plain_words():
        ran = harm(prompt)
        for column, (who, text) in zip(st.columns(3), ran["said"].items(), strict=True):
            column.markdown(f"**{who}**")
            column.text(text)
        st.caption(f"{ran['taken']} of {ran['of']} tokens were Anna's rows."
                   + ("" if ran["taken"] else " Less than a full block: nothing could be taken."))


state = st.session_state
if "identity_start" not in state:
    state.identity_start = from_link()
    state.identity_frame = st.query_params.get("f", "") if "who" in st.query_params else ""
who, record, differs = controls(state.identity_start)
with parts.in_plain_words():
    made = walk(published(), principal=who, namespace=NAMESPACE, record=record, change=merged(record, differs))
    recording = played(made).to_dict()
    first = len(recording["frames"]) - 1
    if state.identity_frame.isdigit():
        first = min(max(int(state.identity_frame) - 1, 0), first)
    state.identity_frame = ""
    parts.show(recording, {"who": who, "record": record, "d": differs}, first, seek=recording["id"])
    verdict(made)
show_harm()
