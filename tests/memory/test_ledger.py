"""Ledgers of a live allocator against an independent count from its tables; what may not be added is refused."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.contract import Rejected
from kvlab.memory import ledger
from kvlab.memory.allocator import Allocator
from kvlab.memory.books import Books, holdings, validate
from kvlab.memory.ledger import Amount, Arena, MetadataConstants, RowGeometry, from_snapshot
from kvlab.study.fixtures import FIXTURES, load_fixture
from tests.memory.worlds import QUICK, THREE, UNEQUAL, layout_of, lengths, propose, refused

BASE = load_fixture(FIXTURES / "loop3_ledgers.json")["base"]
CHOICES = st.tuples(st.sampled_from(["allocate", "fork", "append", "append", "decode", "truncate", "truncate", "end"]),
                    *[st.integers(0, 9)] * 3)
RESERVED = 40


def driven(world, choices):
    machine = Allocator(layout_of(world), queue_seed=3)
    for choice in choices:
        try:
            machine.apply(propose(choice, lengths(machine), []))
        except Rejected:
            continue
    return machine


def count(snapshot, g):
    """The same numbers from the tables alone, by another way: rows one by one."""
    group = snapshot["groups"][g]
    name, size = group["group_id"], group["block_size"]
    tables = {r: row["tables"][name] for r, row in snapshot["requests"].items()}
    contexts = {r: row["context"] for r, row in snapshot["requests"].items()}
    seen = {(r, j): [t for t in range(contexts[r]) if t // size == j] for r in tables for j in range(len(tables[r]))}
    rows = {h: snapshot["blocks"][name]["valid_rows"][int(h.split("@")[0]) - group["first_block_id"]]
            for table in tables.values() for h in table}
    logical = sum(len(visible) for visible in seen.values())
    refs = len(seen)
    hidden = {r: rows[table[-1]] - len(seen[r, len(table) - 1]) for r, table in tables.items()}
    return {"logical": logical, "refs": refs, "unique": len(rows), "rows": sum(rows.values()), "size": size,
            "hidden": hidden, "tails": {r: size - len(seen[r, len(t) - 1]) for r, t in tables.items()}}


@settings(QUICK, max_examples=60)
@given(st.sampled_from([THREE, UNEQUAL]), st.lists(CHOICES, min_size=4, max_size=30))
def test_ledgers_of_a_live_allocator_equal_an_independent_count(world, choices):
    snapshot = driven(world, choices).snapshot()
    for g, h in enumerate(from_snapshot(snapshot, RESERVED)):
        found, size = count(snapshot, g), snapshot["groups"][g]["block_size"]
        view, real, stock = ledger.request_view(h), ledger.unique(h), ledger.pool(h)
        assert (view.references, view.slots) == (found["refs"], found["refs"] * size)
        assert view.tail_slots == found["refs"] * size - found["logical"] == sum(view.tail_by_request.values())
        assert dict(view.hidden_rows) == found["hidden"] and dict(view.tail_by_request) == found["tails"]
        assert (len(real.ids), real.rows) == (found["unique"], found["rows"])
        assert stock.idle == len(snapshot["free"][h.group_id])
        assert all(n <= view.tail_by_request[r] for r, n in view.hidden_rows.items())


@settings(QUICK, max_examples=40)
@given(st.sampled_from([THREE, UNEQUAL]), st.lists(CHOICES, min_size=4, max_size=30), st.integers(30, 50))
def test_the_identities_hold_for_whatever_an_allocator_did(world, choices, reserved):
    for h in from_snapshot(driven(world, choices).snapshot(), reserved):
        rect, view, real = ledger.rectangular(h), ledger.request_view(h), ledger.unique(h)
        stock, saved = ledger.pool(h), ledger.savings(h)
        assert rect.logical + rect.slack == rect.reserved
        assert view.logical + view.tail == view.capacity
        assert real.materialized + real.tail == real.capacity
        assert stock.in_use + stock.free == stock.provisioned
        assert view.capacity.bytes == real.capacity.bytes + saved.capacity_avoided.bytes
        assert rect.logical.bytes == real.materialized.bytes + saved.dedup_payload.bytes


def test_sharing_is_seen_by_one_ledger_only():
    machine = Allocator(layout_of(((16, 8),)))
    machine.allocate("A", 33)
    before = from_snapshot(machine.snapshot())[0]
    machine.fork("A", "B")
    after = from_snapshot(machine.snapshot())[0]
    assert ledger.unique(after) == ledger.unique(before) and ledger.pool(after) == ledger.pool(before)
    assert ledger.request_view(after).references == 2 * ledger.request_view(before).references
    assert ledger.savings(after).capacity_avoided.bytes == ledger.unique(before).capacity.bytes


def test_a_request_that_keeps_less_hides_the_rows_of_the_longer_one():
    machine = Allocator(layout_of(((16, 8),)))
    machine.allocate("A", 32)
    machine.fork("A", "B")
    machine.truncate("B", 25)
    view = ledger.request_view(from_snapshot(machine.snapshot())[0])
    assert dict(view.hidden_rows) == {"A": 0, "B": 7} and dict(view.tail_by_request) == {"A": 0, "B": 7}


# ---------------------------------------------------------------- what may not be added
def test_amounts_of_one_ledger_add_and_of_two_do_not():
    slack, more = Amount(3, ledger.RECTANGULAR), Amount(4, ledger.RECTANGULAR)
    assert slack + more == Amount(7, ledger.RECTANGULAR)
    for other in (ledger.REQUEST_VIEW, ledger.UNIQUE, ledger.POOL, ledger.METADATA, ledger.SAVINGS):
        refused("ledgers_not_addable", slack.__add__, Amount(1, other))
    refused("ledgers_not_addable", slack.__add__, Amount(1, ledger.RECTANGULAR, ledger.MODEL_WIDE))
    for pair in ((slack, Amount(1, ledger.EXTERNAL)), (Amount(1, ledger.EXTERNAL), slack)):
        refused("fragmentation_added_to_slack", pair[0].__add__, pair[1])


@given(st.integers(0, 50), st.lists(st.integers(0, 50), max_size=6), st.integers(0, 200))
@settings(QUICK, max_examples=60)
def test_fragmentation_is_a_ratio_or_not_applicable(allocated, extents, candidate):
    arena = Arena(allocated + sum(extents), allocated, tuple(extents))
    found = ledger.fragmentation(arena, candidate)
    if not sum(extents):
        assert found.ratio == ledger.NOT_APPLICABLE
        refused("fragmentation_ratio_undefined", ledger.fragmentation_ratio, arena)
    else:
        assert Fraction(found.ratio) == ledger.fragmentation_ratio(arena) == 1 - Fraction(max(extents), sum(extents))
    assert (found.contiguous == "accept") == any(candidate <= e for e in [*extents, 0])


def test_the_expected_tail_is_the_mean_over_a_uniform_fill():
    for size in (1, 2, 3, 16, 64):
        fills = [size - j for j in range(1, size + 1)]
        assert ledger.expected_tail(size, 10).slots == sum(fills) / size
        assert ledger.expected_tail(size, 10).most.bytes == 10 * max(fills)


def test_k_and_v_have_widths_of_their_own():
    both = RowGeometry("g", 32, 4, 128, 2, 2)
    mixed = RowGeometry("g", 32, 4, 128, 2, 1)
    assert both.row_bytes == both.factor_two == 65_536
    assert mixed.row_bytes == 49_152 and mixed.factor_two is None
    for bad in (0, -1, 2.0, True, "2"):
        with pytest.raises(Rejected) as no:
            RowGeometry("g", 32, 4, 128, 2, bad)
        assert no.value.reason == "invalid_geometry"


def test_a_metadata_record_of_each_kind_counts_once():
    h = holdings(BASE)
    for i, name in enumerate(("map", "descriptor", "hash", "tail", "free", "fixed")):
        sizes = dict.fromkeys(("map", "descriptor", "hash", "tail", "free", "fixed"), 0) | {name: 1}
        assert ledger.metadata(h, MetadataConstants(**sizes)).total.bytes == (6, 8, 2, 3, 5, 1)[i]


@pytest.mark.parametrize(("hit", "prompt", "skipped"), [
    (192, 4096, 3072), (192, 3072, 3056), (192, 3073, 3072), (0, 1, 0), (1, 16, 0), (1, 17, 16)])
def test_at_least_one_token_is_computed(hit, prompt, skipped):
    assert ledger.tokens_skipped(hit, 16, prompt) == skipped < prompt


# ---------------------------------------------------------------- the machine
def test_the_order_of_refusals():
    """Two things wrong at once: the earlier check of Loop 3 answers."""
    breaks = [
        ("invalid_geometry", ("groups", 0, "layers"), 0),
        ("row_bytes_drift", ("declared", "row_bytes"), 1),
        ("committed_exceeds_reserved", ("requests", "A", "reserved"), 1),
        ("block_count_drift", ("requests", "B", "blocks"), [100]),
        ("valid_rows_exceed_block", ("valid_rows", "102"), 17),
        ("valid_rows_below_view", ("valid_rows", "100"), 15),
        ("prefix_relation_broken", ("requests", "C", "blocks"), [101]),
        ("reference_count_used_as_unique_count", ("declared", "unique_blocks"), 6),
        ("materialized_rows_drift", ("declared", "materialized_rows"), 34),
        ("pool_below_live", ("pool_blocks",), 2),
        ("free_count_drift", ("declared", "free_blocks"), 4),
        ("metadata_count_drift", ("declared", "metadata_counts", "map"), 5),
        ("metadata_total_drift", ("declared", "metadata_bytes"), 481),
        ("slack_identity_broken", ("declared", "slack_bytes"), 0),
    ]
    record = copy.deepcopy(BASE)
    for reason, path, value in reversed(breaks):
        at = record
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        refused(reason, validate, record)


@pytest.mark.parametrize("blocks", [[101], [103, 101], [101, 100], [102, 101]])
def test_a_shared_block_has_one_place_and_one_prefix(blocks):
    b = {"tokens": 16 * len(blocks), "reserved": 48, "blocks": blocks}
    requests = {"A": BASE["requests"]["A"], "B": b}
    rows = BASE["valid_rows"] | {"103": 16, "102": 16}
    refused("prefix_relation_broken", validate, BASE | {"requests": requests, "valid_rows": rows, "declared": {}})


@pytest.mark.parametrize("wrong", [None, [], {}, {"groups": []}, BASE | {"groups": []}, BASE | {"convention": "mine"},
                                   BASE | {"valid_rows": {"x": 1}}, BASE | {"declared": 3}, BASE | {"metadata": {}},
                                   BASE | {"arena": {"size": 3, "allocated": 1, "free_extents": [1]}},
                                   BASE | {"requests": {"A": {"tokens": -1, "reserved": 2, "blocks": []}}}])
def test_what_is_no_record_is_refused_and_the_present_one_stays(wrong):
    books = Books(BASE)
    digest = books.digest
    refused("malformed_snapshot", books.load, wrong)
    assert books.digest == digest
    books.check()


def test_nobody_can_change_the_record_from_outside():
    mine = copy.deepcopy(BASE)
    books = Books(mine)
    digest = books.digest
    mine["pool_blocks"] = 1
    books.snapshot()["requests"].clear()
    assert books.digest == digest and books.ask({"ask": "pool"})["blocks"] == 8


def test_a_question_it_has_no_answer_to_is_refused():
    books = Books(BASE)
    for question in ({}, {"ask": "weather"}, {"ask": "expected_tail"}, {"ask": "add", "terms": ["pool.total"]}):
        refused("unknown_operation", books.ask, question)


def test_every_pair_of_ledgers_refuses_one_total():
    books = Books(BASE)
    terms = {"rectangular.reserved", "request_view.capacity", "unique.capacity", "pool.provisioned", "metadata.total",
             "savings.dedup_payload", "fragmentation.out_of_reach"}
    said = set()
    for a in terms:
        for b in terms - {a}:
            with pytest.raises(Rejected) as no:
                books.ask({"ask": "add", "terms": [a, b]})
            said.add(no.value.reason)
    assert said == {"ledgers_not_addable", "fragmentation_added_to_slack"}
    assert math.isclose(books.ask({"ask": "add", "terms": ["unique.materialized", "unique.tail"]})["mib"], 3)
