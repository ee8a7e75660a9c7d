"""The replay of arrivals: shares against a count by hand, the real allocator's tables, and the paper's figure."""

from __future__ import annotations

import itertools
import math

import pytest

from kvlab.contract import Rejected
from kvlab.memory import ledger
from kvlab.memory.ledger import from_snapshot
from kvlab.study.geometries import KNOWN
from kvlab.study.occupancy import (
    LAYOUTS,
    MAXIMUM,
    PAGED,
    PAPER_REPORTED,
    POWER_OF_TWO,
    Assumptions,
    Replay,
    power_of_two,
    rows_of,
    run,
)
from kvlab.study.thinned import MOST_POINTS
from kvlab.study.traces import EMBEDDED, Arrival, AzureArrivals
from tests.support import ROOT, require

SLOW = Assumptions(decode_rate=2, max_length=64, pool_blocks=32)
THREE = [Arrival(0.0, 20, 5), Arrival(0.5, 16, 1), Arrival(9.0, 40, 3)]


def test_three_requests_by_hand():
    """2 tokens a tick. r1: 20, 22, 24 rows; r2: 16 rows, one tick; then nobody; r3: 40, 42."""
    points = list(Replay(SLOW).ticks(THREE))
    assert [(p.time, p.requests, p.live_rows) for p in points] == [
        (0, 1, 20), (1, 2, 38), (2, 1, 24), (3, 0, 0), (9, 1, 40), (10, 1, 42), (11, 0, 0)]
    assert [p.reserved_rows[PAGED] for p in points] == [32, 48, 32, 0, 48, 48, 0]
    assert [p.reserved_rows[MAXIMUM] for p in points] == [64, 128, 64, 0, 64, 64, 0]
    assert [p.reserved_rows[POWER_OF_TWO] for p in points] == [32, 64, 32, 0, 64, 64, 0]
    found = run(THREE, SLOW)
    assert found.peaks[PAGED].time == 1 and found.peak_share(PAGED) == 38 / 48
    assert found.means[PAGED] == (20 + 38 + 24 + 40 + 42) / (32 + 48 + 32 + 48 + 48)


def test_the_last_token_of_an_answer_never_gets_a_row():
    points = itertools.islice(Replay(Assumptions(decode_rate=100)).ticks([Arrival(0.0, 20, 5)]), 3)
    assert [p.live_rows for p in points] == [20, 24, 0]


def test_the_replay_agrees_with_the_ledgers_of_its_allocator():
    replay = Replay(Assumptions(pool_blocks=16_384))
    for n, point in enumerate(replay.ticks(AzureArrivals(EMBEDDED))):
        if n % 12 == 0:
            (h,) = from_snapshot(replay.allocator.snapshot(), 16_384)
            real, view = ledger.unique(h), ledger.request_view(h)
            assert real.rows == point.live_rows == view.logical.bytes // h.row_bytes
            assert real.slots == point.reserved_rows[PAGED]
            assert ledger.rectangular(h).reserved_rows == point.reserved_rows[MAXIMUM]
    assert not replay.allocator.requests and replay.result().requests == 600
    replay.allocator.check()


def test_the_embedded_arrivals_reach_the_reported_share_on_pages_only():
    found = run(AzureArrivals(EMBEDDED))
    assert found.peak_share(PAGED) >= PAPER_REPORTED["vLLM"] / 100
    assert found.peak_share(MAXIMUM) < found.peak_share(POWER_OF_TWO) < found.peak_share(PAGED)
    assert len(found.points) <= MOST_POINTS
    again = run(AzureArrivals(EMBEDDED))
    assert again == found
    assert [row["layout"] for row in rows_of(found)] == list(LAYOUTS)


def test_the_real_arrivals_reach_the_reported_share():
    found = run(AzureArrivals(require("azure")))
    assert found.requests == 19_366 and len(found.points) <= MOST_POINTS
    assert found.peak_share(PAGED) >= PAPER_REPORTED["vLLM"] / 100
    shares = [f"{100 * found.peak_share(name):.1f} %" for name in LAYOUTS]
    lesson = (ROOT / "notebooks" / "03_where_did_the_memory_go.py").read_text()
    assert [share for share in shares if share not in lesson] == [], "the lesson quotes what is measured here"


def test_the_peak_is_exact_where_the_series_is_thinned():
    arrivals = [Arrival(float(n), 1 if n != 1501 else 60, 1) for n in range(1700)]
    found = run(arrivals, SLOW)
    assert len(found.points) <= MOST_POINTS
    assert found.peaks[PAGED].time == 1501 and found.peaks[PAGED].live_rows == 60
    assert 1501 not in {p.time for p in found.points}
    assert [p.time for p in found.points] == [n * 8.0 for n in range(len(found.points))]


def test_larger_blocks_hold_more_air():
    shares = [run(AzureArrivals(EMBEDDED), Assumptions(block_size=size)).peak_share(PAGED) for size in (16, 128, 512)]
    assert shares == sorted(shares, reverse=True)


def test_ranks_divide_the_bytes_and_not_the_share():
    one, two = (run(THREE, SLOW, KNOWN["llama-3-8b"], tp) for tp in (1, 2))
    assert one.peak_bytes(PAGED) == 2 * two.peak_bytes(PAGED) == 48 * 131_072
    assert one.means == two.means


def test_what_does_not_fit_is_refused():
    with pytest.raises(Rejected) as no:
        run([Arrival(0.0, 60, 2)], Assumptions(pool_blocks=3))
    assert no.value.reason == "out_of_memory"
    with pytest.raises(ValueError, match="longer than the maximum"):
        run([Arrival(0.0, 60, 5)], SLOW)
    with pytest.raises(ValueError, match="no arrivals"):
        run([])
    with pytest.raises(ValueError, match="decode_rate"):
        Assumptions(decode_rate=0)


def test_power_of_two():
    for n in (1, 2, 3, 4, 5, 16, 17, 1000, 1024, 1025):
        assert power_of_two(n) == 2 ** math.ceil(math.log2(n))
