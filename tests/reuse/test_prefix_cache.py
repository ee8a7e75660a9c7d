"""The hash-chain index over a real allocator: who may look, what is found, what is refused, and random histories."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlab.contract import History, Rejected
from kvlab.memory.block_pool import INDEX_MASK
from kvlab.reuse.chain import HASHES, _run
from kvlab.reuse.manifests import SideInput, plain
from kvlab.reuse.prefix_cache import PrefixCache
from kvlab.reuse.prefix_lookup import Asker
from tests.reuse.prefix_worlds import TOKENS, PlainList, asker, end, index, published
from tests.reuse.worlds import manifest

SILENT = {"lookups": 0, "probes": 0, "hits": 0, "misses": 0, "hit_tokens": 0}


def refused(act) -> str:
    with pytest.raises(Rejected) as no:
        act()
    return no.value.reason


# ---------------------------------------------------------------- who may look
@pytest.mark.parametrize(("who", "reason"), [("amy", "lookup_before_authorization"), ("bob", "unauthorized_namespace"),
                                             ("nobody", "unauthorized_namespace")])
@pytest.mark.parametrize("tokens", [TOKENS, [1] * 40])
def test_nothing_is_read_for_whom_it_is_not_meant(who, reason, tokens):
    cache, ann = published()
    cache.telemetry.update(SILENT)
    before = cache.digest
    for act in (lambda a: cache.lookup(a, "x", tokens), lambda a: cache.start(a, "x", tokens),
                lambda a: cache.publish(a, "A", tokens)):
        assert refused(lambda act=act: act(replace(ann, principal=who))) == reason
    assert cache.telemetry == SILENT and cache.digest == before


def test_a_tenants_answer_is_the_same_whatever_the_other_has():
    empty, (full, _) = index(), published()
    bob = asker("b")
    one, other = (cache.lookup(bob, "b1", TOKENS) for cache in (empty, full))
    assert one.lengths == other.lengths and one.lengths.semantic == 0
    assert empty.telemetry["probes"] == 1 == full.telemetry["probes"] - published()[0].telemetry["probes"]


def test_the_same_adapter_name_over_other_weights_is_refused():
    cache = index()
    one = asker(adapter_name="poet", adapter_identity="w1")
    cache.start(one, "A", TOKENS)
    cache.publish(one, "A", TOKENS)
    assert refused(lambda: cache.lookup(asker(adapter_name="poet", adapter_identity="w2"), "x", TOKENS)) \
        == "incompatible_manifest"
    assert cache.lookup(asker(), "x", TOKENS).lengths.indexed == 0


def test_the_manifest_of_an_index_covers_no_tokens():
    with pytest.raises(ValueError, match="covers no tokens"):
        Asker("ann", "prod/a", manifest())


# ---------------------------------------------------------------- what is found
def test_rows_come_before_identity():
    cache, ann = index(), asker()
    txn = cache.stage_admit(cache.lookup(ann, "A", TOKENS).receipt)
    assert refused(lambda: cache.publish(ann, "A", TOKENS)) == "unknown_request"
    txn.finish_writes()
    txn.publish()
    cache.apply({"op": "truncate", "request": "A", "tokens": 40})
    assert refused(lambda: cache.publish(ann, "A", TOKENS)) == "valid_rows_below_view"
    assert len(cache.publish(ann, "A", TOKENS[:40]).published) == 2


def test_a_block_is_not_hashed_after_the_first_miss(monkeypatch):
    cache, ann = published()
    sides = (SideInput("multimodal", 40, 1, "far behind"),)
    for hashed, who in ((HASHES["crc32"], ann), (HASHES["sha256"], replace(ann, side_inputs=sides))):
        made = []
        counting = replace(hashed, make=lambda d, old=hashed.make, made=made: made.append(d) or old(d))
        monkeypatch.setattr(cache, "hashed", replace(counting, run=partial(_run, counting.make)))
        cache.lookup(who, "x", TOKENS[:16] + [0] * 4080)
        assert len(made) <= 2


def test_equal_blocks_of_one_step_have_an_entry_each_and_either_serves():
    cache, ann = published()
    cache.apply({"op": "allocate", "request": "B", "tokens": 32})
    twin = cache.publish(ann, "B", TOKENS[:32])
    assert twin.duplicates == twin.published and len(twin.published) == 2
    first = cache.lookup(ann, "x", TOKENS[:33]).receipt.matched_group_handles.to_dict()
    assert first["g0"] == ["1000@1", "1001@1"]
    cache.apply({"op": "evict", "blocks": [["1000@1", "2000@1"]]})
    second = cache.lookup(ann, "x", TOKENS[:33]).receipt.matched_group_handles.to_dict()
    assert second["g0"] == ["1004@1", "1001@1"]  # one prefix, pieced together from two computations of it
    cache.check()


def test_whole_blocks_of_two_prefixes_are_no_prefix():
    cache, ann = published()
    other = [9] * 16 + TOKENS[16:32]
    cache.apply({"op": "allocate", "request": "B", "tokens": 32})
    cache.publish(ann, "B", other)
    found, theirs = ({g: list(h[:2]) for g, h in cache.lookup(ann, "x", [*tokens[:32], 7]).receipt
                      .matched_group_handles.to_dict().items()} for tokens in (TOKENS, other))
    mixed = {group: [found[group][0], theirs[group][1]] for group in found}
    asked = {"ask": "claim", "principal": "ann", "namespace": "prod/a", "manifest": plain(ann.manifest),
             "request": "x", "tokens": [*TOKENS[:32], 7]}
    assert cache.ask(asked | {"claim": {"handles": found}})["runtime_hit_tokens"] == 32
    assert refused(lambda: cache.ask(asked | {"claim": {"handles": mixed}})) == "parent_hash_mismatch"


def test_a_younger_copy_counts_where_the_older_one_has_lost_its_identity():
    cache, ann = published()
    for request in ("B", "C"):
        cache.apply({"op": "allocate", "request": request, "tokens": 32})
    cache.publish(ann, "B", TOKENS[:32])
    cache.apply({"op": "evict", "blocks": [["1000@1", "2000@1"], ["1001@1", "2001@1"]]})
    third = cache.publish(ann, "C", TOKENS[:32])
    assert third.duplicates == third.published and len(third.published) == 2


def test_a_hit_block_is_not_published_twice():
    cache, ann = published()
    cache.start(ann, "B", TOKENS)
    assert cache.publish(ann, "B", TOKENS).published == ()


def test_table_order_orphans_a_prefix_and_tail_first_order_shortens_it():
    left = {}
    for policy in ("normative", "vllm-0.23"):
        cache, ann = published(policy=policy, pools=(4, 4))
        end(cache, "A")
        cache.apply({"op": "allocate", "request": "B", "tokens": 16})
        left[policy] = cache.lookup(ann, "x", TOKENS).lengths.indexed
        cache.apply({"op": "append", "request": "B"})
        left[policy] = left[policy], cache.lookup(ann, "x", TOKENS).lengths.indexed
    assert left == {"normative": (0, 0), "vllm-0.23": (48, 32)}  # vLLM gives the block that is not full first


def test_a_block_that_one_group_gave_away_ends_the_hit_in_every_group():
    cache, ann = published(policy="vllm-0.23", pools=(8, 4))
    end(cache, "A")
    cache.start(ann, "B", [7] * 32)
    assert cache.lookup(ann, "x", TOKENS).lengths.indexed == 32  # 2002 has another lifetime now
    cache.publish(ann, "B", [7] * 32)
    assert cache.lookup(ann, "x", TOKENS).lengths.indexed == 32  # and another key: its old entry is unmapped
    assert [int((t.spots >= 0).sum()) for t in cache.entries.tables] == [5, 4]


def test_an_identity_that_somebody_else_gave_a_block_is_no_entry_of_ours():
    cache, ann = published(pools=(4, 4))
    end(cache, "A")
    cache.allocator.allocate("B", 64)
    cache.allocator.apply({"op": "cache_full", "request": "B", "blocks": [0, 1, 2, 3], "keys": list("wxyz")})
    assert cache.lookup(ann, "x", TOKENS).lengths.indexed == 0


def test_vllm_keeps_the_cap_where_no_logits_are_wanted():
    runtime = []
    for policy in ("normative", "vllm-0.23"):
        cache, ann = published(policy=policy)
        runtime.append(cache.lookup(ann, "x", TOKENS[:48], requires_logits=False).lengths.runtime)
    assert runtime == [48, 32]


def test_without_witnesses_the_index_claims_only_what_it_can_find():
    cache, ann = published(witness=False)
    own = cache.lookup(ann, "x", TOKENS).lengths
    assert (own.semantic, own.indexed, own.runtime) == (48, 48, 48)
    assert PrefixCache.of(cache.snapshot()).digest == cache.digest


def test_blocks_that_a_transaction_may_have_written_into_are_not_found():
    cache, ann = published(pools=(4, 4))
    end(cache, "A")
    before = cache.digest
    txn = cache.allocator.stage({"op": "allocate", "request": "B", "tokens": 32})
    assert cache.lookup(ann, "x", TOKENS).lengths.indexed == 0
    txn.rollback()
    assert cache.lookup(ann, "x", TOKENS).lengths.indexed == 0  # its rows may be somebody else's by now
    assert cache.digest == before and PrefixCache.of(cache.snapshot()).digest == before


# ---------------------------------------------------------------- receipts
def test_a_receipt_is_good_until_its_blocks_or_its_generation_are_not():
    cache, ann = published()
    match = cache.lookup(ann, "B", TOKENS)
    cache.apply({"op": "gate", "do": {"op": "reset_prefix_cache", "namespace": "prod/a"}})
    assert refused(lambda: cache.admit(match.receipt)) == "stale_entry_generation"
    cache, ann = published(pools=(4, 4))
    match = cache.lookup(ann, "B", TOKENS)
    end(cache, "A")
    cache.apply({"op": "allocate", "request": "C", "tokens": 64})
    assert refused(lambda: cache.admit(match.receipt)) == "stale_block_generation"


def test_every_field_of_a_receipt_is_under_its_seal():
    cache, ann = published()
    receipt = cache.lookup(ann, "B", TOKENS).receipt
    other = cache.lookup(ann, "B", TOKENS[:20]).receipt
    for name in receipt.__dataclass_fields__:
        value = getattr(receipt, name)
        changed = {"matched_group_handles": other.matched_group_handles}.get(
            name, value + 1 if isinstance(value, int) else f"{value}x")
        edited = replace(receipt, **{name: changed})
        assert refused(lambda r=edited: cache.admit(r)) == "receipt_tampering"
    assert receipt.policy_decision is None and cache.admit(receipt).request == "B"


def test_refused_operations_move_no_digest_and_a_history_remembers_them():
    cache, ann = published()
    history = History(cache)
    before = cache.digest
    bad = [{"op": "dance"}, {"op": "publish"}, {"op": "publish", "asker": ann, "request": "A", "tokens": ["x"]},
           {"op": "gate", "do": {"op": "lookup"}}, {"op": "release", "request": "nobody"}, {"op": "admit"},
           {"op": "cache_full", "request": "A", "blocks": [0], "keys": ["k"]}]
    reasons = [refused(lambda op=op: cache.apply(op)) for op in bad]
    assert reasons == [*["unknown_operation"] * 2, "invalid_token", "unknown_operation", "unknown_request",
                       *["unknown_operation"] * 2]
    assert cache.digest == before and [s.kind for s in history.steps[1:]] == ["refused"] * 7
    questions = {"unknown_operation": [{"ask": "what"}, {"ask": "lookup"}],
                 "invalid_token": [{"ask": "keys", "tokens": [-1] * 16}]}
    for word, asked in questions.items():
        assert [refused(lambda q=question: cache.ask(q)) for question in asked] == [word] * len(asked)


@pytest.mark.parametrize("design", [{"policy": "lru"}, {"alignment": 24}, {"hash_name": "crc32", "witness": False},
                                    {"policy": "vllm-0.23", "partial_tails": True}])
def test_a_design_that_contradicts_itself_is_no_index(design):
    with pytest.raises(ValueError, match=r"policy|alignment|witness|partial"):
        index(**design)


def test_a_malformed_snapshot_leaves_the_present_state():
    cache, _ = published()
    good, before = cache.snapshot(), cache.digest
    for change in ({"parts": None}, {"hash": "crc32"}, {"parts": good["parts"] * 2}, {"allocator": {}}):
        assert refused(lambda c=change: cache.load(good | c)) == "malformed_snapshot"
        assert cache.digest == before
    cache.check()


def test_the_chained_audit_needs_no_walk_over_the_entries(monkeypatch):
    cache, ann = published(audit="chain")
    monkeypatch.setattr(cache.entries, "snapshot", None)
    before = cache.digest
    cache.start(ann, "B", TOKENS)
    assert cache.publish(ann, "B", TOKENS).predecessor_digest != before


# ---------------------------------------------------------------- extra keys
PICTURES = (SideInput("multimodal", 20, 4, "picture x"), SideInput("prompt_embedding", 34, 1, "row 1"))


@pytest.mark.parametrize(("change", "hit", "semantic"), [
    ({}, 48, 50), ({"side_inputs": (replace(PICTURES[0], identity="picture y"), PICTURES[1])}, 16, 20),
    ({"side_inputs": (PICTURES[0], replace(PICTURES[1], identity="row 2"))}, 32, 34),
    ({"cache_salt": "other"}, 0, 0), ({"adapter_name": "x", "adapter_identity": "x"}, 0, 0), ({"tenant": "b"}, 0, 0)])
def test_what_stands_beside_the_tokens_decides_where_the_hit_ends(change, hit, semantic):
    cache = index(pools=(16, 16))
    said = {"side_inputs": PICTURES, "cache_salt": "salt"}
    cache.start(asker(**said), "A", TOKENS)
    cache.publish(asker(**said), "A", TOKENS)
    own = cache.lookup(asker(**(said | change)), "x", TOKENS).lengths
    assert (own.indexed, own.semantic) == (hit, semantic)
    assert PrefixCache.of(cache.snapshot()).digest == cache.digest


# ---------------------------------------------------------------- random histories
WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class AgainstAPlainList(RuleBasedStateMachine):
    """The index against a list of everything that was ever published, over pools that run out all the time."""

    @initialize(pools=st.sampled_from([(6,), (6, 6), (9, 6)]), policy=st.sampled_from(["normative", "vllm-0.23"]),
                audit=st.sampled_from(["state", "chain"]))
    def begin(self, pools, policy, audit):
        self.cache = index(2, pools, audit=audit, policy=policy)
        self.plain, self.live, self.serial = PlainList(), {}, 0
        self.generation = {"a": 1, "b": 1}

    def asker(self, tenant):
        return asker(tenant, publication_generation=self.generation[tenant])

    def attempt(self, act, *allowed):
        before = self.cache.digest
        try:
            act()
        except Rejected as no:
            assert no.reason in allowed and self.cache.digest == before, no
            return False
        return True

    def pick(self, at):
        return sorted(self.live)[at % len(self.live)]

    @rule(tenant=st.sampled_from("ab"), tokens=WORDS, fault=st.booleans())
    def start(self, tenant, tokens, fault):
        self.serial += 1
        name = f"r{self.serial}"
        if fault:
            before = self.cache.digest
            match = self.cache.lookup(self.asker(tenant), name, tokens)
            if self.attempt(lambda: self.opened(match), "out_of_memory"):
                self.plain.spoil(self.cache.allocator)
                self.txn.rollback()
            assert self.cache.digest == before
        if self.attempt(lambda: self.cache.start(self.asker(tenant), name, tokens), "out_of_memory"):
            self.live[name] = (tenant, list(tokens))

    def opened(self, match):
        self.txn = self.cache.stage_admit(match.receipt)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 99))
    def publish(self, at):
        name = self.pick(at)
        tenant, tokens = self.live[name]
        tables = self.cache.snapshot()["allocator"]["requests"][name]["tables"]
        if self.attempt(lambda: self.cache.publish(self.asker(tenant), name, tokens), *(
                ["in_place_relabel"] if self.generation[tenant] > 1 else [])):
            self.plain.publish(tenant, self.generation[tenant], tokens, tables, 2)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 99), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def append(self, at, more):
        name = self.pick(at)
        op = {"op": "append", "request": name, "tokens": len(more)}
        if self.attempt(lambda: self.cache.apply(op), "out_of_memory"):
            self.live[name][1].extend(more)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 99), keep=st.integers(1, 9))
    def truncate(self, at, keep):
        name = self.pick(at)
        tokens = self.live[name][1]
        keep = min(keep, len(tokens))
        self.cache.apply({"op": "truncate", "request": name, "tokens": keep})
        del tokens[keep:]

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 99), how=st.sampled_from(["release", "cancel"]))
    def finish(self, at, how):
        name = self.pick(at)
        self.cache.apply({"op": how, "request": name})
        del self.live[name]

    @precondition(lambda self: self.plain.rows)
    @rule(at=st.integers(0, 999))
    def evict(self, at):
        _, _, tokens, _, _ = sorted(self.plain.rows)[at % len(self.plain.rows)]
        groups = [pool.group for pool in self.cache.allocator.pools]
        bundle = [next((h for _, _, t, g, h in sorted(self.plain.rows) if (t, g) == (tokens, group)), "")
                  for group in groups]
        self.attempt(lambda: self.cache.apply({"op": "evict", "blocks": [bundle]}),
                     "stale_block_generation", "touch_without_identity", "cross_group_bundle_mismatch")

    @rule(tenant=st.sampled_from("ab"), sure=st.integers(0, 9))
    def reset(self, tenant, sure):
        if sure == 0:
            self.cache.apply({"op": "gate", "do": {"op": "reset_prefix_cache", "namespace": f"prod/{tenant}"}})
            self.generation[tenant] += 1

    @rule(tenant=st.sampled_from("ab"), tokens=WORDS, logits=st.booleans())
    def lookup(self, tenant, tokens, logits):
        before = self.cache.digest
        own = self.cache.lookup(self.asker(tenant), "x", tokens, requires_logits=logits).lengths
        state = self.cache.allocator.snapshot()
        blocks = self.plain.blocks(tenant, self.generation[tenant], tokens, state, 2)
        cap = len(tokens) - (logits or self.cache.policy == "vllm-0.23")
        assert (own.indexed, own.runtime) == (2 * blocks, min(2 * blocks, cap) // 2 * 2)
        assert own.runtime <= min(own.semantic, own.indexed, own.cap) <= own.prompt
        assert self.cache.digest == before

    @invariant()
    def nobody_reads_a_free_block(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        state = self.cache.allocator.snapshot()
        for row in state["requests"].values():
            for group, table in row["tables"].items():
                assert not {int(text.split("@")[0]) for text in table} & set(state["free"][group])
        numbers = {p.number for p in self.cache.entries.parts.values()}
        for table in self.cache.entries.tables:
            stand = [table.words[row] & INDEX_MASK for row in table.slots if row >= 0]
            stand += [i for twins in table.twins.values() for i in twins]
            assert sorted(stand) == np.flatnonzero(table.spots >= 0).tolist()
            assert {table.part(i) for i in stand} <= numbers


TestAgainstAPlainList = AgainstAPlainList.TestCase
TestAgainstAPlainList.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_snapshot_is_the_whole_machine():
    cache, ann = published()
    end(cache, "A")
    again = PrefixCache.of(cache.snapshot())
    assert again.digest == cache.digest and again.snapshot() == cache.snapshot()
    assert again.lookup(ann, "x", TOKENS).lengths == cache.lookup(ann, "x", TOKENS).lengths
    asked = {"ask": "lookup", "principal": "ann", "namespace": "prod/a", "manifest": plain(ann.manifest),
             "request": "x", "tokens": TOKENS}
    assert cache.ask(asked) == cache.lookup(ann, "x", TOKENS).to_dict()
