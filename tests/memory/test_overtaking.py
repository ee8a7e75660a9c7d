"""What happens between staging and publication: who is overtaken, who is believed, and who may still write."""

from __future__ import annotations

import pytest

from kvlab.memory.allocator import Allocator
from tests.memory.worlds import EQUAL, UNEQUAL, article, at_rest, finish, layout_of, picture, refused, shared, staged


# ---------------------------------------------------------------- what overtakes an open transaction
def test_a_fork_between_staging_and_publication_is_a_second_owner():
    machine = article()
    txn = staged(machine, "A")
    machine.fork("A", "D")
    before = picture(machine)
    refused("in_place_shared_tail_write", finish, txn)
    assert picture(machine) == before
    assert at_rest(machine)
    assert txn.phase == "ROLLED_BACK"


OPEN_A = {
    "append": {"op": "append", "request": "A"}, "fork": {"op": "fork", "request": "A", "child": "D"},
    "truncate": {"op": "truncate", "request": "A", "tokens": 5}, "release": {"op": "release", "request": "A"},
    "cache_full": {"op": "cache_full", "request": "A", "blocks": [0], "keys": ["7be1"]},
}


@pytest.mark.parametrize("kind", list(OPEN_A))
@pytest.mark.parametrize(("between", "reason"), [
    ([{"op": "append", "request": "A", "tokens": 3}], "stale_table_version"),
    ([{"op": "truncate", "request": "A", "tokens": 2}], "stale_table_version"),
    ([{"op": "release", "request": "A"}], "unknown_request"),
    ([{"op": "release", "request": "A"}, {"op": "allocate", "request": "A", "tokens": 6}], "stale_request_generation"),
])
def test_what_a_transaction_read_must_still_be_so(kind, between, reason):
    machine = Allocator(layout_of(EQUAL))
    machine.allocate("A", 6)
    txn = machine.stage(OPEN_A[kind])
    for op in between:
        machine.apply(op)
    before = picture(machine)
    refused(reason, finish, txn)
    assert picture(machine) == before
    assert at_rest(machine)
    machine.check()


@pytest.mark.parametrize("op", [{"op": "allocate", "request": "D", "tokens": 1},
                                {"op": "fork", "request": "A", "child": "D"}])
def test_two_transactions_cannot_both_bring_the_same_request(op):
    machine = Allocator(layout_of(EQUAL))
    machine.allocate("A", 6)
    txn = machine.stage(op)
    machine.allocate("D", 2)
    refused("request_exists", finish, txn)


def cached() -> Allocator:
    """One free cached bundle, 1000@1 and 2000@1, at the end of full queues."""
    machine = Allocator(layout_of(EQUAL))
    machine.allocate("A", 4)
    machine.apply({"op": "cache_full", "request": "A", "blocks": [0], "keys": ["7be1"]})
    machine.release("A")
    return machine


BUNDLE = [["1000@1", "2000@1"]]
EVERYTHING = {"op": "allocate", "request": "F", "tokens": 28}
TOUCH = {"op": "touch", "request": "G", "blocks": BUNDLE}
EVICT = {"op": "evict", "blocks": BUNDLE}


@pytest.mark.parametrize("op", [TOUCH, EVICT])
def test_a_cached_bundle_may_be_reserved_or_gone_by_the_time(op):
    machine = cached()
    other = machine.stage(EVERYTHING)
    refused("block_reserved", machine.apply, op)
    finish(other)
    refused("stale_block_generation", machine.apply, op)


def test_an_eviction_may_find_its_bundle_reserved():
    machine = cached()
    txn, _ = machine.stage(EVICT), machine.stage(EVERYTHING)
    refused("block_reserved", txn.publish)


def test_a_promised_bundle_is_not_given_away():
    """A hit that is staged is pinned: nobody may take its blocks between the promise and its publication."""
    machine = cached()
    before = picture(machine)
    txn = machine.stage(TOUCH)
    refused("out_of_memory", machine.apply, EVERYTHING)
    assert picture(machine) == before
    txn.rollback()
    machine.apply(EVERYTHING)
    machine.check()


@pytest.mark.parametrize("op", [TOUCH, EVICT])
def test_a_cached_bundle_may_have_lost_its_identity_by_the_time(op):
    machine = cached()
    txn = machine.stage(op)
    machine.apply(EVICT)
    refused("touch_without_identity", txn.publish)
    machine.check()


def test_a_cached_bundle_may_have_another_identity_by_the_time():
    machine = cached()
    machine.apply(TOUCH)
    txn = machine.stage(TOUCH | {"request": "H"})
    machine.apply({"op": "cache_full", "request": "G", "blocks": [0], "keys": ["c40d"]})
    refused("touch_without_identity", txn.publish)


def test_rows_that_a_broken_off_transaction_may_have_overwritten_are_not_found_again():
    """The identity stays committed, to the bit; but who would touch the block would read the wrong rows."""
    machine = cached()
    before = picture(machine)
    machine.stage(EVERYTHING).rollback()
    assert picture(machine) == before
    refused("touch_without_identity", machine.apply, TOUCH)
    machine.apply(EVERYTHING)
    machine.check()
    assert not any(p.spoiled for p in machine.pools)


def test_a_reservation_that_failed_has_overwritten_nothing():
    machine = cached()
    refused("out_of_memory", machine.allocate, "F", 36)
    assert machine.apply(TOUCH).requests == ("G",)


def test_bundles_are_one_block_of_one_identity_in_every_group():
    machine = cached()
    machine.allocate("B", 4)
    machine.apply({"op": "cache_full", "request": "B", "blocks": [0], "keys": ["c40d"]})
    other = machine.snapshot()["requests"]["B"]["tables"]
    before = picture(machine)
    for blocks in ([["1000@1", other["g1"][0]]], [["1000@1"]], [["1000@1", "2000@1", "2000@1"]]):
        refused("cross_group_bundle_mismatch", machine.apply, TOUCH | {"blocks": blocks})
    assert picture(machine) == before


def test_bundles_of_unequal_blocks_do_not_make_a_table():
    machine = Allocator(layout_of(UNEQUAL))
    machine.allocate("A", 8)
    machine.apply({"op": "cache_full", "request": "A", "blocks": [0], "keys": ["7be1"]})
    refused("cross_group_bundle_mismatch", machine.apply, TOUCH | {"blocks": [["1000@1", "2000@1", "3000@1"]]})


def test_as_many_keys_as_blocks():
    op = {"op": "cache_full", "request": "A", "blocks": [0, 1], "keys": ["7be1"]}
    refused("unknown_operation", article().apply, op)


# ---------------------------------------------------------------- what the caller believes
BELIEFS = {"expected_epoch": 43, "expected_request_generation": 41, "expected_table_version": 2,
           "expected_tail": {"g0": "1003@12", "g1": "2003@6"}}


@pytest.mark.parametrize(("belief", "wrong", "reason"), [
    ("expected_epoch", 42, "stale_allocator_epoch"), ("expected_request_generation", 1, "stale_request_generation"),
    ("expected_table_version", 1, "stale_table_version"),
    ("expected_tail", {"g0": "1003@12", "g1": "2002@12"}, "stale_block_generation"),
    ("expected_tail", {"g7": "1003@12"}, "unknown_operation"),
])
@pytest.mark.parametrize("op", [{"op": "append"}, {"op": "fork", "child": "E"}, {"op": "truncate", "tokens": 3},
                                {"op": "cancel"}, {"op": "cache_full", "blocks": [0], "keys": ["7be1"]}])
def test_beliefs_are_compared_when_they_are_given(op, belief, wrong, reason):
    machine = article()
    machine.fork("A", "D")
    machine.append("D")
    machine.release("A")
    believing = op | {"request": "D"} | BELIEFS
    before = picture(machine)
    refused(reason, machine.apply, believing | {belief: wrong})
    assert picture(machine) == before
    assert machine.apply(believing).outcome == "committed"


def test_a_second_life_of_a_name_is_another_request():
    machine = Allocator(layout_of(EQUAL))
    machine.allocate("A", 6)
    first = machine.requests["A"].generation
    machine.release("A")
    machine.allocate("A", 6)
    refused("stale_request_generation", machine.apply,
            {"op": "append", "request": "A", "expected_request_generation": first})


# ---------------------------------------------------------------- late writers
def test_a_late_writer_with_the_handle_of_an_earlier_lifetime():
    machine = shared(article())
    machine.append("D")
    machine.admit_writer("D", {"g0": "1003@12", "g1": "2003@6"})
    machine.truncate("D", 32)
    machine.allocate("F", 16)
    assert machine.snapshot()["requests"]["F"]["tables"] == {"g0": ["1003@13"], "g1": ["2003@7"]}
    machine.admit_writer("F", {"g0": "1003@13", "g1": "2003@7"})
    for request in ("F", "D"):
        refused("stale_block_generation", machine.admit_writer, request, {"g0": "1003@12", "g1": "2003@6"})
    refused("stale_block_generation", machine.admit_writer, "D", {"g0": "1003@13", "g1": "2003@7"})
    machine.cancel("D")
    refused("unknown_request", machine.admit_writer, "D", {"g0": "1003@12", "g1": "2003@6"})


def test_a_writer_into_a_shared_tail_is_turned_away():
    machine = shared(article())
    for request in "AD":
        refused("in_place_shared_tail_write", machine.admit_writer, request, {"g0": "1002@9", "g1": "2002@12"})


def test_the_writer_of_a_rolled_back_transaction_is_turned_away():
    """The same handle text is issued again: the fence is the transaction, not the handle."""
    machine = shared(article())
    old = staged(machine, "D")
    handle = old.staged()["reserved"]["g0"][0]["handle"]
    old.rollback()
    new = staged(machine, "D")
    assert new.staged()["reserved"]["g0"][0]["handle"] == handle == "1003@12"
    before = (picture(machine), new.staged())
    for late in (lambda: old.copied("g0", 2), lambda: old.wrote("g0"), old.publish):
        refused("transaction_closed", late)
    old.rollback()
    assert (picture(machine), new.staged()) == before
    finish(new)
    refused("transaction_closed", new.wrote, "g0")
    refused("rollback_after_publication", new.rollback)


def test_a_tail_that_is_being_written_is_not_given_away():
    """Its owner goes while the transaction is open; the late row must not land in somebody else's block."""
    machine = Allocator(layout_of(((4, 2), (4, 2))))
    machine.allocate("A", 6)
    txn = staged(machine, "A")
    machine.cancel("A")
    refused("out_of_memory", machine.allocate, "F", 8)
    machine.allocate("F", 4)
    assert machine.snapshot()["requests"]["F"]["tables"] == {"g0": ["1000@2"], "g1": ["2000@2"]}
    refused("unknown_request", finish, txn)
    machine.allocate("H", 4)
    assert machine.snapshot()["requests"]["H"]["tables"] == {"g0": ["1001@2"], "g1": ["2001@2"]}
    machine.check()


def test_loading_a_snapshot_ends_what_was_open():
    machine = shared(article())
    copying, writing = staged(machine, "D"), machine.stage({"op": "release", "request": "A"})
    machine.load(machine.snapshot())
    before = picture(machine)
    fresh = staged(machine, "D")
    for txn in (copying, writing):
        refused("transaction_closed", txn.publish)
        txn.rollback()
    assert picture(machine) == before
    finish(fresh)
    machine.check()


def test_the_record_of_an_intent_stays_what_it_was():
    machine = shared(article())
    txn = machine.stage({"op": "release", "request": "D"})
    record = txn.record()
    assert [str(h) for h in record.touched_handles] == ["1000@3", "1001@4", "1002@9", "2000@6", "2001@8", "2002@12"]
    assert (record.expected_table_version, record.expected_allocator_epoch) == ((1,), 42)
    txn.publish()
    after = txn.record()
    assert (after.touched_handles, after.expected_table_version) == (record.touched_handles, (1,))
    assert after.publication_state == "PUBLISHED"


def test_a_view_is_not_handed_out_once_the_request_has_moved_on():
    """Its table would name blocks that this transaction may not write."""
    machine = article()
    txn = staged(machine, "A")
    machine.truncate("A", 20)
    before = picture(machine)
    refused("stale_table_version", txn.view)
    assert picture(machine) == before
    refused("stale_table_version", finish, txn)
