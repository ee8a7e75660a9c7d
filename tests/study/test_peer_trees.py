"""Peers are asked for the same work as ours, whatever they are; shown on a peer of our own making, and on clocks."""

from __future__ import annotations

import sys

import pytest

from kvlab.study import peer_trees, peers
from kvlab.study.peer_trees import CHATS, Stock, Tree, chat_turns, matches, turns


class Prefixes:
    """A tree in name only: a dictionary from each cached prefix, in whole blocks, to its slots."""

    def __init__(self, block_size: int) -> None:
        self.size, self.known, self.locks, self.calls = block_size, {}, {}, []

    def match(self, key):
        import torch

        ends = range(len(key) // self.size * self.size, 0, -self.size)
        held = next((end for end in ends if tuple(key[:end]) in self.known), 0)
        self.calls.append(("match", held))
        return torch.tensor([self.known[tuple(key[:end])] for end in range(1, held + 1)]), held

    def insert(self, key, slots):
        assert len(key) == len(slots) and len(key) % self.size == 0
        there = len(self.match(key)[0])
        for end in range(there + 1, len(key) + 1):
            self.known[tuple(key[:end])] = int(slots[end - 1])
        return there

    def lock(self, node):
        self.locks[node] = self.locks.get(node, 0) + 1

    def unlock(self, node):
        self.locks[node] -= 1

    def face(self) -> Tree:
        return Tree(list, self.match, self.lock, self.unlock, self.insert)


@pytest.mark.parametrize("block_size", [4, 1])
def test_a_turn_matches_locks_inserts_whole_blocks_and_gives_the_rest_back(monkeypatch, block_size):
    chats = [(list(range(n)), n - 3) for n in (9, 9, 15)]
    monkeypatch.setattr(peer_trees, "chat_turns", lambda: chats)
    made = []
    run, units, prepare = turns(lambda size: made.append(Prefixes(size)) or made[-1].face(), (block_size,))[
        f"turns {block_size}"]
    tree, stock, rows = prepare()
    stock._free, before = stock._free[:64], 64
    run((tree, stock, rows))
    (peer,) = made
    assert units == 3 and set(peer.locks.values()) == {0}
    held = len(set(peer.known.values()))
    assert held == len(peer.known) == 15 // block_size * block_size
    assert len(stock._free) + sum(map(len, stock._back)) == before - held
    said = [held for kind, held in peer.calls][::2]
    assert said == [0, 6 // block_size * block_size, 9 // block_size * block_size]


def test_each_run_starts_from_an_empty_tree():
    _, units, prepare = turns(lambda size: Prefixes(size).face(), (16,))["turns 16"]
    (one, _, rows), (two, _, _) = prepare(), prepare()
    assert one is not two and len(rows) == units == len(chat_turns()) and units % CHATS == 0


def test_a_match_of_a_peer_returns_its_slots(monkeypatch):
    monkeypatch.setattr(peer_trees, "LENGTHS", (64,))
    work = matches(lambda size: Prefixes(size).face())
    assert {name: len(run()[0]) for name, (run, _) in work.items()} == {
        "match 64 full": 64, "match 64 half": 32, "match 64 miss": 0}


def test_a_stock_gives_out_what_came_back_and_nothing_twice():
    stock = Stock(12)
    first, second = stock.take(8), stock.take(4)
    stock.give(first[:4])
    stock.give(first[:0])
    third = stock.take(4)
    assert sorted([*second.tolist(), *first[4:].tolist(), *third.tolist()]) == list(range(12))


def test_state_that_a_run_uses_up_is_made_anew_and_not_timed(monkeypatch):
    clock, states = iter(range(0, 1_000, 5)), []
    monkeypatch.setattr(peers.time, "process_time", lambda: next(clock))
    took = peers.prepared_time(lambda state: states.append(state.pop()), 2, lambda: [len(states)], least=0.0)
    assert states == [0, 1, 2] and took == 5 / 2 * 1e6


def test_serve_times_plain_work_and_work_with_a_state(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "mine", lambda: {"plain": (lambda: None, 1), "state": (len, 1, list)})
    monkeypatch.setattr(sys, "stdin", ["plain\n", "state\n", "nothing\n"])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    first, *numbers = peers.serve("mine")
    assert first == "kvlab:" and [float(n) >= 0 for n in numbers] == [True, True, False]


def test_a_tree_to_be_compiled_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="no sources"):
        peer_trees.sglang_cpp_module()
    home = tmp_path / peer_trees.CPP_FOLDER
    home.mkdir(parents=True)
    for name in peer_trees.CPP_FILES:
        (home / name).write_text("")
    monkeypatch.setattr(peer_trees.shutil, "which", lambda program: None)
    with pytest.raises(FileNotFoundError, match="compiled"):
        peer_trees.sglang_cpp_module()
