"""One pool by hand: exact queue orders, lifetimes, reservations, leases, holes; and the audit that follows it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.contract import FactSum, Rejected
from kvlab.memory.block_pool import BORN_KEPT, HOLE, BlockPool, PhysicalBlockHandle, generation_of, index_of, pack
from kvlab.memory.facts import PoolFacts
from kvlab.memory.pool_bulk import drop_all

SIZE = 4


def pool_of(blocks: int, *, audited: bool) -> BlockPool:
    if not audited:
        return BlockPool("g0", blocks, 1000, SIZE)
    facts = PoolFacts("g0", blocks, FactSum(lambda cell: cell[1].fact(cell[0], cell[2])))
    facts.sum.total = facts.total()
    return BlockPool("g0", blocks, 1000, SIZE, facts)


@pytest.fixture
def pool():
    """Five blocks 1000..1004 of four tokens, all free, with facts kept."""
    return pool_of(5, audited=True)


def hold(pool: BlockPool, count: int, rows: int = SIZE) -> list[int]:
    """Begin `count` lifetimes; the words."""
    words = pool.reserve(count)
    for word in words:
        pool.begin(word, rows)
    return words


def indices(words: list[int]) -> list[int]:
    return [index_of(word) for word in words]


# ---------------------------------------------------------------- the queue
def test_first_in_first_out(pool):
    words = hold(pool, 3)
    assert indices(words) == [0, 1, 2]
    for i in (1, 0, 2):
        assert pool.drop_ref(words[i])
    assert list(pool.queue()) == [3, 4, 1, 0, 2]
    assert indices(hold(pool, 4)) == [3, 4, 1, 0]


@pytest.mark.parametrize(("out", "left"), [([2], [0, 1, 3, 4]), ([0], [1, 2, 3, 4]), ([4], [0, 1, 2, 3]),
                                           ([1, 2, 3], [0, 4]), ([0, 1, 2, 3, 4], [])])
def test_taking_from_anywhere_keeps_the_order_of_the_rest(pool, out, left):
    words = hold(pool, 5)
    for word in words:
        pool.set_key(index_of(word), "7be1")
        pool.drop_ref(word)
    for i in out:
        pool.add_ref(words[i])
    assert list(pool.queue()) == left
    assert pool.free_count == len(left)
    assert not any(pool.is_free(i) for i in out)
    for i in reversed(out):
        pool.drop_ref(words[i])
    assert list(pool.queue()) == left + out[::-1]


def test_a_given_order():
    pool = pool_of(5, audited=False)
    pool.restore([3, 0, 0, 0, 8], [4, 0, 2], {0: "7be1", 1: "c40d"})
    assert list(pool.queue()) == [4, 0, 2]
    assert pool.free_count == 3
    assert pool.place == {0: 1}
    assert pool.reserve(2) == [pack(4, 9), pack(0, 4)]


def test_the_ring_closes_its_holes_when_it_is_full():
    pool = pool_of(3, audited=False)
    words = hold(pool, 3)
    for word in words:
        pool.set_key(index_of(word), "7be1")
        pool.drop_ref(word)
    for _ in range(10):
        pool.add_ref(words[1])
        pool.drop_ref(words[1])
    assert list(pool.queue()) == [0, 2, 1]
    assert pool.tail - pool.head <= 6
    words = pool.ring[pool.head : pool.tail].tolist()
    assert pool.place == {index_of(w): pool.head + n for n, w in enumerate(words) if w != HOLE}
    assert [index_of(w) for w in hold(pool, 3)] == [0, 2, 1]


# ---------------------------------------------------------------- the short way
@pytest.mark.parametrize("counts", [[1] * 40, [3, 5, 2, 5, 4, 1, 5], [5] * 9])
def test_taking_at_once_is_reserving_and_beginning(counts):
    short, long = pool_of(5, audited=False), pool_of(5, audited=False)
    for count in counts:
        taken = short.take(count, [])
        assert taken.tolist() == hold(long, count)
        assert short.generations().tolist() == long.generations().tolist()
        drop_all(short, array("q", taken.tolist()))
        for word in taken.tolist():
            long.drop_ref(word)
        assert list(short.queue()) == list(long.queue())
        assert short.free_count == long.free_count == 5


def test_taking_at_once_refuses_and_evicts_as_the_long_way_does():
    pool, evicted = pool_of(4, audited=False), []
    words = pool.take(4, evicted).tolist()
    assert pool.take(1, evicted) is None
    pool.set_key(2, "7be1")
    for word in words:
        pool.drop_ref(word)
    reserved = pool.reserve(1)
    assert pool.take(4, evicted) is None
    assert pool.take(3, evicted).tolist() == [pack(i, 2) for i in (1, 2, 3)]
    assert evicted == ["7be1"]
    pool.unreserve(reserved)
    assert pool.take(1, evicted).tolist() == [pack(0, 2)]


def test_the_generation_column_is_brought_up_to_date_in_time():
    pool = pool_of(2, audited=False)
    for _ in range(BORN_KEPT + 3):
        words = pool.take(2, [])
        assert len(pool._born) <= BORN_KEPT
        drop_all(pool, array("q", words.tolist()))
    assert pool.generations().tolist() == [BORN_KEPT + 3] * 2


# ---------------------------------------------------------------- reservations
def test_a_reservation_leaves_everything_where_it_was(pool):
    def all_of_it() -> tuple:
        return list(pool.queue()), pool.generations().tolist(), pool.free_count, pool.facts.total()

    before = all_of_it()
    first, second = pool.reserve(2), pool.reserve(2)
    assert (first, second) == ([pack(0, 1), pack(1, 1)], [pack(2, 1), pack(3, 1)])
    assert pool.spare == 1
    assert pool.reserve(2) == []
    assert all_of_it() == before
    pool.unreserve(first)
    assert indices(pool.reserve(3)) == [0, 1, 4]
    pool.unreserve([pack(i, 1) for i in range(5)])
    assert all_of_it() == before


def test_reserved_blocks_keep_their_places_while_others_come_back(pool):
    held = hold(pool, 2)
    reserved = pool.reserve(2)
    pool.drop_ref(held[1])
    pool.drop_ref(held[0])
    assert list(pool.queue()) == [2, 3, 4, 1, 0]
    pool.unreserve(reserved)
    assert indices(pool.reserve(5)) == [2, 3, 4, 1, 0]


def test_too_few_blocks_reserve_none(pool):
    hold(pool, 3)
    assert pool.reserve(3) == []
    assert pool.spare == 2
    assert not pool.reserved


# ---------------------------------------------------------------- lifetimes
def test_only_the_beginning_of_a_lifetime_counts_the_generation_up(pool):
    (word,) = pool.reserve(1)
    assert pool.generations()[0] == 0
    pool.begin(word, 3)
    assert (pool.generations()[0], pool.refs(0), pool.valid_rows(0, 3)) == (1, 1, 3)
    pool.add_ref(word)
    pool.drop_ref(word)
    assert pool.refs(0) == 1
    assert pool.drop_ref(word)
    assert pool.generations()[0] == 1
    assert pool.current(pack(0, 1)) and not pool.current(pack(0, 2))


def test_an_identity_outlives_the_last_reference_and_dies_with_the_next_lifetime(pool):
    (word,) = hold(pool, 1)
    pool.set_key(0, "7be1")
    assert pool.refs(0) == 1
    pool.drop_ref(word)
    assert (pool.keys, pool.is_free(0)) == ({0: "7be1"}, True)
    assert list(pool.queue())[-1] == 0
    pool.add_ref(word)
    assert (pool.refs(0), pool.generations()[0], pool.is_free(0)) == (1, 1, False)
    pool.drop_ref(word)
    pool.reserve(5)
    assert pool.begin(pack(0, 2), 2) == "7be1"
    assert (pool.keys, pool.generations()[0]) == ({}, 2)


def test_rows_that_differ_from_the_view_are_noted_until_the_block_is_free_or_written(pool):
    (word,) = hold(pool, 1)
    assert pool.valid_rows(0, 2) == 2
    pool.rows[0] = 3
    assert pool.valid_rows(0, 2) == 3
    pool.set_rows(0, 4)
    assert pool.valid_rows(0, 2) == 2
    pool.add_ref(word)
    assert pool.valid_rows(0, 2) == SIZE
    pool.rows[0] = 3
    pool.drop_ref(word)
    pool.drop_ref(word)
    assert not pool.rows


# ---------------------------------------------------------------- leases
def test_a_lease_keeps_a_block_whose_last_reference_went(pool):
    (word,) = hold(pool, 1)
    pool.lease(word)
    pool.lease(word)
    pool.drop_ref(word)
    assert list(pool.queue()) == [1, 2, 3, 4, 0]
    assert pool.spare == 4
    assert pool.reserve(5) == []
    pool.unlease(word)
    assert pool.spare == 4
    pool.unlease(word)
    assert pool.leases == {}
    assert indices(pool.reserve(5)) == [1, 2, 3, 4, 0]


def test_a_leased_block_at_the_head_is_passed_over_and_found_again(pool):
    words = hold(pool, 5)
    pool.lease(words[2])
    for i in (2, 4):
        pool.drop_ref(words[i])
    (reserved,) = pool.reserve(1)
    assert index_of(reserved) == 4
    assert list(pool.queue()) == [2, 4]
    pool.unlease(words[2])
    assert indices(pool.reserve(1)) == [2]


def test_spoiled_rows_hide_an_identity_until_the_next_lifetime(pool):
    words = hold(pool, 2)
    pool.set_key(0, "7be1")
    pool.drop_ref(words[0])
    pool.drop_ref(words[1])
    pool.spoil(words)
    assert pool.spoiled == {0}
    assert pool.keys == {0: "7be1"}
    pool.reserve(5)
    pool.begin(pack(0, 2), 1)
    assert not pool.spoiled


# ---------------------------------------------------------------- names and facts
def test_handles_pack_into_a_word_and_print(pool):
    word = pack(2, 9)
    assert (index_of(word), generation_of(word)) == (2, 9)
    assert pool.text(word) == "1002@9"
    assert pool.word("1002@9") == word
    assert pool.handle(word) == PhysicalBlockHandle("g0", "g0", 1002, 9)
    assert str(pool.handle(word)) == "1002@9"
    assert pool.handle(word) != pool.handle(pack(2, 10))


@pytest.mark.parametrize("text", ["1002", "1002@", "@9", "x@9", "1002@-1", "999@1", "1005@1", "1002@4294967296", ""])
def test_what_is_no_handle_is_refused(pool, text):
    with pytest.raises(Rejected) as no:
        pool.word(text)
    assert no.value.reason == "malformed_snapshot"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("bddakx"), st.integers(0, 9)), max_size=60))
def test_facts_follow_every_change_and_say_what_the_pool_says(steps):
    """b: begin, d: drop, a: one more reference, k: an identity, x: take one away; on whatever is there to do it to."""
    pool, held = pool_of(4, audited=True), []
    for verb, pick in steps:
        free_keyed = sorted(pool.place)
        if verb == "b" and pool.free_count:
            held += hold(pool, 1)
        elif verb == "d" and held:
            pool.drop_ref(held.pop(pick % len(held)))
        elif verb == "a" and (held or free_keyed):
            words = [*held, *(pack(i, int(pool.generations()[i])) for i in free_keyed)]
            held.append(words[pick % len(words)])
            pool.add_ref(held[-1])
        elif verb == "k" and held:
            pool.set_key(index_of(held[pick % len(held)]), f"k{pick}")
        elif verb == "x" and pool.keys:
            pool.set_key(sorted(pool.keys)[pick % len(pool.keys)], None)
        pool.facts.sum.settle()
        assert pool.facts.sum.total == pool.facts.total() % (1 << 256)
        said = pool.facts.columns()
        assert said["free"] == list(pool.queue())
        assert said["keys"] == dict(sorted(pool.keys.items()))
        assert said["generation"] == pool.generations().tolist()
        assert said["ref_cnt"] == [held.count(pack(i, int(g))) for i, g in enumerate(pool.generations())]
        assert all(pool.refs(index_of(w)) == held.count(w) for w in held)


def test_the_order_of_the_queue_is_part_of_the_facts():
    orders = [[0, 1, 2], [0, 2, 1], [2, 1, 0], [0, 1], [1, 0], []]
    totals = set()
    for order in orders:
        facts = PoolFacts("g0", 3, FactSum(lambda cell: 0))
        facts.link(order)
        totals.add(facts.total())
    assert len(totals) == len(orders)
