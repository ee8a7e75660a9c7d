"""The page without a browser: it opens on the embedded agents, follows its controls, answers mistakes in words."""

from __future__ import annotations

import json
from functools import partial

import pytest

from kvlab.study.draw_agents import AGENTS, draw_agents
from kvlab.study.replay import Setting, run
from kvlab.study.replay_source import Source
from tests.app.pages import open_page


@pytest.fixture
def page():
    return partial(open_page, "app_pages/replay.py")


def metric(at, label):
    assert not at.exception, at.exception
    (cell,) = [m for m in at.metric if m.label == label]
    return cell.value


def words(at):
    return " ".join(m.value for m in (*at.markdown, *at.caption, *at.code))


def test_the_embedded_agents_are_their_models_output():
    assert AGENTS.read_text().splitlines() == list(draw_agents())


def test_it_opens_on_a_real_replay_with_its_losses(page):
    at = page()
    source = Source(str(AGENTS))
    found = run(source.requests(source.open()), Setting("radix", 16, 3_072, in_flight=12))
    assert metric(at, "Hit, of prompt tokens") == f"{100 * found.hit_share:.1f} %"
    assert metric(at, "Tokens computed again") == f"{found.recomputed_tokens:,}"
    said = words(at)
    assert "lost to **capacity**" in said and "best evictions of this pool" in said and "no row of anybody's" in said
    assert f"digest {found.digest[:12]}" in said  # the same machine, the same history
    assert len(at.get("vega_lite_chart")) == 1


def test_pool_block_size_and_index_move_the_figures(page):
    at = page()
    before = metric(at, "Hit, of prompt tokens")
    at.select_slider(key="gib").set_value(20.0)
    at.run()
    more = metric(at, "Hit, of prompt tokens")
    assert float(more.split()[0]) > float(before.split()[0])
    at.select_slider(key="size").set_value(512)
    at.radio(key="i").set_value("prefix")
    at.run()
    assert "index: prefix, normative; blocks of 512 tokens" in words(at)


def test_a_link_reopens_the_same_replay(page):
    first = page({"i": "prefix", "p": "vllm-0.23", "size": "64", "gib": "3.0", "n": "2"})
    again = page({key: value[0] if isinstance(value, list) else value for key, value in first.query_params.items()})
    assert "index: prefix, vllm-0.23; blocks of 64 tokens" in words(again) and "2 in flight" in words(again)
    assert metric(again, "Blocks evicted") == metric(first, "Blocks evicted")


@pytest.mark.parametrize(("query", "says"), [
    ({"gib": "7.3"}, "cannot show"), ({"n": "many"}, "no number"), ({"file": "/nowhere/trace.jsonl"}, "readable file"),
    ({"m": "gpt-9"}, "one of the names")])
def test_mistakes_are_answered_in_words(page, query, says):
    at = page(query)
    assert not at.exception and any(says in e.value for e in at.error)


def test_your_own_trace_of_lengths_says_that_nothing_can_be_hit(page, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,400,44\n"
                    "2023-11-16 18:15:50.9951690,300,109\n")
    at = page({"file": str(path)})
    assert metric(at, "Hit, of prompt tokens") == "0.0 %" and any("no content" in i.value for i in at.info)
    rows = [{"timestamp": n, "input_length": 512, "output_length": 1, "hash_ids": [0]} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{}\n")
    at = page({"file": str(path), "size": "128"})
    assert metric(at, "Hit, of prompt tokens") == "50.0 %" and any("1 bad rows" in w.value for w in at.warning)
    (button,) = at.button
    button.click().run()
    assert len(at.get("vega_lite_chart")) == 2
