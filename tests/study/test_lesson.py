"""The parts of the lessons: they grade by running, keep a stable repr, escape words, never hide a changed digest."""

from __future__ import annotations

import copy
import re
from xml.etree import ElementTree

import jupytext
import pytest
import torch

from kvlab.contract import History, Rejected
from kvlab.execution.model import load_model
from kvlab.memory.allocator import Allocator
from kvlab.memory.records import PUBLICATION_ORDER
from kvlab.study import fixtures, lesson
from kvlab.study.lesson import Bounce, Comparison, FailureLab, PagedWorld, Predictions, Question, Stills, Table
from kvlab.views import pool
from tests.support import ROOT, require

TRACE = fixtures.load_fixture(ROOT / "fixtures" / "loop5_ownership.json")
STORY = "The two young ladies were walking in the garden before dinner, and"
SVG = "{http://www.w3.org/2000/svg}svg"


@pytest.fixture(scope="module")
def austen():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small is ten times slower where several threads wait for each other
    yield load_model("austen")
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- worlds
def test_a_branch_says_what_it_would_say_alone(austen):
    together, alone = PagedWorld(*austen, num_blocks=6), lesson.copying_world(*austen, chats=1, max_length=64)
    length = together.read("A", STORY)
    together.branch("A", "B")
    together.read("B", " he cried")
    together.read("A", " she smiled")
    together.speak("A", "B", tokens=5)
    for text in (STORY, " he cried"):
        alone.read("A", text)
    alone.speak("A", tokens=5)
    assert together.reply("B") == alone.reply("A") != together.reply("A")
    assert together.memory.length("A") == length + len(austen[1].encode(" she smiled")) + 5
    together.leave("B")
    together.allocator.check()


def test_copying_counts_every_row_and_paging_none(austen):
    copying, paged = lesson.copying_world(*austen, chats=2, max_length=64), PagedWorld(*austen, num_blocks=4)
    for world in (copying, paged):
        length = world.read("A", STORY)
        world.branch("A", "B")
    assert copying.memory.bytes_copied == length * paged.layout.row_bytes == length * 4 * 2 * 32 * 2 * 4
    assert paged.history.now.receipt["copy_payload_bytes"] == 0
    with pytest.raises(Rejected, match="out_of_memory"):
        copying.branch("A", "C")


def test_rows_are_those_of_the_published_table(austen):
    world = PagedWorld(*austen, num_blocks=4)
    length = world.read("A", STORY)
    before = world.rows("A")
    assert [tuple(t.shape) for t in before] == [(2, 3, length, 2, 32), (2, 1, length, 2, 32)]
    assert not any(torch.isnan(t).any() for t in before)
    world.branch("A", "B")
    world.read("B", " he")
    assert all(torch.equal(a, b) for a, b in zip(before, world.rows("A"), strict=True))
    tail = world.allocator.requests["A"].tables[0][-1] & 0xFFFFFFFF
    world.store.k[0][0, tail, 0] += 1
    assert not torch.equal(before[0], world.rows("A")[0])


def test_a_recording_has_the_words_that_were_written(austen):
    world = PagedWorld(*austen, num_blocks=4)
    world.read("A", STORY)
    world.read("A", " he cried")
    recording = world.recording("One chat", "Who may write here?")
    assert 'A writes " he cried"' in recording.frames[-1].title
    assert recording.id == world.recording("One chat", "Who may write here?").id


def append_after_a_fork() -> Allocator:
    allocator = fixtures.play(TRACE, "fork A to D").machine
    allocator.check()
    return allocator


@pytest.mark.parametrize("group", ["g0", "g1"])
def test_work_is_broken_off_after_one_step_and_leaves_nothing(group):
    allocator = append_after_a_fork()
    before, watching = allocator.snapshot(), list(allocator.observers)
    assert lesson.break_off(allocator, PUBLICATION_ORDER[2], group, lambda: allocator.append("D"))
    assert (allocator.snapshot(), allocator.observers) == (before, watching)
    assert not lesson.break_off(allocator, "no such step", group, lambda: allocator.append("D"))
    assert allocator.snapshot() != before


def test_another_refusal_is_not_taken_for_the_break():
    allocator = append_after_a_fork()
    with pytest.raises(Rejected, match="out_of_memory"):
        lesson.break_off(allocator, "no such step", "g0", lambda: allocator.append("A", 400))


# ---------------------------------------------------------------- tables, texts, stills
def test_a_table_says_the_same_as_text_and_as_html():
    table = Table(["what", "bytes"], [["a <b> & c", 65536], ["true?", True]])
    assert repr(table) == "what       bytes\n---------  ------\na <b> & c  65,536\ntrue?      yes"
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", table._repr_html_())
    assert cells == ["what", "bytes", "a &lt;b&gt; &amp; c", "65,536", "true?", "yes"]


def test_a_comparison_points_at_the_first_difference():
    shown = repr(Comparison(left="a fine man", and_right="a fine girl")).splitlines()
    assert shown[0][shown[2].index("^")] == "m" and shown[1][shown[2].index("^")] == "g"
    assert shown[1].startswith("and right")
    assert "<b><u>man</u></b>" in Comparison(left="a fine man", and_right="a fine girl")._repr_html_()
    assert repr(Comparison(left="same", right="same")).endswith("the same")
    assert "<script>" not in Comparison(left="<script>", right="<script>x")._repr_html_()


def test_stills_are_one_svg_file_with_every_frame_in_its_order():
    history = History(allocator := append_after_a_fork())
    allocator.append("D")
    frames = pool.recording(history.to_dict(), title="t", question="q").frames[:2]
    picture = Stills(*frames)._repr_svg_()
    root = ElementTree.fromstring(picture)
    top = [text.text for text in root.findall(SVG.replace("svg}svg", "svg}text"))]
    assert top == [frame.title for frame in frames]
    inside = root.findall(SVG)
    assert len(inside) == 2 and float(inside[1].get("y")) > float(inside[0].get("height"))
    for part, frame in zip(inside, frames, strict=True):
        lowest = max(s["y"] + s.get("h", 0) for s in frame.scene.shapes)
        assert lowest <= float(part.get("height")) <= frame.scene.view[1]
    assert repr(Stills(*frames)) == "\n\n".join(frame.text() for frame in frames)
    assert picture == Stills(*frames)._repr_svg_()


# ---------------------------------------------------------------- predictions
def quiz(truth: dict) -> tuple[Predictions, list[int]]:
    runs: list[int] = []

    def run():
        runs.append(1)
        return truth

    return Predictions([Question("rows", "How many <rows>?", "Only valid ones.", "rows"),
                        Question("ids", "Which blocks?", "The next ones.")], run), runs


def test_grading_runs_the_machine_each_time_and_stores_no_answer():
    truth = {"rows": 2, "ids": [1003, 2004]}
    asked, runs = quiz(truth)
    assert runs == []
    asked.fields["rows"].value = "2"
    asked.button.click()
    assert len(runs) == 1 and asked.marks["rows"].value.startswith("✓")
    truth["rows"] = 7
    assert asked.grade() == {"rows": False}
    assert len(runs) == 2 and "✗ no, the machine says 7 rows" in asked.marks["rows"].value


def test_a_field_without_a_guess_gives_nothing_away():
    asked, _ = quiz({"rows": 2, "ids": [1003, 2004]})
    assert asked.grade() == {}
    assert {mark.value for mark in asked.marks.values()} == {"No guess yet."}


def test_usual_wrong_answers_are_rejected():
    asked, _ = quiz({"rows": 2, "ids": [1003, 2004]})
    wrong = [("50", "1003"), ("16", "1003 1003"), ("3", "1003 2005"), ("-2", ""), ("2.5", "x"), ("two", "1, 2")]
    for rows, ids in wrong:
        asked.fields["rows"].value, asked.fields["ids"].value = rows, ids
        assert not any(asked.grade().values()), (rows, ids)


@pytest.mark.parametrize(("guess", "answer", "numbers"), [
    ("4096", 1, [4096]), (" 4,096 bytes", 1, [4096]), ("4 KiB", 1, [4096]), ("1.5 kib", 1, [1536]), ("2 rows", 1, [2]),
    ("4,5", 1, []), ("2 or 3", 1, []), ("", 1, []), ("0.1 KiB", 1, []),
    ("2004 and 1003", [1, 2], [1003, 2004]), ("1003@1, 2004@12", [1, 2], [1003, 2004]), ("none", [1], []),
])
def test_guesses_are_read_as_people_write_them(guess, answer, numbers):
    assert lesson.read_guess(guess, answer) == numbers


def test_widgets_have_a_short_repr_that_no_click_changes():
    asked, _ = quiz({"rows": 2, "ids": [1, 2]})
    lab = FailureLab(TRACE)
    first = repr(asked), repr(lab)
    asked.fields["rows"].value = "2"
    asked.grade()
    lab.pick.value = lab.pick.options[3][1]
    assert (repr(asked), repr(lab)) == first == (
        "Predictions(2 questions, not graded)", f"FailureLab('loop5-ownership', {len(TRACE['negatives'])} cases)")
    assert "<rows>" not in asked.children[0].children[0].value


# ---------------------------------------------------------------- the failure lab
def test_every_negative_bounces_with_its_reason_and_its_digest():
    tried = [lesson.bounce(TRACE, negative) for negative in TRACE["negatives"]]
    assert [b.reason for b in tried] == [n["reason"] for n in TRACE["negatives"]]
    assert all(b.unchanged and re.fullmatch("[0-9a-f]{64}", b.before) for b in tried)
    assert len({b.before for b in tried}) > 5, "the negatives start from several states"
    table = lesson.refusals(TRACE)
    assert [row[1] for row in table.rows] == [f"✗ {n['reason']}" for n in TRACE["negatives"]]
    assert {row[2] for row in table.rows} == {"= unchanged"}


def test_the_lab_shows_what_was_picked():
    lab = FailureLab(TRACE)
    for what, negative_id in lab.pick.options[:4]:
        lab.pick.value = negative_id
        negative = lab.negatives[negative_id]
        assert what == negative["what"] and negative["reason"] in lab.outcome.value
        assert "unchanged" in lab.outcome.value


def test_an_operation_that_is_accepted_is_no_failure():
    step = {"op": {"op": "append", "request": "A"}}
    fine = {"id": "x", "reason": "out_of_memory", "what": "A appends.", "do": [step]}
    with pytest.raises(ValueError, match="was accepted"):
        lesson.bounce(TRACE, fine)


def test_a_refusal_that_changed_something_is_not_called_unchanged(monkeypatch):
    def changes_and_refuses(session, step):
        session.machine.append("D")
        raise Rejected("out_of_memory")

    negative = {"id": "x", "reason": "out_of_memory", "what": "w", "at": "base", "do": [{"op": {"op": "append"}}]}
    fixture = TRACE | {"trace": [], "base": append_after_a_fork().snapshot()}
    monkeypatch.setattr(fixtures.Session, "do", changes_and_refuses)
    assert not lesson.bounce(fixture, negative).unchanged


def test_a_digest_that_moved_is_shown(monkeypatch):
    fixture = copy.deepcopy(TRACE)
    fixture["negatives"] = fixture["negatives"][:2]
    moved = Bounce("x", "w", "double_free", "m", "aa", "bb")
    monkeypatch.setattr(lesson, "bounce", lambda *_: moved)
    assert {row[2] for row in lesson.refusals(fixture).rows} == {"→ CHANGED"}
    assert "→ CHANGED" in FailureLab(fixture).outcome.value


# ---------------------------------------------------------------- what no stored output covers
def test_the_optional_cell_of_lesson_5_runs_with_the_larger_model(monkeypatch):
    require("smollm2")
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    notebook = jupytext.read(ROOT / "notebooks" / "05_ownership_and_copy_on_write.py")
    cells = [c.source for c in notebook.cells if c.cell_type == "code"]
    (optional,) = (c for c in cells if c.startswith("WITH_SMOLLM2 = False"))
    for wide, small in (("= False", "= True"), ("max_new_tokens=32", "max_new_tokens=2"), ("samples=8", "samples=2")):
        assert wide in optional
        optional = optional.replace(wide, small)
    shown: list = []
    names: dict = {}
    exec(cells[0].partition("torch.set_num_threads")[0], names)
    names |= {"display": shown.append, "print": shown.append, "device": "cpu"}
    exec(optional.replace('print(*played.texts.values(), sep="\\n\\n")', "print(played.texts)"), names)
    assert "2 answers" in repr(shown[0]) and list(shown[1]) == ["A", "B"]
