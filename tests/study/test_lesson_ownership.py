"""The bench and the failure lab's cases: every event of the trace is seen, short words parse, every story bounces."""

from __future__ import annotations

import pytest

from kvlab.study import fixtures
from kvlab.study.lesson_ownership import (
    GRAMMAR,
    PLUGS,
    Bench,
    article,
    fresh,
    in_words,
    incidents,
    malformed,
    step_of,
    stories,
)


def bench(*words, start="trace"):
    made = Bench(article()["base"], article()["trace"]) if start == "trace" else Bench(fresh())
    for word in words:
        made.say(word)
    return made


def test_the_bench_arrives_where_the_fixture_runner_does():
    played, made = fixtures.play(article()), bench()
    assert made.machine.snapshot() == played.machine.snapshot()
    assert made.outcomes == [step.get("refused", "") for step in article()["trace"]]
    assert {s.reason for s in made.history if s.kind == "refused"} == set(made.outcomes) - {""}


def test_a_late_writer_and_a_lease_are_steps_of_the_history():
    made = bench("lease.F.write", "cancel.F", "lease.G.read", "unlease.1", "unlease.1")
    late, *_ = [s for s in made.history if s.op.get("op") == "admit_writer"]
    assert (late.kind, late.reason, late.digest) == ("refused", "stale_block_generation",
                                                     made.history.steps[made.history.steps.index(late) - 1].digest)
    leases = [s for s in made.history if s.op.get("op") in ("lease", "unlease")]
    assert [s.kind for s in leases] == ["staged", "staged", "staged", "refused"]
    assert leases[0].staged["leases"] == {"g0": ["1003@13"], "g1": ["2003@7"]} and leases[2].staged["leases"] == {}
    assert len({s.digest for s in leases[1:]}) == 1, "a lease moves no digest"


def test_leased_blocks_carry_their_padlock_from_frame_to_frame():
    made = bench("lease.F.write", "cancel.F", "unlease.1")
    frames = made.recording("T").frames[-4:]
    assert [f.title for f in frames[1:]] == ["A lease on F's blocks, to write them", "Cancel F", "The lease ends"]
    assert [f.kind for f in frames[1:]] == ["staged", "committed", "staged"]
    assert "A lease keeps" in frames[2].why and "Outside any transaction" in frames[3].text()
    pictures = [f.scene.by_key()["b.g0.1003"] for f in frames]
    assert [p.get("badge") for p in pictures] == [None, 1, 1, None]


def test_each_step_has_the_frame_of_its_outcome():
    made = bench("append.G.1", "plug.G.9", "fork.G.K", "plug.K.2", "release.Z")
    recording = made.recording("T")
    shown = [recording.frames[made.frame(recording, back)] for back in (5, 4, 3, 2, 1)]
    assert [f.kind for f in shown] == ["committed", "refused", "committed", "refused", "refused"]
    assert shown[3].title == "Refused: append 1 token to K" and shown[4].title == "Refused: release Z"
    assert made.outcomes[-4:] == ["fault_after_partial_reservation", "", "fault_after_partial_reservation",
                                  "unknown_request"]


@pytest.mark.parametrize("plug", range(len(PLUGS)))
def test_every_plug_breaks_a_copy_on_write_and_leaves_nothing(plug):
    made = bench("allocate.A.33", "fork.A.B", start="fresh")
    before = made.machine.digest
    assert made.say(f"plug.B.{plug}") == "fault_after_partial_reservation"
    assert made.machine.digest == before
    made.machine.check()
    assert made.say("append.B.1") == ""


def test_compensation_is_a_successor_and_comes_too_late_for_a_release():
    made = bench("append.G.3")
    longer = made.machine.digest
    assert made.say("compensate") == "" and made.live["G"] == 16
    last = made.history.now.receipt
    assert last["predecessor_digest"] == longer and last["reason"] == "compensate"
    made.say("release.G")
    assert made.say("compensate") == "not_compensable"
    assert made.recording("T").frames[-1].title == "Refused: undo the release of G"


def test_a_hit_and_its_rest_say_what_was_found_and_what_is_new():
    made = bench("touch.T.5.1000@3-2000@6")
    frame = made.recording("T").frames[-1]
    assert frame.title == "T finds 16 tokens in the cache, adds 5" and "5 new rows" in frame.why
    assert made.live["T"] == 21


def test_bundles_that_have_or_had_a_name():
    made = bench()
    assert made.named() == {"1000@3-2000@6": "7be1"}
    assert list(made.ever_named()) == ["1000@3-2000@6", "1001@4-2001@8"]
    assert made.everyone() == ["F", "G", "A", "D"]


@pytest.mark.parametrize("text", ["", "append", "append.A", "append.A.1.2", "fork.A.", "fork.A.b c", "lease.A.both",
                                  "plug.A.10", "plug.A.x", "compensate.1", "evict.", "evict.1000", "name.A.100",
                                  "allocate.A.1234567", "touch.T.1000@3", "release.A.B", "truncate.A.1e3"])
def test_what_is_no_operation_is_named(text):
    with pytest.raises(ValueError, match="is no operation"):
        step_of(text)


def test_what_never_began_cannot_end():
    for word in ("unlease.1", "compensate"):
        with pytest.raises(ValueError, match=r"no lease 1|nothing to undo"):
            bench(start="fresh").say(word)


def test_every_word_of_the_grammar_can_be_said():
    said = ["allocate.A.33", "append.A.1", "fork.A.B", "truncate.B.20", "name.A.2", "touch.C.3.1000@1-2000@1",
            "evict.1000@1-2000@1", "lease.C.read", "unlease.1", "plug.C.1", "compensate", "release.A", "cancel.B"]
    assert {word.split(".")[0] for word in said} == set(GRAMMAR)
    made = bench(start="fresh")
    for word in said:
        step = step_of(word)
        assert in_words(step) and made.do(step) in ("", "fault_after_partial_reservation", "not_compensable"), word
    made.machine.check()


@pytest.mark.parametrize("case", [*malformed(), *stories()], ids=lambda case: case.id)
def test_every_case_bounces_and_the_digest_stays(case):
    tried = case.attempt()
    assert tried.reason == case.negative["reason"] and tried.before == tried.after and case.tried


def test_every_incident_has_its_story():
    told, known = {case.id for case in stories()}, {value["id"] for value in incidents()["expect"]}
    assert told == known and len(told) == 13
    assert all(case.engine and case.wrong and case.right for case in stories())
