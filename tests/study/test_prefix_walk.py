"""A walk keeps what a real index said: every step, lookups and refusals too, and nothing changes by asking."""

from __future__ import annotations

import pytest

from kvlab.study.prefix_walk import PrefixWalk
from kvlab.views.prefix import DONE, LOOKUP, REFUSED, STARTS

TOKENS = list(range(100, 150))


@pytest.fixture
def walk():
    made = PrefixWalk(num_blocks=8)
    made.start("Anna", TOKENS)
    made.publish("Anna", TOKENS)
    return made


def test_every_step_is_kept_with_the_state_that_it_left(walk):
    walk.lookup("Ben", TOKENS)
    walk.start("Ben", TOKENS)
    walk.release("Anna")
    assert [s.what for s in walk.steps] == [STARTS, DONE, DONE, LOOKUP, DONE, DONE]
    assert walk.steps[-1].state == walk.cache.snapshot() and walk.steps[-1].digest == walk.cache.digest
    assert walk.outcomes == [""] * 5
    assert walk.steps[4].match["lengths"]["S_runtime"] == 48


def test_a_lookup_changes_nothing_and_keeps_its_match(walk):
    before = walk.cache.digest
    walk.lookup("Ben", TOKENS[:48])
    assert walk.cache.digest == before == walk.steps[-1].digest
    assert walk.steps[-1].match["lengths"] | {"new_block_bundles": 1} == {
        "S_prompt": 48, "S_sem": 48, "S_indexed": 48, "S_cap": 47, "S_runtime": 32, "S_recompute": 16,
        "new_block_bundles": 1}
    walk.lookup("Ben", TOKENS[:48], False)
    assert walk.steps[-1].match["lengths"]["S_runtime"] == 48


def test_a_refusal_is_a_step_with_its_word_and_the_same_digest(walk):
    before = walk.cache.digest
    said = [walk.lookup("Ben", []), walk.take("Zoe", 5000), walk.refused({"op": "fly"}), walk.release("nobody"),
            walk.refused({"op": "publish", "asker": walk.asker, "request": "Anna", "tokens": [*TOKENS, 1]})]
    assert said == ["empty_prompt", "out_of_memory", "unknown_operation", "unknown_request", "valid_rows_below_view"]
    assert walk.outcomes[-5:] == said and all(s.what == REFUSED for s in walk.steps[-5:])
    assert {s.digest for s in walk.steps[-5:]} == {before}
    walk.cache.check()


def test_keys_chain_and_belong_to_full_blocks(walk):
    walk.lookup("Ben", [*TOKENS[:37], 7, *TOKENS[38:]])
    one, other = walk.steps[2].keys, walk.steps[-1].keys
    assert len(one) == 3 and [a == b for a, b in zip(one, other, strict=True)] == [True, True, False]


def test_an_evicted_block_ends_the_walk_before_it(walk):
    handles = walk.steps[-1].state["parts"][0]["entries"][1]["handles"]
    assert walk.evict([row[0] for row in handles.values()]) == ""
    walk.lookup("Ben", TOKENS)
    assert walk.steps[-1].match["lengths"]["S_indexed"] == 16


def test_a_recording_of_it_all():
    made = PrefixWalk(num_blocks=8, groups=1, policy="vllm-0.23")
    made.start("Anna", TOKENS)
    recording = made.record("T", "Q")
    assert recording.frames[0].title == "An empty index" and recording.frames[-1].title == "Anna starts"
    with pytest.raises(ValueError, match="partial tails"):
        PrefixWalk(policy="vllm-0.23", partial_tails=True)
