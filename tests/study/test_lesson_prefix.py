"""What lesson and page on the prefix chain share: grades, each small trial, the model's chats, every refusal."""

from __future__ import annotations

import zlib

import pytest
import torch

from kvlab.execution.model import load_model
from kvlab.reuse.chain import HASHES
from kvlab.reuse.token_keys import pack
from kvlab.study import fixtures, lesson_prefix
from kvlab.study.lesson_prefix import POLICIES, PREDICTIONS, TOKENS, Server, by_turn, changed, malformed, warm, written
from kvlab.study.lesson_prefix_rows import PrefixWorld, alone, apart, over_nothing, talk
from kvlab.study.replay import Setting

STORY = "The two young ladies were walking in the garden before dinner, when they saw a gentleman coming up the road"
PROMPT = STORY + '; and it was Mr. Darcy. "I am'


# ---------------------------------------------------------------- predictions
def test_the_grades_are_what_the_lesson_says_in_words():
    """By hand: whole blocks of the longest equal prefix, at most all tokens but one."""
    assert lesson_prefix.answers() == {"all": 64 - 48, "rest": 2, "one": 16, "edit": 50 - 32, "front": 50}
    assert [p["key"] for p in PREDICTIONS] == list(lesson_prefix.PROMPTS) == list(lesson_prefix.answers())
    assert [row[1:] for row in lesson_prefix.reveal()] == [
        [64, 48, 16, 1], [50, 48, 2, 1], [16, 0, 16, 1], [50, 32, 18, 2], [50, 0, 50, 4]]


def test_a_question_never_says_its_answer():
    truth = lesson_prefix.answers()
    for p in PREDICTIONS:
        assert f" {truth[p['key']]} tokens are" not in p["because"]


@pytest.mark.parametrize(("size", "taken"), [(1, 63), (4, 60), (8, 56), (32, 32), (64, 0)])
def test_the_cap_comes_before_the_whole_blocks(size, taken):
    server = Server(blocks=80, block_size=size)
    server.serve("A", TOKENS[:64])
    assert server.find(TOKENS[:64]).runtime == taken
    assert server.find(TOKENS[:64], requires_logits=False).runtime == 64


# ---------------------------------------------------------------- four lengths
def test_each_way_to_ask_has_another_short_length():
    told = {what: (n.semantic, n.indexed, n.cap, n.runtime, n.recompute)
            for what, n in lesson_prefix.four_lengths().items()}
    assert list(told.values()) == [(48, 48, 47, 32, 16), (48, 48, 48, 48, 0), (50, 48, 49, 48, 2),
                                   (37, 32, 47, 32, 16), (48, 32, 47, 32, 16), (48, 48, 47, 32, 16)]


@pytest.mark.parametrize("at", [0, 15, 16, 37, 47])
def test_an_edit_changes_every_name_from_its_block_on(at):
    server = Server()
    pairs = zip(server.keys(TOKENS[:64]), server.keys(changed(TOKENS[:64], at)), strict=True)
    assert [a == b for a, b in pairs] == [n < at // 16 for n in range(4)]
    assert warm().find(changed(TOKENS[:64], at)).runtime == at // 16 * 16


# ---------------------------------------------------------------- the learner's questions
def test_why_a_hit_rate_is_zero():
    assert [found for _, _, found in lesson_prefix.zero_rates()] == [32, 0, 48, 0, 0, 0]


def test_requests_and_tokens_are_two_rates():
    assert lesson_prefix.two_rates(10) == (9 / 10, 9 * 16 / (10 * 500))


def test_free_blocks_keep_their_names_until_they_are_taken():
    rows = lesson_prefix.idle()
    assert [list(pool.values()) for _, pool, _ in rows] == [[0, 0, 8], [4, 0, 4], [0, 3, 5], [4, 3, 1], [8, 0, 0]]
    assert [found for *_, found in rows] == [0, 48, 48, 48, 0]


@pytest.mark.parametrize("taken", [1, 2, 3, 4])
def test_tail_first_leaves_a_prefix_and_head_first_leaves_orphans(taken):
    ours, theirs = (lesson_prefix.eviction(policy, taken) for policy in POLICIES)
    assert ours.queue == (0, 1, 2, 3) and ours.gone == tuple(range(taken))
    assert (ours.found, ours.orphans) == (0, 4 - taken)
    assert theirs.queue == (3, 2, 1, 0) and (theirs.found, theirs.orphans) == (16 * (4 - taken), 0)


def test_full_blocks_and_partial_tails_side_by_side():
    rows = lesson_prefix.tails()
    assert [row[1] for row in rows] == ["full blocks", "partial tails"] * 4
    assert [row[2:] for row in rows] == [(48, 2, 0), (49, 1, 1), (32, 16, 0), (47, 1, 15), (48, 32, 0), (50, 30, 2),
                                         (48, 32, 0), (48, 32, 0)]


def test_equal_prompts_of_one_step_do_not_meet():
    assert [row[1:] for row in lesson_prefix.at_once()] == [(0, 8, 0), (0, 8, 3), (48, 9, 0)]


def test_two_blocks_with_one_weak_key():
    one, other = lesson_prefix.twins()
    assert one != other and len(one) == len(other) == 16
    root = HASHES["crc32"].root
    assert zlib.crc32(root + pack(one)) == zlib.crc32(root + pack(other))
    rows = {name: (a, b) for name, a, b in lesson_prefix.collision()}
    assert rows["crc32"][0] == rows["crc32"][1] and rows["sha256"][0] != rows["sha256"][1]
    assert "needs token witnesses" in lesson_prefix.without_witness()


def test_a_salt_changes_every_name():
    server = Server()
    plain, anna, ben = (server.keys(TOKENS[:48], salt=salt) for salt in (None, "anna", "ben"))
    assert len({*plain, *anna, *ben}) == 9
    server.serve("A", TOKENS[:48], salt="anna")
    assert [server.find(TOKENS[:48], salt=s).runtime for s in (None, "anna", "ben")] == [0, 32, 0]


# ---------------------------------------------------------------- turn after turn
def oracle(requests):
    """Tokens found without a limit, turn by turn: blocks behind equal prefixes, all tokens but one at most."""
    seen, rows = set(), {}
    for request in requests:
        whole = request.prompt + request.output
        ends = range(64, len(whole) + 1, 64)
        hit = 0
        while (hit + 1) * 16 < request.prompt_tokens and whole[: (hit + 1) * 64] in seen:
            hit += 1
        seen |= {whole[:end] for end in ends}
        row = rows.setdefault(request.turn, [0, 0, 0])
        row[:] = row[0] + 1, row[1] + request.prompt_tokens, row[2] + 16 * hit
    return [(turn, *row) for turn, row in sorted(rows.items())]


CHATS = {"A": [("one two three ", "four five six seven "), ("eight? ", "nine "), ("ten? ", "no ")],
         "B": [("one two four ", "and so it goes on for a while "), ("why? ", "because ")]}
HEAD = "a long instruction that everybody begins with, and that says nothing at all. "


def test_turns_find_what_was_said_before():
    """A letter a token: the words' own prefixes say what must be found."""
    letters = lambda text: list(text.encode())  # noqa: E731
    requests = list(written(letters, HEAD, CHATS))
    assert [(r.session, r.turn) for r in requests] == [("A", 1), ("B", 1), ("A", 2), ("B", 2), ("A", 3)]
    assert bytes(requests[2].prompt[::4]).decode() == HEAD + "one two three four five six seven eight? "
    found = by_turn(requests, Setting("prefix", 16, 400))
    assert found == oracle(requests) and all(row[3] for row in found)
    small = by_turn(requests, Setting("prefix", 16, 10))
    assert sum(row[3] for row in small) < sum(row[3] for row in found)


# ---------------------------------------------------------------- chats on a real model
@pytest.fixture(scope="module")
def austen():
    torch.set_num_threads(1)
    return load_model("austen")


def test_a_full_hit_computes_a_block_and_speaks_as_if_alone(austen):
    world = PrefixWorld(*austen, num_blocks=16)
    begun = [world.begin(name, PROMPT) for name in ("Anna", "Ben")]
    assert [(b.tokens, b.found, b.computed) for b in begun] == [(48, 0, 48), (48, 32, 16)]
    logits, words = alone(*austen, PROMPT, 14)
    world.speak("Ben", tokens=14)
    assert apart(logits, begun[1].logits) < 1e-4 and world.reply("Ben") == words
    world.cache.check()


def test_nothing_computed_gives_no_logits_and_the_last_token_again_gives_others(austen):
    world = PrefixWorld(*austen, num_blocks=16)
    anna = world.begin("Anna", PROMPT)
    assert world.take_everything("Ben", PROMPT) == 48 and "Ben" not in world.logits
    assert "0 elements" in over_nothing(austen[0])
    world.feed_again("Ben")
    world.speak("Ben", tokens=14)
    assert apart(anna.logits, world.logits["Ben"]) > 1 and world.reply("Ben") != alone(*austen, PROMPT, 14)[1]


def test_an_answer_can_be_found_when_its_chat_has_ended(austen):
    turns = talk(PrefixWorld(*austen, num_blocks=32), STORY, ["; and it was", " And then"], words=16)
    first, second = turns
    assert (first.found, first.computed) == (0, first.tokens)
    assert second.found == (first.tokens + 16) // 16 * 16 > first.tokens // 16 * 16


# ---------------------------------------------------------------- the failure lab
@pytest.mark.parametrize("case", malformed(), ids=lambda case: case.id)
def test_every_case_bounces_and_the_digest_stays(case):
    tried = case.attempt()
    assert tried.reason == case.negative["reason"] and tried.before == tried.after and case.tried


def test_every_public_bug_is_told_and_holds():
    known = set()
    for name in ("incidents_index", "incidents_index_one_block", "incidents_isolation"):
        fixture = fixtures.load_fixture(fixtures.FIXTURES / f"{name}.json")
        known |= {value["id"] for value in fixture["expect"]} | {n["id"] for n in fixture["negatives"]}
    told = lesson_prefix.bugs()
    assert {row[0] for row in told} == known and all(row[3] for row in told)
