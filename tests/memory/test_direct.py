"""The short way and the long way are one way: equal receipts, digests, states and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.contract import Json, Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.identities import NAME_BYTES, packed_of
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
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


def as_packed(keys: list[str]) -> Any:
    """As an index gives them: an array where all of them pack."""
    names = [packed_of(key) for key in keys]
    return np.frombuffer(b"".join(names), np.uint8).reshape(-1, NAME_BYTES) if names and all(names) else keys


def short(machine: Allocator, op: Json, batches: dict[tuple, Batch]) -> Json | str:
    """Perform an operation by its method where there is one, a batch of single tokens as a kept batch."""
    match op:
        case {"op": "allocate", "request": request, "tokens": tokens}:
            return outcome(machine.allocate, request, tokens)
        case {"op": "release", "request": request, "tail_first": True}:
            return outcome(machine.release, request, True)
        case {"op": "release" | "cancel" as kind, "request": request}:
            return outcome(getattr(machine, kind), request)
        case {"op": "cache_full", "request": request, "blocks": blocks, "keys": keys}:
            return outcome(machine.cache_full, request, blocks, as_packed(keys))
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


STEPS = st.lists(st.tuples(st.sampled_from(("start", "start", "start", "end", "end", "fork", "grow", "lose")),
                           st.integers(0, 5), st.integers(0, 9), st.booleans()), min_size=8, max_size=50)
SIZE, BLOCKS = 4, 12


def name_of(whose: int, place: int) -> str:
    """Names that pack into bytes, and some that do not, at times in one prompt."""
    return f"{whose:08x}/{place:024x}" if whose != 1 or place == 2 else f"{whose}/{place}"


def served(machine: Allocator, near: bool, step: tuple, named: dict[str, dict[int, int]]) -> Json | str:
    """One step of a server whose requests are prompts of whole blocks out of few: hit, publish, fork, grow, end."""
    kind, who, length, flag = step
    request, live = f"r{who}", sorted(machine.requests)
    if kind == "start":
        path = [name_of(who % 2 if j < 3 else who, j) for j in range(1 + length // 2)]
        hit = 0
        while hit < len(path) and all(named.get(path[hit], {}).get(g) in _held(pool) for g, pool in
                                      enumerate(machine.pools)):
            hit += 1
        tokens = len(path) * SIZE + length % 3
        rows = [[named[key][g] for key in path[:hit]] for g in range(len(machine.pools))]
        bundles = [[pool.text(w) for pool, w in zip(machine.pools, row, strict=True)]
                   for row in zip(*rows, strict=True)]
        op = {"op": "touch", "request": request, "blocks": bundles, "tokens": tokens} if hit else {
            "op": "allocate", "request": request, "tokens": tokens}
        made = short(machine, op, {}) if near else outcome(machine.apply, op)
        if isinstance(made, str) or hit == len(path):
            return made
        op = {"op": "cache_full", "request": request, "blocks": list(range(hit, len(path))), "keys": path[hit:]}
        for j in range(hit, len(path)):
            named[path[j]] = {g: table[j] for g, table in enumerate(machine.requests[request].tables)}
        return [made, short(machine, op, {}) if near else outcome(machine.apply, op)]
    if not live:
        return "nobody"
    name = live[who % len(live)]
    op = {"end": {"op": "release", "request": name, **({"tail_first": True} if flag else {})},
          "fork": {"op": "fork", "request": name, "child": f"c{length}"},
          "grow": {"op": "append", "request": name, "tokens": 1 + length},
          "lose": {"op": "truncate", "request": name, "tokens": 1 + length}}[kind]
    return short(machine, op, {}) if near else outcome(machine.apply, op)


def _held(pool: Any) -> set[int]:
    """Words of blocks that carry an identity now."""
    return {pool.word(f"{pool.first_block_id + i}@{pool.generations()[i]}") for i in pool.keys}


def plain(said: Any) -> Any:
    """A receipt without the number of its transaction."""
    return [plain(one) for one in said] if isinstance(said, list) else {
        k: v for k, v in said.items() if k != "transaction_id"} if isinstance(said, dict) else said


@settings(QUICK, max_examples=80)
@given(groups=st.integers(1, 2), seed=st.one_of(st.none(), st.integers(0, 99)), history=STEPS)
def test_hits_identities_and_ends_are_one_in_both_ways(groups, seed, history):
    layout = CacheLayoutManifest(tuple(CacheGroup(f"g{g}", g, g + 1, 1, 4, 2, SIZE, BLOCKS, 100 * g)
                                       for g in range(groups)))
    near, far = (Allocator(layout, audit="chain", queue_seed=seed) for _ in range(2))
    knows: tuple[dict, dict] = ({}, {})
    for step in history:
        got, wanted = served(near, True, step, knows[0]), served(far, False, step, knows[1])
        assert plain(got) == plain(wanted), step
        assert near.digest == far.digest and near.snapshot() == far.snapshot()
        assert at_rest(near) and queues_are_sound(near)
    near.check()


def test_the_short_ways_for_hits_are_really_taken(monkeypatch):
    """Otherwise the two ways above would be one and the same."""
    def never(self, op):
        raise AssertionError(op)

    machine = Allocator(CacheLayoutManifest((CacheGroup("g", 0, 1, 1, 4, 2, SIZE, BLOCKS),)), audit="chain")
    monkeypatch.setattr(Allocator, "apply", never)
    machine.allocate("A", 10)
    machine.cache_full("A", [0, 1], ["x", "y"])
    words = list(machine.requests["A"].tables[0][:2])
    machine.touch("B", [words], 9)
    machine.release("A", tail_first=True)
    machine.release("B")
    assert machine.touch("C", [words], 8).fresh == (0,)


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
