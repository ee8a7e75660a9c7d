"""Random histories of the radix cache against a plain table of all cached prefixes, both audits at once."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvlab.contract import Rejected
from kvlab.reuse.eviction import ORDERS
from kvlab.reuse.radix_cache import RadixCache
from tests.reuse.radix_model import Live, Model

SLOTS = 22
TALES = ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4, 5, 7, 7, 7, 7], [0, 1, 2, 9, 9, 9, 9, 9, 9, 9])
TOKENS = st.builds(lambda tale, end, other: [*tale[:end], *other], st.sampled_from(TALES), st.integers(0, 10),
                   st.sampled_from([[], [], [5], [6, 6]]))
MORE = st.tuples(st.sampled_from([0, 0, 1, 2]), st.integers(0, 6))
EXTRA = st.sampled_from(["", "", "", "adapter"])


class RadixHistory(RuleBasedStateMachine):
    """Every rule does one operation on the machine, its twin and the model, and compares what came of it."""

    reserved = Bundle("reserved")

    @initialize(size=st.sampled_from([1, 1, 2, 3]), order=st.sampled_from(["lru", "lru", *ORDERS]),
                policy=st.sampled_from(["normative", "normative", "sglang-0.5.11"]))
    def begin(self, size, order, policy):
        args = {"block_size": size, "first_slot": 5, "eviction": order, "policy": policy}
        self.cache, self.twin = RadixCache(SLOTS, **args), RadixCache(SLOTS, **args, audit="chain")
        self.model, self.names, self.loose = Model(size), 0, []
        self.lru = (order, policy) == ("lru", "normative")

    def do(self, **op):
        """Both audits; a refusal changes neither."""
        before, chained, snapshot = self.cache.digest, self.twin.digest, self.cache.snapshot()
        try:
            receipt = self.cache.apply(op)
        except Rejected as no:
            with pytest.raises(Rejected, match=no.reason):
                self.twin.apply(op)
            assert (self.cache.digest, self.twin.digest, self.cache.snapshot()) == (before, chained, snapshot)
            raise
        again = self.twin.apply(op)
        assert receipt.predecessor_digest == before and again.predecessor_digest == chained
        assert receipt.successor_digest == self.cache.digest != before
        assert again.successor_digest == self.twin.digest != chained
        assert {**receipt.to_dict(), "handoff": 0, "predecessor_digest": 0, "successor_digest": 0} == \
            {**again.to_dict(), "handoff": 0, "predecessor_digest": 0, "successor_digest": 0}
        self.last = receipt, again
        return receipt

    def refused(self, reason, **op):
        with pytest.raises(Rejected, match=reason):
            self.do(**op)

    def extra(self, extra):
        return {"extra_key": extra or None}

    # ------------------------------------------------------------------ the index
    @rule(tokens=TOKENS, extra=EXTRA)
    def match(self, tokens, extra):
        wanted = self.model.match(extra, tokens)
        seen = self.cache.ask({"ask": "match", "tokens": tokens, **self.extra(extra)})
        receipt = self.do(op="match", tokens=tokens, **self.extra(extra))
        assert list(receipt.slots) == seen["slots"] == wanted
        assert receipt.matched == seen["matched"] == len(wanted) * self.model.size
        assert len(receipt.splits) == (seen["inside"] is not None) <= 1
        self.model.touch(extra, tokens[: receipt.matched], receipt.version)

    @rule(tokens=TOKENS, extra=EXTRA)
    def insert(self, tokens, extra):
        blocks = len(tokens) // self.model.size
        op = {"op": "insert", "tokens": tokens, **self.extra(extra)}
        if blocks > self.cache.pool.free_count:
            return self.refused("out_of_memory", **op)
        receipt = self.do(**op)
        duplicates = self.model.store(extra, tokens, list(receipt.allocated), 0, receipt.version)
        assert list(receipt.released) == duplicates

    @rule(count=st.integers(1, 6), target=reserved)
    def reserve(self, count):
        if count > self.cache.pool.free_count:
            self.refused("out_of_memory", op="reserve", count=count)
            return ()
        taken = list(self.do(op="reserve", count=count).allocated)
        self.loose += taken
        return tuple(taken)

    @rule(slots=consumes(reserved), tokens=TOKENS, keep=st.booleans())
    def insert_reserved(self, slots, tokens, keep):
        """A producer with slots of its own, some of its prefix perhaps the tree's already."""
        mine, size = list(slots), self.model.size
        found = self.model.match("", tokens)
        protected = found if keep else []
        table = protected + mine
        if len(mine) not in (len(tokens) // size - len(protected), -(-len(tokens) // size) - len(protected)):
            return self.refused("edge_length_mismatch", op="insert", tokens=tokens, slots=table,
                                protected_len=len(protected) * size) if mine else None
        receipt = self.do(op="insert", tokens=tokens, slots=table, protected_len=len(protected) * size)
        duplicates = self.model.store("", tokens, table, len(protected) * size, receipt.version)
        assert list(receipt.released) == duplicates + table[len(tokens) // size :]
        self.loose = [s for s in self.loose if s not in mine]

    @rule(slots=consumes(reserved))
    def give_back(self, slots):
        if slots:
            self.do(op="give_back", slots=list(slots))
            self.loose = [s for s in self.loose if s not in slots]

    @rule(wanted=st.integers(1, 9))
    def evict(self, wanted):
        receipt = self.do(op="evict", tokens=wanted)
        gone = 0
        for edge in receipt.evicted:
            assert gone < wanted, "it went on although enough was released"
            self.model.drop(list(edge.slots), self.lru)
            gone += len(edge.slots) * self.model.size
        assert receipt.evicted_tokens == gone
        assert gone >= wanted or (receipt.outcome == "short" and not self.model.leaves())

    # ------------------------------------------------------------------ requests
    @rule(tokens=TOKENS, extra=EXTRA, disposition=st.sampled_from(["admit", "admit", "admit", "defer", "reject"]))
    def start(self, tokens, extra, disposition):
        name, self.names = f"r{self.names}", self.names + 1
        found = self.model.match(extra, tokens)
        self.do(op="handoff", request=name, tokens=tokens, **self.extra(extra))
        first, second = (r.handoff for r in self.last)
        assert list(first.prefix_slot_ids) == found
        self.model.touch(extra, tokens[: first.matched_tokens], self.cache.version)
        self.cache.settle(first, disposition)
        self.twin.settle(second, disposition)
        if disposition == "admit":
            self.model.live[name] = Live(extra, tokens[: first.matched_tokens], found, first.matched_tokens)

    def one(self, data) -> tuple[str, Live, list[int]]:
        """A live request, and how it goes on: mostly as others do, so that there are duplicates."""
        name = data.draw(st.sampled_from(sorted(self.model.live)))
        live, (tale, more) = self.model.live[name], data.draw(MORE)
        return name, live, TALES[tale][len(live.tokens) :][:more]

    def grow(self, live, append, receipt):
        live.tokens = live.tokens + append
        live.table = live.table + list(receipt.allocated)
        assert len(live.table) == -(-len(live.tokens) // self.model.size)

    def short(self, live, append) -> bool:
        need = -(-(len(live.tokens) + len(append)) // self.model.size) - len(live.table)
        return need > self.cache.pool.free_count

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def extend(self, data):
        name, live, append = self.one(data)
        op = {"op": "extend", "request": name, "append": append}
        if self.short(live, append):
            return self.refused("out_of_memory", **op)
        self.grow(live, append, self.do(**op))

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), chunked=st.booleans())
    def publish(self, data, chunked):
        name, live, append = self.one(data)
        op = {"op": "publish", "request": name, "append": append, "chunked": chunked}
        if self.short(live, append):
            return self.refused("out_of_memory", **op)
        receipt = self.do(**op)
        self.grow(live, append, receipt)
        duplicates = self.model.store(live.extra, live.tokens, live.table, live.protected, receipt.version)
        assert list(receipt.released) == duplicates
        found = self.model.match(live.extra, live.tokens)
        live.table[: len(found)] = found
        live.protected = len(live.tokens) // self.model.size * self.model.size
        assert len(found) * self.model.size == live.protected

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def finish(self, data):
        name, live, append = self.one(data)
        op = {"op": "finish", "request": name, "append": append}
        if self.short(live, append):
            return self.refused("out_of_memory", **op)
        receipt = self.do(**op)
        self.grow(live, append, receipt)
        duplicates = self.model.store(live.extra, live.tokens, live.table, live.protected, receipt.version)
        assert list(receipt.released) == duplicates + live.table[len(live.tokens) // self.model.size :]
        del self.model.live[name]

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def cancel(self, data):
        name, live, _ = self.one(data)
        receipt = self.do(op="cancel", request=name)
        assert list(receipt.released) == live.table[live.protected // self.model.size :]
        del self.model.live[name]

    # ------------------------------------------------------------------ always
    @invariant()
    def every_slot_has_one_owner_and_no_live_request_points_at_a_free_one(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        self.twin.check()
        snapshot = self.cache.snapshot()
        assert snapshot == self.twin.snapshot()
        owned, private, free = list(self.model.slots.values()), self.model.private() + self.loose, snapshot["free"]
        assert sorted(owned + private + free) == list(range(5, 5 + SLOTS))
        assert sorted(private) == snapshot["private"]
        assert {name: row["table"] for name, row in snapshot["requests"].items()} == \
            {name: live.table for name, live in self.model.live.items()}
        assert not {s for row in snapshot["requests"].values() for s in row["table"]} & set(free)

    @invariant()
    def the_ledgers_are_the_models(self):
        if not hasattr(self, "cache"):
            return
        size, ledgers = self.model.size, self.cache.ask({"ask": "ledgers"})
        locked = self.model.locked()
        assert ledgers["protected"] == size * len(locked)
        assert ledgers["evictable"] == size * (len(self.model.slots) - len(locked))
        again = RadixCache.of(self.cache.snapshot())
        assert again.digest == self.cache.digest
        assert again.ask({"ask": "victims"}) == self.cache.ask({"ask": "victims"})


RadixHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None,
                                          suppress_health_check=list(HealthCheck))
test_random_histories = RadixHistory.TestCase
