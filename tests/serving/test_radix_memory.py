"""Radix reuse on real tensors: whatever was found, evicted or called off, what a chat says is what it says alone."""

from __future__ import annotations

import pytest
import torch

from kvlab.contract import Rejected
from kvlab.execution.model import load_model
from kvlab.memory.kv_store import PagedStore
from kvlab.reuse.radix_cache import RadixCache
from kvlab.reuse.slot_pool import FREE
from kvlab.serving.engine import Sampling
from kvlab.serving.radix_memory import RadixMemory
from tests.serving.reused import (
    LENGTHS,
    TEXT,
    alone,
    chain,
    close,
    honest,
    layout_of,
    pair,
    plain,
    radix,
    same_talk,
    talk,
)
from tests.support import require

BLOCKS = pytest.mark.parametrize("size", [1, 16])


@pytest.fixture(scope="module")
def austen():
    model, tokenizer = load_model("austen")
    return model, tokenizer.encode(TEXT)


@pytest.fixture(scope="module")
def smollm2():
    require("smollm2")
    model, tokenizer = load_model("smollm2")
    return model, tokenizer.encode(TEXT)


def state(memory: RadixMemory):
    """Tree, partition and requests: everything but versions, times of use and the order of the queue."""
    cache = memory.cache
    requests = {name: (r.tokens, r.table.tolist(), r.protected) for name, r in cache.requests.items()}
    return cache.ask({"ask": "edges"}), cache.ask({"ask": "pool"}), requests, memory.writing


def sound(memory: RadixMemory) -> bool:
    """The cache checks itself; no live table names a free slot; nothing is reserved for nobody."""
    cache = memory.cache
    cache.check()
    tables = {name: cache.table(name) for name in cache.requests}
    return not cache.loose and all(cache.pool.state(slot) != FREE for table in tables.values() for slot in table)


# ---------------------------------------------------------------- what is found is not computed
@BLOCKS
@pytest.mark.parametrize(("same", "length"), LENGTHS)
def test_cold_half_full_and_off_by_one(austen, size, same, length):
    """A hit is whole blocks of what is shared, and never the last token of the prompt."""
    model, ids = austen
    first, second = pair(ids, same, length)
    engine = radix(model, size)
    engine.start("A", first)
    logits, hit = engine.start("B", second)
    assert hit == min(same, length - 1) // size * size
    assert engine.rows_computed == 64 + length - hit
    assert close(logits, alone(model, second))
    assert sound(engine.memory)


@BLOCKS
@pytest.mark.parametrize("gone", [False, True])
def test_the_words_after_a_reused_prefix_are_the_same(austen, size, gone):
    """Twelve greedy tokens, with the producer still there and after it has left."""
    model, ids = austen
    engine = radix(model, size)
    engine.start("A", ids[:50])
    if gone:
        engine.memory.release("A")
    logits, hit = engine.start("B", ids[:50])
    assert hit == (49 if size == 1 else 48)
    assert same_talk(talk(engine, {"B": logits}, 12), honest(model, {"B": ids[:50]}, 12))


@BLOCKS
@pytest.mark.parametrize("index", [radix, chain])
def test_several_chats_at_once_say_what_each_says_alone(austen, size, index):
    model, ids = austen
    prompts = {name: ids[:40] + ids[60 + 9 * n : 75 + 9 * n] for n, name in enumerate("ABCD")}
    engine = index(model, size)
    now = {name: engine.start(name, prompt)[0] for name, prompt in prompts.items()}
    assert engine.rows_computed == sum(map(len, prompts.values())) - 3 * (40 // size * size)
    assert same_talk(talk(engine, now, 8), honest(model, prompts, 8))


@BLOCKS
@pytest.mark.parametrize("index", [radix, chain])
def test_a_whole_run_over_an_index_equals_a_run_without_reuse(austen, size, index):
    """Three runs: what the first two leave is found by the third, and no answer changes."""
    model, ids = austen
    prompts = {name: ids[: 20 + 7 * n] + ids[90 + n : 96] for n, name in enumerate("ABC")}
    wanted = plain(model).run(prompts, Sampling(6), share=False).outputs
    engine = index(model, size)
    computed = []
    for share in (False, True, True):
        before = engine.rows_computed
        assert engine.run(prompts, Sampling(6), share=share).outputs == wanted
        computed.append(engine.rows_computed - before)
    assert computed[0] == sum(map(len, prompts.values())) + 3 * 5
    assert computed[2] < computed[0]
    if size == 1:
        assert computed[2] == 3 + 3 * 5, "of each prompt the last token, and five words of each answer"


def test_rows_that_no_hit_saved_count_as_computed_again(austen):
    """Two equal prompts of 40 tokens: at block size 16 the last 8 are there already and are computed again."""
    model, ids = austen
    engine = radix(model, 16)
    run = engine.run({"A": ids[:40], "B": ids[:40]}, Sampling(1))
    assert (run.rows_computed, run.rows_recomputed) == (48, 8)


@BLOCKS
def test_the_next_turn_finds_the_answer_of_the_last(austen, size):
    """A finished chat leaves its own words behind; the next turn begins with them and computes only what is new."""
    model, ids = austen
    engine = radix(model, size)
    logits, _ = engine.start("A", ids[:30])
    said, _ = talk(engine, {"A": logits}, 10)["A"]
    engine.memory.release("A")
    turn = [*ids[:30], *said, *ids[70:80]]
    logits, hit = engine.start("A", turn)
    assert hit == 40 // size * size
    assert close(logits, alone(model, turn))


@BLOCKS
def test_a_duplicate_is_freed_and_its_owner_reads_the_rows_of_the_tree(austen, size):
    """A and B compute the same prompt; B offers second, so its own rows go, and are NaN, and B talks on."""
    model, ids = austen
    engine = radix(model, size)
    now = {**engine.extend({"A": ids[:37]}), **engine.extend({"B": ids[:37]})}
    cache, whole = engine.memory.cache, 37 // size
    mine = cache.table("B")
    engine.memory.offer("A", ids[:37])
    engine.memory.offer("B", ids[:37])
    assert cache.table("B")[:whole] == cache.table("A")[:whole] != mine[:whole]
    assert all(cache.pool.state(slot) == FREE for slot in mine[:whole])
    store, first = engine.memory.store, cache.pool.first_slot
    assert torch.isnan(store.k[0][:, [slot - first for slot in mine[:whole]]]).all()
    assert same_talk(talk(engine, now, 6), honest(model, {"A": ids[:37], "B": ids[:37]}, 6))
    assert sound(engine.memory)


# ---------------------------------------------------------------- eviction
@BLOCKS
def test_eviction_and_readmission(austen, size):
    """A crowd takes the cached blocks, by an eviction that an observer sees; what comes back is the same again."""
    model, ids = austen
    prompt, wanted = ids[:48], alone(model, ids[:48])
    engine, seen = radix(model, size, tokens=96), []
    memory = engine.memory
    memory.cache.observers.append(lambda e: seen.append(e.receipt) if e.op["op"] == "evict" else None)
    engine.start("A", prompt)
    memory.release("A")
    engine.extend({"crowd": ids[64:128] + ids[:24]})
    assert memory.evicted_tokens == sum(r.evicted_tokens for r in seen) > 0
    assert {r.outcome for r in seen} == {"done"}
    memory.cancel("crowd")
    assert memory.cache.ask({"ask": "match", "tokens": prompt})["matched"] == 0
    logits, hit = engine.start("C", prompt)
    assert hit == 0 and close(logits, wanted)
    memory.release("C")
    logits, hit = engine.start("D", prompt)
    assert hit == 47 // size * size and close(logits, wanted)
    assert same_talk(talk(engine, {"D": logits}, 6), honest(model, {"D": prompt}, 6))
    assert sound(memory)


@BLOCKS
def test_a_new_chat_evicts_around_what_it_begins_with_itself(austen, size):
    """Its own prefix is an unlocked leaf too; it is leased first, so the older one beside it goes."""
    model, ids = austen
    engine = radix(model, size, tokens=96)
    engine.start("mine", ids[:32])
    engine.memory.release("mine")
    engine.start("other", ids[64:112])
    engine.memory.release("other")
    prompt = ids[:32] + ids[112:150]
    logits, hit = engine.start("B", prompt)
    assert hit == 32 and engine.memory.evicted_tokens == 48
    assert close(logits, alone(model, prompt))


@BLOCKS
def test_decoding_evicts_what_nobody_reads_and_no_more(austen, size):
    """Two chats that read one prefix fill the pool word by word; only the leaf that neither reads goes."""
    model, ids = austen
    engine = radix(model, size, tokens=80 if size == 1 else 96)
    engine.start("old", ids[100:116])
    engine.memory.release("old")
    prompts = {"A": ids[:40], "B": ids[:32]}
    now = {name: engine.start(name, prompt)[0] for name, prompt in prompts.items()}
    assert same_talk(talk(engine, now, 20), honest(model, prompts, 20))
    assert engine.memory.evicted_tokens == 16
    assert sound(engine.memory)


# ---------------------------------------------------------------- what does not fit, or breaks off
@BLOCKS
def test_what_does_not_fit_leaves_everything_as_it_was(austen, size):
    """A prompt, a word for a batch, a prompt that would fit if its own prefix were evicted: all refused, all as before.
    """
    model, ids = austen
    engine = radix(model, size, tokens=64)
    engine.start("gone", ids[:32])
    engine.memory.release("gone")
    cache = engine.memory.cache
    for prompt in (ids[64:129], ids[:32] + ids[64:97]):
        before = cache.digest
        with pytest.raises(Rejected, match="out_of_memory"):
            engine.start("B", prompt)
        assert cache.digest == before and not cache.requests and not engine.memory.evicted_tokens
    now, _ = engine.start("B", ids[64:128])
    before, rows = cache.digest, engine.rows_computed
    with pytest.raises(Rejected, match="out_of_memory"):
        engine.extend({"B": [int(now.argmax())]})
    assert (cache.digest, engine.rows_computed) == (before, rows)


class Falls:
    """A model that breaks down after its rows of the first layers are written."""

    def __init__(self, model, layers: int, error: type[Exception] | None) -> None:
        self.model, self.config, self.layers, self.error = model, model.config, layers, error

    def forward(self, tokens, positions, attend, rows):
        def attended(layer, q, k, v):
            if layer < self.layers:
                return attend(layer, q, k, v)
            if self.error:
                raise self.error("the device is gone")
            return torch.zeros_like(q)

        return self.model.forward(tokens, positions, attended, rows)


@BLOCKS
@pytest.mark.parametrize("layers", [0, 1, -1])
@pytest.mark.parametrize("error", [RuntimeError, None])
def test_a_model_that_fails_on_its_way_leaves_no_trace_in_tables_and_partition(austen, size, layers, error):
    """For a new chat over a hit, and for a batch of chats. Without an error of its own, the missing rows are one."""
    model, ids = austen
    engine = radix(model, size)
    now = {"A": engine.start("A", ids[:48])[0], "B": engine.start("B", ids[:30] + ids[60:70])[0]}
    engine.start("A2", ids[:48])
    engine.memory.release("A2")
    before = state(engine.memory)
    engine.model = Falls(model, layers % model.config.layers, error)
    failure = error or Rejected
    with pytest.raises(failure):
        engine.start("C", ids[:48] + ids[70:90])
    with pytest.raises(failure):
        engine.extend({"A": [5], "B": [6]})
    assert state(engine.memory) == before
    assert sound(engine.memory)
    engine.model = model
    now["C"], _ = engine.start("C", ids[:48] + ids[70:90])
    prompts = {"A": ids[:48], "B": ids[:30] + ids[60:70], "C": ids[:48] + ids[70:90]}
    assert same_talk(talk(engine, now, 4), honest(model, prompts, 4))


def test_a_failed_start_may_have_split_an_edge_and_loses_no_row_by_it(austen):
    model, ids = austen
    engine = radix(model, 1)
    engine.start("A", ids[:48])
    engine.memory.release("A")
    engine.model = Falls(model, 1, RuntimeError)
    cache = engine.memory.cache
    pool, nodes, version = cache.ask({"ask": "pool"}), len(cache.tree.nodes), cache.version
    with pytest.raises(RuntimeError):
        engine.start("B", ids[:20] + ids[60:90])
    assert cache.ask({"ask": "pool"}) == pool and not cache.requests and sound(engine.memory)
    assert len(cache.tree.nodes) == nodes + 1 and cache.version > version
    engine.model = model
    logits, hit = engine.start("A", ids[:48])
    assert hit == 47 and close(logits, alone(model, ids[:48]))


@BLOCKS
def test_a_cancelled_chat_leaves_nothing_to_find_and_disturbs_nobody(austen, size):
    model, ids = austen
    prompts = {"A": ids[:40], "B": ids[:36] + ids[80:90]}
    engine = radix(model, size)
    now = {name: engine.start(name, prompt)[0] for name, prompt in prompts.items()}
    said, _ = talk(engine, now, 5)["B"]
    again = engine.extend({"A": [7]})["A"]
    engine.memory.cancel("B")
    found = engine.memory.cache.ask({"ask": "match", "tokens": [*prompts["B"], *said]})["matched"]
    assert found == len(prompts["B"]) // size * size, "what it offered stays, what it said since does not"
    assert engine.memory.length("B") == 0 and sound(engine.memory)
    spoken = honest(model, {"A": prompts["A"]}, 5)["A"][0]
    assert close(again, alone(model, [*prompts["A"], *spoken, 7]))


# ---------------------------------------------------------------- calls that are refused
def test_refused_calls_change_nothing(austen):
    """Each by its own word, while A is live and a step of B is open."""
    model, ids = austen
    engine = radix(model, 16)
    memory = engine.memory
    engine.start("A", ids[:20])
    engine.start("B", ids[:20])
    step = memory.open({"B": [1]})
    calls = [
        ("request_exists", lambda: memory.start("A", ids[:4])),
        ("empty_prompt", lambda: memory.start("N", [])),
        ("invalid_token", lambda: memory.start("N", [1, -1])),
        ("invalid_length", lambda: memory.open({"A": []})),
        ("unknown_operation", lambda: memory.open({"A": [1], "N": [1]})),
        ("covered_token_mismatch", lambda: memory.offer("A", ids[:19])),
        ("unknown_request", lambda: memory.release("N")),
        ("publish_before_append_write", step.commit),
        ("write_in_flight", lambda: memory.open({"A": [1], "B": [1]})),
        ("write_in_flight", lambda: memory.release("B")),
        ("write_in_flight", lambda: memory.cancel("B")),
        ("write_in_flight", lambda: memory.offer("B", ids[:20])),
    ]
    before = memory.cache.digest
    for reason, call in calls:
        with pytest.raises(Rejected) as no:
            call()
        assert no.value.reason == reason
        assert memory.cache.digest == before
    step.rollback()
    with pytest.raises(Rejected, match="transaction_closed"):
        step.commit()
    memory.release("B")


def test_a_store_that_the_tree_does_not_fit_is_refused(austen):
    store = PagedStore(layout_of(austen[0], 16, 8))
    for cache in (RadixCache(9, block_size=16), RadixCache(8, block_size=8)):
        with pytest.raises(ValueError, match="one for each slot"):
            RadixMemory(store, cache)


# ---------------------------------------------------------------- the real model
@pytest.mark.parametrize(("same", "length"), [(0, 32), (24, 48), (48, 48), (48, 49), (47, 48)])
def test_the_same_on_smollm2(smollm2, same, length):
    """Cold, half, full and off by one, with both block sizes at once."""
    model, ids = smollm2
    first, second = pair(ids, same, length)
    wanted = alone(model, second)
    for size in (1, 16):
        engine = radix(model, size)
        engine.start("A", first[:48])
        logits, hit = engine.start("B", second)
        assert hit == min(same, length - 1) // size * size
        assert close(logits, wanted)


@BLOCKS
def test_chats_on_smollm2_across_eviction_and_readmission(smollm2, size):
    """Two chats at once; a crowd that evicts one's prefix after it left; the same chat again."""
    model, ids = smollm2
    prompts = {"A": ids[:33], "B": ids[:24] + ids[40:48]}
    wanted = honest(model, prompts, 4)
    engine = radix(model, size, tokens=96)
    for turn in range(2):
        now = {name: engine.start(name, prompt)[0] for name, prompt in prompts.items()}
        assert same_talk(talk(engine, now, 4), wanted)
        for name in prompts:
            engine.memory.release(name)
        if not turn:
            engine.extend({"crowd": (ids + ids)[5:93]})
            engine.memory.cancel("crowd")
            assert engine.memory.evicted_tokens
    assert sound(engine.memory)
