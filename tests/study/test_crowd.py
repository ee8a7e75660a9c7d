"""Many writers: whatever the threads do, one order explains it; and a wrong row, a gap or a late claim is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlab.study.crowd import Crowd, in_order, judge, let_them_write, told_again


@pytest.fixture(scope="module")
def run():
    crowd = Crowd(calls=1200, threads=6, seed=7)
    return crowd, crowd.run()


def test_a_crowd_meets_and_one_order_explains_it():
    seen = let_them_write(2000, threads=6, seed=3)
    assert seen.unbroken and seen.in_time and 0 < seen.rows == seen.own
    assert seen.calls == 2000 == sum(seen.receipts.values()) + sum(seen.refusals.values())
    assert set(seen.receipts) == {"allocate", "append", "fork", "truncate", "release", "cancel"}
    assert seen.copied > 20, "hardly a tail was copied"
    assert seen.met > 200, "the threads hardly met"


def test_one_thread_alone_meets_nobody():
    seen = let_them_write(300, threads=1, seed=1)
    assert seen.met == 0 and seen.unbroken and seen.rows == seen.own


def test_a_missing_receipt_breaks_the_chain(run):
    crowd, calls = run
    lost = in_order(calls)[40]
    assert judge(crowd, calls).unbroken
    seen = judge(crowd, [c for c in calls if c is not lost])
    assert not seen.unbroken and seen.own < seen.rows


def test_a_call_that_claims_to_have_ended_before_it_published_is_noticed(run):
    crowd, calls = run
    late = in_order(calls)[40]
    assert judge(crowd, calls).in_time
    assert not judge(crowd, [replace(c, last=c.first) if c is late else c for c in calls]).in_time


def test_one_wrong_row_in_memory_is_noticed(run):
    crowd, calls = run
    before = judge(crowd, calls)
    name = next(iter(crowd.machine.requests))
    block = crowd.machine.requests[name].tables[0][0] & 0xFFFFFFFF
    kept = crowd.memory[0, block, 0]
    crowd.memory[0, block, 0] = -1
    try:
        assert judge(crowd, calls).own < before.own == before.rows
    finally:
        crowd.memory[0, block, 0] = kept


def test_a_copy_that_moves_too_little_is_noticed():
    class Careless(Crowd):
        def move(self, group, src, dst, rows):
            super().move(group, src, dst, rows - 1)
            return rows

    crowd = Careless(calls=1200, threads=6, seed=5)
    seen = judge(crowd, crowd.run())
    assert seen.unbroken and seen.own < seen.rows


def test_what_a_thread_raises_reaches_the_caller():
    class Broken(Crowd):
        def move(self, group, src, dst, rows):
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        Broken(calls=600).run()


def test_told_again_is_plain_list_arithmetic(run):
    _, calls = run
    told = told_again(in_order(calls))
    assert all(len(rows) == len(set(rows)) for rows in told.values())
