"""One pool by hand: exact queue orders, lifetimes, reservations and leases."""

from __future__ import annotations

import pytest

from kvlab.contract import FactSum, Rejected
from kvlab.memory.block_pool import BlockPool, PhysicalBlockHandle, generation_of, index_of, pack


@pytest.fixture
def pool():
    """Five blocks 1000..1004, all free, with facts kept."""
    pool = BlockPool("g0", 5, 1000, None)
    pool.facts = FactSum(lambda cell: pool.fact(cell[0], cell[2]))
    pool.facts.total = pool.facts_total()
    return pool


def hold(pool: BlockPool, count: int, rows: int = 4) -> list[int]:
    taken = pool.reserve(count)
    for index in taken:
        pool.begin(index, rows)
    return taken


# ---------------------------------------------------------------- the queue
def test_first_in_first_out(pool):
    assert hold(pool, 3) == [0, 1, 2]
    for index in (1, 0, 2):
        assert pool.drop_ref(index)
    assert list(pool.queue()) == [3, 4, 1, 0, 2]
    assert hold(pool, 4) == [3, 4, 1, 0]


@pytest.mark.parametrize(("out", "left"), [([2], [0, 1, 3, 4]), ([0], [1, 2, 3, 4]), ([4], [0, 1, 2, 3]),
                                           ([1, 2, 3], [0, 4]), ([0, 1, 2, 3, 4], [])])
def test_taking_from_anywhere_keeps_the_order_of_the_rest(pool, out, left):
    for index in out:
        pool.take(index)
    assert list(pool.queue()) == left
    assert pool.free_count == len(left)
    assert not any(pool.is_free(i) for i in out)
    for index in reversed(out):
        pool.put(index)
    assert list(pool.queue()) == left + out[::-1]


def test_a_given_order(pool):
    pool.queue_up([4, 0, 2])
    assert list(pool.queue()) == [4, 0, 2]
    assert pool.free_count == 3
    assert not pool.is_free(1)
    assert pool.reserve(2) == [4, 0]


# ---------------------------------------------------------------- reservations
def test_a_reservation_leaves_everything_where_it_was(pool):
    before = (list(pool.next), list(pool.prev), list(pool.generation), pool.free_count, pool.facts_total())
    first, second = pool.reserve(2), pool.reserve(2)
    assert (first, second) == ([0, 1], [2, 3])
    assert pool.available() == 1
    assert pool.reserve(2) == []
    assert (list(pool.next), list(pool.prev), list(pool.generation), pool.free_count, pool.facts_total()) == before
    pool.unreserve(first)
    assert pool.reserve(3) == [0, 1, 4]
    pool.unreserve([0, 1, 2, 3, 4])
    assert (list(pool.next), list(pool.prev), list(pool.generation), pool.free_count, pool.facts_total()) == before


def test_reserved_blocks_keep_their_places_while_others_come_back(pool):
    hold(pool, 2)
    reserved = pool.reserve(2)
    pool.drop_ref(1)
    pool.drop_ref(0)
    assert list(pool.queue()) == [2, 3, 4, 1, 0]
    pool.unreserve(reserved)
    assert pool.reserve(5) == [2, 3, 4, 1, 0]


def test_too_few_blocks_reserve_none(pool):
    hold(pool, 3)
    assert pool.reserve(3) == []
    assert pool.available() == 2
    assert not pool.reserved


# ---------------------------------------------------------------- lifetimes
def test_only_the_beginning_of_a_lifetime_counts_the_generation_up(pool):
    (index,) = pool.reserve(1)
    assert pool.generation[index] == 0
    pool.begin(index, 3)
    assert (pool.generation[index], pool.ref_cnt[index], pool.valid_rows[index]) == (1, 1, 3)
    pool.add_ref(index)
    pool.set_rows(index, 4)
    pool.drop_ref(index)
    assert not pool.is_free(index)
    assert pool.drop_ref(index)
    assert (pool.generation[index], pool.ref_cnt[index], pool.valid_rows[index]) == (1, 0, 0)
    assert pool.current(pack(index, 1)) and not pool.current(pack(index, 2))


def test_an_identity_outlives_the_last_reference_and_dies_with_the_next_lifetime(pool):
    hold(pool, 1)
    pool.set_key(0, "7be1")
    assert pool.ref_cnt[0] == 1
    pool.drop_ref(0)
    assert (pool.keys, pool.valid_rows[0]) == ({0: "7be1"}, 4)
    assert list(pool.queue())[-1] == 0
    pool.add_ref(0)
    assert (pool.ref_cnt[0], pool.generation[0], pool.is_free(0)) == (1, 1, False)
    pool.drop_ref(0)
    pool.reserve(5)
    assert pool.begin(0, 2) == "7be1"
    assert (pool.keys, pool.generation[0]) == ({}, 2)


def test_an_identity_taken_from_a_free_block_takes_its_rows_along(pool):
    hold(pool, 2)
    for index in (0, 1):
        pool.set_key(index, f"k{index}")
    pool.drop_ref(0)
    pool.set_key(0, None)
    pool.set_key(1, None)
    assert (pool.valid_rows[0], pool.valid_rows[1]) == (0, 4)


# ---------------------------------------------------------------- leases
def test_a_lease_keeps_a_block_whose_last_reference_went(pool):
    hold(pool, 1)
    pool.lease(0)
    pool.lease(0)
    pool.drop_ref(0)
    assert list(pool.queue()) == [1, 2, 3, 4, 0]
    assert pool.available() == 4
    assert pool.reserve(5) == []
    pool.unlease(0)
    assert pool.available() == 4
    pool.unlease(0)
    assert pool.leases == {}
    assert pool.reserve(5) == [1, 2, 3, 4, 0]


def test_a_leased_block_at_the_head_is_passed_over(pool):
    hold(pool, 5)
    pool.lease(2)
    for index in (2, 4):
        pool.drop_ref(index)
    assert pool.reserve(1) == [4]
    assert list(pool.queue()) == [2, 4]


def test_spoiled_rows_hide_an_identity_until_the_next_lifetime(pool):
    hold(pool, 2)
    pool.set_key(0, "7be1")
    pool.drop_ref(0)
    pool.drop_ref(1)
    pool.spoil([0, 1])
    assert pool.spoiled == {0}
    assert pool.keys == {0: "7be1"}
    pool.reserve(5)
    pool.begin(0, 1)
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


def test_facts_follow_every_change(pool):
    def settled() -> None:
        pool.facts.settle()
        assert pool.facts.total == pool.facts_total() % (1 << 256)

    hold(pool, 3)
    settled()
    pool.set_key(1, "7be1")
    pool.set_rows(0, 2)
    settled()
    for index in (1, 0):
        pool.drop_ref(index)
    settled()
    pool.add_ref(1)
    settled()
    pool.set_key(1, None)
    settled()


def test_the_order_of_the_queue_is_part_of_the_facts():
    orders = [[0, 1, 2], [0, 2, 1], [2, 1, 0], [0, 1], [1, 0], []]
    totals = set()
    for order in orders:
        pool = BlockPool("g0", 3, 0, None)
        pool.queue_up(order)
        totals.add(pool.facts_total())
    assert len(totals) == len(orders)
