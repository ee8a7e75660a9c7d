"""The gate as a machine: authorise, publish, look up, hold, rotate; refusals leave the digest and the index alone."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlab.contract import History, Rejected
from kvlab.reuse import gate_operations
from kvlab.reuse.gate_state import grant_cell
from kvlab.reuse.identity import IdentityGate
from kvlab.reuse.manifests import plain
from tests.reuse.worlds import OTHERS, RANK0, SIDES, gate, identity, manifest, published

IN_A = {"principal": "ann", "namespace": "prod/a"}
UNTOUCHED = {"lookups": 0, "candidates": 0, "hits": 0, "misses": 0, "accesses": []}


def refused(machine, op):
    """The reason an operation is refused with; the digest must stay."""
    before, snapshot = machine.digest, machine.snapshot()
    with pytest.raises(Rejected) as no:
        machine.apply(op)
    assert machine.digest == before and machine.snapshot() == snapshot
    return no.value.reason


def lookup(consumer, **more):
    return {"op": "lookup", **IN_A, "group": "g0", "consumer": plain(consumer)} | more


# ---------------------------------------------------------------- authorise first
def test_a_lookup_without_a_grant_reads_no_index():
    machine, _ = published()
    assert refused(machine, lookup(manifest(), principal="amy")) == "lookup_before_authorization"
    assert machine.ask({"ask": "telemetry"}) == UNTOUCHED


@pytest.mark.parametrize("who", ["bob", "nobody"])
@pytest.mark.parametrize("namespace", ["prod/a", "prod/none"])
def test_another_tenant_moves_no_counter_and_learns_nothing(who, namespace):
    machine, _ = published()
    machine.authorize("bob", "prod/b")
    hit, miss = manifest(), manifest(covered_token_ids=(1,) * 8)
    said = []
    for consumer in (hit, miss):
        with pytest.raises(Rejected) as no:
            machine.apply(lookup(consumer, principal=who, namespace=namespace))
        said.append((no.value.reason, no.value.detail))
    assert said[0] == said[1] and said[0][0] == "unauthorized_namespace"
    assert refused(machine, {"op": "authorize", "principal": who, "namespace": namespace}) == "unauthorized_namespace"
    assert machine.ask({"ask": "telemetry"}) == UNTOUCHED


def test_a_question_about_a_record_needs_the_same_grant():
    machine, _ = published()
    for principal, reason in (("amy", "lookup_before_authorization"), ("bob", "unauthorized_namespace")):
        for word in ("compatible", "require", "evaluate"):
            with pytest.raises(Rejected) as no:
                machine.ask({"ask": word, "principal": principal, "namespace": "prod/a", "record": "g0/1000@1",
                             "candidates": []})
            assert no.value.reason == reason


# ---------------------------------------------------------------- finding
def test_a_hit_is_held_for_its_request_and_a_miss_changes_nothing():
    machine, grant = published()
    before = machine.digest
    miss = machine.lookup(grant, "g1", manifest(request_id="c1"))
    assert (miss.outcome, miss.successor_digest) == ("miss", before)
    hit = machine.lookup(grant, "g0", manifest(request_id="c1"))
    assert (hit.outcome, hit.handle, hit.predecessor_digest) == ("hit", "g0/1000@1", before)
    assert machine.ask({"ask": "serve", "request": "c1", "record": "g0/1000@1"})["owners"] == ["p1", "c1"]
    again = machine.lookup(grant, "g0", manifest(request_id="c1"))
    assert again.outcome == "hit" and machine.digest == hit.successor_digest
    machine.release("c1")
    assert machine.digest == before and machine.ask({"ask": "telemetry"})["hits"] == 2


def test_the_key_finds_and_the_manifest_refuses():
    machine, _ = published()
    rank1 = manifest(cache_layout_sha256=OTHERS["tp_rank_mismatch"].digest, request_id="c1")
    with pytest.raises(Rejected) as no:
        machine.apply(lookup(rank1))
    assert no.value.reason == "concrete_key_not_sufficient"
    assert no.value.detail == "g0/1000@1: tp_rank_mismatch"
    assert machine.ask({"ask": "telemetry"})["candidates"] == 1


def test_several_objects_may_share_a_key_and_each_is_served_to_its_own():
    machine, grant = published()
    rank1 = manifest(cache_layout_sha256=OTHERS["tp_rank_mismatch"].digest, request_id="p2")
    machine.publish(grant, "g0/1001@1", "g0", rank1)
    found = [machine.lookup(grant, "g0", m) for m in (manifest(request_id="c1"), rank1)]
    assert [r.handle for r in found] == ["g0/1000@1", "g0/1001@1"]
    assert found[1].verdicts == (("g0/1000@1", "tp_rank_mismatch"), ("g0/1001@1", ""))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=8, max_size=8).map(tuple), min_size=1, max_size=6, unique=True),
       st.lists(st.integers(0, 6), min_size=8, max_size=8).map(tuple))
def test_a_degenerate_hash_costs_comparisons_and_never_an_answer(prompts, asked):
    answers, compared = [], []
    for name in ("sha256", "sum_mod_7"):
        machine = gate(name)
        grant = machine.authorize("ann", "prod/a")
        for i, tokens in enumerate(prompts):
            machine.publish(grant, f"g0/{i}@1", "g0", manifest(covered_token_ids=tokens, request_id=f"p{i}"))
        try:
            receipt = machine.lookup(grant, "g0", manifest(covered_token_ids=asked, request_id="c"))
            answers.append(receipt.handle)
        except Rejected as no:
            assert no.reason == "concrete_key_not_sufficient"
            answers.append(None)
        compared.append(machine.telemetry.counters["candidates"])
    assert answers[0] == answers[1] == (f"g0/{prompts.index(asked)}@1" if asked in prompts else None)
    assert compared[0] <= compared[1]


# ---------------------------------------------------------------- what is published stays what it is
def test_a_live_object_is_never_published_under_another_manifest():
    machine, _ = published()
    op = {"op": "publish", **IN_A, "handle": "g0/1000@1", "group": "g0", "manifest": plain(manifest())}
    assert refused(machine, op) == "in_place_relabel"
    machine.apply({"op": "successor", "namespace": "prod/a"})
    machine.authorize("ann", "prod/a")
    new = manifest(namespace_generation=2, publication_generation=2)
    assert refused(machine, op | {"manifest": plain(new)}) == "in_place_relabel"
    machine.release("p1")
    assert machine.apply(op | {"manifest": plain(new)}).outcome == "done"


def test_a_layout_id_and_a_namespace_are_given_once():
    machine, _ = published()
    relabelled = identity("rank0", tp_rank=1)
    assert refused(machine, {"op": "admit_layout", "namespace": "prod/a", "layout": plain(relabelled)}) \
        == "in_place_relabel"
    again = {"op": "create", "namespace": machine.snapshot()["directories"]["prod/a"]["namespace"], "members": [],
             "abis": [], "layouts": []}
    assert refused(machine, again) == "in_place_relabel"
    third = OTHERS["storage_dtype_mismatch"]
    assert refused(machine, lookup(manifest(cache_layout_sha256=third.digest))) == "layout_mismatch"
    machine.apply({"op": "admit_layout", "namespace": "prod/a", "layout": plain(third)})
    assert refused(machine, lookup(manifest(cache_layout_sha256=third.digest))) == "concrete_key_not_sufficient"


def test_each_field_of_a_loaded_record_is_guarded():
    machine, _ = published()
    good = machine.snapshot()
    for name, value in good["records"]["g0/1000@1"]["manifest"].items():
        bad = copy.deepcopy(good)
        row = bad["records"]["g0/1000@1"]["manifest"]
        row[name] = (value + 1 if isinstance(value, int) else [] if isinstance(value, list) else
                     "0" * 64 if len(value or "") == 64 else "other")
        with pytest.raises(Rejected) as no:
            machine.load(bad)
        assert no.value.reason == "in_place_relabel", name
        assert machine.snapshot() == good


@pytest.mark.parametrize(("path", "value", "reason"), [
    (("hash",), "md5", "malformed_snapshot"),
    (("grants",), [{"principal": "ann", "namespace": "prod/a", "generation": 7}], "malformed_snapshot"),
    (("grants",), [{"principal": "bob", "namespace": "prod/a", "generation": 1}], "unauthorized_namespace"),
    (("records", "g0/1000@1", "owners"), ["p1", "p1"], "malformed_snapshot"),
    (("records", "g0/1000@1", "listed"), False, "malformed_snapshot"),
    (("records", "g0/1000@1", "adapter_name"), "a", "in_place_relabel"),
    (("records", "g0/1000@1", "key", "cache_group_id"), "g9", "cache_group_mismatch"),
    (("directories", "prod/a", "publication_generation"), 0, "malformed_snapshot"),
    (("directories", "prod/a", "publication_generation"), 2, "stale_namespace_generation"),
    (("directories", "prod/a", "frozen"), [1], "malformed_snapshot"),
    (("directories", "prod/a", "layouts"), ["0" * 64], "layout_mismatch"),
    (("directories", "prod/a", "abis"), ["0" * 64], "cache_abi_mismatch"),
    (("layouts",), {}, "layout_mismatch"),
    (("directories",), {}, "unauthorized_namespace"),
])
def test_malformed_states_are_refused_and_the_present_one_kept(path, value, reason):
    machine, _ = published()
    good, digest = machine.snapshot(), machine.digest
    bad = copy.deepcopy(good)
    at = bad
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(Rejected) as no:
        machine.load(bad)
    assert no.value.reason == reason
    assert machine.digest == digest
    machine.load(good)
    assert machine.digest == digest


# ---------------------------------------------------------------- successors
def test_old_owners_are_served_until_they_leave_and_then_the_rows_go():
    machine, grant = published()
    machine.lookup(grant, "g0", manifest(request_id="c1"))
    rotated = machine.apply({"op": "successor", "namespace": "prod/a"})
    assert rotated.steps[-1] == "admit_only_against_successor" and rotated.reclaimed == ()
    assert refused(machine, lookup(manifest())) == "stale_namespace_generation"
    grant = machine.authorize("ann", "prod/a")
    assert machine.lookup(grant, "g0", manifest(namespace_generation=2, publication_generation=2)).outcome == "miss"
    serve = {"ask": "serve", "request": "c1", "record": "g0/1000@1"}
    assert machine.ask(serve)["manifest"] == manifest().digest
    assert machine.release("p1").reclaimed == ()
    assert machine.ask(serve)["owners"] == ["c1"]
    last = machine.release("c1")
    assert last.reclaimed == ("g0/1000@1",) and last.steps == ("reclaim_old_when_refs_zero",)
    with pytest.raises(Rejected):
        machine.ask(serve)


def test_a_reset_ends_what_was_published_and_keeps_what_is_held():
    machine, grant = published()
    machine.apply({"op": "reset_prefix_cache", "namespace": "prod/a"})
    assert refused(machine, lookup(manifest())) == "stale_publication_generation"
    assert machine.lookup(grant, "g0", manifest(publication_generation=2)).outcome == "miss"
    assert machine.ask({"ask": "serve", "request": "p1", "record": "g0/1000@1"})["listed"] is False
    assert machine.release("p1").reclaimed == ("g0/1000@1",)


# ---------------------------------------------------------------- the face
@pytest.mark.parametrize("op", [
    {}, {"op": "steal"}, {"op": "lookup"}, {"op": "lookup", **IN_A, "group": "g0", "consumer": {}},
    {"op": "lookup", **IN_A, "group": "g0", "consumer": 7}, {"op": "create", "namespace": {}},
    {"op": "authorize", "principal": "ann"}, {"op": "release"},
])
def test_a_malformed_operation_is_unknown(op):
    assert refused(published()[0], op) == "unknown_operation"


@pytest.mark.parametrize("question", [{}, {"ask": "why"}, {"ask": "keys"}, {"ask": "keys", "tokens": [1],
                                                                          "block_size": 0}])
def test_a_malformed_question_is_unknown(question):
    with pytest.raises(Rejected) as no:
        published()[0].ask(question)
    assert no.value.reason == "unknown_operation"


@pytest.mark.parametrize(("op", "reason"), [
    ({"op": "successor", "namespace": "x"}, "namespace_mismatch"),
    ({"op": "reset_prefix_cache", "namespace": "x"}, "namespace_mismatch"),
    ({"op": "publish", **IN_A, "handle": "h", "group": "g0",
      "manifest": plain(manifest(cache_isolation_namespace="prod/b"))}, "namespace_mismatch"),
    ({"op": "publish", **IN_A, "handle": "h", "group": "g0",
      "manifest": plain(manifest(cache_abi_sha256="0" * 64))}, "cache_abi_mismatch"),
    ({"op": "publish", **IN_A, "handle": "h", "group": "g9", "manifest": plain(manifest())}, "cache_group_mismatch"),
    ({"op": "publish", **IN_A, "handle": "h", "group": "g0",
      "manifest": plain(manifest(covered_token_ids=(1, 2, 3), input_side_data_identity=()))}, "cache_partial_block"),
    ({"op": "release", "request": "nobody"}, "unknown_request"),
])
def test_refusals_by_name(op, reason):
    assert refused(published()[0], op) == reason


def test_a_history_is_plain_data_and_forks():
    machine = gate()
    history = History(machine)
    grant = machine.authorize("ann", "prod/a")
    machine.publish(grant, "g0/1000@1", "g0", manifest())
    with pytest.raises(Rejected):
        machine.lookup(grant, "g0", manifest(cache_layout_sha256=OTHERS["tp_rank_mismatch"].digest))
    assert [s.kind for s in history] == ["start", "committed", "committed", "refused"]
    assert history.now.step == "validate_equality_bearing_facts"
    assert History.from_dict(history.to_dict()).steps[-1].reason == "concrete_key_not_sufficient"
    other = history.fork(2, IdentityGate())
    assert other.machine.digest == machine.digest


def test_the_gate_reads_a_layout_by_its_id_and_names_geometry():
    machine, _ = published()
    said = machine.ask({"ask": "layout", "manifest_id": "rank0"})
    assert (said["layers"], said["tp_rank"], said["digest"]) == (4, 0, RANK0.digest)
    with pytest.raises(Rejected):
        machine.ask({"ask": "layout", "manifest_id": "none"})
    assert gate_operations.manifest_of(manifest()) == manifest()


class Walk(RuleBasedStateMachine):
    """Random lives of a gate against a model that holds sets: what may be found, by whom it is held."""

    def __init__(self):
        super().__init__()
        self.machine, self.generation, self.publication, self.serial = gate(), 1, 1, 0
        self.listed, self.held, self.granted = {}, {}, None

    def manifest(self, tokens, request):
        return manifest(covered_token_ids=(tokens,) * 8, input_side_data_identity=SIDES[:1], request_id=request,
                        namespace_generation=self.generation, publication_generation=self.publication)

    @rule()
    def authorize(self):
        self.machine.authorize("ann", "prod/a")
        self.granted = self.generation

    @rule(tokens=st.integers(0, 3))
    def publish(self, tokens):
        self.serial += 1
        handle, request = f"g0/{self.serial}@1", f"p{self.serial}"
        op = {"op": "publish", **IN_A, "handle": handle, "group": "g0",
              "manifest": plain(self.manifest(tokens, request))}
        if self.granted != self.generation:
            assert refused(self.machine, op) in ("lookup_before_authorization", "stale_namespace_generation")
        else:
            self.machine.apply(op)
            self.listed[handle], self.held[handle] = tokens, {request}

    @precondition(lambda self: self.granted == self.generation)
    @rule(tokens=st.integers(0, 3), request=st.sampled_from(["c1", "c2"]))
    def lookup(self, tokens, request):
        receipt = self.machine.apply(lookup(self.manifest(tokens, request)))
        could = sorted(h for h, t in self.listed.items() if t == tokens)
        assert (receipt.handle in could) if could else receipt.outcome == "miss"
        if could:
            self.held[receipt.handle].add(request)

    @rule(data=st.data())
    def release(self, data):
        holders = sorted(set().union(*self.held.values()))
        if not holders:
            return
        request = data.draw(st.sampled_from(holders))
        receipt = self.machine.release(request)
        for owners in self.held.values():
            owners.discard(request)
        assert set(receipt.reclaimed) == {h for h, o in self.held.items() if not o and h not in self.listed}
        self.forget()

    def forget(self):
        self.held = {h: o for h, o in self.held.items() if o or h in self.listed}

    @rule()
    def rotate(self):
        self.machine.apply({"op": "successor", "namespace": "prod/a"})
        self.generation, self.publication, self.listed = self.generation + 1, self.publication + 1, {}
        self.forget()

    @rule()
    def reset(self):
        self.machine.apply({"op": "reset_prefix_cache", "namespace": "prod/a"})
        self.publication, self.listed = self.publication + 1, {}
        self.forget()

    @invariant()
    def state_is_what_the_model_says(self):
        rows = self.machine.snapshot()["records"]
        assert {h: set(r["owners"]) for h, r in rows.items()} == self.held
        assert {h for h, r in rows.items() if r["listed"]} == set(self.listed)
        self.machine.check()
        assert IdentityGate.of(self.machine.snapshot()).digest == self.machine.digest


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_a_grant_is_for_one_generation():
    machine, grant = published()
    assert machine.state.get(grant_cell("ann", "prod/a")) == grant and grant.generation == 1
