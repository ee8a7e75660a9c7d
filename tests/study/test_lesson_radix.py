"""What lesson and page on the radix tree share: the trace, the chats, the grades, the orders, the bug and its cure."""

from __future__ import annotations

import pytest

from kvlab.contract import Rejected
from kvlab.execution.model import load_model
from kvlab.reuse.eviction import ORDERS
from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.token_keys import pack
from kvlab.study import fixtures, lesson_radix
from kvlab.study.lesson_radix import (
    PREDICTIONS,
    SHELF_NAMES,
    Tried,
    answers,
    article,
    found_in,
    half_used,
    malformed,
    on_trace,
    operations,
    orders,
    rows_computed,
    serve,
    stories,
)
from kvlab.study.lesson_radix_rows import CarelessBook, RadixBook, SlotWorld, alone
from kvlab.study.traced_request import TracedRequest

STORY = "The two young ladies were walking in the garden before dinner, when they saw a gentleman coming up the road"
ANNA, BEN = STORY + "; and it was Mr. Darcy. He", STORY + "; it was her brother, and she cried"
CLARA = "Poor Miss Bates was ill. Miss Bates was old. Miss Bates could talk for ever, and Miss Bates"


# ---------------------------------------------------------------- the trace
def test_the_trace_arrives_where_the_fixture_runner_does():
    last = next(step["name"] for step in reversed(article()["trace"]) if step["name"].startswith("r18"))
    played, tried = fixtures.play(article(), last).machine, on_trace()
    assert len(operations()) == 18 and tried.outcomes == [""] * 18
    assert tried.machine.snapshot() == played.snapshot() and tried.machine.digest == played.digest


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("policy", lesson_radix.POLICIES)
def test_the_trace_plays_on_every_kind_of_cache(policy, size):
    for order in ORDERS:
        tried = on_trace(eviction=order, policy=policy, block_size=size)
        tried.machine.check()
        assert len(tried.recording("T").frames) > 18


# ---------------------------------------------------------------- predictions
def test_the_grades_are_what_the_lesson_says_in_words():
    """Derived by hand from the article's operations, one by one."""
    assert answers() == {"split": 2, "back": 4, "evictable": 0, "ready": 2, "one": 3, "none": 0}
    assert [p["key"] for p in PREDICTIONS] == list(answers())


# ---------------------------------------------------------------- chats
def test_a_chat_finds_what_is_there_and_computes_at_least_one_token():
    tried = Tried(RadixCache(10))
    assert serve(tried, "A", [1, 2, 3, 4]) == 0
    assert serve(tried, "B", [1, 2, 3, 4]) == 3
    assert serve(tried, "C", [1, 2, 9]) == 2
    assert tried.machine.ask({"ask": "pool"}) == {"tree": 5, "private": 0, "free": 5, "slots": 10}
    assert not tried.machine.requests and set(tried.outcomes) == {""}


def test_a_full_pool_evicts_and_who_runs_on_is_kept():
    for runs_on, free in ((False, ""), (True, "out_of_memory")):
        tried = Tried(RadixCache(6))
        serve(tried, "A", [1, 2, 3, 4], runs_on=runs_on)
        serve(tried, "B", [7, 8, 9])
        assert tried.outcomes[-2] == free
        assert tried.machine.ask({"ask": "match", "tokens": [1, 2, 3, 4]})["matched"] == (4 if runs_on else 0)
        assert tried.machine.ask({"ask": "match", "tokens": [7, 8, 9]})["matched"] == (0 if runs_on else 3)
        tried.machine.check()


def test_a_name_that_runs_already_is_refused_and_finds_nothing():
    tried = Tried(RadixCache(20))
    serve(tried, "A", [1, 2], runs_on=True)
    assert serve(tried, "A", [1, 2]) == 0 and tried.outcomes[-1] == "request_exists"


def test_a_trace_in_text_finds_prompts_and_answers_of_the_turn_before():
    def turn(n, prompt, output):
        return TracedRequest(len(prompt), len(output), session=4, turn=n, prompt=pack(prompt), output=pack(output))

    row = [turn(1, [1, 2, 3], [4, 5]), turn(2, [1, 2, 3, 4, 5, 6], [7]), turn(3, [9, 9], [9])]
    assert list(found_in(row, 20)) == [(4, 1, 3, 0), (4, 2, 6, 5), (4, 3, 2, 0)]
    with pytest.raises(Rejected, match="out_of_memory"):
        list(found_in(row, 4))


# ---------------------------------------------------------------- orders, policies, batches
def test_every_order_lets_all_five_go_and_no_two_agree():
    told = orders()
    assert set(told) == set(ORDERS)
    assert all(sorted(who) == sorted(SHELF_NAMES.values()) for who in told.values())
    assert len({tuple(who) for who in told.values()}) == len(ORDERS)


def test_orders_by_hand():
    """Used at, made at, hits, priority, from the shelf's nine operations."""
    told = orders()
    assert told["lru"] == ["Dora", "Clara", "Anna", "Ben", "Emma"]  # last uses: 4, 6, 7, 8, 9
    assert told["fifo"] == ["Anna", "Ben", "Clara", "Dora", "Emma"] and told["filo"] == told["fifo"][::-1] == [
        "Emma", "Dora", "Clara", "Ben", "Anna"]
    assert told["mru"] == told["lru"][::-1]
    assert told["priority"] == ["Dora", "Ben", "Anna", "Clara", "Emma"]  # 0 1 2 3 4


def test_the_policies_differ_in_what_half_a_use_protects():
    gone = {p: [e.to_dict()["tokens"] for e in half_used(p).last.evicted] for p in lesson_radix.POLICIES}
    assert gone == {"normative": [[3, 4]], "sglang-0.5.11": [[9, 9]]}


def test_depth_first_meets_the_bound_with_the_smallest_cache():
    batch = [[1, 2, 3], [7, 8], [1, 2, 4], [7, 9], [1, 2, 3, 5]]
    ask = {"ask": "bound", "requests": batch, "capacity": 4, "offline_fixed_batch": True, "tree_from_that_batch": True}
    bound = RadixCache(1).ask(ask)
    assert bound["rows"] == 3 + 1 + 1 + 3  # 1 2 3, then 5, then 4; then 7 8 and 9
    assert rows_computed(batch, bound["order"], 4) == bound["rows"]
    assert rows_computed(batch, range(5), 4) > bound["rows"]
    assert rows_computed(batch, range(5), 40) == bound["rows"]


# ---------------------------------------------------------------- the failure lab
@pytest.mark.parametrize("case", [*malformed(), *stories()], ids=lambda case: case.id)
def test_every_case_bounces_and_the_digest_stays(case):
    tried = case.attempt()
    assert tried.reason == case.negative["reason"] and tried.before == tried.after and case.tried


# ---------------------------------------------------------------- the bug and its cure, on the real model
@pytest.fixture(scope="module")
def austen():
    return load_model("austen")


def three_chats(austen, book):
    world = SlotWorld(*austen, book, slots=192)
    for chat, text in {"Anna": ANNA, "Ben": BEN, "Clara": CLARA}.items():
        world.read(chat, text)
        world.publish(chat)
    return world


def test_freeing_what_was_only_borrowed_lets_a_stranger_write_there(austen):
    book = CarelessBook(192)
    world = three_chats(austen, book)
    stolen = set(book.table("Clara")) & set(book.table("Anna"))
    assert stolen and len(book.free) == len(set(book.free)), "slots of a live table were given away, each once"
    assert world.speak("Anna", 8) != alone(*austen, ANNA, 8)


def test_the_real_cache_keeps_every_chat_as_if_alone(austen):
    book = RadixBook(192)
    world = three_chats(austen, book)
    for chat, text in {"Anna": ANNA, "Ben": BEN, "Clara": CLARA}.items():
        assert world.speak(chat, 8) == alone(*austen, text, 8)
    assert world.computed < sum(world.length.values()), "the shared story was computed once"
    book.cache.check()
