"""Lesson 4's parts on the real model: the harm is real, the panel follows every choice, the run reads true scalars."""

from __future__ import annotations

import json
import random

import pytest

from kvlab.contract import Rejected
from kvlab.execution.model import load_model
from kvlab.memory.address_bytes import address_snapshot
from kvlab.memory.address_records import read_snapshot
from kvlab.memory.address_snapshot import validate
from kvlab.memory.address_sources import layout_axes
from kvlab.study import address_run
from kvlab.study.lesson import PagedWorld
from kvlab.study.lesson_address import Follower, heads_before_tokens, misread, slot_id_as_offset
from tests.support import FIXTURES


@pytest.fixture(scope="module")
def model():
    return load_model("austen")


@pytest.fixture(scope="module")
def run(model):
    return address_run.AddressRun(*model)


def said(model, gathers):
    world = misread(PagedWorld(*model, num_blocks=4), gathers)
    world.read("A", "Emma was not quite")
    world.speak("A", tokens=8)
    world.allocator.check()
    return world.reply("A")


def test_only_a_wrong_gather_changes_the_words(model):
    plain = PagedWorld(*model, num_blocks=4)
    plain.read("A", "Emma was not quite")
    plain.speak("A", tokens=8)
    assert said(model, {}) == plain.reply("A") == said(model, {1: slot_id_as_offset}), "g1 has one layer: no harm"
    assert said(model, {0: slot_id_as_offset}) != plain.reply("A")
    assert said(model, {1: heads_before_tokens}) != plain.reply("A")


def test_the_panel_follows_every_choice(model):
    world = PagedWorld(*model, num_blocks=4)
    world.read("A", "Emma was not quite")
    panel = Follower(address_snapshot(world.store, world.allocator.snapshot()), "A", token=1, layer=0)
    assert len(panel.stage.recording["frames"]) == 13
    panel.fields["layer"].value = 4
    assert panel.trace().refused == "layer_out_of_range"
    assert panel.stage.recording["frames"][-1]["kind"] == "refused" and panel.stage.frame == 2
    panel.fields["layer"].value = 3
    assert panel.stage.recording["frames"][-1]["kind"] == "read" and panel.stage.frame == 12


def test_the_committed_opening_is_what_the_model_gives(model):
    assert json.loads((FIXTURES / "address_run.json").read_text()) == json.loads(json.dumps(address_run.opening()))


def test_the_run_reads_its_scalars_in_any_layout(run):
    dice = random.Random(2)
    for _ in range(25):
        lanes, together = dice.choice([1, 2, 4, 8]), dice.random() < 0.5
        axes = layout_axes(dice.sample(address_run.AXES, 5), interleaved=together, inner_lanes=lanes)
        asked = {"request": dice.choice("AB"), "token": dice.randrange(25), "layer": dice.randrange(4),
                 "kind": dice.choice("KV"), "head": dice.randrange(2), "lane": dice.randrange(32)}
        got = run.read(asked, axes, lanes)
        assert got.read == got.shown
    with pytest.raises(Rejected, match="outside_request_context"):
        run.read(asked | {"request": "B", "token": 25})


def test_the_opening_is_a_legal_snapshot():
    snapshot = read_snapshot(json.loads((FIXTURES / "address_run.json").read_text())["snapshot"])
    validate(snapshot)
    assert set(snapshot.requests) == {"A", "B"}
