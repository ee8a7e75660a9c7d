"""Digests, snapshots and histories: two audit levels tell one story, and whatever is written down reads back."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlab.contract import History, Json, Rejected, Step
from kvlab.memory.allocator import Allocator
from tests.memory.worlds import (
    CHOICES,
    EQUAL,
    QUICK,
    WORLDS,
    Plug,
    PlugPulled,
    article,
    first_bundles,
    layout_of,
    lengths,
    picture,
    propose,
)

SEEDS = st.one_of(st.none(), st.integers(0, 99))
HISTORIES = st.lists(st.tuples(CHOICES, st.integers(1, 40)), min_size=3, max_size=25)
"""Choices, each with the step at which the plug is pulled; most operations have fewer steps."""


def attempt(machine: Allocator, op: Json, fault_at: int) -> tuple[str, Json | None]:
    """What came of an operation: committed with its receipt, or why not."""
    plug = Plug(fault_at)
    machine.observers.append(plug)
    try:
        receipt = machine.apply(op).to_dict()
        del receipt["transaction_id"]
        return "committed", receipt
    except Rejected as no:
        return no.reason, None
    except PlugPulled:
        return "fault", None
    finally:
        machine.observers.remove(plug)


def perform(history: list, *machines: Allocator) -> list[tuple[Json, list[tuple[str, Json | None]], list[str]]]:
    """The same history on several machines, compared in whole after every step.

    Operations are proposed from what the first machine holds. Per step: the operation, outcomes, digests.
    """
    done, bundles = [], []
    for choice, fault_at in [(("allocate", 0, 0, 4), 99), *history]:
        op = propose(choice, lengths(machines[0]), bundles)
        outcomes = [attempt(machine, op, fault_at) for machine in machines]
        if op["op"] == "cache_full" and outcomes[0][0] == "committed":
            bundles += first_bundles(machines[0], op["request"], op["blocks"])
        done.append((op, outcomes, [machine.digest for machine in machines]))
        assert all(machine.snapshot() == machines[0].snapshot() for machine in machines)
    return done


def committed(done: list) -> list[Json]:
    return [op for op, outcomes, _ in done if outcomes[0][0] == "committed"]


# ---------------------------------------------------------------- two audit levels, one story
@settings(QUICK, max_examples=40)
@given(world=st.sampled_from(WORLDS), seed=SEEDS, history=HISTORIES)
def test_both_audits_tell_the_same_story(world, seed, history):
    machines = [Allocator(layout_of(world), audit=audit, queue_seed=seed) for audit in ("state", "chain")]
    before = [machine.digest for machine in machines]
    for op, ((outcome, receipt), (theirs, other)), after in perform(history, *machines):
        assert theirs == outcome, op
        if receipt:
            for row, old, new in ((receipt, before[0], after[0]), (other, before[1], after[1])):
                assert (row.pop("predecessor_digest"), row.pop("successor_digest")) == (old, new)
        assert receipt == other
        assert [a != b for a, b in zip(before, after, strict=True)] == [outcome == "committed"] * 2
        before = after
    for machine in machines:
        machine.check()


@settings(QUICK, max_examples=25)
@given(audit=st.sampled_from(["state", "chain"]), seed=SEEDS, history=HISTORIES)
def test_equal_histories_give_equal_digests_whatever_failed_in_between(audit, seed, history):
    """Refusals and faults leave no trace: only what was committed counts."""
    first, second = (Allocator(layout_of(EQUAL), audit=audit, queue_seed=seed) for _ in range(2))
    done = perform(history, first)
    for op in committed(done):
        second.apply(op)
    assert second.digest == first.digest
    assert second.snapshot() == first.snapshot()


@settings(QUICK, max_examples=40)
@given(one=HISTORIES, other=HISTORIES)
def test_a_different_history_gives_a_different_chain(one, other):
    machines = [Allocator(layout_of(EQUAL), audit="chain") for _ in range(2)]
    left, right = (committed(perform(h, m)) for h, m in zip((one, other), machines, strict=True))
    assume(left != right)
    assert machines[0].digest != machines[1].digest


def test_the_chain_remembers_the_way_where_the_state_forgets_it():
    digests = {}
    for audit in ("state", "chain"):
        for key in ("7be1", "c40d"):
            machine = Allocator(layout_of(EQUAL), audit=audit)
            machine.allocate("A", 4)
            for k in (key, "beef"):
                machine.apply({"op": "cache_full", "request": "A", "blocks": [0], "keys": [k]})
            digests[audit, key] = machine.digest
    assert digests["state", "7be1"] == digests["state", "c40d"]
    assert digests["chain", "7be1"] != digests["chain", "c40d"]


def test_the_chain_names_the_handles():
    """Two operations alike but for the block they take up again."""
    digests = set()
    for block in (0, 1):
        machine = Allocator(layout_of(EQUAL), audit="chain")
        machine.allocate("A", 8)
        machine.apply({"op": "cache_full", "request": "A", "blocks": [0, 1], "keys": ["7be1", "c40d"]})
        machine.apply({"op": "touch", "request": "G", "blocks": first_bundles(machine, "A", [block])})
        digests.add(machine.digest)
    assert len(digests) == 2


def test_an_unknown_audit_is_no_audit():
    with pytest.raises(ValueError, match="audit"):
        Allocator(layout_of(EQUAL), audit="none")


@pytest.mark.parametrize("seed", range(6))
def test_the_first_digest_names_the_queue_order(seed):
    digests = {Allocator(layout_of(EQUAL), queue_seed=s).digest for s in (None, seed, seed + 1)}
    assert len(digests) == 3
    assert Allocator(layout_of(EQUAL), queue_seed=seed).digest in digests


@settings(QUICK, max_examples=20)
@given(world=st.sampled_from(WORLDS), seed=SEEDS, history=HISTORIES)
def test_the_kept_digest_is_the_one_from_nothing(world, seed, history):
    machine = Allocator(layout_of(world), queue_seed=seed)
    seen: list[bool] = []
    machine.observers.append(lambda event: seen.append(machine.facts.total == machine.total_from_nothing()))
    perform(history, machine)
    assert seen and all(seen)


# ---------------------------------------------------------------- snapshots
@settings(QUICK, max_examples=40)
@given(world=st.sampled_from(WORLDS), seed=SEEDS, history=HISTORIES, then=HISTORIES)
def test_a_snapshot_reads_back_and_goes_on_the_same(world, seed, history, then):
    machine = Allocator(layout_of(world), queue_seed=seed)
    perform(history, machine)
    shown = machine.snapshot()
    twin = Allocator(layout_of(WORLDS[0]))
    twin.load(json.loads(json.dumps(shown)))
    assert twin.snapshot() == shown
    assert twin.digest == machine.digest
    assert picture(twin) == picture(machine)
    done = perform(then, machine, twin)
    assert all(mine == theirs for _, (mine, theirs), _ in done)
    assert picture(twin) == picture(machine)


def test_a_snapshot_shows_nothing_of_what_is_open():
    machine = article()
    machine.fork("A", "D")
    before = machine.snapshot()
    txn = machine.stage({"op": "append", "request": "D"})
    assert machine.snapshot() == before
    machine.release("A")
    machine.release("D")
    gone = machine.snapshot()
    twin = article()
    twin.load(gone)
    assert (twin.snapshot(), twin.digest) == (gone, machine.digest)
    txn.rollback()
    assert (machine.snapshot(), machine.digest) == (gone, twin.digest)


MALFORMED = [
    (("blocks", "g0", "generation", 3), "eleven", "malformed_snapshot"),
    (("blocks", "g0", "generation", 3), 1 << 40, "malformed_snapshot"),
    (("blocks", "g0", "generation", 3), -1, "malformed_snapshot"),
    (("blocks", "g1", "valid_rows", 3), 0.5, "malformed_snapshot"),
    (("blocks", "g0", "keys"), {"7": "7be1"}, "malformed_snapshot"),
    (("blocks", "g0", "keys"), {"1000": 7}, "malformed_snapshot"),
    (("blocks", "g0", "keys"), ["7be1"], "malformed_snapshot"),
    (("blocks", "g0", "keys"), {"1002": "7be1"}, "cache_partial_block"),
    (("blocks", "g0", "ref_cnt"), [1, 1, 1], "malformed_snapshot"),
    (("free", "g0"), [1003, 1004], "malformed_snapshot"),
    (("free", "g0"), None, "malformed_snapshot"),
    (("groups", 0, "block_size"), 0, "malformed_snapshot"),
    (("requests", "A", "context"), 0, "malformed_snapshot"),
    (("requests", "A", "tables", "g0", 0), "1000", "malformed_snapshot"),
    (("requests", "A", "tables", "g0", 0), "7@3", "malformed_snapshot"),
    (("epoch",), "40", "malformed_snapshot"),
]


@pytest.mark.parametrize("audit", ["state", "chain"])
@pytest.mark.parametrize(("path", "value", "reason"), MALFORMED)
def test_a_malformed_snapshot_leaves_the_present_state(audit, path, value, reason):
    good = article().snapshot()
    machine = Allocator(layout_of(EQUAL), audit=audit)
    machine.allocate("B", 6)
    before = picture(machine)
    bad: Any = copy.deepcopy(good)
    place = bad
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(Rejected) as no:
        machine.load(bad)
    assert no.value.reason == reason
    assert picture(machine) == before
    machine.load(good)
    assert machine.snapshot() == good


def test_drift_of_the_kept_digest_is_found():
    machine = article()
    machine.facts.total += 1
    with pytest.raises(AssertionError, match="digest drifted"):
        machine.check()


def test_a_change_behind_the_allocators_back_is_found():
    machine = article()
    machine.pools[0].generations()[0] += 1
    with pytest.raises(Rejected):
        machine.check()
    machine = article()
    machine.pools[0].facts.generation[3] += 1
    with pytest.raises(AssertionError, match="digest drifted"):
        machine.check()
    machine = article()
    machine.pools[0].generations()[3] += 1
    with pytest.raises(AssertionError, match="say different things"):
        machine.check()


# ---------------------------------------------------------------- histories
@pytest.fixture
def told() -> History:
    """A fork, a fault half way through its reservation, a copy-on-write, a refusal, a release."""
    machine = article()
    history = History(machine)
    machine.fork("A", "D")
    plug = Plug(3)
    machine.observers.insert(0, plug)
    with pytest.raises(PlugPulled):
        machine.append("D")
    machine.observers.remove(plug)
    machine.append("D")
    with pytest.raises(Rejected):
        machine.truncate("D", 99)
    machine.stage({"op": "append", "request": "A"}).rollback()
    machine.release("A")
    return history


def test_what_a_history_holds(told):
    kinds = [s.kind for s in told]
    assert kinds[0] == "start"
    assert [s.op.get("op") for s in told if s.kind == "committed"] == ["fork", "append", "release"]
    assert [(s.op["op"], s.reason) for s in told if s.kind == "refused"] == [
        ("append", "PlugPulled"), ("truncate", "truncate_beyond_context"), ("append", "rolled_back")]
    broken = next(s for s in told if s.kind == "refused")
    assert (broken.step, broken.staged["phase"]) == ("reserve_every_group_unpublished:g0", "ROLLED_BACK")
    for before, step in zip(told.steps, told.steps[1:], strict=False):
        assert (step.digest != before.digest) == (step.kind == "committed")
        assert (step.staged is None) == (step.kind == "committed" or step.reason == "truncate_beyond_context")
        if step.kind == "committed":
            assert step.receipt["predecessor_digest"] == before.digest
            assert step.receipt["successor_digest"] == step.digest


def test_equal_digests_share_one_snapshot(told):
    for step in told:
        others = [other.committed for other in told if other.digest == step.digest]
        assert all(snapshot is others[0] for snapshot in others)
    written = told.to_dict()
    assert len(written["snapshots"]) == 4 == len({s.digest for s in told})
    assert len(written["steps"]) == len(told) > 20


def test_a_history_reads_back_from_json(told):
    text = json.dumps(told.to_dict())
    back = History.from_dict(json.loads(text))
    plain = [json.loads(json.dumps({k: getattr(s, k) for k in Step.__slots__})) for s in told]
    assert [{k: getattr(s, k) for k in Step.__slots__} for s in back] == plain
    assert json.dumps(back.to_dict()) == text
    assert back.machine is None
    back.detach()
    with pytest.raises(ValueError, match="history/1"):
        History.from_dict({"kvlab": "history/2"})


def test_going_through_a_history(told):
    last = len(told) - 1
    assert told.at == last
    assert told.forward() is told.steps[last]
    assert told.back() is told.steps[last - 1]
    assert told.seek(0) is told.now is told.steps[0]
    assert told.back() is told.steps[0]
    assert told.forward() is told.steps[1]
    for outside in (-1, len(told)):
        with pytest.raises(IndexError):
            told.seek(outside)
    assert told.at == 1


def test_going_back_runs_nothing_again(told):
    before = picture(told.machine)
    told.seek(0)
    assert picture(told.machine) == before


def test_a_detached_history_is_over(told):
    machine, length = told.machine, len(told)
    told.detach()
    machine.cancel("D")
    assert len(told) == length
    assert machine.observers == []


def test_a_fork_shares_the_past_and_nothing_else(told):
    at = next(i for i, s in enumerate(told) if s.kind == "committed" and s.op["op"] == "fork")
    mine, length = picture(told.machine), len(told)
    other = told.fork(at, Allocator(layout_of(EQUAL)))
    assert other.steps == told.steps[: at + 1]
    assert other.machine.digest == told.steps[at].digest
    other.machine.cancel("A")
    other.machine.append("D")
    other.machine.check()
    assert [s.op["op"] for s in other if s.kind == "committed"] == ["fork", "cancel", "append"]
    assert other.now.receipt["paths"] == {"D": "in_place_write_row_o_valid_o_plus_1"}
    assert (picture(told.machine), len(told)) == (mine, length)


def test_a_fork_that_arrives_elsewhere_says_so(told):
    with pytest.raises(ValueError, match="replay arrived at"):
        told.fork(len(told) - 1, Allocator(layout_of(EQUAL), audit="chain"))


@settings(QUICK, max_examples=25)
@given(seed=SEEDS, history=HISTORIES, at=st.integers(0, 10_000), audit=st.sampled_from(["state", "chain"]))
def test_any_point_of_any_history_can_be_forked(seed, history, at, audit):
    machine = Allocator(layout_of(EQUAL), audit=audit, queue_seed=seed)
    told = History(machine)
    perform(history, machine)
    at %= len(told)
    other = told.fork(at, Allocator(layout_of(EQUAL), audit=audit))
    assert other.machine.snapshot() == told.steps[at].committed == other.now.committed
    assert other.machine.digest == told.steps[at].digest
