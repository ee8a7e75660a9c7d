"""Keys of blocks, the ceiling of an infinite cache, and the order of sessions in waves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.reuse.token_keys import pack
from kvlab.study.ideal_hits import IdealHits, ideal_hits
from kvlab.study.trace_formats import open_trace
from kvlab.study.traced_request import TracedRequest, by_session, in_turn
from tests.support import require


def tokens(prompt, output=(), **more):
    return TracedRequest(len(prompt), len(output), prompt=pack(prompt), output=pack(output), **more)


def ids(count, *block_ids, size=512):
    return TracedRequest(count, 1, block_ids=block_ids, id_tokens=size)


def test_the_keys_of_token_ids_are_their_full_blocks():
    request = tokens([1, 2, 3, 4, 5], [6, 7])
    assert request.block_keys(2) == [pack([1, 2]), pack([3, 4])]
    assert request.block_keys(2, output=True) == [pack([1, 2]), pack([3, 4]), pack([5, 6])]
    assert pack([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])


def test_an_id_splits_into_sub_keys_and_joins_into_tuples():
    request = ids(700, 8, 9)
    assert request.block_keys(512) == [(8, 0), (9, 0)]
    assert request.block_keys(256) == [(8, 0), (8, 1), (9, 0)]
    assert request.block_keys(128) == [(8, 0), (8, 1), (8, 2), (8, 3), (9, 0), (9, 1)]
    assert request.block_keys(1024) == [(8, 9)]
    assert ids(40, 1, 2, 3, size=16).block_keys(32) == [(1, 2), (3,)]
    for wrong, says in ((48, "neither"), (0, "at least 1")):
        with pytest.raises(ValueError, match=says):
            request.block_keys(wrong)


def test_lengths_alone_hit_nothing():
    request = TracedRequest(100, 5, at=0.0)
    assert not request.content_known and request.block_keys(16) == []
    assert ideal_hits([request] * 3, 16) == IdealHits(3, 300, 0, 0)
    assert ideal_hits([], 16).share == 0.0


def test_a_block_counts_only_behind_the_same_prefix():
    rows = [ids(48, 1, 2, 3, size=16), ids(48, 1, 9, 3, size=16), ids(48, 9, 2, 3, size=16), ids(32, 1, 9, size=16)]
    assert ideal_hits(rows, 16) == IdealHits(4, 176, 16 + 0 + 32, 3 + 2 + 3)


def test_the_last_partial_block():
    assert ideal_hits([ids(700, 8, 9)] * 2, 512).hit_tokens == 700  # its id says that it is the same
    assert ideal_hits([ids(700, 8, 9)] * 2, 16).hit_tokens == 700
    assert ideal_hits([tokens(range(40))] * 2, 16).hit_tokens == 32  # of token ids it is no block


def test_the_output_is_cached_but_is_no_prompt():
    first = tokens(range(20), range(20, 36))
    assert ideal_hits([first, tokens(range(36))], 16) == IdealHits(2, 56, 32, 2)
    assert ideal_hits([first, first], 16).hit_tokens == 16  # the second block is not in the prompt


def brute(prompts, size):
    """Every prefix of full blocks that was ever cached, as a plain set."""
    seen, hit = set(), 0
    for prompt, output in prompts:
        whole = tuple(prompt + output)
        cuts = range(size, len(prompt) + 1, size)
        hit += max((cut for cut in cuts if whole[:cut] in seen), default=0)
        seen |= {whole[:cut] for cut in range(size, len(whole) + 1, size)}
    return hit, len(seen)


PROMPTS = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=4)),
                   max_size=12)


@settings(max_examples=80, deadline=None)
@given(prompts=PROMPTS, size=st.integers(1, 4))
def test_it_agrees_with_a_set_of_all_prefixes(prompts, size):
    found = ideal_hits([tokens(*pair) for pair in prompts], size)
    assert (found.hit_tokens, found.unique_blocks) == brute(prompts, size)


def test_sessions_take_turns_in_waves():
    lengths = {"a": 2, "b": 1, "c": 3, "d": 1}
    rows = [tokens([1], session=s, turn=t + 1) for s, n in lengths.items() for t in range(n)]
    sessions = list(by_session(rows))
    assert [len(session) for session in sessions] == [2, 1, 3, 1]
    said = [f"{r.session}{r.turn}" for r in in_turn(sessions, wave=3)]
    assert said == ["a1", "b1", "c1", "a2", "c2", "c3", "d1"]
    assert [len(s) for s in by_session([tokens([1])] * 2)] == [1, 1]
    with pytest.raises(ValueError, match="at least 1 session"):
        list(in_turn(sessions, wave=0))


MOONCAKE = [("conversation_first6000.jsonl", 6000, 35.3, 99_716), ("synthetic.jsonl", 3993, 65.1, 43_924)]


@pytest.mark.parametrize(("file", "rows", "percent", "blocks"), MOONCAKE)
def test_mooncake(file, rows, percent, blocks):
    found = ideal_hits(open_trace(f"{require('mooncake')}/{file}"), 512)
    assert (found.requests, round(100 * found.share, 1), found.unique_blocks) == (rows, percent, blocks)


def test_tau_bench_in_two_waves():
    """The published 94.8 % of the tokens of the prompts, every one of which ends with the opening of the answer."""
    require("smollm2")
    trace = open_trace(require("tau-bench"), tokenizer="smollm2")
    found = ideal_hits(in_turn(by_session(trace), wave=50), 16)
    assert (found.requests, found.unique_blocks) == (1229, 18_791)
    assert round(100 * found.share, 1) == 94.8
