"""Adapters: the deltas that were asked for, everything else shared, and an identity that is their content."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvlab.execution.adapters import TARGETS, seeded_adapter, with_adapter
from kvlab.execution.model import causal_attend, load_model
from tests.execution.tiny import random_tensors, write_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_folder(tmp_path_factory.mktemp("tiny") / "model", random_tensors()))[0]


def logits(model, tokens=(5, 9, 7, 30)):
    return model.forward(torch.tensor(tokens), torch.arange(len(tokens)), causal_attend)


def split(model, layer):
    """q, k and v of one fused matrix, by the tiny model's sizes: 6 and 2 heads of 8 lanes."""
    return dict(zip(TARGETS, layer.qkv.split([48, 16, 16]), strict=True))


def test_a_projection_gains_scale_times_up_times_down_and_the_rest_is_shared(model):
    adapter = seeded_adapter(model, seed=3, rank=2, scale=0.5, targets=("k", "v"))
    made = with_adapter(model, adapter)
    for at, (before, after) in enumerate(zip(model.weights.layers, made.weights.layers, strict=True)):
        ours, theirs = split(model, before), split(model, after)
        assert torch.equal(ours["q"], theirs["q"])
        for target in "kv":
            up, down = (part.double() for part in adapter.factors[at][target])
            wanted = ours[target].double() + 0.5 * up @ down
            torch.testing.assert_close(theirs[target].double(), wanted, atol=1e-5, rtol=1e-5)
            assert torch.linalg.matrix_rank(theirs[target].double() - ours[target].double(), tol=1e-4) == 2
        assert after.down is before.down and after.gate_up is before.gate_up
        assert after.attention_out is before.attention_out
    assert made.weights.embed is model.weights.embed


def test_the_base_model_is_untouched_and_a_zero_scale_is_the_base_model(model):
    before = logits(model)
    other = with_adapter(model, seeded_adapter(model, seed=1))
    assert not torch.allclose(logits(other), before, atol=1e-2)
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(with_adapter(model, seeded_adapter(model, seed=1, scale=0.0))), before)


def test_an_identity_is_the_content(model):
    one = seeded_adapter(model, seed=1)
    assert one.identity == seeded_adapter(model, seed=1).identity
    others = [seeded_adapter(model, seed=2), seeded_adapter(model, seed=1, rank=2),
              seeded_adapter(model, seed=1, scale=2.0), seeded_adapter(model, seed=1, targets=("k",))]
    assert len({one.identity, *(o.identity for o in others)}) == 5
    bent = tuple({t: (up.clone(), down.clone()) for t, (up, down) in layer.items()} for layer in one.factors)
    bent[-1]["v"][1][0, 0] += 1e-3
    assert replace(one, factors=bent).identity != one.identity
    assert replace(one, seed=99).identity == one.identity  # a label is not what it adds
    digests = {model.digest, with_adapter(model, one).digest, with_adapter(model, others[0]).digest}
    assert len(digests) == 3


@pytest.mark.parametrize("bad", [{"rank": 0}, {"targets": ()}, {"targets": ("q", "o")}])
def test_what_is_no_adapter(model, bad):
    with pytest.raises(ValueError):
        seeded_adapter(model, seed=1, **bad)


def test_an_adapter_for_another_shape_is_refused(model):
    adapter = seeded_adapter(model, seed=1)
    with pytest.raises(ValueError, match="layers"):
        with_adapter(model, replace(adapter, factors=adapter.factors[:1]))
    narrow = tuple({t: (up[:-1], down) for t, (up, down) in layer.items()} for layer in adapter.factors)
    with pytest.raises(ValueError, match="shape"):
        with_adapter(model, replace(adapter, factors=narrow))
