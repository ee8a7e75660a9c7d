"""The packed table of keys beside a plain dictionary of lists; the walk by hints beside one key at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.memory.block_pool import BlockPool
from kvlab.reuse.chain import HASHES, _run, block_keys
from kvlab.reuse.key_table import KeyTable, Record, rows_of
from kvlab.reuse.prefix_lookup import FIRST_CHUNK, LARGEST_CHUNK, descend
from kvlab.reuse.token_keys import TOKEN_BYTES, pack

BLOCKS, SIZE = 9, 2
KEYS = [n.to_bytes(4, "little") for n in (0, 19, 38, 57, 1, 20, 18, 37, 5)]
"""19 slots: four keys have one home, and the last slots' keys go on at the first."""
PUTS = st.tuples(st.just("put"), st.integers(1, 2), st.permutations(range(BLOCKS)), st.permutations(KEYS),
                 st.integers(1, 5))
FORGETS = st.tuples(st.just("forget"), st.integers(0, BLOCKS - 1))


def record_of(key: bytes, index: int) -> Record:
    return Record(key[::-1], index, key * SIZE, b"x" * (index % 2))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(PUTS, FORGETS), max_size=12), st.booleans())
def test_the_table_is_a_dictionary_of_lists(history, witness):
    table = KeyTable(BlockPool("g", BLOCKS, 0, SIZE), 4, SIZE if witness else None)
    plain: dict[tuple[int, bytes], list[int]] = {}

    def drop(index: int) -> None:
        for under in plain.values():
            if index in under:
                under.remove(index)

    for step in history:
        if step[0] == "put":
            _, part, blocks, keys, count = step
            table.put(part, np.array(blocks[:count], np.int64), rows_of(keys[:count]),
                      [record_of(k, i) for k, i in zip(keys[:count], blocks[:count], strict=True)])
            for index in blocks[:count]:
                drop(index)
            for index, key in zip(blocks[:count], keys[:count], strict=True):
                plain.setdefault((part, key), []).append(index)
        elif table.part(step[1]):
            table.forget([step[1]])
            drop(step[1])
        for part in (1, 2):
            for key in KEYS:
                under = plain.get((part, key), [])
                assert table.under(part, key) == under
                if witness:
                    assert [table.witnesses.record(i) for i in under] == [record_of(key, i) for i in under]
        held = sorted(i for under in plain.values() for i in under)
        assert np.flatnonzero(table.spots >= 0).tolist() == held and table.end <= table.room
        assert not table.parts[table.end :].any()
        assert sorted(table.words[i] for i in table.slots if i >= 0) == sorted(u[0] for u in plain.values() if u)
        assert sorted(i for twins in table.twins.values() for i in twins) == sorted(
            i for under in plain.values() for i in under[1:])


TOKENS = st.lists(st.integers(0, 1), max_size=24)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(tuple(HASHES)), prompts=st.lists(TOKENS, max_size=9), asked=TOKENS,
       gone=st.sets(st.integers(0, 23)), other=st.booleans())
def test_a_walk_by_runs_finds_what_one_key_at_a_time_finds(name, prompts, asked, gone, other):
    table, hashed, at = KeyTable(BlockPool("g", 24, 0, SIZE), len(HASHES[name].root), None), HASHES[name], 0
    for turn, tokens in enumerate(prompts):
        keys = block_keys(tokens, SIZE, hash_name=name)
        blocks = [(at + n) % 24 for n in range(len(keys))]
        if keys:
            table.put(1 + (other and turn % 3 == 2), np.array(blocks), rows_of(keys), None)
        at += len(keys)
    table.forget(sorted(i for i in gone if table.part(i)))
    found = []
    for key in block_keys(asked, SIZE, hash_name=name):
        if not table.under(1, key):
            break
        found.append((key, table.under(1, key)[0]))
    keys, words = descend(hashed, table, 1, pack(asked), SIZE * TOKEN_BYTES)
    assert list(zip(keys, words, strict=True)) == found


def test_behind_the_first_miss_at_most_a_chunk_is_hashed():
    tokens, hashed = list(range(400)), HASHES["sha256"]
    table = KeyTable(BlockPool("g", 200, 0, SIZE), 32, None)
    table.put(1, np.arange(200), rows_of(block_keys(tokens, SIZE)), None)
    made: list[bytes] = []
    counting = replace(hashed, make=lambda data: made.append(data) or hashed.make(data))
    counting = replace(counting, run=partial(_run, counting.make))
    for hit, most in ((0, 1), (1, 2 + FIRST_CHUNK), (8, 10 + 4 * FIRST_CHUNK), (150, 152 + LARGEST_CHUNK)):
        made.clear()
        asked = pack(tokens[: hit * SIZE] + [500] * (400 - hit * SIZE))
        keys, _ = descend(counting, table, 1, asked, SIZE * TOKEN_BYTES)
        assert len(keys) == hit and hit < len(made) <= most
