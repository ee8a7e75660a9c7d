"""The allocator's bench drives the real machine, and finds or names its peers; no speed is asserted."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from kvlab.study import bench_memory
from kvlab.study.peers import PEERS, REQUESTS, Peer, cpu_time, folders
from tests.support import ROOT

MANAGER = """
class BlockSpaceManager:
    def __init__(self, blocks, size): self.free_blocks, self.size = list(range(blocks)), size
    def allocate(self, name, tokens): self.held = [self.free_blocks.pop() for _ in range(-(-tokens // self.size))]
    def free(self, name): self.free_blocks += self.held
"""


@pytest.fixture
def peers(monkeypatch, tmp_path):
    """A folder with one small peer of our own making."""
    package = tmp_path / "unpacked" / "smol_vllm"
    package.mkdir(parents=True)
    (package / "block_manager.py").write_text(MANAGER)
    monkeypatch.setenv("KVLAB_PEERS", str(tmp_path))


def test_churn_and_decode_use_the_real_allocator():
    allocator = bench_memory.machine(40)
    took, gave = bench_memory.churn(allocator, 32)()
    assert (took.new_bundles, len(gave.freed), allocator.epoch) == (32, 32, 2)
    step = bench_memory.decode_batch(room=2_500)
    receipts = [step for _ in range(30) if step() is None]
    assert len(receipts) == 30


def test_a_decode_batch_starts_again_when_the_pool_is_full():
    step = bench_memory.decode_batch(room=REQUESTS * 9)
    for _ in range(60):
        step()


def test_without_peers_every_row_says_so(monkeypatch):
    monkeypatch.delenv("KVLAB_PEERS", raising=False)
    assert folders() == []
    rows = list(bench_memory.against_peers())
    assert len(rows) == sum(map(len, bench_memory.TARGETS.values()))
    assert all("not here" in row.note and row.holds is None and row.ours > 0 for row in rows)


def test_a_peer_is_measured_in_its_own_process(peers):
    with Peer("smol-vllm") as peer:
        assert peer.why == ""
        assert peer.measure("blocks 32") > 0
        assert math.isnan(peer.measure("no such work"))


def test_a_peer_that_is_not_there_says_why(peers):
    with Peer("vLLM v0.23.0") as peer:
        assert "ModuleNotFoundError" in peer.why


ALL = "from kvlab.study.peers import PEERS, serve\nfor name in PEERS: print(next(serve(name)), '|', name)"


def test_every_peer_that_is_not_there_says_why(peers):
    """All in one process: each imports what the last one has imported already."""
    child = subprocess.run([sys.executable, "-c", ALL], capture_output=True, text=True, check=True, cwd=ROOT)
    said = dict(reversed(line.split(" | ")) for line in child.stdout.splitlines())
    assert said.keys() == PEERS.keys()
    assert [name for name, why in said.items() if "ModuleNotFoundError" not in why] == ["smol-vllm"]
    assert "StopIteration" in said["smol-vllm"]  # it is looked for by its file, which this process' path has not


def test_metadata_counts_what_the_machine_keeps():
    (row,) = bench_memory.metadata()
    assert 0.5 < row.ours < 30


def test_processor_time_grows_with_the_work():
    assert cpu_time(lambda: sum(range(20_000)), 1) > cpu_time(lambda: sum(range(20)), 1)
