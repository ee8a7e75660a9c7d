"""One tenant's index goes through the real gate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlab.contract import Rejected
from kvlab.memory.allocator import Allocator
from kvlab.reuse.one_tenant import one_tenant
from tests.reuse.prefix_worlds import TOKENS, layout


@pytest.mark.parametrize("design", [{}, {"policy": "vllm-0.23", "witness": False}])
def test_the_owner_finds_what_it_published_and_nobody_else_may_look(design):
    cache, owner = one_tenant(Allocator(layout(), audit="chain"), **design)
    cache.start(owner, "A", TOKENS)
    cache.publish(owner, "A", TOKENS)
    assert cache.start(owner, "B", TOKENS).match.lengths.runtime == 48
    with pytest.raises(Rejected, match="unauthorized_namespace"):
        cache.lookup(replace(owner, principal="somebody"), "C", TOKENS)
    cache.check()
