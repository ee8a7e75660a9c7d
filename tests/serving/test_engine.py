"""The engine over real memory: paged, rectangular and no cache give the same logits, and the oracle agrees."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from kvlab.contract import Rejected
from kvlab.execution.model import causal_attend, load_model
from kvlab.memory.allocator import Allocator
from kvlab.memory.kv_store import PagedMemory, PagedStore, RectangularMemory
from kvlab.memory.layout import BLOCK_MAJOR, LAYER_MAJOR, quarter_split
from kvlab.serving.engine import Engine, Sampling, common_prefix, sample
from tests.support import require

TOKENS = 200
TOLERANCE = 1e-4
PROMPT = "She looked at the letter again, and thought of her sister"
PAIR = ("It is a truth universally acknowledged, that a single man in want of a wife",
        "It is a truth universally acknowledged, that a single man in possession of a good fortune")


@functools.cache
def model_of(name, dtype=torch.float32):
    if name == "smollm2":
        require("smollm2")
    return load_model(name, dtype)


def paged(model, *, block_size=16, num_blocks=64, seed=11, order=LAYER_MAJOR):
    """Paged memory with shuffled block ids and NaN in every row that nobody wrote or that was recycled."""
    c = model.config
    layout = quarter_split(c.layers, c.kv_heads, c.head_dim, 4, block_size=block_size, num_blocks=num_blocks,
                           axis_order=order)
    allocator, store = Allocator(layout, queue_seed=seed), PagedStore(layout)
    allocator.observers.append(store.poison)
    return PagedMemory(allocator, store)


def rectangular(model, slots=4, max_length=512):
    c = model.config
    return RectangularMemory(c.layers, c.kv_heads, c.head_dim, slots=slots, max_length=max_length)


def dirty(memory):
    """Use and recycle every block once, so that a later run never meets a fresh one."""
    rows = sum(g.num_blocks for g in memory.allocator.groups[:1]) * memory.allocator.groups[0].block_size
    memory.allocator.allocate("dirt", rows)
    for tensor in (*memory.store.k, *memory.store.v):
        tensor.fill_(1e9)
    memory.release("dirt")
    return memory


def step_by_step(model, memory, prompt, forced):
    """Logits `[len(forced), vocab]`, each after one more token of `forced` (None: greedy)."""
    engine, logits, tokens = Engine(model, memory), [], []
    row = engine.extend({"A": prompt})["A"]
    for n in range(TOKENS):
        logits.append(row)
        tokens.append(int(row.argmax()) if forced is None else forced[n])
        if n < TOKENS - 1:
            row = engine.extend({"A": tokens[-1:]})["A"]
    return torch.stack(logits), tokens


def one_pass(model, prompt, tokens):
    """The same logits from one teacher-forced pass without any cache."""
    ids = torch.tensor(prompt + tokens[:-1])
    rows = torch.arange(len(prompt) - 1, len(ids))
    return model.forward(ids, torch.arange(len(ids)), causal_attend, rows)


def assert_same_choices(logits, tokens):
    """Each token is the best, or within the tolerance of it (then either is right)."""
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() <= 2 * TOLERANCE


@pytest.mark.parametrize("name", ["austen", "smollm2"])
def test_paged_rectangular_no_cache_and_oracle_agree_over_200_tokens(name):
    model, tokenizer = model_of(name)
    prompt = tokenizer.encode(PROMPT)
    ours, tokens = step_by_step(model, dirty(paged(model)), prompt, None)
    theirs, _ = step_by_step(model, rectangular(model), prompt, tokens)
    without = one_pass(model, prompt, tokens)
    oracle = one_pass(load_model(name, torch.float64)[0], prompt, tokens)
    assert torch.isfinite(ours).all()
    assert (ours - theirs).abs().max() <= TOLERANCE
    assert (ours - without).abs().max() <= TOLERANCE
    error, rectangular_error = ((x.double() - oracle).abs().max() for x in (ours, theirs))
    assert error <= TOLERANCE
    assert error <= 2 * rectangular_error
    for logits in (ours, theirs, without, oracle):
        assert_same_choices(logits, tokens)


@pytest.mark.parametrize("order", [LAYER_MAJOR, BLOCK_MAJOR], ids=["layer_major", "block_major"])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_two_prompts_share_and_say_what_they_say_alone(order, block_size):
    model, tokenizer = model_of("austen")
    prompts = dict(zip("AB", map(tokenizer.encode, PAIR), strict=True))
    sampling = Sampling(12, temperature=0.7, seed=4)
    memory = dirty(paged(model, block_size=block_size, num_blocks=120, order=order))
    run = Engine(model, memory).run(prompts, sampling)
    plain = Engine(model, rectangular(model)).run(prompts, sampling, share=False)
    assert run.outputs == plain.outputs
    shared = common_prefix(list(prompts.values()))
    assert run.rows_recomputed == 0 and plain.rows_recomputed == shared
    assert plain.rows_computed - run.rows_computed == shared
    memory.allocator.check()
    assert memory.allocator.requests == {}
    assert memory.allocator.pools[0].free_count == 120


def test_parallel_samples_by_fork_equal_samples_alone():
    model, tokenizer = model_of("austen")
    prompt = tokenizer.encode(PAIR[0])
    names = "ABCDE"
    sampling = Sampling(10, temperature=0.9, top_k=40, seed=1)
    memory = dirty(paged(model))
    together = Engine(model, memory).run(dict.fromkeys(names, prompt), sampling)
    apart = Engine(model, rectangular(model, slots=5)).run(dict.fromkeys(names, prompt), sampling, share=False)
    assert together.outputs == apart.outputs
    assert len({tuple(o) for o in together.outputs.values()}) > 1
    assert apart.rows_recomputed == 4 * len(prompt)


def test_a_prompt_that_is_a_prefix_of_the_other():
    model, tokenizer = model_of("austen")
    long = tokenizer.encode(PAIR[1])
    prompts = {"A": long[:20], "B": long}
    run = Engine(model, dirty(paged(model))).run(prompts, Sampling(6))
    alone = Engine(model, rectangular(model)).run({"A": long[:20]}, Sampling(6))
    assert run.outputs["A"] == alone.outputs["A"]


def test_copy_moves_exactly_the_valid_rows():
    model, tokenizer = model_of("austen")
    memory = paged(model)
    engine = Engine(model, memory)
    engine.extend({"A": tokenizer.encode(PROMPT)[:10]})
    for g, group in enumerate(memory.store.layout.groups):
        block = memory.allocator.requests["A"].tables[g][0] & 0xFFFFFFFF
        memory.store.k[g][:, block, 10:] = 777.0
        memory.store.v[g][:, block, 10:] = 777.0
        assert group.block_size == 16
    memory.fork("A", "B")
    engine.extend({"B": [5]})
    for g in range(2):
        a, b = (memory.allocator.requests[r].tables[g][0] & 0xFFFFFFFF for r in "AB")
        for tensor in (memory.store.k[g], memory.store.v[g]):
            assert a != b
            assert torch.equal(tensor[:, a, :10], tensor[:, b, :10])
            assert torch.isfinite(tensor[:, b, 10]).all() and not (tensor[:, b, 10] == 777.0).any()
            assert torch.isnan(tensor[:, b, 11:]).all()


def test_freed_rows_are_poisoned_unless_somebody_may_find_them_again():
    model, tokenizer = model_of("austen")
    memory = paged(model)
    Engine(model, memory).extend({"A": tokenizer.encode(PAIR[0])[:20]})
    full, tail = (word & 0xFFFFFFFF for word in memory.allocator.requests["A"].tables[0])
    memory.allocator.apply({"op": "cache_full", "request": "A", "blocks": [0], "keys": ["7be1"]})
    memory.release("A")
    assert torch.isfinite(memory.store.k[0][:, full]).all() and torch.isfinite(memory.store.v[0][:, full]).all()
    assert torch.isnan(memory.store.k[0][:, tail]).all() and torch.isnan(memory.store.v[0][:, tail]).all()


def test_sharing_without_copying_would_change_the_neighbours_words():
    """The harm that copy-on-write prevents: B's row in A's block, and A's next logits are not A's any more."""
    model, tokenizer = model_of("austen")
    memory = paged(model)
    engine = Engine(model, memory)
    prompt = tokenizer.encode(PAIR[0])
    row = engine.extend({"A": prompt})["A"]
    before = engine.extend({"A": [int(row.argmax())]})["A"]
    block, offset = divmod(len(prompt), 16)
    for g in range(2):
        index = memory.allocator.requests["A"].tables[g][block] & 0xFFFFFFFF
        memory.store.k[g][:, index, offset] = torch.randn_like(memory.store.k[g][:, index, offset])
    after = engine.extend({"A": [int(before.argmax())]})["A"]
    clean = one_pass(model, prompt, [int(row.argmax()), int(before.argmax()), 0])[-1]
    assert (after - clean).abs().max() > 1e-2


def test_too_small_a_pool_is_refused_and_nothing_changes():
    model, tokenizer = model_of("austen")
    memory = paged(model, num_blocks=2)
    engine = Engine(model, memory)
    engine.extend({"A": tokenizer.encode(PROMPT)})
    before = memory.allocator.digest
    with pytest.raises(Rejected, match="out_of_memory"):
        engine.extend({"A": list(range(40))})
    assert memory.allocator.digest == before
    engine.extend({"A": [3]})
    memory.allocator.check()


def test_a_model_that_fails_leaves_the_memory_as_it_was():
    model, tokenizer = model_of("austen")
    memory = paged(model)
    engine = Engine(model, memory)
    engine.extend({"A": tokenizer.encode(PROMPT)})
    before = memory.allocator.digest
    with pytest.raises(IndexError):
        engine.extend({"A": [model.config.vocab]})
    assert memory.allocator.digest == before
    assert all(not pool.reserved and not pool.leases for pool in memory.allocator.pools)


def test_rectangular_memory_refuses_by_name():
    model, _ = model_of("austen")
    memory = rectangular(model, slots=1, max_length=8)
    memory.open({"A": range(8)}).commit()
    calls = {
        "out_of_memory": [lambda: memory.open({"A": [1]}), lambda: memory.open({"B": [1]})],
        "request_exists": [lambda: memory.fork("A", "A")],
        "unknown_request": [lambda: memory.release("Z")],
    }
    for reason, call in [(r, c) for r, cs in calls.items() for c in cs]:
        with pytest.raises(Rejected) as no:
            call()
        assert no.value.reason == reason


def test_sampling_is_the_distribution_it_says():
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    assert sample(logits, Sampling(), random.Random(0)) == 1
    draws = random.Random(5)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sample(logits, Sampling(temperature=0.5, top_k=3), draws)] += 1
    expected = torch.tensor([0.0, 2.0, 1.0]).div(0.5).softmax(0)
    assert counts[3] == 0
    assert (counts[:3] / 4000 - expected).abs().max() < 0.03


@pytest.mark.parametrize("bad", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}])
def test_senseless_sampling_is_refused(bad):
    with pytest.raises(ValueError):
        Sampling(**bad)


def test_an_empty_prompt_is_refused():
    model, _ = model_of("austen")
    with pytest.raises(ValueError, match="at least one token"):
        Engine(model, paged(model)).run({"A": []}, Sampling())
