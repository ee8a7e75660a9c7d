"""What the rows of growing chats measure is what they say; how fast it is, no test asserts."""

from __future__ import annotations

import pytest

from kvlab.reuse.radix_cache import RadixCache
from kvlab.study import bench_turns
from kvlab.study.bench_turns import BESIDE, measured, play, requests, turns
from kvlab.study.peer_trees import CHATS, SYSTEM_TOKENS, TURNS, chat_turns

ROOM = 100_000


def tree(block_size: int) -> RadixCache:
    return RadixCache(ROOM // block_size, block_size=block_size, audit="chain")


def test_chats_grow_by_what_was_said_and_share_their_first_tokens():
    asked = chat_turns()
    assert len(asked) == CHATS * TURNS and asked == chat_turns()
    assert len({tuple(tokens[:SYSTEM_TOKENS]) for tokens, _ in asked}) == 1
    for (before, _), (after, said) in zip(asked, asked[CHATS:], strict=False):
        assert after[: len(before)] == before and len(before) < said < len(after)


@pytest.mark.parametrize("block_size", [16, 1])
def test_every_request_finds_the_turn_before_it_and_leaves_nothing_locked(block_size):
    cache, asked, lengths = tree(block_size), requests(packed=False), chat_turns()
    found = []
    cache.observers.append(lambda event: found.append(event.receipt.matched) if event.op["op"] == "match" else None)
    play(cache, asked)
    whole = [len(tokens) // block_size * block_size for tokens, _ in lengths]
    assert found[0] == 0 and found[1:CHATS] == [SYSTEM_TOKENS] * (CHATS - 1) and found[CHATS:] == whole[:-CHATS]
    ledgers = cache.ask({"ask": "ledgers"})
    assert ledgers["protected"] == 0 and cache.requests == {}
    assert ledgers["evictable"] == sum(whole[-CHATS:]) - (CHATS - 1) * SYSTEM_TOKENS
    cache.check()


@pytest.mark.parametrize("sealed", [False, True])
def test_packed_keys_and_lists_write_one_history(sealed):
    packed, lists = (play(tree(16), requests(form), sealed) for form in (True, False))
    assert packed.digest == lists.digest and packed.version == 3 * CHATS * TURNS


def test_rows_are_named_apart_and_a_missing_peer_says_so(monkeypatch):
    monkeypatch.delenv("KVLAB_PEERS", raising=False)
    monkeypatch.setattr(bench_turns, "measured", lambda *kind, **more: lambda: 1.0)
    rows = list(turns())
    missing = [row for row in rows if row.note]
    assert [row.ratio for row in rows[:4]] == [1.0] * 4 and len({row.name for row in rows[:4]}) == 4
    assert len(missing) == len(BESIDE)
    assert all(f"not here: {peer} " in row.note for row, peer in zip(missing, BESIDE, strict=True))


def test_a_measurement_is_a_time_a_request():
    assert 0 < measured(16, packed=True)() < 1e6
