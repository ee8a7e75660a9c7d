"""The teaching view over real machines: every field is counted again here from the requests alone."""

from __future__ import annotations

import json

import pytest

from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import quarter_split
from kvlab.study import fixtures
from kvlab.study.physical_state import physical_state
from kvlab.study.sources import CLAIMS, PAPER, SOURCE_OBSERVED, SOURCES
from tests.support import FIXTURES


@pytest.fixture
def machine():
    """A has 40 tokens, B branched and went on: two shared full blocks with names, two private tails."""
    made = Allocator(quarter_split(4, 2, 32, 4, block_size=16, num_blocks=8), queue_seed=4)
    made.allocate("A", 40)
    made.apply({"op": "cache_full", "request": "A", "blocks": [0, 1], "keys": ["k0", "k1"]})
    made.fork("A", "B")
    made.append("B")
    return made


def values(state):
    return {name: f.value for group in state.values() for name, f in group.items()}


def test_every_field_is_what_the_machine_says(machine):
    snapshot = machine.snapshot()
    got, tables = values(physical_state(snapshot)), {n: r["tables"] for n, r in snapshot["requests"].items()}
    named = [handle for t in tables.values() for table in t.values() for handle in table]
    assert got["allocator_epoch"] == machine.epoch == 4
    assert got["cache_groups"] == {"g0": [0, 3], "g1": [3, 4]}
    assert got["logical_block_or_virtual_page_map"] == tables
    assert got["physical_handles"] == sorted(set(named))
    assert got["valid_token_tail"] == {"A": {"g0": 8, "g1": 8}, "B": {"g0": 9, "g1": 9}}
    assert got["request_refs"] == {handle: named.count(handle) for handle in named}
    assert got["shared_prefix_refs"] == dict.fromkeys([h for t in tables["A"].values() for h in t[:2]], 2)
    assert got["mutable_private_tail"] == {r: {g: table[-1] for g, table in t.items()} for r, t in tables.items()}
    assert got["hash_chain_or_radix_entries"] == {
        f"k{j}": [tables["A"][g][j] for g in ("g0", "g1")] for j in range(2)}


def test_a_tail_that_is_full_or_shared_is_not_mutable(machine):
    machine.append("A", 8)
    machine.fork("B", "D")
    got = values(physical_state(machine.snapshot()))
    assert got["mutable_private_tail"] == {"A": {}, "B": {}, "D": {}}
    assert got["valid_token_tail"]["A"] == {"g0": 16, "g1": 16} and got["valid_token_tail"]["D"]["g0"] == 9


def test_locked_becomes_evictable_when_its_owners_leave(machine):
    held = values(physical_state(machine.snapshot()))["cached_locked_evictable"]
    assert len(held["cached"]) == 4 and held["locked"] == held["cached"] and held["evictable"] == []
    machine.release("A")
    machine.release("B")
    freed = values(physical_state(machine.snapshot()))["cached_locked_evictable"]
    assert freed["evictable"] == freed["cached"] == held["cached"] and freed["locked"] == []


@pytest.mark.parametrize(("wanted", "prompt", "length"), [
    (["k0", "k1"], 40, 32), (["k0", "k1"], 32, 16), (["k0", "x"], 40, 16), (["x", "k1"], 40, 0), ([], 40, 0),
    (["k0", "k1"], 0, 0)])
def test_the_admissible_length_is_a_prefix_and_leaves_a_token_to_compute(machine, wanted, prompt, length):
    got = values(physical_state(machine.snapshot(), wanted=wanted, prompt_tokens=prompt))
    assert got["runtime_admissible_length"] == length


def test_the_gate_and_the_receipts_are_shown_as_they_are(machine):
    gate = fixtures.play(fixtures.load_fixture(FIXTURES / "loop2_identity.json"), "publish p2").machine.snapshot()
    receipt = machine.append("A").to_dict()
    got = values(physical_state(machine.snapshot(), gate, match={"outcome": "hit"}, allocation=receipt))
    assert got["allocation_or_release_receipt"] == receipt and got["prefix_match_receipt"] == {"outcome": "hit"}
    assert got["commit_or_explicit_failure"] == "committed"
    assert got["logical_cache_abi_and_namespace"]["abis"] == sorted(gate["abis"])
    assert got["request_and_publication_generation"]["publications"] == dict.fromkeys(gate["records"], 1)
    keys = {f"{r['key']['block_hash']}|{r['key']['cache_group_id']}" for r in gate["records"].values()}
    assert set(got["concrete_prefix_keys"]) == keys | {"k0", "k1"}
    refused = values(physical_state(machine.snapshot(), refused="out_of_memory"))
    assert refused["commit_or_explicit_failure"] == "out_of_memory"
    assert values(physical_state(machine.snapshot()))["commit_or_explicit_failure"] == "nothing yet"


def test_it_is_plain_data_and_every_claim_can_be_looked_up(machine):
    state = physical_state(machine.snapshot())
    assert json.loads(json.dumps(values(state))) == values(state)
    for group in state.values():
        for fact in group.values():
            assert fact.claim in CLAIMS
            named = fact.source.split(", ")
            if fact.claim in (PAPER, SOURCE_OBSERVED):
                assert {SOURCES[name].claim for name in named} == {fact.claim}
            else:
                assert all(name.startswith("0x") for name in named)
