"""The article's Loop 5 values, out of the real allocator running the trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab.memory.allocator import Allocator
from kvlab.memory.block_pool import PhysicalBlockHandle
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest, quarter_split
from kvlab.memory.records import PUBLICATION_ORDER, RECEIPT_FIELDS, AllocationReceipt, AllocationTxn, append_path
from kvlab.study import fixtures
from tests.support import FIXTURES, require

FIXTURE = fixtures.load_fixture(fixtures.FIXTURES / "loop5_ownership.json")


@pytest.fixture(scope="module")
def golden():
    return {name: row["expected"] for name, row in json.loads((FIXTURES / "golden.json").read_text()).items()}


def test_our_copy_of_the_values_is_the_articles():
    theirs = {r["id"]: r["expected"] for r in json.loads(Path(require("golden")).read_text())}
    ours = json.loads((FIXTURES / "golden.json").read_text())
    assert ours
    assert {name: row["expected"] for name, row in ours.items()} == {name: theirs[name] for name in ours}


@pytest.fixture(scope="module")
def played():
    return fixtures.play(FIXTURE).results


STEPS = ["base", "append A 33", "cache_full A 0,1", "fork A to D", "append D 34, fault", "cow publish", "truncate D 32",
         "allocate F 16", "cancel D", "release A", "touch G", "evict 1"]


@pytest.mark.parametrize(("at", "step"), list(enumerate(STEPS)))
def test_the_whole_trace(golden, played, at, step):
    wanted, state = golden["L5.trace.full_reconstruction"][at], played[step]["state"]
    assert state["epoch"] == wanted["epoch"]
    assert {g: [str(b) for b in q] for g, q in state["free"].items()} == wanted["free"]
    refs = {str(g["first_block_id"] + i): n for g in state["groups"]
            for i, n in enumerate(state["blocks"][g["group_id"]]["ref_cnt"])}
    assert refs == wanted["refs"]
    requests = {r: {k: v for k, v in row.items() if k != "generation"} for r, row in state["requests"].items()}
    assert requests == wanted["requests"]


def test_the_copy_on_write_of_token_34(golden, played):
    wanted, staged, after = golden["L5.trace.D34.cow"], played["cow reserve"]["staged"], played["cow publish"]["state"]
    assert {g: row[0]["handle"] for g, row in staged["reserved"].items()} == wanted["reserved"]
    assert {(c["src"], c["rows"]) for c in staged["copies"]} == {
        (h, wanted["copy_rows"][1]) for h in ("1002@9", "2002@12")}
    assert after["blocks"]["g0"]["valid_rows"][3] == wanted["published_rows"] == wanted["append_offset"] + 1
    assert after["blocks"]["g0"]["ref_cnt"][3] == wanted["published_refs"]
    assert after["blocks"]["g0"]["ref_cnt"][2] == wanted["old_tail_refs"]
    assert [played["cow reserve"]["state"]["epoch"], after["epoch"]] == wanted["epoch"]
    d = after["requests"]["D"]
    assert (d["context"], d["version"]) == (wanted["context"], wanted["version"])


def test_receipt_of_the_copy_on_write(golden, played):
    receipt, wanted = played["cow publish"]["receipt"], dict(golden["L5.receipt.D34"])
    assert receipt["new_physical_blocks"] == wanted.pop("new_physical_blocks_handles")
    assert receipt["new_bundles"] == wanted.pop("new_physical_blocks_bundles")
    assert {k: receipt[k] for k in wanted} == wanted


def test_the_private_append_and_the_late_writer(golden, played):
    post, state = golden["L5.trace.A33.post"], played["append A 33"]["state"]
    assert state["blocks"]["g0"]["valid_rows"][2] == state["blocks"]["g1"]["valid_rows"][2] == post["tail_rows"]
    fresh = golden["L5.trace.allocate_F"]
    tables = played["allocate F 16"]["state"]["requests"]["F"]["tables"]
    assert tables == {g: [fresh[g]] for g in ("g0", "g1")}
    assert played["late writer of D"]["refused"] == "stale_block_generation"
    assert played["truncate D 32"]["receipt"]["freed"] == golden["L5.trace.truncate"]["freed"]
    assert played["append D 34, fault"]["state"]["epoch"] == golden["L5.rollback.fault_trace"]["epoch_after"]


def test_publication_order_is_the_log_of_what_happened(golden, played):
    order = []
    for entry in played["cow publish"]["log"]:
        step = entry.split(":")[0]
        if step not in order:
            order.append(step)
    assert order == golden["L5.pub.order"] == list(PUBLICATION_ORDER)
    assert order.index("atomic_publish_tables_length_refdeltas") + 1 == golden["L5.pub.linearization_step"]


def test_costs_of_the_copy(golden, played):
    receipt = played["cow publish"]["receipt"]
    assert 2 * receipt["copy_payload_bytes"] == golden["L5.cow.read_plus_write"]
    assert receipt["copy_payload_bytes"] == golden["L5.cow.copy_payload"]
    assert receipt["traffic_bytes"] == golden["L5.cow.total_traffic"]
    assert receipt["amplification"] == golden["L5.cow.amplification"]
    assert receipt["new_capacity_bytes"] == golden["L5.cow.new_capacity"] == golden["L5.bundle.bytes"]
    assert receipt["write_bytes"] == golden["L5.cow.append_write"] == golden["L5.bundle.row"]


@pytest.mark.parametrize("rows", [0, 1, 2, 4, 15])
def test_amplification_is_two_r_plus_one(rows):
    layout = quarter_split(32, 4, 128, 2, block_size=16, num_blocks=8)
    machine = Allocator(layout, queue_seed=3)
    machine.allocate("A", 16 + rows)
    machine.fork("A", "D")
    receipt = machine.append("D")
    assert receipt.copied_rows == rows
    assert receipt.amplification == 2 * rows + 1
    assert receipt.new_bundles == 1


def test_append_paths(golden):
    for t, owners, name in ((32, 0, "boundary"), (33, 1, "unique_tail"), (34, 2, "shared_tail")):
        assert append_path(t, 16, owners) == golden[f"L5.append.path.{name}"]
    for t in (33, 34):
        assert divmod(t, 16) == tuple(golden[f"L5.append.offset.t{t}"].values())


def test_twenty_token_prefix_copies_four_rows(golden):
    machine = Allocator(quarter_split(32, 4, 128, 2, block_size=16, num_blocks=8), queue_seed=1)
    machine.allocate("A", 20)
    machine.fork("A", "B")
    expected = golden["L5.append.demo20"]
    receipt = machine.append("B")
    assert receipt.copied_rows == expected["copied_rows"]
    first, last = expected["partial_block"]
    assert (first, last + 1) == (16, 20)
    assert expected["free_slots"] == [20, 31]
    a, b = (machine.snapshot()["requests"][r]["tables"]["g0"] for r in "AB")
    assert a[0] == b[0] and a[1] != b[1]


def test_records_have_the_articles_fields(golden):
    for record, rule in ((AllocationTxn, "L5.receipt.txn_fields"), (AllocationReceipt, "L5.receipt.receipt_fields"),
                         (PhysicalBlockHandle, "L5.handle_fields")):
        fields = list(getattr(record, "__dataclass_fields__", RECEIPT_FIELDS))
        assert fields[: len(golden[rule])] == golden[rule]


def test_three_sequences_three_handles(golden):
    base = CacheLayoutManifest((CacheGroup("g0", 0, 1, 1, 8, 2, 16, 32, 0),))
    machine = Allocator(base)
    snapshot = machine.snapshot()
    handles = list(golden["L5.share.example"])
    held = [int(h.split("@")[0]) for h in handles]
    for handle in handles:
        block, generation = map(int, handle.split("@"))
        snapshot["blocks"]["g0"]["generation"][block] = generation
        snapshot["blocks"]["g0"]["ref_cnt"][block] = 1
        snapshot["blocks"]["g0"]["valid_rows"][block] = 16
    snapshot["free"]["g0"] = [b for b in range(32) if b not in held]
    table = [f"{int(h.split('@')[0])}@{h.split('@')[1]}" for h in handles]
    snapshot["requests"]["A"] = {"generation": 1, "version": 1, "context": 48, "tables": {"g0": table}}
    machine.load(snapshot)
    deltas = dict(machine.fork("A", "D").refcount_deltas)
    after = machine.snapshot()["blocks"]["g0"]["ref_cnt"]
    assert {h: after[int(h.split("@")[0])] for h in handles} == golden["L5.share.example"]
    assert set(deltas.values()) == {1}


def test_weak_identity_and_states(golden, played):
    blocks = played["release A"]["state"]["blocks"]["g0"]
    state = {b: "EVICTABLE" if str(1000 + b) in blocks["keys"] else "FREE" for b in (0, 1, 2)}
    assert state == {0: golden["L5.state.refs0_key"], 1: "EVICTABLE", 2: golden["L5.state.refs0_nokey"]}
    before, after = played["append A 33"]["state"], played["cache_full A 0,1"]["state"]
    weak = after["blocks"]["g0"]["ref_cnt"][0] - before["blocks"]["g0"]["ref_cnt"][0]
    assert weak == golden["L5.refcount.def"]["weak_identity_adds"]


def test_allocating_a_cached_block_ends_its_identity(golden):
    session = fixtures.play(FIXTURE, "release A")
    machine = session.machine
    receipt = machine.allocate("H", 16)
    assert receipt.evicted_identities == ("7be1", "7be1")
    left = machine.snapshot()["blocks"]["g0"]["keys"].get("1000")
    assert left == golden["L5.alloc_evicts_old_identity"]["key_after_allocation"]


def test_reference_count_with_a_lease(golden):
    session = fixtures.play(FIXTURE, "cow reserve")
    pool = session.machine.pools[0]
    assert pool.refs(2) + pool.leases[2] == golden["L5.cow.refs_during_copy"] == golden["L5.refcount.example"]


def test_same_number_two_lifetimes(golden):
    twelve, thirteen = (PhysicalBlockHandle("g0", "g0", 1003, g) for g in (12, 13))
    assert [str(twelve), str(thirteen)] == [k for k in golden["L5.aba"] if k != "equal_handles"]
    assert (twelve == thirteen) is golden["L5.aba"]["equal_handles"]


def test_cancel_and_release_have_the_same_physical_effect(golden):
    states = []
    for op in ("cancel", "release"):
        session = fixtures.play(FIXTURE, "fork A to D")
        session.machine.apply({"op": op, "request": "A"})
        states.append(session.machine.digest)
    assert (states[0] == states[1]) is golden["L5.cancel_vs_release"]["physical_effect_equal"]
