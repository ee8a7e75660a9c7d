"""The short way and the long way are one way: equal receipts, digests, states and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.contract import Json, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.records import BOUNDARY, IN_PLACE
from kvlab.memory.requests import Batch
from tests.memory.worlds import (
    CHOICES,
    EQUAL,
    NAMES,
    QUICK,
    WORLDS,
    at_rest,
    first_bundles,
    layout_of,
    lengths,
    propose,
    queues_are_sound,
)


def outcome(call: Any, *args: Any) -> Json | str:
    try:
        return call(*args).to_dict()
    except Rejected as no:
        return no.reason


def short(machine: Allocator, op: Json, batches: dict[tuple, Batch]) -> Json | str:
    """Perform an operation by its method where there is one, a batch of single tokens as a kept batch."""
    match op:
        case {"op": "allocate", "request": request, "tokens": tokens}:
            return outcome(machine.allocate, request, tokens)
        case {"op": "release" | "cancel" as kind, "request": request}:
            return outcome(getattr(machine, kind), request)
        case {"op": "release", "request": request, "tail_first": True}:
            return outcome(machine.release, request, True)
        case {"op": "cache_full", "request": request, "blocks": blocks, "keys": keys}:
            return outcome(machine.cache_full, request, blocks, keys)
        case {"op": "touch", "request": request, "blocks": [_, *_] as blocks}:
            try:
                columns = zip(*blocks, strict=True)
                rows = [[p.word(t) for t in row] for p, row in zip(machine.pools, columns, strict=True)]
            except (Rejected, ValueError):
                return outcome(machine.apply, op)
            hit = len(rows[0]) * machine.pools[0].block_size
            return outcome(machine.touch, request, rows, op.get("tokens", hit))
        case {"op": "append", "requests": rows} if len(rows) > 1 and {n for _, n in rows} == {1}:
            names = tuple(name for name, _ in rows)
            if len(set(names)) == len(names):
                return outcome(machine.append_batch, batches.setdefault(names, Batch(names)))
    return outcome(machine.apply, op)


@settings(QUICK, max_examples=60)
@given(world=st.sampled_from(WORLDS), seed=st.one_of(st.none(), st.integers(0, 99)),
       history=st.lists(CHOICES, min_size=5, max_size=40))
def test_both_ways_are_one(world, seed, history):
    near, far = (Allocator(layout_of(world), audit="chain", queue_seed=seed) for _ in range(2))
    batches: dict[tuple, Batch] = {}
    bundles: list[list[str]] = []
    for choice in [("allocate", 0, 0, 4), ("allocate", 1, 0, 2), *history]:
        op = propose(choice, lengths(near), bundles)
        if choice[0] == "decode" and choice[3] % 2:
            op["requests"] = [[name, 1] for name, _ in op["requests"]]
        if op["op"] == "release" and choice[3] % 2:
            op["tail_first"] = True
        got, wanted = short(near, op, batches), outcome(far.apply, op)
        if isinstance(wanted, dict):
            del got["transaction_id"], wanted["transaction_id"]
        assert got == wanted, op
        assert near.digest == far.digest
        assert near.snapshot() == far.snapshot()
        assert at_rest(near) and queues_are_sound(near)
        if op["op"] == "cache_full" and isinstance(wanted, dict):
            bundles += first_bundles(far, op["request"], op["blocks"])
    near.check()


def test_a_batch_moves_without_a_transaction_and_breaks_up_when_a_member_moves_alone():
    machine = Allocator(layout_of(EQUAL), audit="chain")
    for name in "AB":
        machine.allocate(name, 3)
    batch = Batch("AB")
    receipt = machine.append_batch(batch)
    assert batch.live and machine.requests["A"].batch is batch
    assert receipt.paths == (("A", IN_PLACE), ("B", IN_PLACE))
    assert machine.append_batch(batch).paths == (("A", BOUNDARY), ("B", BOUNDARY))
    machine.append("A")
    assert not batch.live
    assert (machine.requests["A"].context, machine.requests["B"].context) == (6, 5)
    machine.append_batch(batch)
    assert batch.live
    assert (machine.requests["A"].version, machine.requests["B"].version) == (5, 4)
    machine.release("B")
    assert machine.requests["A"].context == 7
    before = machine.digest
    with pytest.raises(Rejected) as no:
        machine.append_batch(batch)
    assert (no.value.reason, machine.digest) == ("unknown_request", before)


def test_a_request_that_comes_back_is_not_the_one_of_the_batch():
    machine = Allocator(layout_of(EQUAL), audit="chain")
    for name in "AB":
        machine.allocate(name, 3)
    batch = Batch("AB")
    machine.append_batch(batch)
    machine.release("B")
    machine.allocate("B", 1)
    machine.append_batch(batch)
    assert {n: r.context for n, r in machine.requests.items()} == {"A": 5, "B": 2}


def test_a_shared_tail_is_copied_in_a_batch_too():
    machine = Allocator(layout_of(EQUAL), audit="chain")
    machine.allocate("A", 5)
    batch = Batch("A" "D")
    machine.fork("A", "D")
    receipt = machine.append_batch(batch)
    assert receipt.copied_rows == 1
    assert machine.append_batch(batch).copied_rows == 0
    assert batch.live


def test_a_batch_that_finds_no_room_moves_nobody():
    machine = Allocator(layout_of(((4, 5), (4, 5))), audit="chain")
    for name in NAMES[:2]:
        machine.allocate(name, 8)
    batch = Batch(NAMES[:2])
    before = machine.digest, machine.snapshot()
    with pytest.raises(Rejected, match="out_of_memory"):
        machine.append_batch(batch)
    assert (machine.digest, machine.snapshot()) == before


def test_a_receipt_keeps_its_handles_though_the_table_grows():
    machine = Allocator(layout_of(EQUAL), audit="chain")
    receipt = machine.allocate("A", 4)
    said = receipt.to_dict()
    machine.append("A")
    machine.release("A")
    assert receipt.to_dict() == said


@pytest.mark.parametrize("names", ["", "AA"])
def test_a_batch_names_each_once(names):
    with pytest.raises(ValueError, match="each once"):
        Batch(names)


@pytest.mark.parametrize(("request_id", "tokens", "reason"), [
    ("A", 4, "request_exists"), ("", 4, "unknown_operation"), (7, 4, "unknown_operation"), ("B", 0, "invalid_length"),
    ("B", 2.0, "invalid_length"), ("B", True, "invalid_length"), ("B", 4000, "out_of_memory")])
def test_what_is_not_plain_is_refused_by_the_planner(request_id, tokens, reason):
    machine = Allocator(layout_of(EQUAL), audit="chain")
    machine.allocate("A", 4)
    before = machine.digest
    with pytest.raises(Rejected) as no:
        machine.allocate(request_id, tokens)
    assert (no.value.reason, machine.digest) == (reason, before)
