"""The article's loop 4 values that are no single number of the fixture: field names, classes, orders, invariants."""

from __future__ import annotations

import copy
import itertools
import json

import jsonpatch
import pytest

from kvlab.contract import Rejected
from kvlab.memory.address import follow, resolve
from kvlab.memory.address_map import AddressMap
from kvlab.memory.address_records import PhysicalRef, read_request, read_snapshot
from kvlab.memory.address_sources import relaid
from kvlab.memory.address_tables import slot_mapping
from kvlab.study import fixtures
from tests.support import FIXTURES

FIXTURE = fixtures.load_fixture(FIXTURES / "loop4_addresses.json")
BASE = FIXTURE["base"]
GOLDEN = {k: v for k, v in json.loads((FIXTURES / "golden.json").read_text()).items() if k.startswith("L4.")}
EXPECTED = {k: v["expected"] for k, v in GOLDEN.items()}
NEGATIVES = {int(n["id"].split(".")[1]): n for n in FIXTURE["negatives"]}


@pytest.fixture
def article():
    return read_snapshot(BASE)


def leaves(data):
    """Every number and word in some data: names too, and how long each list is."""
    if isinstance(data, dict):
        return set(data) | set().union(*map(leaves, data.values()))
    if isinstance(data, list):
        return {len(data)}.union(*map(leaves, data))
    return set() if isinstance(data, bool) or data is None else {data}


def test_every_value_of_the_loop_is_asserted_somewhere():
    here = {"L4.physicalref", "L4.paper.fig6", "L4.oracle.rejects", "L4.invariants", "L4.lookup.legal"}
    assert {v["id"] for v in FIXTURE["expect"]} | here == set(GOLDEN)


@pytest.mark.parametrize("golden_id", sorted({v["id"] for v in FIXTURE["expect"]}))
def test_the_fixture_says_what_golden_says(golden_id):
    """Every number and word of the golden value stands in what the fixture expects of the machine."""
    wanted = EXPECTED[golden_id]
    told = leaves([v["equals"] for v in FIXTURE["expect"] if v["id"] == golden_id])
    wanted = list(wanted.values()) if isinstance(wanted, dict) else [wanted]
    missing = set().union(*(leaves(v) - {len(v)} if isinstance(v, list) else leaves(v) for v in wanted)) - told
    assert missing <= {EXPECTED["L4.vllm.slot_mapping_shape"]}, "the formula has a test of its own"


def test_a_physical_reference_has_the_articles_fields():
    assert list(PhysicalRef.__dataclass_fields__)[:4] == EXPECTED["L4.physicalref"]
    assert PhysicalRef("g1", "pool-1", 6, 2001) != PhysicalRef("g1", "pool-1", 7, 2001)


def test_figure_6_of_the_paper():
    """Logical block 0 is physical block 7, logical block 1 is physical block 1; four tokens a block."""
    blocks = [{"physical_block_id": b, "physical_slot": b, "valid_rows": n, "pool_id": "p", "pool_generation": 1}
              for b, n in ((7, 4), (1, 3))]
    group = {"id": "g", "layer_start": 0, "layer_end": 1, "block_size": 4, "kv_heads_local": 1, "head_dim": 1,
             "axis_order": [
                 "layer_local", "physical_slot", "token_offset", "kv_head_local", "head_dim"],
             "shape": [1, 9, 4, 1, 1], "scalar_bytes": 2, "base": {"K": 0, "V": 72}, "end": {"K": 72, "V": 144},
             "pool_id": "p", "pool_generation": 1, "num_slots": 9, "blocks": blocks}
    table = [{"pool_id": "p", "pool_generation": 1, "physical_block_id": b} for b in (7, 1)]
    machine = AddressMap(read_snapshot({"kind": "addresses", "version": 1, "model_layers": 1, "groups": [group],
                                        "requests": {"A": {"context_length": 7, "table_version": 1,
                                                           "tables": {"g": table}}}}))
    found = {f"logical_{t // 4}": resolve(machine.state, "A", t, 0, "K", 0, 0).physical_ref.physical_block_id
             for t in (3, 6)}
    assert found == EXPECTED["L4.paper.fig6"]


LEGAL = {
    "0<=token<context_length": {"token": 33},
    "0<=j<len(table)": {"table": 2},
    "PhysicalRef exists in named pool generation": {"generation": 6},
    "offset<descriptor.valid_rows": {"context": 34, "token": 33},
}


def test_a_lookup_is_legal_after_four_checks_and_no_fewer(article):
    """Break each of the four alone: the first three leave fewer guards passed than the next."""
    assert list(LEGAL) == EXPECTED["L4.lookup.legal"]
    passed = []
    for fault in LEGAL.values():
        view = copy.deepcopy(BASE["requests"]["A"]) | ({"context_length": 34} if "context" in fault else {})
        view["tables"]["g1"] = view["tables"]["g1"][: fault.get("table")]
        for ref in view["tables"]["g1"]:
            ref["pool_generation"] = fault.get("generation", 7)
        trace = follow(article, read_request("A", view), fault.get("token", 32), 24, "K", 0, 0)
        assert trace.refused
        passed.append(trace.to_dict()["guards"])
    order = EXPECTED["L4.check.order"]
    assert passed == [order[:n] for n in range(4)]
    assert follow(article, "A", 32, 24, "K", 0, 0).to_dict()["guards"] == order


CLASSES = {
    "layer_gaps": [1, 2], "duplicate_axes": [3, 4], "table_length_drift": [6], "unknown_physical_identity": [7],
    "stale_physical_identity": [8, 9], "slot_reuse": [10, 11], "cross_group_bundle_mismatch": [12],
    "invalid_tails": [13, 14], "out_of_range_coordinates": [15, 16, 17, 18], "overlapping_tensor_ranges": [19, 20],
    "stale_successor_versions": [21], "frozen_address_drift": [22],
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_oracle_rejects_each_class(name):
    assert list(CLASSES) == EXPECTED["L4.oracle.rejects"]
    for n in CLASSES[name]:
        assert fixtures.check_negative(FIXTURE, NEGATIVES[n]).held


def test_twenty_two_negatives_with_twenty_two_reasons():
    assert sorted(NEGATIVES) == list(range(1, 23))
    assert len({n["reason"] for n in FIXTURE["negatives"]}) == 22


@pytest.mark.parametrize("part", EXPECTED["L4.version_atomic"]["atomic"])
def test_no_part_of_a_successor_goes_alone(part):
    op = next(s for s in FIXTURE["trace"] if s["name"] == "adopt C 17")["op"]
    without = {"table_version": op | {"table_version": 2}, "mapping": op | {"tables": {}, "blocks": {}},
               "valid_rows": op | {"blocks": {}}}[part]
    machine = AddressMap(read_snapshot(BASE))
    before = machine.digest
    with pytest.raises(Rejected):
        machine.apply(without)
    assert machine.digest == before
    assert machine.apply(op).moved == tuple(EXPECTED["L4.version_atomic"]["atomic"])


def test_vllms_slot_mapping_formula_is_ours(article):
    name, _, formula = EXPECTED["L4.vllm.slot_mapping_shape"].partition(" = ")
    for token in range(33):
        trace = resolve(article, "A", token, 24, "K", 0, 0)
        place = {"physical_slot": trace.physical_slot, "block_size": 16, "offset": trace.token_offset}
        assert eval(formula, {}, place) == getattr(trace, name) == slot_mapping(
            article, {"A": (token, token + 1)})["g1"][0]


# ---------------------------------------------------------------- the seven invariants
def logical_order_contiguous(s):
    rows = [resolve(s, "A", t, 24, "K", 0, 0) for t in range(33)]
    return [16 * r.logical_block + r.token_offset for r in rows] == list(range(33))


def physical_blocks_not_contiguous(s):
    slots = [resolve(s, "A", t, 24, "K", 0, 0).physical_slot for t in (0, 16, 32)]
    return all(b != a + 1 for a, b in itertools.pairwise(slots))


def tables_are_group_and_snapshot_state(s):
    one, two = (resolve(s, "A", 16, layer, "K", 0, 0).physical_ref for layer in (0, 24))
    later = AddressMap(s)
    later.apply(next(x for x in FIXTURE["trace"] if x["name"] == "adopt C 17")["op"])
    return one.cache_group_id != two.cache_group_id and s.requests["C"] != later.state.requests["C"]


def identity_scoped_by_pool_and_generation(s):
    reasons = []
    for n in (8, 9):
        try:
            AddressMap(s).load(jsonpatch.apply_patch(BASE, NEGATIVES[n]["patch"]))
        except Rejected as no:
            reasons.append(no.reason)
    return reasons == ["stale_pool_generation", "wrong_pool_identity"]


def visibility_stricter_than_validity(s):
    return [bool(follow(s, name, 25, 24, "K", 0, 0).refused) for name in "AB"] == [False, True]


def slot_id_not_address(s):
    trace = resolve(s, "A", 16, 24, "K", 1, 5)
    told = {"slot_id": trace.slot_id, "byte_address": trace.byte_address}
    return told | {"equal": trace.slot_id == trace.byte_address} == EXPECTED["L4.addr.slot_ne_address"]


def byte_math_only_under_declared_abi(s):
    group = s.groups[1]
    offsets = set()
    for order in itertools.permutations(group.axis_order):
        strides = relaid(group, order).strides()
        offsets.add(6 * strides["physical_slot"] + strides["kv_head_local"] + 5 * strides["head_dim"])
    return len(offsets) > 60


@pytest.mark.parametrize("name", EXPECTED["L4.invariants"])
def test_an_invariant_holds(article, name):
    assert globals()[name](article)
