"""What the radix rows measure is what they say; how fast it is, no test asserts."""

from __future__ import annotations

import math

import pytest

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


class Fake:
    """A peer that knows one workload, or that is not here."""

    why = ""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def measure(self, workload):
        return 4.0 if workload == "known" else math.nan


def test_a_row_beside_a_peer_takes_its_number_or_says_that_it_has_none(monkeypatch, tmp_path):
    wanted = [("one", "known", lambda: 2.0, 0.5), ("two", "other", lambda: 2.0, 0.5)]
    monkeypatch.setenv("KVLAB_PEERS", str(tmp_path))
    monkeypatch.setattr(bench_radix, "Peer", Fake)
    one, two = bench_radix.beside("mine", wanted)
    assert (one.ours, one.theirs, one.ratio, one.holds, one.against) == (2.0, 4.0, 0.5, True, "mine")
    assert (two.ours, two.theirs, two.holds, two.note) == (2.0, None, None, "mine has no such workload")
    monkeypatch.setattr(Fake, "why", "it is not")
    (row,) = bench_radix.beside("mine", wanted)
    assert row.note == "not here: mine (it is not)"


@pytest.mark.parametrize("rows", [bench_radix.packed_beside, bench_radix.full_pool])
def test_new_rows_without_peers_say_so_in_one_line_a_peer(monkeypatch, rows):
    monkeypatch.delenv("KVLAB_PEERS", raising=False)
    monkeypatch.setattr(bench_radix, "LENGTHS", (64,))
    monkeypatch.setattr(bench_radix, "turn", lambda leaves: lambda: 1)
    said = [row.note for row in rows()]
    assert len(said) == len(set(said)) >= 1 and all(note.startswith("not here") for note in said)
