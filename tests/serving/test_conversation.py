"""A real run as a recording: the committed one is made again, links reopen frames, histories replay."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvlab.__main__ import main
from kvlab.contract import History, Rejected
from kvlab.execution.model import load_model
from kvlab.memory.allocator import Allocator
from kvlab.study import conversation
from kvlab.study.conversation import OPENING, play
from kvlab.study.setup import Link, Setup
from kvlab.views.scene import Recording
from tests.support import FIXTURES

COMMITTED = json.loads((FIXTURES / "two_prompts.json").read_text())


@pytest.fixture(scope="module")
def austen():
    return load_model("austen")


@pytest.fixture(scope="module")
def played(austen):
    return play(OPENING, *austen)


def test_the_committed_recording_is_what_the_embedded_model_does(tmp_path):
    out = tmp_path / "again.json"
    assert main(["record", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == COMMITTED
    assert out.read_bytes() == (FIXTURES / "two_prompts.json").read_bytes()


def test_the_opening_shows_a_fork_a_copy_and_a_release():
    recording = Recording.from_dict(COMMITTED["recording"])
    assert "copy" in recording.frame(COMMITTED["frame"]).title
    titles = " ".join(f.title for f in recording.frames)
    assert all(word in titles for word in ("Fork", "Release", "Publish"))
    assert len(json.dumps(COMMITTED["recording"])) < 500_000
    copied = [next(c["value"] for c in f.board if c["label"] == "K/V copied") for f in recording.frames]
    assert copied[0] == 0 and copied[-1] > 0


def test_every_frame_has_words(played):
    for frame in played.recording.frames:
        assert frame.why and frame.twin and frame.board


def test_replaying_the_history_arrives_at_the_same_state(played):
    forked = played.history.fork(len(played.history) - 1, Allocator(played.layout))
    assert forked.machine.digest == played.history.now.digest
    forked.machine.allocate("Z", 3)
    assert forked.now.kind == "committed" and len(forked) > len(played.history)
    assert History.from_dict(json.loads(json.dumps(forked.to_dict()))).steps[-1].digest == forked.now.digest


def test_more_answers_than_rows_on_the_stage(austen):
    setup = replace(OPENING, samples=3, max_new_tokens=6)
    played = play(setup, *austen)
    assert len(played.texts) == 6
    assert all(f.scene.view == (960, 484) for f in played.recording.frames)


def test_without_sharing_the_prefix_is_computed_again(austen):
    run = play(replace(OPENING, share=False, max_new_tokens=2), *austen).run
    assert run.rows_recomputed == 26


def test_a_pool_that_is_too_small_is_refused_by_name(austen):
    with pytest.raises(Rejected, match="out_of_memory"):
        play(replace(OPENING, num_blocks=2), *austen)


def test_a_prompt_longer_than_the_model_reaches_is_refused_in_words(austen):
    with pytest.raises(ValueError, match="512 tokens this model can hold"):
        play(replace(OPENING, prompts=("word " * 600,)), *austen)


def test_a_link_carries_every_input_and_the_frame():
    setup = Setup(("one", "two"), "smollm2", 8, 5, 0.5, 3, 9, 2, False, True, 40)
    link = Link(setup, "ab" * 32, "0123", 7)
    query = {k: v if isinstance(v, list) else [v] for k, v in link.query().items()}
    back = Link.from_query(query)
    assert back.setup == setup and back.frame == 7 and back.recording == "0123"
    assert back.mismatches("ab" * 32, "0123", 8) == []
    assert len(back.mismatches("cd" * 32, "9999", 3)) == 3
    assert Link.from_query({}) is None


@pytest.mark.parametrize(("key", "value"), [("b", "x"), ("share", "2"), ("f", "-1"), ("t", "warm")])
def test_a_broken_link_names_the_parameter(key, value):
    query = {"p": ["one"], key: [value]}
    with pytest.raises(ValueError, match="link"):
        Link.from_query(query)


@pytest.mark.parametrize("bad", [{"prompts": ()}, {"prompts": (" ",)}, {"samples": 30}, {"max_new_tokens": 0},
                                 {"block_size": 0}, {"temperature": -1.0}, {"num_blocks": 0}])
def test_a_senseless_setup_is_refused(bad):
    with pytest.raises(ValueError):
        Setup(**({"prompts": ("a",)} | bad))


def test_the_title_counts_prompts_and_answers():
    assert conversation._title(OPENING, 2) == "2 prompts, one memory"
    assert conversation._title(replace(OPENING, samples=4), 8) == "2 prompts, 8 answers, one memory"
