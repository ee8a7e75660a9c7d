"""Random histories: the real allocator against the plain model, every operation also with the plug pulled."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvlab.contract import Rejected
from kvlab.memory.allocator import Allocator
from tests.memory.model import Model
from tests.memory.worlds import (
    CHOICES,
    QUICK,
    WORLDS,
    Plug,
    PlugPulled,
    at_rest,
    first_bundles,
    layout_of,
    lengths,
    picture,
    propose,
    queues_are_sound,
)


class AgainstTheModel(RuleBasedStateMachine):
    @initialize(world=st.sampled_from(WORLDS), seed=st.one_of(st.none(), st.integers(0, 99)))
    def start(self, world, seed):
        self.real = Allocator(layout_of(world), queue_seed=seed)
        free = self.real.snapshot()["free"]
        self.model = Model([size for size, _ in world], list(free.values()))
        self.bundles: list[list[str]] = []
        self.perform({"op": "allocate", "request": "A", "tokens": 7}, 99)
        self.bundles += first_bundles(self.real, "A", [0])

    @rule(choice=CHOICES, fault_at=st.integers(1, 14), behind=st.integers(0, 30))
    def operate(self, choice, fault_at, behind):
        op = propose(choice, lengths(self.real), self.bundles)
        if behind > 28:
            op["expected_epoch"] = self.real.epoch - 1
        if self.perform(op, fault_at) is None and op["op"] == "cache_full":
            self.bundles += first_bundles(self.real, op["request"], op["blocks"])

    def perform(self, op: dict, fault_at: int) -> str | None:
        """The operation with a fault, and again without; the reason of its refusal, or None."""
        before = picture(self.real)
        plug = Plug(fault_at)
        self.real.observers.append(plug)
        outcome = self.outcome(op)
        self.real.observers.remove(plug)
        if outcome == "fault":
            assert picture(self.real) == before
            assert at_rest(self.real)
            outcome = self.outcome(op)
        assert outcome == self.model.apply(op)
        if outcome is not None:
            assert picture(self.real) == before
        assert at_rest(self.real)
        return outcome

    def outcome(self, op: dict) -> str | None:
        before = self.real.digest
        try:
            receipt = self.real.apply(op)
        except Rejected as no:
            return no.reason
        except PlugPulled:
            return "fault"
        assert (receipt.predecessor_digest, receipt.successor_digest) == (before, self.real.digest)
        assert receipt.allocator_epoch_after == self.real.epoch
        return None

    @invariant()
    def both_tell_the_same(self):
        if not hasattr(self, "real"):
            return
        self.real.check()
        assert queues_are_sound(self.real)
        shown, wanted = self.real.snapshot(), self.model.picture()
        for row in shown["requests"].values():
            del row["generation"]
        assert {k: shown[k] for k in wanted} == wanted


TestAgainstTheModel = AgainstTheModel.TestCase
TestAgainstTheModel.settings = settings(QUICK, max_examples=50, stateful_step_count=40)
