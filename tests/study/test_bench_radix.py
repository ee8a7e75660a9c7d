"""What the radix rows measure is what they say; how fast it is, no test asserts."""

from __future__ import annotations

from kvlab.study import bench_radix
from kvlab.study.peer_trees import EVICT_TOKENS, queries


def test_a_match_finds_all_half_or_nothing():
    for packed in (False, True):
        found = {kind: work().matched for kind, work in bench_radix.matches(256, packed).items()}
        assert found == {"full": 256, "half": 128, "miss": 0}
    assert set(queries(64)) == {"full", "half", "miss"}


def test_a_turn_evicts_as_much_as_it_inserts_and_a_chain_has_its_nodes():
    step = bench_radix.turn(5)
    tree = next(cell.cell_contents for cell in step.__closure__ if not callable(cell.cell_contents))
    for _ in range(7):
        step()
        assert tree.ask({"ask": "ledgers"})["evictable"] == 5 * EVICT_TOKENS
    assert len(bench_radix.chain(30)().path) == 30


def test_metadata_rows_count_bytes_a_token():
    rows = list(bench_radix.metadata(sequences=20, tokens=512))
    assert [r.target for r in rows] == [1.0, None]
    assert 4 < rows[0].ours < rows[1].ours


def test_without_peers_every_row_says_so(monkeypatch):
    monkeypatch.delenv("KVLAB_PEERS", raising=False)
    monkeypatch.setattr(bench_radix, "cpu_time", lambda work, units: float(work() is not None))
    monkeypatch.setattr(bench_radix, "LENGTHS", (64,))
    monkeypatch.setattr(bench_radix, "turn", lambda leaves: lambda: 1)
    rows = list(bench_radix.against_sglang())
    assert len(rows) == 4
    assert all(r.note.startswith("not here") and r.holds is None for r in rows)
