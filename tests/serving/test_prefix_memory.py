"""Prefix reuse on real tensors: whatever was found instead of computed, the next token's logits are the same."""

from __future__ import annotations

import pytest

from kvlab.contract import Rejected
from kvlab.execution.model import load_model
from kvlab.memory.allocator import Allocator
from kvlab.memory.kv_store import PagedMemory, PagedStore
from kvlab.memory.layout import quarter_split
from kvlab.reuse.one_tenant import one_tenant
from kvlab.serving.engine import Engine
from kvlab.serving.prefix_memory import PrefixMemory
from tests.serving.reused import TEXT as LONGER
from tests.serving.reused import honest, pair, same_talk, talk
from tests.support import require

BLOCK, CLOSE = 16, 1e-4
TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of "
        "a wife. However little known the feelings or views of such a man may be on his first entering a "
        "neighbourhood, this truth is so well fixed in the minds of the surrounding families.")


@pytest.fixture(scope="module")
def austen():
    return load_model("austen")


def served(model, blocks: int = 24) -> Engine:
    """An engine over a paged memory with an index; freed blocks that nobody may find are filled with NaN."""
    c = model.config
    layout = quarter_split(c.layers, c.kv_heads, c.head_dim, 4, block_size=BLOCK, num_blocks=blocks)
    allocator, store = Allocator(layout, queue_seed=3), PagedStore(layout, model.dtype, model.device)
    allocator.observers.append(store.poison)
    return Engine(model, PrefixMemory(PagedMemory(allocator, store), *one_tenant(allocator)), device=model.device)


def alone(model, tokens):
    c = model.config
    layout = quarter_split(c.layers, c.kv_heads, c.head_dim, 4, block_size=BLOCK, num_blocks=24)
    memory = PagedMemory(Allocator(layout, queue_seed=8), PagedStore(layout, model.dtype, model.device))
    return Engine(model, memory, device=model.device).extend({"alone": tokens})["alone"]


def close(a, b) -> bool:
    return bool((a - b).abs().max() < CLOSE) and int(a.argmax()) == int(b.argmax())


@pytest.mark.parametrize(("same", "length", "hit"), [
    (0, 48, 0), (24, 48, 16), (48, 49, 48), (48, 48, 32), (47, 48, 32), (33, 64, 32), (64, 64, 48), (16, 17, 16)])
def test_cold_half_full_and_off_by_one(austen, same, length, hit):
    """The second prompt shares its first `same` tokens with the first; a full hit still computes a whole block."""
    model, tokenizer = austen
    ids = tokenizer.encode(TEXT)
    first, second = ids[:64], [*ids[:same], *ids[::-1][: length - same]]
    engine = served(model)
    engine.start("A", first)
    logits, found = engine.start("B", second)
    assert found == hit
    assert engine.rows_computed == 64 + length - hit
    assert close(logits, alone(model, second))


@pytest.mark.parametrize("gone", [False, True])
def test_the_words_after_a_reused_prefix_are_the_same(austen, gone):
    """Twelve greedy tokens, with the producer still there and after it has left."""
    model, tokenizer = austen
    prompt = tokenizer.encode(TEXT)[:50]
    engine, plain = served(model), served(model)
    engine.start("A", prompt)
    if gone:
        engine.memory.release("A")
    reused, hit = engine.start("B", prompt)
    honest, _ = plain.start("B", prompt)
    assert hit == 48
    for _ in range(12):
        assert close(reused, honest)
        token = [int(honest.argmax())]
        reused, honest = engine.extend({"B": token})["B"], plain.extend({"B": token})["B"]
    engine.memory.memory.allocator.check()


def test_eviction_and_readmission(austen):
    """A crowd takes the cached blocks; what comes back is computed again, found again, and the same."""
    model, tokenizer = austen
    ids = tokenizer.encode(TEXT)
    prompt, wanted = ids[:48], alone(model, ids[:48])
    engine = served(model, blocks=6)
    engine.start("A", prompt)
    engine.memory.release("A")
    assert engine.start("B", prompt)[1] == 32
    engine.memory.release("B")
    engine.extend({"crowd": (ids + ids)[:96]})
    engine.memory.release("crowd")
    logits, hit = engine.start("C", prompt)
    assert hit == 0 and close(logits, wanted)
    engine.memory.release("C")
    logits, hit = engine.start("D", prompt)
    assert hit == 32 and close(logits, wanted)


def test_several_chats_at_once_share_what_they_begin_with(austen):
    model, tokenizer = austen
    ids = tokenizer.encode(TEXT)
    prompts = {name: ids[:40] + ids[60 + 9 * n : 75 + 9 * n] for n, name in enumerate("ABC")}
    engine = served(model)
    now = {name: engine.start(name, prompt)[0] for name, prompt in prompts.items()}
    assert engine.rows_computed == sum(map(len, prompts.values())) - 2 * 32
    said = {name: [] for name in prompts}
    for _ in range(4):
        step = {name: [int(logits.argmax())] for name, logits in now.items()}
        for name, token in step.items():
            said[name] += token
        now = engine.extend(step)
    for name, prompt in prompts.items():
        assert close(now[name], alone(model, prompt + said[name]))


def test_a_prompt_that_does_not_fit_leaves_everything_as_it_was(austen):
    model, tokenizer = austen
    ids = tokenizer.encode(TEXT)
    engine = served(model, blocks=5)
    engine.start("A", ids[:48])
    allocator = engine.memory.memory.allocator
    before = allocator.digest
    with pytest.raises(Rejected, match="out_of_memory"):
        engine.start("B", ids[:48] + ids[60:120])
    assert allocator.digest == before
    assert not any(pool.leases or pool.reserved for pool in allocator.pools)


def test_a_model_that_fails_publishes_nothing(austen):
    model, tokenizer = austen

    class Falls:
        config, dtype, device = model.config, model.dtype, model.device

        def forward(self, *args):
            raise RuntimeError("the device is gone")

    engine = served(model)
    engine.start("A", tokenizer.encode(TEXT)[:48])
    before = engine.memory.memory.allocator.digest
    engine.model = Falls()
    with pytest.raises(RuntimeError):
        engine.start("B", tokenizer.encode(TEXT)[:60])
    assert engine.memory.memory.allocator.digest == before


def test_an_index_over_another_allocator_is_refused(austen):
    engine = served(austen[0])
    other = served(austen[0])
    with pytest.raises(ValueError, match="another allocator"):
        PrefixMemory(engine.memory.memory, other.memory.cache, other.memory.asker)
    memory = other.memory.memory
    with pytest.raises(ValueError, match="partial tails"):
        PrefixMemory(memory, *one_tenant(memory.allocator, partial_tails=True))


@pytest.fixture(scope="module")
def smollm2():
    require("smollm2")
    model, tokenizer = load_model("smollm2")
    return model, tokenizer.encode(LONGER)


@pytest.mark.parametrize(("same", "length", "hit"), [
    (0, 32, 0), (24, 48, 16), (48, 48, 32), (48, 49, 48), (47, 48, 32)])
def test_cold_half_full_and_off_by_one_on_smollm2(smollm2, same, length, hit):
    model, ids = smollm2
    first, second = pair(ids, same, length)
    engine = served(model)
    engine.start("A", first[:48])
    logits, found = engine.start("B", second)
    assert found == hit and close(logits, alone(model, second))


def test_chats_on_smollm2_across_eviction_and_readmission(smollm2):
    """Two chats at once; a crowd that takes their blocks after they left; the same chats again."""
    model, ids = smollm2
    prompts = {"A": ids[:33], "B": ids[:24] + ids[40:48]}
    wanted = honest(model, prompts, 4)
    engine = served(model, blocks=6)
    for turn in range(2):
        starts = {name: engine.start(name, prompt) for name, prompt in prompts.items()}
        assert [hit for _, hit in starts.values()] == [0, 16], "evicted, then admitted again"
        assert same_talk(talk(engine, {name: logits for name, (logits, _) in starts.items()}, 4), wanted)
        for name in prompts:
            engine.memory.release(name)
        if not turn:
            engine.extend({"crowd": (ids + ids)[5:101]})
            engine.memory.release("crowd")
    engine.memory.memory.allocator.check()
