"""The identity lesson's world: reuse through the paged memory is real, and so is what it does to the words."""

from __future__ import annotations

import pytest
import torch

from kvlab.execution.adapters import seeded_adapter, with_adapter
from kvlab.execution.model import load_model
from kvlab.memory.block_pool import index_of
from kvlab.reuse.compatibility import examine
from kvlab.study.gate_walk import walk
from kvlab.study.lesson_identity import Records, SharedCache, rows

PROMPT = ("The two young ladies were walking in the garden before dinner, "
          "when they saw a gentleman coming up the road; and it was")


@pytest.fixture(scope="module")
def world():
    model, tokenizer = load_model("austen")
    adapters = {name: seeded_adapter(model, seed=seed, rank=4, scale=0.4) for name, seed in (("Anna", 5), ("Ben", 1))}
    voices = {"base": model} | {name: with_adapter(model, a) for name, a in adapters.items()}
    return voices, tokenizer, adapters


def test_reuse_within_a_voice_changes_no_word_and_computes_less(world):
    voices, tokenizer, _ = world
    cache = SharedCache(voices, tokenizer)
    first = cache.answer("A", "Ben", PROMPT, 8)
    computed = cache.engines["Ben"].rows_computed
    assert cache.answer("B", "Ben", PROMPT, 8, reuse="A") == first
    assert cache.engines["Ben"].rows_computed - computed == computed - 32
    assert cache.found == {"B": "A"}
    cache.allocator.check()


def test_reuse_across_voices_gives_the_other_ones_words(world):
    voices, tokenizer, _ = world
    alone = SharedCache(voices, tokenizer).answer("B", "Ben", PROMPT, 14)
    cache = SharedCache(voices, tokenizer)
    anna = cache.answer("A", "Anna", PROMPT, 14)
    mixed = cache.answer("B", "Ben", PROMPT, 14, reuse="A")
    assert alone != anna and mixed != alone and mixed[:16] == anna[:16]


def test_less_than_a_block_is_not_taken_and_one_token_is_always_computed(world):
    voices, tokenizer, _ = world
    cache = SharedCache(voices, tokenizer)
    cache.answer("A", "base", "It was", 2)
    cache.answer("B", "base", "It was", 2, reuse="A")
    assert cache.found == {}
    whole = tokenizer.decode(tokenizer.encode(PROMPT)[:32])
    assert len(tokenizer.encode(whole)) == 32
    cache.answer("C", "base", whole, 2)
    before = cache.engines["base"].rows_computed
    cache.answer("D", "base", whole, 2, reuse="C")
    assert cache.engines["base"].rows_computed - before == 16 + 2


def test_planted_rows_are_what_the_next_chat_reads(world):
    voices, tokenizer, _ = world
    ids, said = tokenizer.encode(PROMPT)[:32], []
    for planted in (rows(voices["base"], ids), rows(voices["base"], ids, first=16)):
        cache = SharedCache(voices, tokenizer)
        cache.answer("A", "base", PROMPT, 1)
        cache.plant("A", planted)
        live = cache.allocator.requests["A"]
        got = cache.store.k[0][:, index_of(live.tables[0][0])]
        torch.testing.assert_close(got, planted[0, : got.shape[0], :16], atol=1e-4, rtol=1e-4)
        said.append(cache.answer("B", "base", PROMPT, 12, reuse="A"))
    assert said[0] == SharedCache(voices, tokenizer).answer("B", "base", PROMPT, 12) != said[1]


def test_records_of_the_real_model_refuse_the_harm(world):
    voices, tokenizer, adapters = world
    records = Records(voices["base"], SharedCache(voices, tokenizer))
    rank1 = records.other("rank 1", tp_rank=1)
    gate = records.gate(rank1)
    tokens = tokenizer.encode(PROMPT)[:32]
    hers, his = (records.manifest(tokens, who, adapter_identity=adapters[who].identity) for who in ("Anna", "Ben"))
    assert examine(hers, his, gate.state.layouts).reason == "adapter_mismatch"
    gate.publish(gate.authorize("anna", records.space.name), "g0/1@1", "g0", hers)
    before = gate.digest
    made = walk(gate.snapshot(), principal="anna", namespace=records.space.name, record="g0/1@1",
                change={"adapter_identity": adapters["Ben"].identity})
    assert made["checks"][-1]["reason"] == "adapter_mismatch" and gate.digest == before
    bf16 = records.other("bf16", storage_dtype="BF16")
    assert {g.storage_dtype for g in bf16.cache_groups} == {"BF16"} and bf16.digest != records.layout.digest
