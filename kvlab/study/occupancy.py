"""Replays arrivals through three memory layouts at once and says which share of their bytes holds live rows.

It owns the assumptions of the replay and no layout of its own: pages are taken from the real allocator, without
tensors. It schedules nothing: who arrives is in at the next tick, and what does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvlab.contract import Json
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.study.geometries import KNOWN, Geometry, row_geometry
from kvlab.study.thinned import Thinned
from kvlab.study.traces import Arrival

MAXIMUM, POWER_OF_TWO, PAGED = "rectangles, maximum length", "rectangles, next power of two", "pages"
LAYOUTS = (MAXIMUM, POWER_OF_TWO, PAGED)
PAPER_REPORTED = MappingProxyType({"three Orca variants": (20.4, 38.2), "vLLM": 96.3})
"""Percent of K/V memory with token states, paper-reported: PagedAttention, figure 2, for its own workload. Not ours."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a trace of arrivals does not say. Prefill takes no time: a prompt's rows are there at the next tick.

    `decode_rate` tokens a second for each request, whatever the load. `tick` seconds. `max_length` tokens: what a
    rectangle for the maximum reserves. `pool_blocks` blocks of `block_size` tokens; too few are refused, not queued.
    The last token of an answer is emitted, not processed, so its row never exists.
    """

    decode_rate: float = 30.0
    tick: float = 1.0
    max_length: int = 16_384
    block_size: int = 16
    pool_blocks: int = 65_536

    def __post_init__(self) -> None:
        for name in ("decode_rate", "tick", "max_length", "block_size", "pool_blocks"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)!r}")

    def words(self) -> str:
        return (f"{self.decode_rate:g} tokens/s for each request, prefill at once, ticks of {self.tick:g} s, "
                f"blocks of {self.block_size} tokens, {self.max_length:,} tokens as the maximum")


@dataclass(frozen=True, slots=True)
class Point:
    """One moment: seconds, requests in flight, rows that exist, and rows that each layout has reserved for them."""

    time: float
    requests: int
    live_rows: int
    reserved_rows: Mapping[str, int]

    def share(self, layout: str) -> float:
        """Live bytes over reserved bytes of one layout; 1 where nothing is reserved. Rows are equally wide."""
        reserved = self.reserved_rows[layout]
        return self.live_rows / reserved if reserved else 1.0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a replay found. `peaks`: each layout's moment of most reserved bytes, exact even where `points` are thinned.

    `means`: live byte-seconds over reserved byte-seconds. `digest`: the allocator's chained digest at the end.
    """

    assumptions: Assumptions
    row_bytes: int
    requests: int
    points: tuple[Point, ...]
    peaks: Mapping[str, Point]
    means: Mapping[str, float]
    digest: str

    def peak_share(self, layout: str) -> float:
        return self.peaks[layout].share(layout)

    def peak_bytes(self, layout: str) -> int:
        return self.peaks[layout].reserved_rows[layout] * self.row_bytes


def power_of_two(tokens: int) -> int:
    """The smallest power of two that holds some tokens: what a buddy allocator reserves."""
    return 1 << max(0, tokens - 1).bit_length()


@dataclass(slots=True)
class _InFlight:
    arrival: Arrival
    rows: int
    ticks: int = 0


class Replay:
    """The replay itself, tick by tick; `run` does it all. O(requests in flight) a tick, O(points) memory."""

    def __init__(self, assumptions: Assumptions | None = None, geometry: Geometry = KNOWN["llama-3-8b"],
                 tp: int = 1) -> None:
        self.assumptions = a = assumptions or Assumptions()
        row = row_geometry(geometry, tp)
        group = CacheGroup("kv", 0, row.layers, row.kv_heads, row.head_dim, row.k_bytes, a.block_size, a.pool_blocks)
        self.allocator = Allocator(CacheLayoutManifest((group,)), audit="chain")
        self.row_bytes, self.flight = group.row_bytes, dict[str, _InFlight]()
        self.live_rows, self.admitted, self.now = 0, 0, 0.0
        self.reserved = dict.fromkeys(LAYOUTS, 0)
        self._series, self._peaks = Thinned[Point](), dict[str, Point]()
        self._live_sum, self._reserved_sum = 0, dict.fromkeys(LAYOUTS, 0)

    def ticks(self, arrivals: Iterable[Arrival]) -> Iterator[Point]:
        """Every tick from the first arrival until the last request has gone; empty stretches are jumped over.

        `Rejected("out_of_memory")` where the pool is too small; ValueError for a request longer than `max_length`.
        """
        waiting = iter(arrivals)
        arrival, step = next(waiting, None), self.assumptions.tick
        n = 0
        while arrival is not None or self.flight:
            if not self.flight and arrival is not None:
                n = max(n, -int(-arrival.at // step))
            self.now = n * step
            self._leave()
            self._decode()
            while arrival is not None and arrival.at <= self.now:
                self._admit(arrival)
                arrival = next(waiting, None)
            yield self._measure()
            n += 1

    def _leave(self) -> None:
        done = [name for name, f in self.flight.items() if f.rows == f.arrival.final_tokens - 1]
        for name in done:
            flight = self.flight.pop(name)
            self.allocator.release(name)
            self.live_rows -= flight.rows
            self._reserve(flight.arrival, -1)

    def _decode(self) -> None:
        """One batched append: every request in flight gets the rows of its tokens of this tick."""
        grown: dict[str, int] = {}
        for name, f in self.flight.items():
            f.ticks += 1
            said = int(f.ticks * self.assumptions.tick * self.assumptions.decode_rate)
            rows = f.arrival.context_tokens + min(said, f.arrival.generated_tokens - 1)
            if rows > f.rows:
                grown[name], f.rows = rows - f.rows, rows
        if grown:
            self.allocator.apply({"op": "append", "requests": grown})
            self.live_rows += sum(grown.values())

    def _admit(self, arrival: Arrival) -> None:
        if arrival.final_tokens > self.assumptions.max_length:
            raise ValueError(f"a request of {arrival.final_tokens:,} tokens is longer than the maximum of "
                             f"{self.assumptions.max_length:,}")
        self.admitted += 1
        name = f"r{self.admitted}"
        self.allocator.allocate(name, arrival.context_tokens)
        self.flight[name] = _InFlight(arrival, arrival.context_tokens)
        self.live_rows += arrival.context_tokens
        self._reserve(arrival, 1)

    def _reserve(self, arrival: Arrival, sign: int) -> None:
        self.reserved[MAXIMUM] += sign * self.assumptions.max_length
        self.reserved[POWER_OF_TWO] += sign * power_of_two(arrival.final_tokens)

    def _measure(self) -> Point:
        pool = self.allocator.pools[0]
        self.reserved[PAGED] = (pool.num_blocks - pool.free_count) * self.assumptions.block_size
        point = Point(self.now, len(self.flight), self.live_rows, MappingProxyType(dict(self.reserved)))
        self._series.add(point)
        self._live_sum += point.live_rows
        for layout, rows in self.reserved.items():
            self._reserved_sum[layout] += rows
            if layout not in self._peaks or rows > self._peaks[layout].reserved_rows[layout]:
                self._peaks[layout] = point
        return point

    def result(self) -> Occupancy:
        """What has been found so far; ValueError before the first request."""
        if not self._peaks:
            raise ValueError("there are no arrivals to replay")
        means = {name: self._live_sum / rows if rows else 1.0 for name, rows in self._reserved_sum.items()}
        return Occupancy(self.assumptions, self.row_bytes, self.admitted, tuple(self._series.points),
                         MappingProxyType(dict(self._peaks)), MappingProxyType(means), self.allocator.digest)


def run(arrivals: Iterable[Arrival], assumptions: Assumptions | None = None,
        geometry: Geometry = KNOWN["llama-3-8b"], tp: int = 1,
        progress: Callable[[float], None] | None = None) -> Occupancy:
    """Replay all arrivals; `progress(seconds of the trace)` after each tick. Raises as `Replay.ticks` does."""
    replay = Replay(assumptions, geometry, tp)
    for point in replay.ticks(arrivals):
        if progress:
            progress(point.time)
    return replay.result()


def rows_of(found: Occupancy) -> list[Json]:
    """A layout a row: GiB reserved at its peak, percent of them live there, percent live over the whole time."""
    return [{"layout": name, "peak_gib": found.peak_bytes(name) / 2**30, "live_at_peak": 100 * found.peak_share(name),
             "live_over_time": 100 * found.means[name]} for name in LAYOUTS]
