"""How a change becomes visible: the order of its steps, who may still write, and what overtakes what."""

from __future__ import annotations

import pytest

from kvlab.contract import Event, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.records import BOUNDARY, COPY_ON_WRITE, IN_PLACE, PUBLICATION_ORDER
from kvlab.memory.transaction import AllocatorTxn
from tests.memory.worlds import EQUAL, UNEQUAL, Plug, PlugPulled, article, at_rest, layout_of, picture

VALIDATE, LOAD, RESERVE, RETAIN, COPY, WRITE, FRONTIERS, PUBLISH, RELEASE = PUBLICATION_ORDER
PER_GROUP = (RESERVE, COPY, WRITE)


def refused(reason: str, call, *args) -> None:
    with pytest.raises(Rejected) as no:
        call(*args)
    assert no.value.reason == reason


def shared(machine: Allocator) -> Allocator:
    """A and D share everything, the tail of two rows included."""
    machine.append("A")
    machine.fork("A", "D")
    return machine


def staged(machine: Allocator, request: str, tokens: int = 1) -> AllocatorTxn:
    return machine.stage({"op": "append", "request": request, "tokens": tokens})


def in_order(log: list[str], groups: tuple[str, ...] = ("g0", "g1")) -> bool:
    """Whether a log shows the nine steps of a copy-on-write append (0x05C), each group once, nothing else."""
    names = [entry.partition(":")[0] for entry in log]
    steps = list(dict.fromkeys(names))
    if tuple(steps) != PUBLICATION_ORDER:
        return False
    if names != sorted(names, key=steps.index):
        return False
    return all([e.partition(":")[2] for e in log if e.startswith(step)] == list(groups if step in PER_GROUP else [""])
               for step in steps)


# ---------------------------------------------------------------- the order
def cow_log(machine: Allocator) -> list[str]:
    txn = staged(shared(machine), "D")
    txn.finish_writes()
    assert txn.publish().paths == (("D", COPY_ON_WRITE),)
    return txn.log


def test_the_nine_steps_of_a_copy_on_write():
    assert in_order(cow_log(article()))


def written_before_copied(txn: AllocatorTxn) -> None:
    for group in txn.allocator.groups:
        txn.wrote(group.group_id)
    txn.copy()


def group_after_group(txn: AllocatorTxn) -> None:
    """Each group copies and writes before the next one copies."""
    for g, group in enumerate(txn.allocator.groups):
        if txn.copies:
            txn.copied(group.group_id, txn.copies[g].rows)
        txn.wrote(group.group_id)


@pytest.mark.parametrize("swap", [written_before_copied, group_after_group])
def test_a_planted_swap_of_the_writes_shows_in_the_log(monkeypatch, swap):
    monkeypatch.setattr(AllocatorTxn, "finish_writes", swap)
    assert not in_order(cow_log(article()))


def test_a_planted_early_end_of_the_leases_shows_in_the_log(monkeypatch):
    commit = Allocator.commit

    def too_early(machine: Allocator, txn: AllocatorTxn):
        txn.release_leases()
        txn.log.append(RELEASE)
        return commit(machine, txn)

    monkeypatch.setattr(Allocator, "commit", too_early)
    assert not in_order(cow_log(article()))


def test_each_step_has_really_happened_when_it_is_logged():
    """The log against the facts: what is reserved, leased, moved and visible at every event."""
    moved: list[tuple[int, int, int, int]] = []

    def mover(*call: int) -> int:
        assert machine.pools[call[0]].leases == {call[1]: 1}
        moved.append(call)
        return call[3]

    machine = shared(article())
    machine.mover = mover
    before, facts = picture(machine), {}

    def watch(event: Event) -> None:
        if event.kind == "staged":
            assert picture(machine) == before
        facts.setdefault(event.step, []).append((
            [sorted(p.reserved) for p in machine.pools], [dict(p.leases) for p in machine.pools], len(moved)))

    machine.observers.append(watch)
    machine.append("D")
    nothing, both, leased = [[], []], [[3], [3]], [{2: 1}, {2: 1}]
    assert facts == {
        VALIDATE: [(nothing, [{}, {}], 0)], LOAD: [(nothing, [{}, {}], 0)],
        RESERVE: [([[3], []], [{}, {}], 0), (both, [{}, {}], 0)], RETAIN: [(both, leased, 0)],
        COPY: [(both, leased, 1), (both, leased, 2)], WRITE: [(both, leased, 2)] * 2, FRONTIERS: [(both, leased, 2)],
        PUBLISH: [(nothing, [{}, {}], 2)],
    }
    assert moved == [(0, 2, 3, 2), (1, 2, 3, 2)]


# ---------------------------------------------------------------- which path
def test_three_paths_of_an_append():
    machine = article()
    assert machine.append("A").paths == (("A", IN_PLACE),)
    machine.fork("A", "D")
    assert machine.append("D").paths == (("D", COPY_ON_WRITE),)
    assert machine.append("A").paths == (("A", IN_PLACE),)
    machine.cancel("D")
    machine.truncate("A", 32)
    assert machine.append("A").paths == (("A", BOUNDARY),)


def test_a_sole_owner_writes_in_place_and_moves_nothing():
    machine = article()
    before = machine.snapshot()
    receipt = machine.append("A")
    assert (receipt.new_physical_blocks, receipt.copied_rows, receipt.refcount_deltas) == (0, 0, ())
    after = machine.snapshot()
    assert after["requests"]["A"]["tables"] == before["requests"]["A"]["tables"]
    assert (before["blocks"]["g0"]["valid_rows"][2], after["blocks"]["g0"]["valid_rows"][2]) == (1, 2)
    assert after["free"] == before["free"]
    assert at_rest(machine)


def test_of_two_owners_in_one_batch_the_first_copies_and_the_last_stays():
    machine = shared(article())
    receipt = machine.apply({"op": "append", "requests": {"D": 1, "A": 1}})
    assert receipt.paths == (("D", COPY_ON_WRITE), ("A", IN_PLACE))
    assert (receipt.new_bundles, receipt.copied_rows) == (1, 2)
    assert dict(receipt.refcount_deltas) == {"1003@12": 1, "1002@9": -1, "2003@6": 1, "2002@12": -1}
    shown = machine.snapshot()
    assert [shown["requests"][r]["tables"]["g0"][2] for r in "AD"] == ["1002@9", "1003@12"]
    assert shown["blocks"]["g0"]["valid_rows"] == [16, 16, 3, 3]
    assert shown["blocks"]["g0"]["ref_cnt"] == [2, 2, 1, 1]


def test_the_last_owner_copies_too_where_the_first_one_still_sees_the_row():
    """A has taken back a row that D still reads; until the batch is published D reads it in the old block."""
    machine = Allocator(layout_of(EQUAL))
    machine.allocate("A", 7)
    machine.fork("A", "D")
    machine.truncate("A", 6)
    receipt = machine.apply({"op": "append", "requests": [["D", 1], ["A", 1]]})
    assert receipt.paths == (("D", COPY_ON_WRITE), ("A", COPY_ON_WRITE))
    assert "1001@1" in receipt.freed
    machine.check()


def test_the_receipt_of_a_copy_names_a_source_that_became_free():
    machine = Allocator(layout_of(EQUAL))
    machine.allocate("A", 6)
    machine.fork("A", "D")
    txn = staged(machine, "D")
    machine.release("A")
    txn.finish_writes()
    receipt = txn.publish()
    assert receipt.freed == ("1001@1", "2001@1")
    assert at_rest(machine)
    machine.check()


def test_a_foreign_lease_forces_a_copy():
    machine = shared(article())
    first = staged(machine, "D")
    machine.cancel("D")
    assert machine.pools[0].ref_cnt[2] == 1
    refused("out_of_memory", machine.append, "A")
    first.rollback()
    assert machine.append("A").paths == (("A", IN_PLACE),)


def test_a_foreign_lease_forces_a_copy_where_there_is_room():
    machine = Allocator(layout_of(EQUAL))
    machine.allocate("A", 6)
    machine.fork("A", "D")
    first = staged(machine, "D")
    machine.cancel("D")
    receipt = machine.append("A")
    assert receipt.paths == (("A", COPY_ON_WRITE),)
    refused("unknown_request", finish, first)
    assert at_rest(machine)
    machine.check()


def test_a_cached_tail_is_copied_so_that_its_identity_keeps_its_rows():
    machine = Allocator(layout_of(EQUAL))
    machine.allocate("A", 8)
    machine.apply({"op": "cache_full", "request": "A", "blocks": [1], "keys": ["7be1"]})
    machine.truncate("A", 6)
    receipt = machine.append("A")
    assert receipt.paths == (("A", COPY_ON_WRITE),)
    assert receipt.copied_rows == 2
    assert machine.apply({"op": "touch", "request": "G", "blocks": [["1001@1", "2001@1"]]}).requests == ("G",)
    machine.check()


def test_every_group_takes_its_own_path_where_block_sizes_differ():
    """Token 6: the middle of a block of 4 and of 8, the edge of a block of 2."""
    machine = Allocator(layout_of(UNEQUAL))
    machine.allocate("A", 6)
    machine.fork("A", "D")
    receipt = machine.append("D")
    assert receipt.paths == (("D", COPY_ON_WRITE),)
    assert dict(receipt.refcount_deltas) == {"1002@1": 1, "1001@1": -1, "2003@1": 1, "3001@1": 1, "3000@1": -1}
    assert receipt.copied_rows == 6
    machine.check()


# ---------------------------------------------------------------- all groups or none
@pytest.mark.parametrize("groups", [((4, 9), (4, 2)), ((4, 2), (4, 9))])
def test_one_group_without_room_stops_all(groups):
    machine = Allocator(layout_of(groups))
    machine.allocate("A", 5)
    before = picture(machine)
    refused("out_of_memory", machine.allocate, "B", 5)
    assert picture(machine) == before
    assert at_rest(machine)


def test_what_is_missing_is_named_and_the_transaction_stays_open():
    machine = shared(article())
    before = picture(machine)
    txn = staged(machine, "D")
    refused("publish_before_copy_complete", txn.publish)
    refused("copied_row_count_drift", txn.copied, "g0", 3)
    refused("unknown_operation", txn.copied, "g7", 2)
    txn.copied("g0", 2)
    refused("publish_before_copy_complete", txn.publish)
    txn.copied("g1", 2)
    refused("publish_before_append_write", txn.publish)
    txn.wrote("g0")
    refused("half_bundle_publication", txn.publish)
    assert picture(machine) == before
    txn.wrote("g1")
    assert txn.publish().outcome == "committed"


@pytest.mark.parametrize("moves", ["too few rows", "nothing at all"])
def test_a_copy_that_goes_wrong_leaves_nothing_open(moves):
    machine = shared(article())
    before = picture(machine)

    def mover(group: int, src: int, dst: int, rows: int) -> int:
        if moves == "too few rows":
            return rows - 1
        raise PlugPulled("the copy engine is gone")

    machine.mover = mover
    with pytest.raises((Rejected, PlugPulled)):
        machine.append("D")
    assert picture(machine) == before
    assert at_rest(machine)
    machine.mover = None
    assert machine.append("D").paths == (("D", COPY_ON_WRITE),)


@pytest.mark.parametrize("at", range(1, 11))
def test_pulling_the_plug_at_each_step_of_a_copy_on_write(at):
    machine = shared(article())
    before, plug = picture(machine), Plug(at)
    machine.observers.append(plug)
    with pytest.raises(PlugPulled):
        machine.append("D")
    assert picture(machine) == before
    assert at_rest(machine)
    receipt = machine.append("D")
    assert dict(receipt.refcount_deltas)["1003@12"] == 1


def test_an_observer_that_fails_after_publication_changes_nothing_any_more():
    machine = shared(article())

    def late(event: Event) -> None:
        if event.kind == "committed":
            raise PlugPulled(event.step)

    machine.observers.append(late)
    with pytest.raises(PlugPulled):
        machine.append("D")
    machine.check()
    assert machine.requests["D"].context == 35
    assert at_rest(machine)


# ---------------------------------------------------------------- what overtakes an open transaction
def finish(txn: AllocatorTxn):
    txn.finish_writes()
    return txn.publish()


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
    txn, other = machine.stage(op), machine.stage(EVERYTHING)
    refused("block_reserved", txn.publish)
    refused("block_reserved", machine.apply, op)
    finish(other)
    refused("stale_block_generation", machine.apply, op)


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
