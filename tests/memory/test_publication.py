"""How a change becomes visible: the order of its steps, the path it takes, all groups or none."""

from __future__ import annotations

import pytest

from kvlab.contract import Event, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.records import BOUNDARY, COPY_ON_WRITE, IN_PLACE, PUBLICATION_ORDER
from kvlab.memory.transaction import AllocatorTxn
from tests.memory.worlds import (
    EQUAL,
    UNEQUAL,
    Plug,
    PlugPulled,
    article,
    at_rest,
    finish,
    layout_of,
    picture,
    refused,
    shared,
    staged,
)

VALIDATE, LOAD, RESERVE, RETAIN, COPY, WRITE, FRONTIERS, PUBLISH, RELEASE = PUBLICATION_ORDER
PER_GROUP = (RESERVE, COPY, WRITE)


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
    assert machine.pools[0].refs(2) == 1
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
