"""The best evictions of a pool, against every choice that there is."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.reuse.token_keys import pack
from kvlab.study.ceilings import Journal, PrefixNodes, best_hits, walk
from kvlab.study.traced_request import TracedRequest
from tests.study.replay_model import plain_lru

SIZE = 2


def request(prompt, output=()):
    return TracedRequest(len(prompt), len(output), prompt=pack(prompt), output=pack(output))


def journal_of(requests):
    seen, journal = PrefixNodes(), Journal()
    for one in requests:
        walked = walk(seen, one, SIZE)
        journal.add(walked.nodes, walked.useful, -(-(one.prompt_tokens + one.output_tokens) // SIZE))
    return journal


def paths(requests):
    out, start = [], 0
    journal = journal_of(requests)
    for end, useful, blocks in zip(journal.ends, journal.useful, journal.blocks, strict=True):
        out.append((tuple(journal.nodes[start:end]), useful, blocks))
        start = end
    return out


def every_choice(requests, pool):
    """The most hits of any sequence of kept sets. Exponential, and it shares nothing with what it checks."""
    states = {frozenset(): 0}
    for nodes, useful, blocks in paths(requests):
        after = {}
        for kept, hits in states.items():
            own = 0
            while own < min(useful, len(nodes)) and nodes[own] in kept:
                own += 1
            others = sorted(kept - set(nodes))
            room = max(0, pool - blocks)
            for count in range(min(room, len(others)) + 1):
                for chosen in combinations(others, count):
                    now = frozenset(chosen) | set(nodes)
                    after[now] = max(after.get(now, 0), hits + own)
        states = after
    return max(states.values())


BIT = st.integers(0, 1)
PROMPTS = st.lists(st.tuples(st.lists(BIT, min_size=1, max_size=7), st.lists(BIT, max_size=2)), min_size=1, max_size=7)


@settings(max_examples=120, deadline=None)
@given(prompts=PROMPTS, pool=st.integers(4, 8))
def test_no_choice_of_evictions_hits_more(prompts, pool):
    requests = [request(*pair) for pair in prompts]
    assert best_hits(journal_of(requests), pool) == every_choice(requests, pool)


def test_what_is_needed_last_goes_first():
    a, b, c = ([n] * 4 + [9] for n in range(3))
    rows = [request(p) for p in (a, b, c, a, b, c)]
    assert best_hits(journal_of(rows), 7) == 6  # 3 blocks each: two prompts of two full blocks wait beside the third
    assert best_hits(journal_of(rows), 5) == 2 + 2  # one of them
    assert best_hits(journal_of(rows), 3) == 0
    assert plain_lru(rows, SIZE, [4]) == [0.0]  # in a cycle LRU throws away just what comes next


def test_a_block_that_is_computed_in_any_case_is_not_kept_for_that():
    one = request([1, 1, 1, 1])  # two full blocks, the second is held back for the logits
    assert best_hits(journal_of([one, one, one]), 8) == 2


def test_the_longest_known_prefix_and_what_a_design_may_take():
    seen = PrefixNodes()
    first = walk(seen, request([1, 2, 3, 4, 5]), SIZE)
    assert (len(first.nodes), first.ideal, first.design) == (2, 0, 0)
    again = walk(seen, request([1, 2, 3, 4]), SIZE)
    assert (again.ideal, again.design, again.useful) == (4, 2, 1)
    named = TracedRequest(3, 1, block_ids=(7, 8), id_tokens=2)  # its last block is partial and has a name
    assert walk(seen, named, SIZE).ideal == 0
    twice = walk(seen, named, SIZE)
    assert (twice.ideal, twice.design, len(twice.nodes)) == (3, 2, 1)
