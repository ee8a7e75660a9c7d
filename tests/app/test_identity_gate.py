"""The page of the identity gate without a browser: it opens at once, names the check, and answers mistakes in words."""

from __future__ import annotations

import json

import pytest

from kvlab.study import fixtures
from tests.app.pages import open_page, stage_of

FIXTURE = fixtures.load_fixture(fixtures.FIXTURES / "loop2_identity.json")


def page(**query):
    return open_page("app_pages/identity_gate.py", query)


def said(at):
    return " ".join(m.value for m in at.markdown)


def test_it_opens_at_once_on_a_refusal_with_its_last_frame():
    at = page()
    stage = stage_of(at)
    assert stage["frame"] == len(stage["recording"]["frames"]) - 1
    assert stage["recording"]["frames"][-1]["title"] == "Refused by cache_layout_sha256"
    assert "`tp_rank_mismatch`" in said(at) and "here is a candidate" in said(at) and "unchanged" in said(at)
    assert not at.warning and not at.error


@pytest.mark.parametrize(("edit", "reason", "candidate"), [
    ("another adapter", "adapter_mismatch", True), ("16 positions further on", "position_contract_mismatch", True),
    ("layout: bf16", "storage_dtype_mismatch", True), ("layout: int8-scheme", "quantization_schema_mismatch", True),
    ("layout: block-major", "axis_stride_mismatch", True), ("layout: swapped-groups", "cache_group_mismatch", True),
    ("layout: scheduler-32", "layout_mismatch", True), ("another cache ABI", "cache_abi_mismatch", True),
    ("other weights", "model_generation_mismatch", True), ("transformed weights", "weight_transform_mismatch", True),
    ("one token inside", "covered_token_mismatch", False), ("another salt", "cache_salt_mismatch", False),
    ("another namespace", "namespace_mismatch", True), ("a later publication generation",
                                                        "stale_publication_generation", True),
])
def test_each_change_is_stopped_by_its_check(edit, reason, candidate):
    at = page(who="alice", record="g0/1000@3", d=[edit])
    stage_of(at)
    assert f"`{reason}`" in said(at)
    assert ("here is a candidate" in said(at)) == candidate
    assert "unchanged" in said(at)


@pytest.mark.parametrize("edit", ["another tokenizer version", "another chat template", "another temperature",
                                  "a longer prompt"])
def test_what_decides_nothing_is_let_through_and_held(edit):
    at = page(who="alice", record="g0/1000@3", d=[edit])
    assert stage_of(at)["recording"]["frames"][-1]["kind"] == "committed"
    assert "may be reused" in said(at) and "held for the consumer" in said(at)


@pytest.mark.parametrize(("who", "reason"), [("bob", "unauthorized_namespace"),
                                             ("amy", "lookup_before_authorization")])
def test_whoever_may_not_look_stops_before_the_key(who, reason):
    at = page(who=who, record="g0/1000@3", d=[])
    frames = stage_of(at)["recording"]["frames"]
    assert len(frames) == 2 and frames[-1]["title"] == "Refused before anything is looked up"
    assert reason in json.dumps(frames[-1]) and said(at).count("not asked") == 2


def test_several_changes_and_the_other_record():
    at = page()
    at.multiselect[0].set_value(["another salt", "another adapter"])
    at.run()
    assert "`adapter_mismatch`" in said(at)
    at.radio(key="identity record").set_value("g0/1001@4")
    at.run()
    at.multiselect[0].set_value(["another picture"])
    at.run()
    assert "`multimodal_feature_mismatch`" in said(at) and "no candidate" in said(at)
    at.multiselect[0].set_value(["another embedding row", "another picture"])
    at.run()
    assert "same field" in at.warning[0].value and not at.exception
    at.multiselect[0].set_value([])
    at.run()
    assert "may be reused" in said(at)


def test_a_link_reopens_the_frame_and_a_wrong_one_is_said_in_words():
    assert stage_of(page(who="alice", record="g0/1000@3", d=["another adapter"], f="3"))["frame"] == 2
    assert stage_of(page(who="alice", record="g0/1000@3", d=["another adapter"], f="999"))["frame"] == 6
    for query in ({"who": "eve"}, {"who": "bob", "record": "x"}, {"who": "bob", "d": ["nonsense"]}):
        at = page(**query)
        assert stage_of(at) and "does not have" in at.warning[0].value


def test_the_harm_is_run_on_the_real_model():
    at = page()
    at.button[0].click()
    at.run()
    anna, ben, mixed = (t.value for t in at.text)
    assert not at.exception and not at.error
    assert ben != anna and mixed != ben and mixed == anna
    assert "32 of 39 tokens" in at.caption[-1].value


@pytest.mark.parametrize(("prompt", "says"), [("", "0 tokens"), ("so long a letter " * 300, "takes 1 to 400")])
def test_a_prompt_that_cannot_run_is_a_message(prompt, says):
    at = page()
    at.text_input(key="identity prompt").set_value(prompt)
    at.button[0].click()
    at.run()
    assert not at.exception and says in at.error[0].value


def test_a_short_prompt_has_nothing_to_take():
    at = page()
    at.text_input(key="identity prompt").set_value("It was")
    at.button[0].click()
    at.run()
    assert "nothing could be taken" in at.caption[-1].value
