"""Lesson 1's parts on the real model: each contract off hurts its own chats, and only its own check speaks."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import attention_oracle
from kvlab.execution.adapters import seeded_adapter, with_adapter
from kvlab.execution.model import load_model
from kvlab.memory.kv_store import RectangularMemory
from kvlab.study import savings
from kvlab.study.contract_walk import follow
from kvlab.study.lesson import PagedWorld, World
from kvlab.study.lesson_contracts import CONTRACTS, Chats, averaged, in_two_parts, merged, noticed
from kvlab.study.rounds import Rounds

STORY = ("The two young ladies were walking in the garden before dinner, "
         "when they saw a gentleman coming up the road; and it was")
ANNA, BEN = " Mr. Darcy. He", " her brother, and she cried"
EVENING = " In the evening they were all in the garden, and in good spirits, and as to the ball,"
LENGTH = 39
HURT = {"address": "ABCDE", "ownership": "A", "identity": "C", "index": "D", "execution_reuse": "AB"}


@pytest.fixture(scope="module")
def austen():
    return load_model("austen")


@pytest.fixture(scope="module")
def build(austen):
    clara = with_adapter(austen[0], seeded_adapter(austen[0], seed=8, rank=4, scale=0.3))

    def made(off="", **how):
        world = Chats(*austen, {"C": clara}, off=off, **how)
        world.ask("A", STORY)
        world.go_on("A", ANNA)
        world.branch_at("A", "B", LENGTH, BEN)
        world.ask("C", STORY)
        world.ask("E", "I have been ill, my dear sister, all this week." + EVENING)
        world.ask("D", "Mr. Knightley was the owner of a large house." + EVENING)
        world.speak(*"ABCDE", tokens=14)
        return world
    return made


@pytest.fixture(scope="module")
def honest(build):
    return build()


def words(world):
    return {chat: world.reply(chat) for chat in "ABCDE"}


def test_the_honest_run_is_that_of_chats_alone(austen, honest):
    for chat, text in {"A": STORY + ANNA, "B": STORY + BEN}.items():
        alone = PagedWorld(*austen, num_blocks=8)
        alone.read(chat, text)
        alone.speak(chat, tokens=14)
        assert alone.reply(chat) == honest.reply(chat)
    assert noticed(honest) == dict.fromkeys(CONTRACTS, "") and honest.taken == [] and honest.overruled == {}


@pytest.mark.parametrize("off", CONTRACTS)
def test_each_contract_off_hurts_its_own_and_only_its_own_check_speaks(build, honest, off):
    broken = build(off)
    said, right = words(broken), words(honest)
    assert "".join(chat for chat in "ABCDE" if said[chat] != right[chat]) == HURT[off]
    assert [name for name, verdict in noticed(broken).items() if verdict] == [off]


def test_what_was_overruled_has_a_name(build):
    assert build("ownership").overruled == {"ownership": "in_place_shared_tail_write"}
    assert build("identity").overruled == {"identity": "adapter_mismatch"}
    wrong = build("index")
    (chat, place, block), = wrong.taken
    assert (chat, place, wrong.compatible(chat, block)) == ("D", 1, "")
    wrong.off = ""
    assert wrong.compatible(chat, block) == "covered_token_mismatch"


def test_the_same_weights_may_take_what_was_computed(austen):
    world = Chats(*austen)
    whole = world.ask("A", STORY)
    assert world.ask("F", STORY + ANNA) == whole - 32 + 7
    assert [(chat, j) for chat, j, _ in world.taken] == [("F", 0), ("F", 1)] and not any(noticed(world).values())
    world.speak("F", tokens=6)
    alone = PagedWorld(*austen, num_blocks=8)
    alone.read("F", STORY + ANNA)
    alone.speak("F", tokens=6)
    assert world.reply("F") == alone.reply("F")


def test_a_match_is_a_prefix_and_ends_at_the_first_gap(austen):
    world = Chats(*austen)
    world.ask("A", STORY)
    ids = world.ids["F"] = world.ids["A"]
    assert list(world.match("F", ids)) == [0, 1] and list(world.match("F", ids[:32])) == [0]
    del world.published[world.keys(ids)[0]]
    assert world.match("F", ids) == {}


def test_two_parts_are_one_pass_if_they_are_merged(build, honest):
    world = build(combine=merged)
    assert words(world) == words(honest) and not any(noticed(world).values())
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, h, 32, generator=draw) for n, h in ((1, 4), (23, 2), (23, 2)))
    exact = attention_oracle(q, k[None], v[None], torch.tensor([0]), 23, 22, 32 ** -0.5)
    for shared in (1, 16, 22):
        assert torch.allclose(in_two_parts(q, k, v, shared, merged).double(), exact, atol=1e-5)
    assert not torch.allclose(in_two_parts(q, k, v, 16, averaged).double(), exact, atol=1e-2)


def test_only_full_blocks_of_somebody_else_too_are_shared(build):
    world = build(combine=merged)
    rows = {}
    for chat, live in world.allocator.requests.items():
        table = torch.tensor([int(word & 0xFFFFFFFF) for word in live.tables[0]])
        rows[chat] = world.shared_rows(0, table, live.context)
    assert rows == {"A": 32, "B": 32, "C": 0, "D": 0, "E": 0}


def test_an_unknown_contract_and_a_walk_without_a_schedule_are_refused(austen):
    with pytest.raises(ValueError, match="the contracts are address"):
        Chats(*austen, off="scheduling")
    world = Chats(*austen)
    world.ask("A", STORY)
    with pytest.raises(ValueError, match="a schedule"):
        follow(world, "A", "B", LENGTH, BEN, 1)
    world.combine, before = merged, world.allocator.digest
    for at, token in ((32, 1), (LENGTH, 7), (LENGTH, -1)):
        with pytest.raises(ValueError, match="a shared tail, and a token below 7"):
            follow(world, "A", "B", at, BEN, token)
    assert world.allocator.digest == before


def test_rounds_admit_what_fits_and_say_the_same_in_both_memories(austen):
    c = austen[0].config
    flat = World(*austen, RectangularMemory(c.layers, c.kv_heads, c.head_dim, slots=1, max_length=64))
    paged = PagedWorld(*austen, num_blocks=8)
    servers = [Rounds(world, {"A": STORY, "B": STORY + BEN}) for world in (flat, paged)]
    for server in servers:
        said = [server.round() for _ in range(5)]
        assert said == [True, server is servers[1], True, True, True]
    assert set(servers[0].refused) == {"B"} and servers[1].refused == {}
    assert flat.said["A"] == paged.said["A"][:3] == paged.said["A"] and "B" not in flat.said
    assert len(servers[1].receipts) == 5 and servers[0].receipts == []


def test_a_round_that_fails_leaves_the_memory_as_it_was(austen):
    world = PagedWorld(*austen, num_blocks=8)
    server, before = Rounds(world, {"A": STORY}), world.allocator.digest
    server.waiting["A"] = [0, 999_999]
    with pytest.raises(IndexError):
        server.round()
    assert world.allocator.digest == before and "A" in server.waiting
    with pytest.raises(ValueError, match="nobody waits"):
        Rounds(world, {}).round()


def test_savings_refuse_schedules_that_do_not_agree(austen, monkeypatch):
    monkeypatch.setattr(savings, "merge_state", lambda shared, own: own)
    with pytest.raises(ValueError, match="do not agree"):
        savings.costs(*austen, STORY)
