"""The translator and its map: the order of refusals, every malformed snapshot, successors, tables for kernels."""

from __future__ import annotations

import copy
import itertools
import json

import jsonpatch
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.contract import History, Rejected
from kvlab.memory.address import STEPS, follow, resolve
from kvlab.memory.address_map import AddressMap
from kvlab.memory.address_records import AddressSnapshot, read_request, read_snapshot
from kvlab.memory.address_snapshot import validate
from kvlab.memory.address_sources import from_allocator, relaid, successors
from kvlab.memory.address_tables import (
    PAD,
    block_payload,
    block_table_rows,
    kernel_block_table,
    place_tensors,
    slot_mapping,
    writes_of,
)
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import AXES, INNER_LANE, KV_KIND
from tests.memory.worlds import CHOICES, QUICK, WORLDS, layout_of, lengths, propose, refused
from tests.support import FIXTURES

BASE = json.loads((FIXTURES / "loop4_addresses.json").read_text())["base"]
INCIDENTS = json.loads((FIXTURES / "incidents_address.json").read_text())["base"]
COORDINATE = ("token", "layer", "kind", "head", "lane")


@pytest.fixture
def article() -> AddressSnapshot:
    return read_snapshot(BASE)


@pytest.fixture
def machine() -> AddressMap:
    return AddressMap(read_snapshot(BASE))


def successor(version=3, **more):
    ref = {g: {"pool_id": p, "pool_generation": n, "physical_block_id": b}
           for g, p, n, b in (("g0", "pool-0", 3, 1003), ("g1", "pool-1", 7, 2003))}
    blocks = {"g0": [ref["g0"] | {"physical_slot": 0, "valid_rows": 1}],
              "g1": [ref["g1"] | {"physical_slot": 4, "valid_rows": 1}]}
    op = {"op": "adopt", "request": "C", "mode": "append", "context_length": 17, "table_version": version,
          "tables": {g: [r] for g, r in ref.items()}, "blocks": blocks}
    return op | more


# ---------------------------------------------------------------- the order of refusals
FAULTS = {
    "outside_request_context": {"token": 25},
    "layer_out_of_range": {"layer": 32},
    "table_length_drift": {"table": 0},
    "wrong_pool_identity": {"pool_id": "pool-0"},
    "stale_pool_generation": {"pool_generation": 6},
    "unknown_physical_block": {"physical_block_id": 2999},
    "stale_block_generation": {"block_generation": 4},
    "physical_row_not_valid": {"physical_block_id": 2002},
    "head_out_of_range": {"head": 4},
    "lane_out_of_range": {"lane": 128},
    "address_outside_tensor": {"end": 0},
}
TOGETHER = [p for p in itertools.combinations(FAULTS, 2)
            if set(p) not in ({"unknown_physical_block", "physical_row_not_valid"},)]


def with_faults(*names):
    """B asks for token 24, with these faults in the question, the reader's table or the tensor's end."""
    faults = {k: v for name in names for k, v in FAULTS[name].items()}
    asked = {"token": 24, "layer": 24, "kind": "K", "head": 0, "lane": 0}
    view, data = copy.deepcopy(BASE["requests"]["B"]), copy.deepcopy(BASE)
    for name, value in faults.items():
        if name in asked:
            asked[name] = value
        elif name == "table":
            view["tables"]["g1"] = view["tables"]["g1"][:1]
        elif name == "end":
            data["groups"][1]["end"]["K"] = value
    if len(view["tables"]["g1"]) > 1:
        view["tables"]["g1"][1] |= {k: v for k, v in faults.items() if k not in asked and k not in ("table", "end")}
    return follow(read_snapshot(data), read_request("B", view), *(asked[k] for k in COORDINATE))


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_has_its_own_reason(name):
    assert with_faults(name).refused == name


@pytest.mark.parametrize("pair", TOGETHER, ids="+".join)
def test_of_two_faults_the_earlier_check_refuses(pair):
    trace = with_faults(*pair)
    assert trace.refused == pair[0]
    assert with_faults(*pair[::-1]) == trace


def test_the_trace_ends_where_the_way_broke_off():
    trace = with_faults("unknown_physical_block")
    assert trace.checks == tuple(name for name, _ in STEPS[:5])
    assert trace.logical_block == 1 and trace.physical_slot is None and trace.byte_address is None
    assert with_faults().checks == tuple(name for name, _ in STEPS)


def test_a_row_that_is_there_and_not_hers(article):
    hers, his = (follow(article, name, 25, 24, "K", 0, 0) for name in "BA")
    assert hers.refused == "outside_request_context"
    assert his.refused == "" and his.token_offset < his.valid_rows == 16


def test_every_layer_of_an_unvalidated_snapshot_needs_one_group():
    data = copy.deepcopy(BASE)
    data["groups"][0]["layer_end"] = 23
    assert follow(read_snapshot(data), "A", 0, 23, "K", 0, 0).refused == "layer_gap"
    data["groups"][0]["layer_end"] = 25
    assert follow(read_snapshot(data), "A", 0, 24, "K", 0, 0).refused == "layer_overlap"


@pytest.mark.parametrize("asked", [{"token": True}, {"token": 1.0}, {"head": "0"}, {"lane": None}, {"kind": "Q"},
                                   {"kind": "K_scale"}, {"layer": None}])
def test_a_question_that_is_none(article, asked):
    values = {"token": 0, "layer": 0, "kind": "K", "head": 0, "lane": 0} | asked
    refused("unknown_operation", resolve, article, "A", *(values[k] for k in COORDINATE))


@pytest.mark.parametrize("name", ["Z", None, ["A"]])
def test_a_request_that_nobody_has(article, name):
    refused("unknown_request", resolve, article, name, 0, 0, "K", 0, 0)


@pytest.mark.parametrize("asked", [{"token": -1}, {"layer": -1}, {"head": -1}, {"lane": -1}])
def test_python_would_count_negative_indices_from_the_end(article, asked):
    values = {"token": 0, "layer": 0, "kind": "K", "head": 0, "lane": 0} | asked
    assert follow(article, "A", *(values[k] for k in COORDINATE)).refused


# ---------------------------------------------------------------- arithmetic
def test_offsets_are_numpys_in_every_order(article):
    group = article.groups[1]
    for order in itertools.permutations(AXES):
        new = relaid(group, order)
        snapshot = AddressSnapshot((article.groups[0], new), article.requests, 1, 32)
        trace = resolve(snapshot, "A", 20, 29, "V", 3, 77)
        at = {"layer_local": 5, "physical_slot": 6, "token_offset": 4, "kv_head_local": 3, "head_dim": 77}
        assert trace.element_offset == np.ravel_multi_index([at[a] for a in order], new.shape)
        assert trace.byte_address == new.base["V"] + 2 * trace.element_offset
        assert (trace.slot_id, trace.logical_block) == (100, 1)


def test_nothing_wraps():
    wide = read_snapshot(INCIDENTS)
    for request, slot in (("P", 262144), ("Q", 262145)):
        trace = resolve(wide, request, 0, 2, "K", 0, 0)
        assert trace.element_offset == slot * 16384 >= 2**32
        assert trace.byte_address > wide.groups[2].base["K"] + 2**33 - 1
        assert np.uint32(trace.element_offset & 0xFFFFFFFF) == (slot - 262144) * 16384


def test_different_block_sizes_have_their_own_quotients():
    snapshot = read_snapshot(INCIDENTS)
    coarse, fine = (resolve(snapshot, "R", 5, layer, "K", 0, 0) for layer in (0, 3))
    assert (coarse.logical_block, coarse.token_offset) == (0, 5)
    assert (fine.logical_block, fine.token_offset) == (1, 1)


def test_a_scale_is_found_by_row_and_head():
    snapshot = read_snapshot(INCIDENTS)
    one, other = (resolve(snapshot, "R", 3, 4, "V_scale", 0, lane) for lane in (0, 1))
    assert one.byte_address == other.byte_address == snapshot.groups[4].base["V_scale"] + 3 * 2


# ---------------------------------------------------------------- what a snapshot may not be
MALFORMED = [
    ("valid_rows_exceed_block", [("replace", "/groups/1/blocks/1/valid_rows", 17)]),
    ("invalid_tail", [("replace", "/groups/1/blocks/1/valid_rows", -1)]),
    ("slot_out_of_range", [("replace", "/groups/1/blocks/1/physical_slot", -1)]),
    ("stale_pool_generation", [("replace", "/groups/1/blocks/1/pool_generation", 6)]),
    ("wrong_pool_identity", [("replace", "/groups/1/blocks/1/pool_id", "pool-0")]),
    ("stale_block_generation", [("add", "/groups/1/blocks/1/block_generation", 3)]),
    ("valid_rows_below_view", [("replace", f"/groups/{g}/blocks/0/valid_rows", 15) for g in (0, 1)]),
    ("layer_gap", [("replace", "/model_layers", 33)]),
    ("layer_gap", [("replace", "/groups/0/layer_start", 1)]),
    ("layer_out_of_range", [("replace", "/model_layers", 31)]),
    ("missing_axis", [("add", "/groups/1/inner_lanes", 8)]),
    ("shape_axis_mismatch", [("replace", "/groups/1/num_slots", 9)]),
    ("shape_axis_mismatch", [("add", "/groups/1/axis_order/5", INNER_LANE), ("add", "/groups/1/inner_lanes", 3),
                             ("replace", "/groups/1/shape", [8, 8, 16, 4, 42, 3])]),
    ("overlapping_tensor_ranges", [("replace", "/groups/1/base/V", BASE["groups"][1]["base"]["K"])]),
    ("address_outside_tensor", [("replace", "/groups/1/end/V", BASE["groups"][1]["end"]["V"] - 1)]),
    ("frozen_address_drift", [("replace", "/frozen/0/token", 33)]),
    ("frozen_address_drift", [("replace", "/frozen/0/request", "Z")]),
    ("malformed_snapshot", [("replace", "/kind", "allocator")]),
    ("malformed_snapshot", [("replace", "/version", -1)]),
    ("malformed_snapshot", [("replace", "/groups", [])]),
    ("malformed_snapshot", [("replace", "/groups/1/id", "g0")]),
    ("malformed_snapshot", [("replace", "/groups/1/axis_order/0", "depth"),
                            ("add", "/groups/1/axis_order/5", "layer_local"),
                            ("replace", "/groups/1/shape", [1, 8, 16, 4, 128, 8])]),
    ("malformed_snapshot", [("remove", "/groups/1/base/V", None)]),
    ("malformed_snapshot", [("replace", "/groups/1/head_dim", True)]),
    ("malformed_snapshot", [("replace", "/groups/1/shape/0", 8.0)]),
    ("malformed_snapshot", [("replace", "/groups/1/layer_end", 24)]),
    ("malformed_snapshot", [("replace", "/groups/1/blocks/1/physical_slot", "6")]),
    ("malformed_snapshot", [("replace", "/groups/1/blocks/1/physical_block_id", 2000)]),
    ("malformed_snapshot", [("add", "/groups/1/blocks/1/colour", "red")]),
    ("malformed_snapshot", [("remove", "/requests/A/tables/g1", None)]),
    ("malformed_snapshot", [("replace", "/requests/A/context_length", 0)]),
    ("malformed_snapshot", [("remove", "/requests", None)]),
    ("malformed_snapshot", [("replace", "/frozen/0", {"request": "A"})]),
    ("malformed_snapshot", [("replace", "/groups/1/axis_order", [*AXES, KV_KIND]),
                            ("replace", "/groups/1/shape", [8, 8, 16, 4, 128, 2])]),
]


@pytest.mark.parametrize(("reason", "patch"), MALFORMED, ids=[f"{i}-{m[0]}" for i, m in enumerate(MALFORMED)])
def test_a_malformed_snapshot_is_refused_and_the_state_stays(machine, reason, patch):
    rows = [{"op": op, "path": path} | ({} if op == "remove" else {"value": value}) for op, path, value in patch]
    before, state = machine.digest, machine.snapshot()
    refused(reason, machine.load, jsonpatch.apply_patch(BASE, rows))
    assert (machine.digest, machine.snapshot()) == (before, state)
    machine.check()


def test_a_snapshot_is_its_json(machine, article):
    assert read_snapshot(machine.snapshot()) == article
    assert read_snapshot(INCIDENTS).to_dict() == read_snapshot(read_snapshot(INCIDENTS).to_dict()).to_dict()
    machine.load(INCIDENTS)
    assert read_snapshot(INCIDENTS) == machine.state


def test_slack_behind_a_tensor_is_no_part_of_it(article):
    data = copy.deepcopy(BASE)
    data["groups"][1]["end"]["K"] += 4096
    last = resolve(read_snapshot(data), "A", 31, 31, "K", 3, 127)
    assert last == resolve(article, "A", 31, 31, "K", 3, 127)


# ---------------------------------------------------------------- successors
def test_a_successor_moves_version_mapping_and_rows_at_once(machine):
    refused("outside_request_context", resolve, machine.state, "C", 16, 24, "K", 0, 0)
    held = machine.state
    receipt = machine.apply(successor())
    assert receipt.moved == ("table_version", "mapping", "valid_rows")
    assert resolve(machine.state, "C", 16, 24, "K", 0, 0).byte_address == 4311810048
    assert held.requests["C"].context_length == 16, "a reader's snapshot does not change under it"
    assert receipt.successor_digest == machine.digest != receipt.predecessor_digest
    machine.check()


def edited(change):
    op = successor()
    change(op)
    return op


G0 = BASE["requests"]["C"]["tables"]["g0"]
REFUSED = [
    ("stale_successor_version", lambda op: op.update(table_version=2)),
    ("stale_successor_version", lambda op: op.update(table_version=4)),
    ("table_length_drift", lambda op: op.update(tables={}, blocks={})),
    ("table_length_drift", lambda op: op.update(context_length=33)),
    ("unknown_physical_block", lambda op: op["blocks"].update(g1=[])),
    ("invalid_tail", lambda op: op["blocks"]["g0"][0].update(valid_rows=0)),
    ("slot_reuse", lambda op: op["blocks"]["g0"][0].update(physical_slot=5)),
    ("cross_group_bundle_mismatch", lambda op: op["blocks"]["g0"][0].update(valid_rows=2)),
    ("stale_pool_generation", lambda op: op["tables"]["g1"][0].update(pool_generation=6)),
    ("stale_successor_version", lambda op: op["blocks"]["g1"].append(BASE["groups"][1]["blocks"][2])),
    ("stale_successor_version", lambda op: op["blocks"]["g1"].append(
        BASE["groups"][1]["blocks"][0] | {"valid_rows": 15})),
    ("stale_successor_version", lambda op: op["blocks"]["g1"].append(
        BASE["groups"][1]["blocks"][0] | {"physical_slot": 7})),
    ("stale_successor_version", lambda op: op.update(
        mode="replace", changed={"g0": [1], "g1": []}, tables={
            g: BASE["requests"]["C"]["tables"][g] + op["tables"][g] for g in ("g0", "g1")})),
    ("unknown_operation", lambda op: op.update(mode="merge")),
    ("unknown_operation", lambda op: op.pop("mode")),
    ("unknown_operation", lambda op: op.pop("table_version")),
    ("unknown_operation", lambda op: op["tables"].update(g7=[])),
    ("unknown_operation", lambda op: op.update(context_length=True)),
    ("unknown_operation", lambda op: op["blocks"]["g0"][0].pop("pool_id")),
    ("unknown_operation", lambda op: op.update(op="allocate")),
    ("unknown_request", lambda op: op.update(op="retire", request="Z")),
    ("stale_table_version", lambda op: op.update(op="retire")),
    ("frozen_address_drift", lambda op: op.update(op="retire", request="A", table_version=5)),
    ("outside_request_context", lambda op: op.update(op="freeze", addresses=[
        {"request": "B", "token": 25, "layer": 0, "kind": "K", "head": 0, "lane": 0}])),
]


@pytest.mark.parametrize(("reason", "change"), REFUSED, ids=[f"{i}-{r[0]}" for i, r in enumerate(REFUSED)])
def test_a_wrong_successor_changes_nothing(machine, reason, change):
    seen, before = [], machine.digest
    machine.observers.append(seen.append)
    refused(reason, machine.apply, edited(change))
    assert machine.digest == before
    assert [(e.kind, e.reason) for e in seen] == [("refused", reason)]
    machine.check()


def test_a_replacement_declares_what_it_changes(machine):
    machine.apply(successor())
    tables = {g: BASE["requests"]["C"]["tables"][g] for g in ("g0", "g1")}
    shrunk = {"op": "adopt", "request": "C", "mode": "replace", "context_length": 10, "table_version": 4,
              "tables": tables, "changed": {"g0": [1], "g1": [1]}}
    receipt = machine.apply(shrunk)
    assert dict(receipt.changed) == {"g0": (1,), "g1": (1,)} and receipt.moved == ("table_version", "mapping")
    assert 1003 not in machine.state.groups[0].descriptors, "a block that no table names is not published"
    assert 1000 in machine.state.groups[0].descriptors


def test_a_frozen_address_holds_its_request_until_it_is_let_go(machine):
    retire = {"op": "retire", "request": "A", "table_version": 5}
    refused("frozen_address_drift", machine.apply, retire)
    machine.apply({"op": "freeze", "addresses": []})
    machine.apply(retire)
    assert "A" not in machine.state.requests and 2001 in machine.state.groups[1].descriptors
    assert 2002 not in machine.state.groups[1].descriptors


def test_its_history_can_be_read_back_and_forked(machine):
    history = History(machine)
    with pytest.raises(Rejected):
        machine.apply(successor(2))
    machine.apply(successor(3))
    assert [s.kind for s in history] == ["start", "refused", "committed"]
    other = history.fork(2, AddressMap(read_snapshot(BASE)))
    assert other.now.digest == machine.digest
    assert History.from_dict(json.loads(json.dumps(history.to_dict()))).steps[1].reason == "stale_successor_version"


@pytest.mark.parametrize("question", [{}, {"ask": "where"}, {"ask": "resolve"}, {"ask": "group", "group": "g9"},
                                      {"ask": "writes", "mapping": 3, "block_size": 16},
                                      {"ask": "resolve", "request": "A", "token": 0, "layer": 0, "kind": "K"},
                                      {"ask": "resolve", "request": "A", "view": {}, "token": 0}])
def test_a_question_without_sense_changes_nothing(machine, question):
    before = machine.digest
    refused("unknown_operation", machine.ask, question)
    assert machine.digest == before


def bases(layout):
    """Some address for every tensor."""
    sizes = {f"{g.group_id} {kind}": g.num_blocks * g.block_size * 2 for g in layout.groups for kind in "KV"}
    at = place_tensors(sizes, 4096, 64)
    return {g.group_id: {kind: at[f"{g.group_id} {kind}"][0] for kind in "KV"} for g in layout.groups}


@given(st.sampled_from(WORLDS), st.lists(CHOICES, max_size=18), st.integers(0, 5))
@settings(QUICK, max_examples=60)
def test_a_map_that_follows_a_real_allocator_stays_its_map(groups, choices, seed):
    layout = layout_of(groups)
    allocator, at = Allocator(layout, queue_seed=seed), bases(layout)
    now = from_allocator(allocator.snapshot(), at)
    follower = AddressMap(now)
    for choice in choices:
        try:
            allocator.apply(propose(choice, lengths(allocator), []))
        except Rejected:
            continue
        before, now = now, from_allocator(allocator.snapshot(), at)
        for op in successors(before, now):
            follower.apply(op)
        got = follower.snapshot()
        wanted = AddressMap(now).snapshot()
        assert got | {"version": 0} == wanted | {"version": 0}


# ---------------------------------------------------------------- what kernels are handed
def test_slot_mapping_and_its_padding(article):
    mapping = slot_mapping(article, {"A": (15, 17), "C": (15, 16)}, pad_to=5)
    assert mapping == {"g0": [5 * 16 + 15, 2 * 16, 5 * 16 + 15, PAD, PAD],
                       "g1": [3 * 16 + 15, 6 * 16, 3 * 16 + 15, PAD, PAD]}
    assert writes_of(mapping["g1"], 16) == [(0, 3, 15), (1, 6, 0), (2, 3, 15)]
    assert divmod(PAD, 16) == (-1, 15), "why nobody may divide a sentinel"
    refused("outside_request_context", slot_mapping, article, {"B": (24, 26)})
    refused("outside_request_context", slot_mapping, article, {"B": (-1, 3)})
    assert slot_mapping(article, {"A": (24, 25)})["g1"] == [resolve(article, "A", 24, 24, "K", 0, 0).slot_id]


def test_a_padded_table_keeps_nothing_old(article):
    assert block_table_rows(article, "g1", ["A", "C"], 4) == [[3, 6, 1, PAD], [3, PAD, PAD, PAD]]
    refused("table_length_drift", block_table_rows, article, "g1", ["C", "A"], 2)


@given(st.lists(st.integers(0, 99), max_size=6), st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([1, 2, 4, 8]))
@settings(QUICK, max_examples=60)
def test_kernel_blocks_span_the_same_tokens(table, kernel, split):
    size = kernel * split
    small = kernel_block_table(table, size, kernel)
    tokens = [t for block in table for t in range(block * size, (block + 1) * size)]
    assert [t for block in small for t in range(block * kernel, (block + 1) * kernel)] == tokens


@pytest.mark.parametrize("kernel", [0, -4, 3, 32])
def test_kernel_blocks_that_do_not_divide(kernel):
    refused("kernel_block_does_not_divide_allocator", kernel_block_table, [1], 16, kernel)
    assert kernel_block_table([1, PAD], 16, 8) == [2, 3, PAD, PAD]


@pytest.mark.parametrize("order", [*list(itertools.permutations(AXES))[::11],
                                   (KV_KIND, *AXES), (*AXES[:2], KV_KIND, *AXES[2:]), (*AXES, KV_KIND),
                                   (*AXES[:1], *AXES[2:], INNER_LANE, AXES[1])])
def test_a_blocks_payload_is_every_byte_that_its_scalars_have(order):
    """The runs, byte by byte, are the addresses of all its scalars."""
    data = {"id": "g", "layer_start": 0, "layer_end": 2, "block_size": 3, "kv_heads_local": 2, "head_dim": 4,
            "axis_order": list(AXES), "shape": [2, 4, 3, 2, 4], "scalar_bytes": 2, "base": {"K": 0, "V": 384},
            "end": {"K": 384, "V": 768}, "pool_id": "g", "pool_generation": 1, "num_slots": 4,
            "blocks": [{"physical_block_id": 9, "physical_slot": 2, "valid_rows": 3, "pool_id": "g",
                        "pool_generation": 1}]}
    view = {"context_length": 3, "table_version": 1,
            "tables": {"g": [{"pool_id": "g", "pool_generation": 1, "physical_block_id": 9}]}}
    read = read_snapshot({"kind": "addresses", "version": 1, "model_layers": 2, "groups": [data],
                          "requests": {"A": view}})
    group = relaid(read.groups[0], order, 2 if INNER_LANE in order else 1)
    snapshot = AddressSnapshot((group,), read.requests, 1, 2)
    validate(snapshot)
    runs = block_payload(group, 9)
    told = sorted(group.base[run["kind"]] + run["start"] + i for run in runs for i in range(run["bytes"]))
    places = itertools.product(range(3), range(2), "KV", range(2), range(4))
    found = sorted(resolve(snapshot, "A", *place).byte_address + i for place in places for i in range(2))
    assert told == found
    assert len(told) == group.page_size_bytes
    refused("unknown_physical_block", block_payload, group, 8)


def test_tensors_are_placed_apart_and_aligned():
    placed = place_tensors({"a": 3, "b": 8, "c": 1}, 5, 4)
    assert placed == {"a": (8, 11), "b": (12, 20), "c": (20, 21)}
