"""Replays a trace through a real index over real blocks, without tensors, and says where each lost hit went.

It owns the order (first come, first served, a window of requests in flight) and the ceilings beside what was achieved.
It refuses to schedule, to know time (a trace says when requests came, not how long they took) and to model a GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from kvlab.contract import Json
from kvlab.reuse.eviction import ORDERS
from kvlab.study.ceilings import Journal, PrefixNodes, best_hits, walk
from kvlab.study.replay_pools import Pool, PrefixPool, RadixPool, Use, unit_of
from kvlab.study.thinned import Thinned
from kvlab.study.traced_request import TracedRequest

OBSERVED = {"prefix": "vllm-0.23", "radix": "sglang-0.5.11"}
"""The source-observed behaviour that each index can copy, beside the normative one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a replay is run with. `block_size` tokens, `pool_blocks` blocks, `row_bytes` K/V bytes of one token.

    `index`: "prefix" or "radix". `policy`: "normative", or that index's source-observed one. `eviction`: the radix
    tree's order. `in_flight`: a request ends when so many later ones have begun, or sooner where its blocks are needed.
    """

    index: str = "prefix"
    block_size: int = 16
    pool_blocks: int = 20_480
    policy: str = "normative"
    eviction: str = "lru"
    in_flight: int = 1
    row_bytes: int = 131_072

    def __post_init__(self) -> None:
        if self.index not in OBSERVED:
            raise ValueError(f"an index is {' or '.join(OBSERVED)}, not {self.index!r}")
        if self.policy not in ("normative", OBSERVED[self.index]):
            raise ValueError(f"a {self.index} index is normative or {OBSERVED[self.index]}, not {self.policy!r}")
        if self.eviction not in ORDERS:
            raise ValueError(f"an eviction order is one of {', '.join(ORDERS)}, not {self.eviction!r}")
        if self.index == "prefix" and self.eviction != "lru":
            raise ValueError("a prefix chain's blocks are recycled in the order in which they became free (lru); other "
                             "orders belong to the radix tree")
        for name in ("block_size", "pool_blocks", "in_flight", "row_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def pool(self, unit: int) -> Pool:
        """The machines, for a trace of which `unit` tokens count as one."""
        if self.index == "prefix":
            return PrefixPool(self.block_size, self.pool_blocks, unit, self.policy)
        return RadixPool(self.block_size, self.pool_blocks, unit, self.policy, self.eviction)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.row_bytes


@dataclass(frozen=True, slots=True)
class Moment:
    """Blocks in use after `requests` requests; `at` as the trace has it, seconds after its first row."""

    requests: int
    at: float | None
    use: Use


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found, in tokens and blocks. `refused`: requests larger than the whole pool, never served.
    `requests_hit`: those of which something was found, however little.

    `ideal_hit_tokens`: an infinite cache, as `kvlab.study.ideal_hits` counts. `design_hit_tokens`: an infinite cache of
    full blocks that holds back a row for logits. `optimal_hit_tokens`: the same with the best evictions of this
    pool, requests one at a time. The three are None where ceilings were not asked for. `unknown`: requests whose
    content the trace does not tell; they can hit nothing. `ended_early`: requests that ended before their window, for
    their blocks were needed. `seconds`: in the machines alone, reading, tokenising and ceilings left out.
    """

    setting: Setting
    requests: int
    unknown: int
    refused: int
    refused_tokens: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    requests_hit: int
    ideal_hit_tokens: int | None
    design_hit_tokens: int | None
    optimal_hit_tokens: int | None
    different_blocks: int | None
    evicted_blocks: int
    ended_early: int
    peak_unique_blocks: int
    peak_referenced_blocks: int
    peak_cached_blocks: int
    moments: tuple[Moment, ...]
    seconds: float
    digest: str

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens of served requests that were not found."""
        return self.prompt_tokens - self.refused_tokens - self.hit_tokens

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def losses(self) -> dict[str, int]:
        """Where the ideal hits went that were not achieved, in tokens; empty without ceilings.

        With one request in flight none is negative: no policy beats the best evictions.
        """
        if self.ideal_hit_tokens is None:
            return {}
        return {"design": self.ideal_hit_tokens - self.design_hit_tokens,
                "capacity": self.design_hit_tokens - self.optimal_hit_tokens,
                "policy": self.optimal_hit_tokens - self.hit_tokens}

    def to_dict(self) -> Json:
        """Plain data, for machines: every figure, without the moments."""
        out = asdict(self)
        del out["moments"]
        return out | {"recomputed_tokens": self.recomputed_tokens, "hit_share": self.hit_share, "losses": self.losses}


class Replay:
    """A replay that takes one request after another; `run` plays a whole trace.

    Memory: the pool, the requests in flight, at most 400 moments; with ceilings also 4 bytes for each block
    of each request and an entry for each different block.
    """

    def __init__(self, setting: Setting, *, ceilings: bool = True) -> None:
        self.setting, self._unit = setting, 0
        self.pool: Pool | None = None
        self.flight: deque[str] = deque()
        self.counts = dict.fromkeys(("requests", "unknown", "refused", "refused_tokens", "prompt_tokens",
                                     "output_tokens", "hit_tokens", "requests_hit", "ended_early"), 0)
        self.ideal = self.design = 0
        self._seen, self._journal = (PrefixNodes(), Journal()) if ceilings else (None, None)
        self._course, self._peaks, self._seconds = Thinned[Moment](), (0, 0, 0), 0.0

    def play(self, request: TracedRequest) -> int | None:
        """One request: tokens that were found; None where it is larger than the pool and is refused.

        ValueError where its blocks have no content at this block size.
        """
        self._begin(request)
        walked = walk(self._seen, request, self.setting.block_size) if self._seen is not None else None
        start = time.perf_counter()
        hit = self._serve(f"r{self.counts['requests']}", request)
        use = self.pool.use()
        self._seconds += time.perf_counter() - start
        counts = self.counts
        counts["requests"] += 1
        self._course.add(Moment(counts["requests"], request.at, use))
        self._peaks = tuple(map(max, self._peaks, (use.unique, use.referenced, use.cached)))
        counts["unknown"] += not request.content_known
        counts["prompt_tokens"] += request.prompt_tokens
        counts["output_tokens"] += request.output_tokens
        counts["hit_tokens"] += hit or 0
        counts["requests_hit"] += bool(hit)
        counts["refused"] += hit is None
        counts["refused_tokens"] += request.prompt_tokens if hit is None else 0
        if walked is not None:
            self.ideal += walked.ideal
            if hit is not None:
                self.design += walked.design
                self._journal.add(walked.nodes, walked.useful, self._blocks(request))
        return hit

    def _begin(self, request: TracedRequest) -> None:
        unit = unit_of(request, self.setting.block_size)
        if self._unit == 0:
            self._unit, self.pool = unit, self.setting.pool(unit)
        if unit != self._unit:
            raise ValueError("a trace tells the content of all its requests in one form: token ids, block ids or none")

    def _blocks(self, request: TracedRequest) -> int:
        return -(-(request.prompt_tokens + request.output_tokens) // self.setting.block_size)

    def _serve(self, name: str, request: TracedRequest) -> int | None:
        while len(self.flight) >= self.setting.in_flight:
            self.pool.end(self.flight.popleft())
        while (hit := self.pool.begin(name, request)) is None:
            if not self.flight:
                return None
            self.pool.end(self.flight.popleft())
            self.counts["ended_early"] += 1
        self.flight.append(name)
        return hit

    def result(self) -> Replayed:
        """What has been found so far."""
        best = design = ideal = different = None
        if self._journal is not None:
            best = best_hits(self._journal, self.setting.pool_blocks) * self.setting.block_size
            design, ideal, different = self.design, self.ideal, len(self._seen)
        unique, referenced, cached = self._peaks
        pool = self.pool or self.setting.pool(1)
        return Replayed(self.setting, **self.counts, ideal_hit_tokens=ideal, design_hit_tokens=design,
                        optimal_hit_tokens=best, different_blocks=different, evicted_blocks=pool.evicted_blocks,
                        peak_unique_blocks=unique, peak_referenced_blocks=referenced, peak_cached_blocks=cached,
                        moments=tuple(self._course.points), seconds=self._seconds, digest=pool.digest)


def run(requests: Iterable[TracedRequest], setting: Setting, *, ceilings: bool = True,
        progress: Callable[[int], None] | None = None) -> Replayed:
    """Replay all requests in their order; `progress(requests so far)` after each. ValueError as `Replay.play`."""
    replay = Replay(setting, ceilings=ceilings)
    for done, request in enumerate(requests, 1):
        replay.play(request)
        if progress:
            progress(done)
    return replay.result()
