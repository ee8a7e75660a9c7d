"""The article's Loop 5 rules, each against what the real allocator does."""

from __future__ import annotations

import ast
import json
from dataclasses import fields
from pathlib import Path

import pytest

from kvlab.contract import Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.block_pool import PhysicalBlockHandle
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.memory.plan import PLANNERS
from kvlab.memory.records import BOUNDARY, Lease
from kvlab.study import fixtures
from tests.memory.worlds import article, picture, refused, shared, staged
from tests.support import FIXTURES, require

FIXTURE = fixtures.load_fixture(fixtures.FIXTURES / "loop5_ownership.json")


@pytest.fixture(scope="module")
def golden():
    return {name: row["expected"] for name, row in json.loads((FIXTURES / "golden.json").read_text()).items()}


def refusal(call, *args) -> str:
    with pytest.raises(Rejected) as no:
        call(*args)
    return no.value.reason


def test_one_mutation_coordinates_all_of_it(golden):
    """Each word of the list is something that this one copy-on-write really moves or shows."""
    machine = shared(article())
    machine.apply({"op": "cache_full", "request": "A", "blocks": [0], "keys": ["7be1"]})
    before, txn = machine.snapshot(), staged(machine, "D")
    open_, log = txn.staged(), txn.log
    txn.finish_writes()
    wrote = txn.staged()
    txn.publish()
    after = machine.snapshot()
    d = after["requests"]["D"]
    shown = {
        "request_generation_and_table_version": (d["generation"], d["version"]) == (
            before["requests"]["D"]["generation"], before["requests"]["D"]["version"] + 1),
        "group_specific_handles": len({*d["tables"]["g0"]} & {*d["tables"]["g1"]}) == 0,
        "physical_generations_and_valid_frontiers": all(
            after["blocks"][g][c] != before["blocks"][g][c]
            for g in ("g0", "g1") for c in ("generation", "valid_rows")),
        "strong_refs_and_leases": after["blocks"]["g0"]["ref_cnt"] != before["blocks"]["g0"]["ref_cnt"]
        and bool(open_["leases"]["g0"]),
        "weak_cache_identity": after["blocks"]["g0"]["keys"] == {"1000": "7be1"},
        "free_or_eviction_queue": after["free"] != before["free"],
        "copy_completion": [c["done"] for c in open_["copies"]] == [False, False]
        and [c["done"] for c in wrote["copies"]] == [True, True],
        "successor_publication": log[-2] == "atomic_publish_tables_length_refdeltas",
        "rollback_or_compensation": refusal(txn.rollback) == "rollback_after_publication",
    }
    assert list(shown) == golden["L5.coordinated_state"]
    assert all(shown.values()), shown


@pytest.mark.parametrize(("t", "rule"), [(33, "L5.append.offset.t33"), (34, "L5.append.offset.t34")])
def test_where_a_token_goes(golden, t, rule):
    machine = article()
    machine.append("A", t - 33) if t > 33 else None
    before = machine.requests["A"].context
    machine.append("A")
    block, row = before // 16, before % 16
    assert before == t
    assert {"j": block, "o": row} == golden[rule]
    assert machine.snapshot()["blocks"]["g0"]["valid_rows"][2] == golden[rule]["o"] + 1


def test_token_32_opens_a_block(golden):
    machine = Allocator(CacheLayoutManifest((CacheGroup("g0", 0, 1, 1, 8, 2, 16, 4),)))
    machine.allocate("A", 32)
    assert dict(machine.append("A").paths)["A"] == golden["L5.append.path.boundary"] == BOUNDARY


def test_half_a_bundle_is_no_successor(golden):
    machine = shared(article())
    txn = staged(machine, "D")
    txn.copy()
    txn.wrote("g0")
    before = picture(machine)
    assert f"invalid_{refusal(txn.publish).removesuffix('_publication')}_successor" == golden["L5.half_bundle"]
    assert picture(machine) == before


def test_before_publication_rollback_after_it_compensation(golden):
    machine = shared(article())
    before = machine.digest
    staged(machine, "D").rollback()
    assert (machine.digest == before) is golden["L5.rollback.before_publication"]["digest_equal"]
    txn = staged(machine, "D")
    txn.finish_writes()
    receipt = txn.publish()
    refused("rollback_after_publication", txn.rollback)
    successor = machine.compensate(receipt)
    assert golden["L5.rollback.after_publication"].startswith(successor.reason.removesuffix("e"))
    assert successor.predecessor_digest == receipt.successor_digest


@pytest.mark.parametrize(("rows", "rule"), [(0, "L5.cow.amplification.r0"), (1, "L5.cow.amplification.r1"),
                                            (4, "L5.cow.amplification.r4"), (15, "L5.cow.amplification.r15")])
def test_amplification(golden, rows, rule):
    machine = Allocator(CacheLayoutManifest((CacheGroup("g0", 0, 2, 3, 8, 2, 16, 8),)))
    machine.allocate("A", 16 + rows)
    machine.fork("A", "D")
    assert machine.append("D").amplification == golden[rule] == 2 * rows + 1


def test_the_three_ways_in_which_a_copy_fails(golden):
    machine = shared(article())
    outcomes = [refusal(machine.apply, {"op": "append", "request": "D",
                                        "expected_tail": {"g0": "1002@8", "g1": "2002@12"}})]
    txn = staged(machine, "D")
    outcomes.append(refusal(machine.allocate, "F", 1))
    seen = []
    machine.observers.append(seen.append)
    txn.rollback()
    outcomes.append(seen[-1].reason)
    assert [o.upper() for o in outcomes] == golden["L5.cow.outcomes"]


def test_an_interior_block_cannot_go(golden):
    machine = article()
    reason = refusal(machine.apply, {"op": "truncate", "request": "A", "drop": [0]})
    assert golden["L5.truncate.interior"].startswith(reason.split("_")[0])


def test_there_are_as_many_malformed_cases(golden):
    numbered = {int(n["id"][4:6]) for n in FIXTURE["negatives"] if n["id"].startswith("L5.n")}
    articles = [n for n in numbered if n <= 22]
    assert len(articles) == golden["L5.negative_count"]


def drift_refs(machine: Allocator) -> None:
    machine.pools[0].shared[0] = 1


def drift_queue(machine: Allocator) -> None:
    pool = machine.pools[0]
    pool._link(int(pool.ring[pool.head]))


def drift_rows(machine: Allocator) -> None:
    machine.pools[1].rows[2] = 7


def drift_digest(machine: Allocator) -> None:
    machine.facts.total += 1


DRIFTS = {"recompute_refs_from_reachability": (drift_refs, "refcount_drift"),
          "check_every_free_queue": (drift_queue, "double_free"),
          "verify_cross_group_valid_rows": (drift_rows, "cross_group_bundle_mismatch"),
          "hash_complete_committed_state": (drift_digest, "the state digest drifted")}


@pytest.mark.parametrize("check", DRIFTS)
def test_every_drift_is_found(check, golden):
    assert list(DRIFTS) == golden["L5.invariant.after_commit"]
    machine, (drift, says) = article(), DRIFTS[check]
    machine.check()
    drift(machine)
    with pytest.raises((Rejected, AssertionError), match=says):
        machine.check()


def test_what_fails_leaves_the_digest(golden):
    machine = shared(article())
    before = machine.digest
    for op in ({"op": "append", "request": "Z"}, {"op": "truncate", "request": "A", "tokens": 99},
               {"op": "allocate", "request": "F", "tokens": 99}, {"op": "no such"}):
        refusal(machine.apply, op)
        assert (machine.digest == before) is golden["L5.invariant.failed_op"]["digest_unchanged"]


def cached() -> Allocator:
    machine = article()
    machine.apply({"op": "cache_full", "request": "A", "blocks": [0], "keys": ["7be1"]})
    machine.release("A")
    return machine


def test_freeing_keeps_an_identity_and_reuse_ends_it(golden):
    machine = cached()
    kept = machine.snapshot()["blocks"]["g0"]["keys"]
    evicted = machine.allocate("F", 64).evicted_identities
    assert {"free_keeps_hash": kept == {"1000": "7be1"}, "allocate_evicts_hash": evicted == ("7be1", "7be1")} == golden[
        "L5.vllm.free_keeps_hash"]


def test_the_free_queue_holds_unused_and_cached_blocks(golden):
    state = cached().snapshot()
    kinds = {"zero_ref_cached" if str(b) in state["blocks"]["g0"]["keys"] else "unused" for b in state["free"]["g0"]}
    assert sorted(kinds, reverse=True) == sorted(golden["L5.vllm.free_queue_content"], reverse=True)


def test_the_papers_operations_are_here(golden):
    """PagedAttention section 5.2; the fused copy is the row mover, called once a block of a staged transaction."""
    moved = []
    machine = shared(article())
    machine.mover = lambda *call: moved.append(call) or call[3]
    machine.append("D")
    ours = {"fork": "fork" in PLANNERS, "append": "append" in PLANNERS, "free": "release" in PLANNERS,
            "fused_block_copy_kernel": moved == [(0, 2, 3, 2), (1, 2, 3, 2)]}
    assert list(ours) == golden["L5.paper.ops"]
    assert all(ours.values())


VLLM_FIELDS = {"block_id": "block_id", "ref_cnt": "ref_cnt", "optional_full_block_hash": "_block_hash",
               "free_queue_links": "prev_free_block", "null_block_flag": "is_null"}


def test_what_the_teaching_model_adds(golden):
    ours = {f.name for record in (PhysicalBlockHandle, Lease) for f in fields(record)}
    assert golden["L5.vllm.missing"] == ["generation", "lease"]
    assert {"generation", "lease_id"} <= ours
    assert list(VLLM_FIELDS) == golden["L5.vllm.kvcacheblock_fields"]


def test_the_pinned_block_has_these_fields_and_not_those(golden):
    """Source-observed, where vLLM v0.23.0 is unpacked: read, not run."""
    source = Path(require("vllm"), "vllm", "v1", "core", "kv_cache_utils.py").read_text()
    block = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == "KVCacheBlock")
    theirs = {n.target.id for n in block.body if isinstance(n, ast.AnnAssign)}
    assert set(VLLM_FIELDS.values()) <= theirs
    assert not [name for name in theirs for word in golden["L5.vllm.missing"] if word in name]
