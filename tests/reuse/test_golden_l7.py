"""The article's Loop 7 values that a fixture cannot point at: sums over the trace, orders, field names, theorems."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from kvlab.contract import Rejected
from kvlab.reasons import REASONS
from kvlab.reuse import radix_tree
from kvlab.reuse.eviction import ORDERS
from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.radix_records import RadixSchedulerHandoffReceipt
from kvlab.reuse.radix_tree import RadixNode
from kvlab.reuse.token_keys import unpack
from kvlab.study import fixtures
from tests.support import FIXTURES

FIXTURE = fixtures.load_fixture(FIXTURES / "loop7_radix.json")
SYSTEM, CHAT_A, CHAT_B = [10, 11, 12, 13], [10, 11, 12, 13, 20, 21], [10, 11, 12, 13, 30, 31]


@pytest.fixture(scope="module")
def golden():
    return {name: row["expected"] for name, row in json.loads((FIXTURES / "golden.json").read_text()).items()}


@pytest.fixture(scope="module")
def receipts():
    """What the 18 operations of the article's trace left behind, in order."""
    results = fixtures.play(FIXTURE).results
    rows = [results[step["name"]]["receipt"] for step in FIXTURE["trace"] if "op" in step]
    return [row for row in rows if row["version"] <= 18]


def test_the_totals_of_the_trace(golden, receipts):
    evictions = [r for r in receipts if r["operation"] == "evict"]
    assert len(receipts) == golden["L7.total.operations"]
    assert sum(len(r["splits"]) for r in receipts) == golden["L7.total.edge_splits"]
    assert sum(len(r["released"]) for r in receipts if r["operation"] == "insert") == \
        golden["L7.total.duplicate_slots_released"]
    assert len(evictions) == golden["L7.total.eviction_calls"]
    assert sum(len(r["evicted"]) for r in evictions) == golden["L7.total.evicted_edges"]
    assert sum(len(e["slots"]) for r in evictions for e in r["evicted"]) == golden["L7.total.evicted_slots"]


def test_locked_chats_survive_both_evictions_before_r17(golden, receipts):
    evicted = [e["tokens"] for r in receipts[:16] for e in r["evicted"]]
    chats = [tokens for tokens in evicted if set(tokens) & {*CHAT_A, *CHAT_B, 22, 23}]
    assert len(evicted) == 3
    assert len(chats) == golden["L7.locked_survive"]["chat_edges_evicted_before_r17"]


def test_no_match_of_any_trace_splits_twice(golden, receipts):
    most = golden["L7.match.one_split"]["max_splits_per_match"]
    assert max(len(r["splits"]) for r in receipts) == most


def test_every_edge_has_as_many_slots_as_tokens_and_the_three_sets_are_the_pool(golden, receipts):
    left, right = golden["L7.edge.equal_lengths"].split("==")
    assert golden["L7.pool.partition"] == "disjoint and complete"
    for result in fixtures.play(FIXTURE).results.values():
        state = result["state"]
        for node in state["nodes"].values():
            names = {"token_ids": node["tokens"], "kv_slot_ids": node["slots"], "len": len}
            assert eval(left, names) == eval(right, names)
        owned = [s for node in state["nodes"].values() for s in node["slots"]]
        assert sorted([*owned, *state["private"], *state["free"]]) == list(range(1, 25))


def test_a_requests_prefix_is_a_reference_and_adds_nothing_to_any_ledger(golden):
    """root -- [10 11 12 13 20 21]: locked, the edge moves from evictable to protected and no slot is added."""
    cache = RadixCache(24, first_slot=1)
    cache.insert(CHAT_A)
    before = cache.ask({"ask": "pool"})
    cache.apply({"op": "lock", "request": "r", "node": 1})
    assert len(cache.table("r")) == 6
    assert sum(cache.ask({"ask": "pool"})[k] - before[k] for k in ("tree", "private")) == \
        golden["L7.prefix_indices_not_owner"]["added_to_ledger"]


def test_the_ledgers_are_what_they_are_defined_as(golden, receipts):
    def summed(state, condition: str) -> int:
        parents = {row["parent"] for row in state["nodes"].values()}
        rule = condition.removeprefix("sum |X| ").replace("no children", "not children")
        return sum(len(row["tokens"]) for name, row in state["nodes"].items()
                   if eval(rule, {"lock": row["lock"], "children": int(name) in parents}))

    results = fixtures.play(FIXTURE).results
    asked = [name for name in results if name.endswith("ledgers")]
    assert len(asked) == 18
    for name in asked:
        wanted = {k: summed(results[name]["state"], rule) for k, rule in golden["L7.ledgers.def"].items()}
        assert results[name]["answer"] == wanted


def test_the_three_cases_of_a_match(golden):
    """root -- [10 11 12 13 20 21]"""
    cases = golden["L7.match.cases"]
    cache = RadixCache(24)
    cache.insert(CHAT_A)
    whole, inside, none = (cache.match(tokens) for tokens in ([*CHAT_A, 7], [*SYSTEM, 99], [99]))
    assert (whole.matched, whole.splits) == (6, ())
    assert cases["lcp==len(edge)"] == "consume and descend"
    assert (inside.matched, inside.splits, inside.terminal) == (4, ((2, 1, 4),), 2)
    assert cases["0<lcp<len(edge)"] == "split once, stop at the shared node"
    assert (none.matched, none.splits, none.terminal) == (0, (), 0)
    assert cases["no child for next token"] == "stop at node"


def test_the_duties_of_a_split_in_their_order(golden, monkeypatch):
    """Watch what a split really writes, in the order in which it writes it."""
    log: list[str] = []

    class Children(dict):
        def __setitem__(self, key, value):
            log.append("replace parent's selector" if self is root_children else "file the suffix")
            super().__setitem__(key, value)

    class Watched(RadixNode):
        __slots__ = ()

        def __setattr__(self, name, value):
            old = getattr(self, "node_id", None) == 1
            if name == "key" and old:
                log.append("partition tokens and slots at m")
            elif name == "node_id":
                log.append("create shared parent")
            elif name == "parent" and old:
                log.append("reparent old child")
            elif name == "lock_ref" and getattr(self, "node_id", None) == 2 and value == 1:
                log.append("copy active lock count")
            super().__setattr__(name, value)

    monkeypatch.setattr(radix_tree, "RadixNode", Watched)
    cache = RadixCache(24)
    cache.insert(CHAT_A)
    cache.apply({"op": "lock", "request": "r", "node": 1})
    root_children = cache.tree.root.children = Children(cache.tree.root.children)
    log.clear()
    cache.apply({"op": "split", "node": 1, "at": 4})
    assert log == golden["L7.split.duties"]


def test_the_orders_of_eviction_are_the_papers_and_the_pinned_sources(golden):
    assert {name.lower() for name in golden["L7.evict.policies"]} | {"lru"} == set(ORDERS)


def test_the_names_of_the_two_segments_are_the_pinned_sources(golden):
    cache = RadixCache(24, first_slot=1)
    cache.insert(CHAT_A)
    node, names = cache.tree.node(1), golden["L7.sglang.treenode"]
    assert unpack(getattr(node, names["token_segment"])) == CHAT_A
    assert list(getattr(node, names["slot_segment"])) == [1, 2, 3, 4, 5, 6]


def test_the_fields_of_the_handoff(golden, receipts):
    wanted = [name.split("=")[0] for name in golden["L7.handoff.fields"]]
    assert [f.name for f in fields(RadixSchedulerHandoffReceipt)] == wanted
    handoff = receipts[-1]["handoff"]
    for name, value in (row.split("=") for row in golden["L7.handoff.fields"] if "=" in row):
        assert str(handoff[name]) == value


def test_the_scheduler_may_pick_any_policy_and_the_cache_writes_none_down(golden):
    cache = RadixCache(24)
    cache.insert(CHAT_A)
    receipt = cache.handoff("r", [*CHAT_A, 7])
    for name in golden["L7.m52_policies"]:
        decided = replace(receipt, policy_decision=name).sealed()
        with pytest.raises(Rejected, match="receipt_tampering"):
            cache.settle(decided, "admit")
    assert cache.settle(receipt, "admit").outcome == "done"


def test_a_receipt_without_its_lease_is_a_stale_read_after_a_mutation(golden):
    cache = RadixCache(24)
    cache.insert(CHAT_A)
    receipt = cache.handoff("r", [*CHAT_A, 7])
    cache.settle(receipt, "reject")
    cache.evict(6)
    with pytest.raises(Rejected) as refused:
        cache.settle(receipt, "admit")
    assert golden["L7.stale_receipt"].replace("_", " ") in REASONS[refused.value.reason]


def test_the_offline_bound_is_reached_by_its_own_order(golden):
    """Run the batch on a cache of the least capacity; what had to be computed is the sum of the edges."""
    batch = [CHAT_A, [50, 51, 60], CHAT_B]
    tree = RadixCache(24)
    for request in batch:
        tree.insert(request)
    edges = sum(len(row["tokens"]) for row in tree.ask({"ask": "edges"}).values())
    bound = tree.ask({"ask": "bound", "requests": batch, "capacity": 6, "offline_fixed_batch": True,
                      "tree_from_that_batch": True})
    assert golden["L7.dfs.lower_bound"] == "C_KV = sum |e|"
    assert bound["rows"] == edges == computed(batch, bound["order"], 6)
    assert computed(batch, [0, 1, 2], 6) > edges


def computed(batch: list[list[int]], order: list[int], capacity: int) -> int:
    """Token rows computed when a batch runs in this order, one request at a time, on a cache of this capacity."""
    cache, rows = RadixCache(capacity, audit="chain"), 0
    for i in order:
        receipt = cache.handoff(f"r{i}", batch[i])
        cache.settle(receipt, "admit")
        need = len(batch[i]) - receipt.matched_tokens
        if (short := need - cache.pool.free_count) > 0:
            cache.evict(short)
        cache.finish(f"r{i}", batch[i][receipt.matched_tokens :])
        rows += need
    return rows


def test_the_papers_nine_steps(golden):
    """Two chats, few-shot queries, sampled answers: the kinds of step of the SGLang paper's third figure."""
    system, few = [1, 2, 3], [40, 41, 42]
    cache = RadixCache(24)
    steps = [
        {"op": "insert", "tokens": [*system, 10, 11]},           # a first chat
        {"op": "insert", "tokens": [*system, 10, 11, 12, 13]},   # its second turn: a hit and one more edge
        {"op": "insert", "tokens": [*system, 20, 21]},           # a second chat: the system prompt is split off
        {"op": "insert", "tokens": [*few, 50]},                  # few-shot: nothing shared
        {"op": "insert", "tokens": [*few, 51]},                  # one more: the examples are split off
        {"op": "evict", "tokens": 2},                            # no room: the oldest leaf goes
        {"op": "insert", "tokens": [*system, 20, 21, 22]},       # the second chat goes on
        {"op": "evict", "tokens": 1},                            # again
        {"op": "insert", "tokens": [*few, 51, 60]},              # a sampled answer
    ]
    receipts = [cache.apply(step) for step in steps]
    assert receipts[-1].version == golden["L7.paper.nine_mutations"]
    assert [len(r.splits) for r in receipts] == [0, 0, 1, 0, 1, 0, 0, 0, 0]
    assert [r.matched for r in receipts if r.operation == "insert"] == [0, 5, 3, 0, 3, 5, 4]
    assert [[unpack(e.key) for e in r.evicted] for r in receipts if r.evicted] == [[[12, 13]], [[10, 11]]]


def test_the_articles_named_refusals_are_refused(golden):
    tried = {n["reason"] for n in FIXTURE["negatives"]}
    ours = {"stale_version": "stale_tree_version"}
    assert {ours.get(name, name) for name in golden["L7.negative.named"]} <= tried
    assert len({n["reason"] for n in FIXTURE["negatives"][: golden["L7.negative_count"]]}) == \
        golden["L7.negative_count"]
