"""Leases outlast a request, compensation follows a publication, and neither is part of what is committed."""

from __future__ import annotations

import pytest

from kvlab.contract import Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.records import COPY_ON_WRITE, IN_PLACE, Lease
from kvlab.memory.requests import Batch
from tests.memory.worlds import EQUAL, article, layout_of, picture, refused


@pytest.fixture(params=["state", "chain"])
def machine(request):
    machine = Allocator(layout_of(((4, 4), (4, 4))), audit=request.param)
    machine.allocate("A", 6)
    return machine


# ---------------------------------------------------------------- leases
def test_a_lease_changes_nothing_that_is_committed(machine):
    before = picture(machine)
    taken = machine.lease("A")
    assert isinstance(taken, Lease) and taken.kind == "read"
    assert [str(h) for h in taken.handles] == ["1000@1", "1001@1", "2000@1", "2001@1"]
    assert picture(machine) == before
    machine.unlease(taken)
    assert picture(machine) == before
    refused("lease_ended", machine.unlease, taken)


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("end", ["release", "cancel"])
def test_released_blocks_stay_out_of_circulation_until_the_lease_ends(machine, kind, end):
    """The owner is gone, the transfer is not: a late write must not land in somebody else's block."""
    taken = machine.lease("A", kind)
    getattr(machine, end)("A")
    machine.check()
    receipt = machine.allocate("B", 8)
    assert {h.split("@")[0] for h, _ in receipt.refcount_deltas} == {"1002", "1003", "2002", "2003"}
    before = picture(machine)
    refused("out_of_memory", machine.allocate, "C", 1)
    assert picture(machine) == before
    machine.unlease(taken)
    assert machine.allocate("C", 8).new_bundles == 2


def test_two_leases_of_one_block_end_one_after_the_other(machine):
    first, second = machine.lease("A", blocks=[1]), machine.lease("A", blocks=[1])
    machine.release("A")
    machine.allocate("B", 12)
    for lease, room in ((first, False), (second, True)):
        machine.unlease(lease)
        if not room:
            refused("out_of_memory", machine.allocate, "C", 1)
    machine.allocate("C", 1)


def test_a_read_lease_forces_the_owner_to_copy(machine):
    taken = machine.lease("A")
    assert machine.append("A").paths == (("A", COPY_ON_WRITE),)
    assert machine.append("A").paths == (("A", IN_PLACE),)
    machine.unlease(taken)
    machine.check()


def test_a_write_lease_is_exclusive(machine):
    taken = machine.lease("A", "write", [1])
    for call in (lambda: machine.lease("A"), lambda: machine.lease("A", "write", [1]), lambda: machine.append("A"),
                 lambda: machine.fork("A", "D")):
        before = picture(machine)
        refused("write_in_flight", call)
        assert picture(machine) == before
    machine.unlease(taken)
    assert machine.append("A").paths == (("A", IN_PLACE),)


def test_nobody_may_write_what_others_own_may_find_or_read(machine):
    machine.fork("A", "D")
    refused("in_place_shared_tail_write", machine.lease, "A", "write")
    machine.release("D")
    reader = machine.lease("A", blocks=[1])
    refused("in_place_shared_tail_write", machine.lease, "A", "write", [1])
    machine.unlease(reader)
    machine.apply({"op": "cache_full", "request": "A", "blocks": [0], "keys": ["7be1"]})
    refused("in_place_shared_tail_write", machine.lease, "A", "write", [0])
    assert machine.lease("A", "write", [1]).kind == "write"


def test_what_cannot_be_leased(machine):
    refused("unknown_request", machine.lease, "Z")
    refused("truncate_beyond_context", machine.lease, "A", "read", [2])
    refused("truncate_beyond_context", machine.lease, "A", "read", [-1])
    with pytest.raises(ValueError, match="'read' or 'write'"):
        machine.lease("A", "own")
    assert not machine.held and not any(p.leases for p in machine.pools)


def test_a_snapshot_that_is_loaded_ends_every_lease(machine):
    taken = machine.lease("A", "write", [1])
    machine.load(machine.snapshot())
    refused("lease_ended", machine.unlease, taken)
    assert machine.append("A").paths == (("A", IN_PLACE),)


# ---------------------------------------------------------------- compensation
@pytest.mark.parametrize("start", [lambda m: m.allocate("B", 3), lambda m: m.fork("A", "B")])
def test_what_started_is_cancelled_by_a_successor(machine, start):
    before, epoch = machine.snapshot(), machine.epoch
    receipt = start(machine)
    undone = machine.compensate(receipt)
    assert (undone.operation, undone.reason, undone.allocator_epoch_after) == ("cancel", "compensate", epoch + 2)
    assert undone.predecessor_digest == receipt.successor_digest
    after = machine.snapshot()
    assert after["requests"] == before["requests"]
    assert after["epoch"] == before["epoch"] + 2
    machine.check()


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_appended_rows_are_cut_off_again_and_the_history_stays(machine, tokens):
    receipt = machine.append("A", tokens)
    undone = machine.compensate(receipt)
    assert (undone.operation, undone.reason) == ("truncate", "compensate")
    assert machine.requests["A"].context == 6
    assert machine.requests["A"].version == 3
    assert machine.digest != receipt.predecessor_digest


def test_a_copied_tail_stays_copied():
    machine = article()
    machine.append("A")
    machine.fork("A", "D")
    receipt = machine.append("D")
    machine.compensate(receipt)
    assert machine.append("D").paths == (("D", IN_PLACE),)
    assert machine.requests["A"].context == 34


def test_a_compensation_comes_too_late_once_the_request_has_moved_on(machine):
    receipt = machine.append("A")
    machine.append("A")
    before = picture(machine)
    refused("stale_table_version", machine.compensate, receipt)
    assert picture(machine) == before


@pytest.mark.parametrize("give_back", [lambda m: m.release("A"), lambda m: m.truncate("A", 2),
                                       lambda m: m.apply({"op": "cache_full", "request": "A", "blocks": [0],
                                                          "keys": ["7be1"]})])
def test_what_gave_something_back_is_not_compensable(machine, give_back):
    receipt = give_back(machine)
    before = picture(machine)
    refused("not_compensable", machine.compensate, receipt)
    assert picture(machine) == before


# ---------------------------------------------------------------- a hit and the rest of a prompt
def cached(machine: Allocator) -> list[list[str]]:
    """Two cached bundles of A, free; two more that are free and plain."""
    machine.append("A", 2)
    machine.apply({"op": "cache_full", "request": "A", "blocks": [0, 1], "keys": ["7be1", "c40d"]})
    machine.release("A")
    return [["1000@1", "2000@1"], ["1001@1", "2001@1"]]


def test_hit_blocks_and_fresh_ones_come_in_one_transaction(machine):
    bundles = cached(machine)
    receipt = machine.apply({"op": "touch", "request": "B", "blocks": bundles, "tokens": 13})
    assert (receipt.new_bundles, receipt.useful_new_rows) == (2, 5)
    assert machine.requests["B"].context == 13
    machine.check()


def test_hit_blocks_in_the_free_queue_count_against_what_is_free(machine):
    """Four free blocks, two of them hits: a prompt of two hits and three more does not fit, and nothing moves."""
    bundles = cached(machine)
    before = picture(machine)
    refused("out_of_memory", machine.apply, {"op": "touch", "request": "B", "blocks": bundles, "tokens": 17})
    assert picture(machine) == before
    assert not any(p.leases or p.parked or p.reserved for p in machine.pools)


@pytest.mark.parametrize(("change", "reason"), [
    ({"tokens": 7}, "invalid_length"), ({"blocks": [["1000@1", "2000@1"]] * 2}, "block_twice_in_table")])
def test_a_hit_that_makes_no_table(machine, change, reason):
    op = {"op": "touch", "request": "B", "blocks": cached(machine)} | change
    before = picture(machine)
    refused(reason, machine.apply, op)
    assert picture(machine) == before


def test_hit_rows_are_published_only_when_the_new_ones_are_written(machine):
    txn = machine.stage({"op": "touch", "request": "B", "blocks": cached(machine), "tokens": 9})
    refused("publish_before_append_write", txn.publish)
    assert [v.start for v in txn.view()] == [8]
    txn.finish_writes()
    txn.publish()
    assert machine.requests["B"].context == 9


def test_the_batch_way_steps_aside_for_a_lease():
    machine = Allocator(layout_of(EQUAL), audit="chain")
    for name in "AB":
        machine.allocate(name, 6)
    batch = Batch("AB")
    taken = machine.lease("A", "write", [1])
    with pytest.raises(Rejected, match="write_in_flight"):
        machine.append_batch(batch)
    machine.unlease(taken)
    assert machine.append_batch(batch).paths == (("A", IN_PLACE), ("B", IN_PLACE))
