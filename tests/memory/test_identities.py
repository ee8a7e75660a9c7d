"""The packed columns of identities and places behave as the dictionaries that they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.memory.allocator import Allocator
from kvlab.memory.chain import given as one_given
from kvlab.memory.chain import given_packed
from kvlab.memory.identities import NAME_BYTES, Identities, Places, packed_of, text_of, texts_of
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from tests.memory.worlds import queues_are_sound

BLOCKS = 8
PACKS = st.binary(min_size=NAME_BYTES, max_size=NAME_BYTES)
TEXTS = st.sampled_from(["", "7be1", "x" * 33, "0" * 8 + "/" + "0" * 23 + " ", "0" * 8 + "/" + "A" * 24, "é" * 16])
STEPS = st.lists(st.tuples(st.sampled_from(("set", "give", "pop", "end")), st.sets(st.integers(0, BLOCKS - 1)),
                           st.lists(st.one_of(PACKS, TEXTS), min_size=BLOCKS, max_size=BLOCKS)), max_size=12)


def rows(names: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(names), np.uint8).reshape(-1, NAME_BYTES)


@given(STEPS)
def test_identities_are_a_dictionary(history):
    kept, plain = Identities(BLOCKS), {}
    for kind, blocks, names in history:
        at = sorted(blocks)
        if kind == "set":
            for i in at:
                kept[i] = names[i]
        elif kind == "give" and at:
            given_names = [names[i] for i in at]
            kept.give(np.array(at), rows(given_names) if all(type(n) is bytes for n in given_names) else given_names)
        elif kind == "pop":
            assert [kept.pop(i) for i in at] == [plain.get(i) for i in at]
        elif kind == "end":
            at = [i for i in at if i in plain]
            assert texts_of(kept.end(np.array(at, np.int64))) == [plain[i] for i in at]
        if kind in ("set", "give"):
            plain.update((i, text_of(names[i])) for i in at)
        else:
            plain = {i: name for i, name in plain.items() if i not in at}
        assert (kept, len(kept), list(kept)) == (plain, len(plain), sorted(plain))
        assert kept.have(np.arange(BLOCKS)).tolist() == [i in plain for i in range(BLOCKS)]
        assert [text_of(n) for n in kept.of(np.array(sorted(plain), np.int64))] == [plain[i] for i in sorted(plain)]


@given(PACKS)
def test_a_packed_name_and_its_text_are_one(name):
    assert packed_of(text_of(name)) == packed_of(name) == name


@pytest.mark.parametrize("text", ["7be1", "0" * 33, "0" * 8 + "/" + "A" * 24, "0" * 8 + "/" + " " * 24, ""])
def test_other_text_is_not_packed(text):
    assert packed_of(text) is None and text_of(text) == text


@given(st.lists(PACKS, min_size=1, max_size=5), st.integers(0, 3))
def test_the_record_of_many_is_that_of_each(names, group):
    words = np.arange(len(names), dtype=np.int64) + (7 << 32)
    each = b"".join(one_given(group, int(word), name) for word, name in zip(words, names, strict=True))
    assert given_packed(group, words, rows(names)).tobytes() == each


def test_a_text_of_sixteen_bytes_is_not_recorded_as_a_packed_name():
    text = "16 bytes of text"
    assert one_given(0, 1, text) != one_given(0, 1, text.encode()) != one_given(0, 1, None)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, BLOCKS - 1), st.integers(0, 99)), max_size=20))
def test_places_are_a_dictionary(history):
    kept, plain = Places(BLOCKS), {}
    for put, index, position in history:
        if put:
            kept[index] = plain[index] = position
        else:
            assert kept.pop(index) == plain.pop(index, None)
        assert (kept, len(kept), dict(kept)) == (plain, len(plain), dict(kept))
    for column in (kept, Identities(BLOCKS)):
        missing = next(i for i in range(BLOCKS) if i not in plain) if len(plain) < BLOCKS else None
        if missing is not None:
            for call in (column.__getitem__, column.__delitem__):
                with pytest.raises(KeyError):
                    call(missing)


def test_positions_begin_again_before_they_outgrow_their_column(monkeypatch: Any):
    monkeypatch.setattr("kvlab.memory.block_pool.LAST_POSITION", 40)
    monkeypatch.setattr("kvlab.memory.pool_bulk.LAST_POSITION", 40)
    for audit in ("chain", "state"):
        machine = Allocator(CacheLayoutManifest((CacheGroup("g", 0, 1, 1, 4, 2, 4, BLOCKS),)), audit=audit)
        for n in range(40):
            machine.allocate("A", 12)
            machine.cache_full("A", [0, 2], [f"{n:08x}/{0:024x}", f"{n}"])
            machine.release("A")
            assert machine.pools[0].tail <= 40 and queues_are_sound(machine)
        machine.check()
