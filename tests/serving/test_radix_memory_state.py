"""Random histories of the radix memory: after every operation each table holds exactly the rows of its tokens.

A row here is a number made of the whole prefix that it ends, so a row of anybody else's prefix is never right.
"""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlab.contract import Rejected
from kvlab.memory.kv_store import PagedStore
from kvlab.memory.layout import quarter_split
from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.slot_pool import PRIVATE, TREE
from kvlab.serving.radix_memory import RadixMemory

TOKENS, FIRST, LAYERS, HALF = 20, 3, 4, 3
TALES = ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4, 5, 7, 7, 7, 7], [0, 1, 2, 9, 9, 9, 9, 9, 9, 9])
PROMPT = st.builds(lambda tale, end, other: [*tale[:end], *other], st.sampled_from(TALES),
                   st.sampled_from([8, 10, 9, 6, 5, 3, 1]), st.sampled_from([[], [], [5], [6, 6]]))
NAME = st.sampled_from("ABCDEF")
WAYS = st.sampled_from(["commit", "commit", "commit", "rollback", "half", "hold"])
REFUSALS = ("out_of_memory", "write_in_flight", "request_exists")


def rows_of(tokens: list[int]) -> torch.Tensor:
    """One number a token, of the prefix that ends with it, small enough to be exact in float32."""
    return torch.tensor([float(zlib.crc32(bytes(tokens[: n + 1])) >> 10) for n in range(len(tokens))])


class RadixMemoryHistory(RuleBasedStateMachine):
    """`live`: the tokens whose rows each request must have. `held`: open steps, with the tokens they will add."""

    @initialize(size=st.sampled_from([1, 2, 4]), order=st.sampled_from(["lru", "lru", "fifo"]))
    def begin(self, size, order):
        self.size, slots = size, TOKENS // size
        layout = quarter_split(LAYERS, 1, 2, 4, block_size=size, num_blocks=slots + 1)
        self.store = PagedStore(layout)
        self.cache = RadixCache(slots, block_size=size, first_slot=FIRST, eviction=order)
        self.memory = RadixMemory(self.store, self.cache)
        self.cache.observers.append(self.memory.poison)
        self.live: dict[str, list[int]] = {}
        self.held: dict[str, tuple] = {}

    def refused(self, call, *args):
        """The refusal of a call, with nothing changed; or what it returned."""
        before, snapshot = self.cache.digest, self.cache.snapshot()
        try:
            return call(*args)
        except Rejected as no:
            assert no.reason in REFUSALS
            assert (self.cache.digest, self.cache.snapshot()) == (before, snapshot)
            return None

    def write(self, step, parts, layers):
        """Write the rows of each request's new tokens, layer by layer, as a model pass does."""
        wanted = torch.cat([rows_of([*before, *new])[len(before):] for before, new in parts.values()])
        for layer in range(layers):
            k = torch.stack([wanted, torch.full_like(wanted, layer)], 1)[:, None]
            step.attend(layer, torch.zeros(len(wanted), 1, 2), k, -k)

    def go(self, step, parts, way):
        """Take an open step to its end, or leave it open."""
        if way == "hold":
            self.held["".join(parts)] = (step, parts)
            return
        self.write(step, parts, HALF if way == "half" else 0 if way == "rollback" else LAYERS)
        if way == "commit":
            step.commit()
            self.live |= {name: [*before, *new] for name, (before, new) in parts.items()}
            return
        if way == "half":
            with pytest.raises(Rejected, match="half_bundle_publication"):
                step.commit()
        step.rollback()

    # ------------------------------------------------------------------ new rows
    @rule(name=NAME, tokens=PROMPT, way=WAYS, offer=st.booleans())
    def start(self, name, tokens, way, offer):
        expected = self.cache.ask({"ask": "match", "tokens": tokens[:-1]})["matched"]
        made = self.refused(self.memory.start, name, tokens)
        if made is None:
            return
        step, hit = made
        assert hit == expected and hit % self.size == 0 and hit < len(tokens)
        for g, table in enumerate(step.tables):
            read = self.store.k[g][0, table[0].tolist()].reshape(-1, 2)[:hit, 0]
            assert torch.equal(read, rows_of(tokens[:hit])), "the hit is somebody else's rows"
        self.go(step, {name: (tokens[:hit], tokens[hit:])}, way)
        if offer and name in self.live and way == "commit":
            self.memory.offer(name, tokens)

    @rule(name=NAME, tokens=PROMPT, way=WAYS)
    def compute_everything(self, name, tokens, way):
        if name in self.live or name in self.memory.writing:
            return
        step = self.refused(self.memory.open, {name: tokens})
        if step is not None:
            self.go(step, {name: ([], tokens)}, way)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), way=WAYS)
    def extend(self, data, way):
        names = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, max_size=3, unique=True))
        new = {name: data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)) for name in names}
        step = self.refused(self.memory.open, new)
        if step is not None:
            self.go(step, {name: (self.live[name], new[name]) for name in names}, way)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), way=st.sampled_from(["commit", "commit", "rollback", "half"]))
    def end(self, data, way):
        step, parts = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        self.go(step, parts, way)

    # ------------------------------------------------------------------ what becomes of them
    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def offer(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.refused(self.memory.offer, name, self.live[name])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["release", "release", "cancel"]))
    def leave(self, data, how):
        name = data.draw(st.sampled_from(sorted(self.live)))
        if self.refused(getattr(self.memory, how), name) is not None:
            del self.live[name]

    # ------------------------------------------------------------------ what always holds
    def rows(self, slots):
        """The first lane of K, every layer, in the order of some slots `[layers, rows]`; V must be its negative."""
        index, sides = [slot - FIRST for slot in slots], (self.store.k, self.store.v)
        k, v = (torch.cat([t[:, index] for t in side]).flatten(1, 2)[:, :, 0, 0] for side in sides)
        assert torch.equal(k.nan_to_num(nan=-1), (-v).nan_to_num(nan=-1))
        return k

    @invariant()
    def tables_hold_their_rows(self):
        for name, tokens in self.live.items():
            read = self.rows(self.cache.table(name))[:, : len(tokens)]
            assert torch.equal(read, rows_of(tokens).expand(LAYERS, -1)), f"a row of {name} is another's"
            assert self.memory.length(name) == len(tokens)

    @invariant()
    def cached_edges_hold_their_rows(self):
        for node in list(self.cache.tree):
            path = self.cache.ask({"ask": "path", "node": node.node_id})
            assert torch.equal(self.rows(path["slots"]), rows_of(path["tokens"]).expand(LAYERS, -1))

    @invariant()
    def requests_are_those_that_live_or_begin(self):
        writing = {name for _, parts in self.held.values() for name in parts}
        assert self.memory.writing == writing
        assert set(self.cache.requests) == set(self.live) | writing

    @invariant()
    def every_slot_has_one_owner(self):
        self.cache.check()
        private = []
        for request in self.cache.requests.values():
            cut = request.protected // self.size
            assert all(self.cache.pool.state(slot) == TREE for slot in request.table[:cut])
            assert all(self.cache.pool.state(slot) == PRIVATE for slot in request.table[cut:])
            private += request.table[cut:]
        staged = [slot for step, _ in self.held.values() for row in step.txn.rows for slot in row.fresh]
        assert sorted(staged) == sorted(self.cache.loose)
        assert sorted(private + staged) == self.cache.pool.private()
        assert all(a != b for a, b in pairwise(sorted(private + staged)))

    @invariant()
    def a_free_slot_holds_no_row(self):
        assert torch.isnan(self.rows(self.cache.pool.free())).all()


RadixMemoryHistory.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
TestRadixMemoryHistory = RadixMemoryHistory.TestCase
