"""The article's Loop 1 values, against what the machines, the loop around them and real runs really are and do."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import fields
from itertools import pairwise

import pytest

from kernels import reference
from kvlab.contract import Rejected
from kvlab.execution.adapters import seeded_adapter, with_adapter
from kvlab.execution.model import load_model
from kvlab.memory.allocator import Allocator
from kvlab.memory.block_pool import index_of
from kvlab.memory.kv_store import PagedMemory, PagedStore
from kvlab.memory.layout import CacheLayoutManifest, quarter_split
from kvlab.memory.ledger import from_snapshot, rectangular
from kvlab.memory.plan import PLANNERS
from kvlab.memory.records import COPY_ON_WRITE, RECEIPT_FIELDS, AllocationReceipt
from kvlab.reuse.compatibility import examine
from kvlab.reuse.identity import GateReceipt
from kvlab.study import fixtures, savings
from kvlab.study.lesson import PagedWorld, World, copying_world, layout_of
from kvlab.study.lesson_contracts import CONTRACTS, Chats, rectangle_facts, row_addresses
from kvlab.study.physical_state import OBLIGATIONS, physical_state
from kvlab.study.rounds import Rounds
from kvlab.study.sources import CLAIMS, SOURCES
from kvlab.views.contracts import ASKS
from tests.support import FIXTURES

STORY = "The two young ladies were walking in the garden before dinner, when they saw a gentleman coming"


@pytest.fixture(scope="module")
def golden():
    return {name: row["expected"] for name, row in json.loads((FIXTURES / "golden.json").read_text()).items()}


@pytest.fixture(scope="module")
def austen():
    return load_model("austen")


# ---------------------------------------------------------------- the loop around a memory
class Listened(Rounds):
    """Rounds over paged memory whose log also has what the allocator did, in the order in which it was done."""

    def __init__(self, world, waiting):
        super().__init__(world, waiting)
        world.allocator.observers.append(lambda event: self.log.append((event.kind, event.receipt)))


def names(log):
    return [entry for entry in log if isinstance(entry, str)]


def test_the_order_of_a_round_is_the_log_of_what_was_done(golden, austen):
    server = Listened(PagedWorld(*austen, num_blocks=8), {"A": STORY})
    assert server.round() and server.round()
    log, n = names(server.log), len(server.log) // 2
    assert len(log) == 10 and log[5:] == log[:5]
    assert [*log[:5], "repeat"] == golden["L1.scheduler_loop.order"]
    kinds = [entry if isinstance(entry, str) else entry[0] for entry in server.log[:n]]
    assert kinds.index("ask_foreign_feasibility") < kinds.index("staged") < kinds.index("run_iteration")
    assert kinds.index("publish_progress") < kinds.index("committed") and kinds.count("committed") == 1


def test_a_planted_swap_is_seen(golden, austen):
    class Hasty(Rounds):
        def observe_frontiers(self):
            self.ask_foreign_feasibility({"A": [1]}).rollback()
            return super().observe_frontiers()

    server = Hasty(PagedWorld(*austen, num_blocks=8), {"A": STORY})
    server.round()
    assert server.log[:5] != golden["L1.scheduler_loop.order"][:5]


def test_authority_runs_from_intent_to_receipt_to_the_next_decision(golden, austen):
    world = PagedWorld(*austen, num_blocks=8)
    server = Listened(world, {"A": STORY, "B": STORY})
    server.round()
    server.round()
    seen, stages = [], golden["L1.authority.order"]
    for entry in server.log:
        if entry == "choose_prefill_and_decode":
            seen.append(stages[3] if stages[2] in seen else stages[0])
        elif isinstance(entry, tuple) and entry[0] == "staged" and stages[1] not in seen:
            seen.append(stages[1])
        elif isinstance(entry, tuple) and entry[0] == "committed" and stages[2] not in seen:
            assert type(entry[1]).__name__ in stages[2].split("|")
            seen.append(stages[2])
    assert seen == stages
    assert isinstance(world.layout, CacheLayoutManifest) and isinstance(server.receipts[0], AllocationReceipt)


def test_an_intent_that_was_refused_owns_nothing(golden, austen):
    world = PagedWorld(*austen, num_blocks=2)
    server, before = Rounds(world, {"A": STORY * 2}), world.allocator.digest
    assert not server.round()
    owned = "A" in world.allocator.requests or any(p.free_count < p.num_blocks for p in world.allocator.pools)
    assert {"ownership": owned} == golden["L1.scheduler_intent_is_not_ownership"]
    assert server.refused["A"].reason == "out_of_memory" and world.allocator.digest == before
    assert "A" in server.waiting and not world.logits


# ---------------------------------------------------------------- rectangles and pages
def test_what_a_rectangle_promises_and_pages_give_up(golden, austen):
    flat, paged = copying_world(*austen, chats=2, max_length=64), PagedWorld(*austen, num_blocks=8)
    for world in (flat, paged):
        world.read("A", STORY * 2)
    row = austen[0].config.kv_heads * austen[0].config.head_dim * 4
    facts = rectangle_facts(row_addresses(flat, "A"), row, 64, 64)
    assert [name for name, held in facts.items() if held] == golden["L1.rect.single_tensor_invariant"]
    assert not any(rectangle_facts(row_addresses(paged, "A"), row, 48, 64).values())


def test_the_examples_lengths_on_the_real_allocator(golden):
    says = golden["L1.rect.example_lengths"]
    shared = says["D_shares_prompt_tokens_with_A"]
    machine = Allocator(quarter_split(4, 2, 32, 4, block_size=16, num_blocks=256))
    machine.allocate("A", shared)
    machine.fork("A", "D")
    assert machine.append("A", says["A_stops_after_output_tokens"]).useful_new_rows == 12
    machine.allocate("B", 4)
    machine.append("B", says["B_continues_for"])
    held = from_snapshot(machine.snapshot(), reserved=4096)[0]
    assert rectangular(held).logical_rows == 2012 + 704 + 2000 and rectangular(held).reserved_rows == 3 * 4096
    refs = machine.snapshot()["blocks"]["g0"]["ref_cnt"]
    assert refs.count(2) == 2000 // 16 and refs.count(1) == 1 + 44


def found(name):
    module, _, path = OBLIGATIONS[name].partition(":")
    thing = importlib.import_module(module)
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing


def test_every_obligation_of_paging_is_met_where_we_say(golden, austen):
    layout = layout_of(austen[0], num_blocks=8)
    machine = Allocator(layout)
    machine.allocate("A", 20)
    pool, tail = machine.pools[0], machine.requests["A"].tables[0][-1]
    world = Chats(*austen, {"C": with_adapter(austen[0], seeded_adapter(austen[0], seed=8))})
    world.ask("A", STORY * 2)
    world.ids["C"] = world.ids["A"]
    sheets = {world.records.layout.digest: world.records.layout}
    machine.fork("A", "B")
    kept = []
    kept += ["valid_token_tail"] * (found("valid_token_tail")(pool, index_of(tail), 4) == 4)
    kept += ["per_layer_or_group_layout"] * (len(found("per_layer_or_group_layout")(layout.groups).groups) == 2)
    with pytest.raises(Rejected, match="in_place_shared_tail_write"):
        found("reference_ownership")(machine, "B", {p.group: p.text(machine.requests["B"].tables[g][-1])
                                                    for g, p in enumerate(machine.pools)})
    kept.append("reference_ownership")
    way = found("copy_on_write_before_divergence")(20, 16, pool.refs(index_of(tail)))
    kept += ["copy_on_write_before_divergence"] * (way == COPY_ON_WRITE == dict(machine.append("B").paths)["B"])
    with pytest.raises(Rejected, match="adapter_mismatch"):
        require = found("compatibility_identity_before_cross_request_reuse")
        require(world.manifest("A", 16), world.manifest("C", 16), sheets)
    kept.append("compatibility_identity_before_cross_request_reuse")
    store = PagedStore(layout)
    txn = PagedMemory(machine, store).open({"A": range(3)})
    step = found("kernel_visible_translation_metadata")
    assert type(txn) is step and txn.tables[0].tolist() == [[0, 1]] and txn.slots[0][1].tolist() == [4, 5, 6]
    txn.rollback()
    kept.append("kernel_visible_translation_metadata")
    assert kept == golden["L1.paging.extra_obligations"] == list(OBLIGATIONS)


# ---------------------------------------------------------------- what does not follow
@pytest.fixture(scope="module")
def pair(austen):
    """Anna's chat; C has another adapter and owns her very blocks."""
    world = Chats(*austen, {"C": with_adapter(austen[0], seeded_adapter(austen[0], seed=8))})
    world.ask("A", STORY * 2)
    world.memory.fork("A", "C")
    world.ids["C"] = world.ids["A"]
    return world


def allocation_is_no_identity(world):
    block = world.published[world.keys(world.ids["A"])[0]]
    pool, live = world.allocator.pools[0], world.allocator.requests["C"]
    assert pool.refs(index_of(live.tables[0][0])) == 2 and world.bundle("C", 0) == block.bundle
    assert world.compatible("C", block) == "adapter_mismatch" and world.compatible("A", block) == ""


def identity_is_no_index(world):
    """The manifest allows 16 of 32 tokens, and the gate, asked for 32, finds nothing: it locates no longest match."""
    gate = world.records.gate()
    grant = gate.authorize("anna", world.records.space.name)
    short, long = world.manifest("A", 16), world.manifest("A", 32)
    gate.publish(grant, "g0/1000@1", "g0", short)
    assert examine(short, long, gate.state.layouts).compatible
    assert gate.lookup(grant, "g0", long).outcome == "miss" and gate.lookup(grant, "g0", short).outcome == "hit"


def a_hit_is_no_decision(world):
    fields_of = [*RECEIPT_FIELDS, *(f.name for f in fields(GateReceipt)), *AllocationReceipt._fields]
    assert not [name for name in fields_of if re.search("admi|schedul|prior|policy|order|next", name)]
    said, logits = dict(world.said), dict(world.logits)
    world.allocator.apply({"op": "touch", "request": "G", "blocks": [world.bundle("A", 0)]})
    assert world.allocator.requests["G"].context == 16 and world.said == said and world.logits == logits
    world.allocator.release("G")


def storage_reuse_is_no_execution_reuse(world, monkeypatch):
    """Rows gathered for one word of two chats over the same blocks: as many as without sharing."""
    read, gather = [], reference._gather
    monkeypatch.setattr(reference, "_gather", lambda cache, ids, n, *a: read.append(n) or gather(cache, ids, n, *a))
    world.memory.fork("A", "B")
    world.logits["B"], n = world.logits["A"], world.memory.length("A")
    before = world.engine.rows_computed
    world.speak("A", "B")
    assert world.engine.rows_computed - before == 2
    assert sum(read) == 2 * world.engine.model.config.layers * 2 * (n + 1)


def test_the_four_negative_rules(golden, pair, monkeypatch):
    proofs = {("allocation", "identity"): lambda: allocation_is_no_identity(pair),
              ("identity", "index"): lambda: identity_is_no_index(pair),
              ("index_hit", "scheduling_decision"): lambda: a_hit_is_no_decision(pair),
              ("storage_reuse", "execution_reuse"): lambda: storage_reuse_is_no_execution_reuse(pair, monkeypatch)}
    proven = []
    for (this, that), prove in proofs.items():
        prove()
        proven.append([this, "!=>", that])
    assert proven == golden["L1.negative_rules"]


def test_three_savings_are_three(golden, austen):
    n, row = len(austen[1].encode(STORY)), austen[0].kv_row_bytes()
    ways = savings.costs(*austen, STORY)
    amounts = savings.saved(ways)
    assert list(amounts) == golden["L1.savings.three_kinds"]
    assert amounts == {"sharing_bytes": n * row, "skipping_prefill": n,
                       "batching_shared_prefix_attention": n // 16 * 16}
    for before, after in pairwise(ways):  # each way differs from the one before in one thing
        assert sum(getattr(before, f.name) != getattr(after, f.name) for f in fields(before) if f.name != "way") == 1


def test_five_contracts_and_the_fields_of_the_state(golden, pair):
    assert list(CONTRACTS) == golden["L1.contracts.five"] and set(ASKS) == set(CONTRACTS)
    state = physical_state(pair.allocator.snapshot(), pair.records.gate().snapshot())
    assert {group: list(row) for group, row in state.items()} == golden["L1.kvphysicalstate.groups"]
    assert {f.claim for row in state.values() for f in row.values()} == set(CLAIMS)


def test_scope_is_what_the_machine_can_do(golden, austen):
    worlds = [copying_world(*austen, chats=2, max_length=64), PagedWorld(*austen, num_blocks=8)]
    for world in worlds:
        world.read("A", STORY)
        before = world.engine.rows_computed
        world.branch("A", "B")
        world.speak("A", "B", tokens=4)
    same = worlds[0].said == worlds[1].said
    reused = worlds[1].said["A"] == worlds[1].said["B"] and worlds[1].engine.rows_computed == before + 8
    machine = worlds[1].allocator
    with pytest.raises(Rejected, match="interior_truncate"):
        machine.apply({"op": "truncate", "request": "A", "drop": [0]})
    lossy = bool(set(PLANNERS) & {"retain", "prune", "compress", "evict_rows"})
    assert {"layout": same, "exact_reuse": reused, "lossy_retention": lossy} == golden["L1.scope"]
    assert isinstance(worlds[0], World)


def test_pins(golden):
    for name, rule in (("vllm", "L1.pin.vllm"), ("sglang", "L1.pin.sglang"), ("vattention", "L1.pin.vattention")):
        assert SOURCES[name].commit == golden[rule] and SOURCES[name].reads
    versions = (FIXTURES.parent / "notebooks").glob("*.py")
    said = {m for path in versions for m in re.findall(r"vLLM (v[\d.]+\d)", path.read_text())}
    assert SOURCES["vllm"].version in said


def test_the_fixture_names_only_values_of_this_loop(golden):
    fixture = fixtures.load_fixture(FIXTURES / "loop1_contracts.json")
    assert {v["id"] for v in fixture["expect"]} <= set(golden) and "negatives" not in fixture
