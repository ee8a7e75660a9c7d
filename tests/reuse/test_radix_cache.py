"""The radix cache by hand: small trees that you can draw, and what each operation makes of them."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.contract import History, Rejected
from kvlab.reuse.eviction import ORDERS
from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.radix_theorem import dfs_bound
from kvlab.reuse.token_keys import TokenKey, first_difference, pack, unpack
from tests.reuse.test_golden_l7 import computed

SYSTEM = [1, 2, 3, 4]


def edges(cache: RadixCache) -> dict[int, tuple[list[int], list[int]]]:
    return {int(k): (v["tokens"], v["slots"]) for k, v in cache.ask({"ask": "edges"}).items()}


def reason(call) -> str:
    with pytest.raises(Rejected) as refused:
        call()
    return refused.value.reason


# ---------------------------------------------------------------- keys
@pytest.mark.parametrize("form", [list, tuple, lambda t: array("I", t), lambda t: array("i", t), pack,
                                  lambda t: np.array(t, np.int32), lambda t: np.array(t, np.int64)])
def test_every_form_of_tokens_is_the_same_query(form):
    cache = RadixCache(64)
    cache.insert(list(range(40)))
    assert cache.match(form([*range(33), 99])).matched == 33


@pytest.mark.parametrize("bad", [[-1], [1 << 32], ["a"], [1.5], b"abc", np.array([-1], np.int32), "12", None, 7])
def test_what_is_no_token_is_refused(bad):
    cache = RadixCache(8)
    cache.insert([1])
    before = cache.digest
    assert reason(lambda: cache.match(bad)) == "invalid_token"
    assert cache.digest == before


def test_a_miss_packs_the_first_chunk_only():
    cache = RadixCache(2000)
    cache.insert(list(range(1000)))
    key = TokenKey([7] * 100_000, 1)
    cache.tree.walk(key)
    assert len(key.data) <= 64 * 4
    key = TokenKey([*range(500), *[7] * 99_500], 1)
    assert cache.tree.walk(key).consumed == 500 * 4
    assert len(key.data) <= 1024 * 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 5))
def test_agreement_is_the_common_prefix(a, b, skip):
    wanted = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    query = [9] * skip + a
    for key in (TokenKey(query, 1), TokenKey(pack(query), 1)):
        assert key.agree(4 * skip, pack(b)) == 4 * wanted
    n = min(len(a), len(b))
    assert first_difference(pack(a), 0, pack(b), 0, 4 * n) == 4 * wanted


# ---------------------------------------------------------------- match
def test_a_read_only_match_changes_nothing():
    """root -- [1 2 3 4]"""
    cache = RadixCache(8)
    cache.insert(SYSTEM)
    before = cache.snapshot()
    assert cache.ask({"ask": "match", "tokens": [1, 2, 9]}) == {
        "matched": 2, "slots": [0, 1], "path": [], "terminal": 0, "inside": [1, 2]}
    assert cache.snapshot() == before


def test_the_cap_for_logits_is_the_callers():
    cache = RadixCache(8)
    cache.insert(SYSTEM)
    assert cache.match(SYSTEM).matched == 4
    assert cache.match(SYSTEM[:-1]).matched == 3


def test_blocks_align_every_boundary_down():
    """blocks of 4: root -- [0..7], then two children under [0 1 2 3]"""
    cache = RadixCache(8, block_size=4)
    cache.insert(list(range(8)))
    receipt = cache.insert([0, 1, 2, 3, 4, 5, 99, 98, 97])
    assert (receipt.matched, list(receipt.released)) == (4, [2])
    assert edges(cache) == {1: ([4, 5, 6, 7], [1]), 2: ([0, 1, 2, 3], [0]), 3: ([4, 5, 99, 98], [3])}
    assert cache.match([0, 1, 2]).matched == 0
    assert cache.match([0, 1, 2, 3, 4, 5, 6]).matched == 4


def test_extra_keys_are_trees_of_their_own_through_a_split():
    """root -- a:[1 2] -- [3 4] and root -- b:[1 2 3 4]"""
    cache = RadixCache(16)
    for extra in ({"adapter": "a"}, {"adapter": "b"}):
        cache.insert(SYSTEM, extra_key=extra)
    assert cache.match([1, 2, 9], {"adapter": "a"}).matched == 2
    assert cache.match(SYSTEM, {"adapter": "a"}).path == (3, 1)
    assert cache.match(SYSTEM, {"adapter": "b"}).path == (2,)
    assert cache.match(SYSTEM).matched == 0
    cache.check()


# ---------------------------------------------------------------- slots
def test_the_protected_length_keeps_the_trees_own_slots():
    """root -- [1 2 3 4]; a request that refers to slots 0..3 brings one more row"""
    cache = RadixCache(8)
    cache.insert(SYSTEM)
    own = list(cache.apply({"op": "reserve", "count": 1}).allocated)
    receipt = cache.insert([*SYSTEM, 5], slots=[0, 1, 2, 3, *own], protected_len=4)
    assert list(receipt.released) == []
    assert edges(cache) == {1: (SYSTEM, [0, 1, 2, 3]), 2: ([5], own)}
    assert reason(lambda: cache.insert([*SYSTEM, 6], slots=[0, 1, 2, 3, 7])) == "owned_slot_reuse"


def test_a_released_slot_goes_to_the_tail_of_the_queue_and_around_its_end():
    cache = RadixCache(5)
    for first in range(7):
        cache.insert([first, 50, 51])
        assert list(cache.evict(3).released) == [(3 * first + i) % 5 for i in range(3)]
    cache.check()


def test_publishing_the_same_prompt_twice_rewrites_the_second_table():
    """root -- [1 2 3 4]: b computed the same rows; its table points at a's slots afterwards, its own are free"""
    cache = RadixCache(12)
    for name in ("a", "b"):
        cache.settle(cache.handoff(name, SYSTEM), "admit")
        cache.extend(name, SYSTEM)
    cache.publish("a")
    receipt = cache.publish("b", [9])
    assert list(receipt.released) == [4, 5, 6, 7]
    assert list(cache.table("b")) == [0, 1, 2, 3, 8]
    assert not set(cache.table("b")) & set(cache.snapshot()["free"])
    cache.check()


def test_a_cancelled_request_gives_back_its_own_rows_and_the_tree_keeps_the_rest():
    cache = RadixCache(12)
    cache.insert(SYSTEM)
    cache.settle(cache.handoff("r", [*SYSTEM, 5, 6]), "admit")
    cache.extend("r", [5, 6])
    assert list(cache.cancel("r").released) == [4, 5]
    assert cache.ask({"ask": "pool"}) == {"tree": 4, "private": 0, "free": 8, "slots": 12}
    assert reason(lambda: cache.table("r")) == "unknown_request"


# ---------------------------------------------------------------- handoff
def test_a_leased_receipt_outlives_changes_elsewhere_and_a_split_under_its_lock():
    """root -- [1 2] -- [3 4]: split while the handoff waits; slots and order stay, so it may still be admitted"""
    cache = RadixCache(16)
    cache.insert(SYSTEM)
    receipt = cache.handoff("r", [*SYSTEM, 5])
    cache.insert([1, 2, 9])
    cache.insert([70, 71])
    assert cache.settle(receipt, "admit").request == "r"
    assert reason(lambda: cache.settle(receipt, "admit")) in ("stale_tree_version", "handoff_without_lease")
    assert cache.publish("r", [5]).path == (2, 1, 5)


def test_deferring_gives_the_lease_back():
    cache = RadixCache(16)
    cache.insert(SYSTEM)
    receipt = cache.handoff("r", [*SYSTEM, 5])
    assert cache.evict(4).outcome == "short"
    cache.settle(receipt, "defer")
    assert cache.ask({"ask": "ledgers"}) == {"protected": 0, "evictable": 4, "leaf_ready": 4}
    assert cache.evict(4).evicted_tokens == 4


def test_every_field_of_a_receipt_is_sealed():
    cache = RadixCache(16)
    cache.insert(SYSTEM)
    receipt = cache.handoff("r", [*SYSTEM, 5])
    for name, value in receipt.to_dict().items():
        other = {int: 99, str: "x", list: (99,), bool: False, type(None): "LPM"}[type(value)]
        if name != "receipt_sha256":
            assert reason(lambda n=name, o=other: cache.settle(replace(receipt, **{n: o}), "admit")) == \
                "receipt_tampering"
    assert reason(lambda: cache.apply({"op": "settle", "receipt": {"a": 1}, "disposition": "admit"})) == \
        "receipt_tampering"


# ---------------------------------------------------------------- eviction
def used(order: str, policy: str = "normative") -> RadixCache:
    """Four leaves a, b, c, d: inserted in this order, used in another."""
    cache = RadixCache(40, eviction=order, policy=policy)
    for first, priority in ((10, 2), (20, 0), (30, 1), (40, 0)):
        cache.insert([first, first + 1], priority=priority)
    for first, times in ((40, 1), (10, 3), (20, 2), (30, 1)):
        for _ in range(times):
            cache.match([first, first + 1])
    return cache


@pytest.mark.parametrize(("order", "wanted"), [
    ("lru", [40, 10, 20, 30]), ("mru", [30, 20, 10, 40]), ("fifo", [10, 20, 30, 40]), ("filo", [40, 30, 20, 10]),
    ("lfu", [40, 30, 20, 10]), ("priority", [40, 20, 30, 10]), ("segmented-lru", [40, 10, 20, 30])])
def test_the_orders(order, wanted):
    cache = used(order)
    asked = [unpack(cache.tree.node(n).key)[0] for n in cache.ask({"ask": "victims"})]
    evicted = [unpack(cache.evict(1).evicted[0].key)[0] for _ in range(4)]
    assert evicted == asked == wanted


def test_segmented_lru_keeps_what_was_used_twice():
    cache = RadixCache(40, eviction="segmented-lru")
    cache.insert([10, 11])
    cache.match([10, 11])
    cache.insert([20, 21])
    assert unpack(cache.evict(1).evicted[0].key) == [20, 21]


def test_a_parent_goes_after_its_last_child():
    """root -- [1 2] -- [3] and [4]"""
    cache = RadixCache(40)
    cache.insert([1, 2, 3])
    cache.insert([1, 2, 4])
    assert [e.node for e in cache.evict(4).evicted] == [1, 3, 2]


def test_policies_date_the_suffix_behind_a_split_differently():
    """root -- [1 2] -- [3 4] and root -- [8 9]. [1 2 7] used the prefix after [8 9]; did it use [3 4]?"""
    victims = {}
    for policy in ("normative", "sglang-0.5.11"):
        cache = RadixCache(40, policy=policy)
        cache.insert(SYSTEM)
        cache.insert([8, 9])
        cache.match([1, 2, 7])
        victims[policy] = unpack(cache.evict(1).evicted[0].key)
    assert victims == {"normative": [3, 4], "sglang-0.5.11": [8, 9]}


def test_only_insertions_count_as_hits_in_the_pinned_source():
    hits = {p: used("lfu", p).tree.node(1).hits for p in ("normative", "sglang-0.5.11")}
    assert hits == {"normative": 4, "sglang-0.5.11": 1}


@pytest.mark.parametrize("order", ORDERS)
def test_the_heap_stays_small_and_right_however_often_a_leaf_is_used(order):
    cache = used(order)
    for _ in range(400):
        cache.match([10, 11])
    assert len(cache.heap) < 100
    asked = cache.ask({"ask": "victims"})
    assert [e.node for e in cache.evict(8).evicted] == asked


# ---------------------------------------------------------------- the machine's face
def test_a_history_can_be_forked():
    cache = RadixCache(16)
    history = History(cache)
    cache.insert(array("I", SYSTEM))
    cache.match(np.array([1, 2, 9], np.int32))
    assert reason(lambda: cache.evict(0)) == "invalid_length"
    assert [s.kind for s in history] == ["start", "committed", "committed", "refused"]
    other = history.fork(2, RadixCache(16))
    assert other.now.committed == cache.snapshot()


def test_a_wrong_stored_ledger_or_digest_is_found():
    cache = RadixCache(16)
    cache.insert(SYSTEM)
    cache.tree.leaf_ready -= 1
    with pytest.raises(AssertionError, match="ledger"):
        cache.check()
    cache.tree.leaf_ready += 1
    cache.facts.total += 1
    with pytest.raises(AssertionError, match="digest"):
        cache.check()


@pytest.mark.parametrize("arguments", [{"eviction": "best"}, {"policy": "vllm"}, {"audit": "none"}, {"block_size": 0},
                                       {"num_slots": -1}])
def test_an_impossible_cache_is_refused(arguments):
    with pytest.raises(ValueError, match=r"is one of|counts tokens"):
        RadixCache(**{"num_slots": 4} | arguments)


@pytest.mark.parametrize("op", [{"op": "dance"}, {"op": "match"}, {"op": "evict", "tokens": 1, "hard": True}, {},
                                {"op": ["match"]}, {"op": "settle", "receipt": {}, "disposition": "maybe"},
                                {"op": "cancel", "request": ["r"]}, {"op": "insert", "tokens": [1], "priority": "high"},
                                {"op": "match", "tokens": [1], "extra_key": {1, 2}},
                                {"op": "insert", "tokens": [1], "slots": "a"}, {"op": "evict", "node": "1"}])
def test_an_operation_that_there_is_not(op):
    assert reason(lambda: RadixCache(4).apply(op)) == "unknown_operation"


@pytest.mark.parametrize("question", [{"ask": "why"}, {}, {"ask": "match"}, {"ask": "path", "node": 1, "x": 2}])
def test_a_question_that_there_is_not(question):
    assert reason(lambda: RadixCache(4).ask(question)) == "unknown_operation"


# ---------------------------------------------------------------- the theorem
BATCH = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(BATCH, st.randoms(use_true_random=False))
def test_no_order_computes_less_than_the_bound_and_depth_first_reaches_it(batch, rng):
    capacity = max(map(len, batch))
    bound = dfs_bound(batch, capacity, offline_fixed_batch=True, tree_from_that_batch=True)
    assert bound.rows == len({tuple(r[:n]) for r in batch for n in range(1, len(r) + 1)})
    assert computed(batch, list(bound.order), capacity) == bound.rows
    other = list(range(len(batch)))
    rng.shuffle(other)
    assert computed(batch, other, capacity) >= bound.rows
