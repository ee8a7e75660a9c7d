"""The index's bench drives the real machine and asks the peer for the same work; no speed is asserted."""

from __future__ import annotations

import hashlib

from kvlab.reuse.chain import block_keys
from kvlab.study import bench_index
from kvlab.study.bench_index import CASES, TOKENS, chain_alone, filled, prompt, vllm_lookups


def test_each_case_hits_what_it_says():
    cache, owner = filled()
    found = {name: cache.lookup(owner, "x", prompt(hit)).lengths.indexed for name, hit in CASES.items()}
    assert found == CASES
    assert all(len(prompt(hit)) == TOKENS for hit in CASES.values())


def test_the_floor_hashes_as_many_blocks_as_the_index_does():
    parent = bytes(32)
    for at in range(0, TOKENS, 16):
        block = b"".join(t.to_bytes(4, "little") for t in prompt(TOKENS)[at : at + 16])
        parent = hashlib.sha256(parent + block).digest()
    assert chain_alone()() == parent
    assert len(block_keys(prompt(TOKENS), 16)) == TOKENS // 16


def test_a_peer_hashes_anew_for_each_lookup():
    said = []

    class Request:
        def __init__(self, name, tokens):
            self.name, self.tokens, self.block_hashes = name, tokens, [1]

        def update_block_hashes(self):
            said.append((self.name, len(self.block_hashes)))

    class Manager:
        def allocate_slots(self, request, tokens):
            said.append((request.name, tokens))

        def get_computed_blocks(self, request):
            said.append((request.name, "found"))

    work = vllm_lookups(Manager(), Request)
    assert set(work) == {f"prefix {name}" for name in CASES} and said == [("first", TOKENS)]
    work["prefix half"][0]()
    assert said[1:] == [("half", 0), ("half", "found")]


def test_without_a_peer_the_row_says_so(monkeypatch):
    monkeypatch.delenv("KVLAB_PEERS", raising=False)
    monkeypatch.setattr(bench_index, "cpu_time", lambda work, units: work() and 1.0)
    rows = list(bench_index.lookups())
    assert [row.holds for row in rows] == [True, None, None] and "not here" in rows[-1].note
