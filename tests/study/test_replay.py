"""Replays: machines against plain models to the token, figures that add up, ceilings, public reference figures."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.__main__ import main
from kvlab.reuse.token_keys import pack
from kvlab.study import replay_report
from kvlab.study.replay import Replay, Setting, run
from kvlab.study.replay_pools import PrefixPool, RadixPool, unit_of, unit_rows
from kvlab.study.replay_source import Source, blocks_in, row_bytes
from kvlab.study.thinned import MOST_POINTS
from kvlab.study.traced_request import TracedRequest
from tests.study.replay_model import ChainModel, plain_lru
from tests.support import require


def request(prompt, output=(), **more):
    return TracedRequest(len(prompt), len(output), prompt=pack(prompt), output=pack(output), **more)


def ids(count, *block_ids, out=3, size=8):
    return TracedRequest(count, out, block_ids=block_ids, id_tokens=size)


TOKENS = st.integers(0, 2)
TEXTS = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=14), st.lists(TOKENS, max_size=4)),
                 min_size=1, max_size=25)
WINDOWS = st.integers(1, 4)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, size=st.integers(1, 4), pool=st.integers(3, 24), flying=WINDOWS, tail_first=st.booleans())
def test_a_prefix_chain_hits_and_evicts_what_a_queue_of_blocks_does(texts, size, pool, flying, tail_first):
    setting = Setting("prefix", size, pool, "vllm-0.23" if tail_first else "normative", in_flight=flying)
    replay, model = Replay(setting), ChainModel(size, pool, tail_first)
    for pair in texts:
        one = request(*pair)
        assert replay.play(one) == model.serve(one, flying)
        assert replay.pool.evicted_blocks == model.evicted
    replay.pool.cache.check()
    sums(replay.result(), exact=flying == 1)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, size=st.integers(1, 4), pool=st.integers(3, 24), flying=WINDOWS,
       eviction=st.sampled_from(("lru", "lfu", "fifo", "mru", "segmented-lru")), observed=st.booleans())
def test_a_radix_tree_keeps_its_partition_and_never_beats_the_ceilings(texts, size, pool, flying, eviction, observed):
    policy = "sglang-0.5.11" if observed else "normative"
    replay = Replay(Setting("radix", size, pool, policy, eviction, flying))
    for pair in texts:
        replay.play(request(*pair))
    replay.pool.cache.check()
    use, cache = replay.pool.use(), replay.pool.cache
    assert use.unique + use.cached + cache.pool.free_count == pool
    sums(replay.result(), exact=flying == 1)


def sums(found, exact):
    assert found.hit_tokens + found.recomputed_tokens + found.refused_tokens == found.prompt_tokens
    assert found.hit_tokens <= found.optimal_hit_tokens <= found.design_hit_tokens <= found.ideal_hit_tokens
    assert sum(found.losses.values()) == found.ideal_hit_tokens - found.hit_tokens
    assert found.peak_unique_blocks <= found.setting.pool_blocks
    if exact:
        assert found.peak_unique_blocks == found.peak_referenced_blocks and found.ended_early == 0


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS, size=st.integers(1, 4), index=st.sampled_from(("prefix", "radix")))
def test_with_room_for_all_both_indexes_reach_the_ceiling_of_their_design(texts, size, index):
    found = run([request(*pair) for pair in texts], Setting(index, size, 2_000))
    assert found.hit_tokens == found.design_hit_tokens == found.optimal_hit_tokens
    assert found.evicted_blocks == found.refused == 0


def test_requests_in_flight_share_blocks_and_count_them_once():
    rows = [request([*range(8), n]) for n in range(3)]
    replay = Replay(Setting("prefix", 4, 40, in_flight=3))
    assert [replay.play(one) for one in rows] == [0, 8, 8]
    use = replay.pool.use()
    assert (use.unique, use.referenced, use.cached) == (2 + 3, 3 * 3, 0)
    radix = Replay(Setting("radix", 4, 40, in_flight=3))
    assert [radix.play(one) for one in rows] == [0, 8, 8]
    assert radix.pool.use() == use


def test_a_request_waits_for_the_oldest_and_one_larger_than_the_pool_is_refused():
    rows = [request([n] * 8) for n in range(4)] + [request([9] * 50)]
    for index in ("prefix", "radix"):
        found = run(rows, Setting(index, 4, 6, in_flight=9))
        assert (found.refused, found.refused_tokens) == (1, 50)
        assert found.ended_early == 4  # the fourth ends the first; the refused one waited for the rest
        assert found.recomputed_tokens == 32


def test_ids_are_played_in_the_largest_unit_that_nothing_parts():
    one = ids(20, 5, 6, 7)
    assert [unit_of(one, size) for size in (8, 4, 16, 2, 12, 3)] == [8, 4, 8, 2, 4, 1]
    assert unit_rows(one, 8) == (pack([5, 6, 7]), b"")
    assert unit_rows(one, 4) == (pack([10, 11, 12, 13, 14]), b"")
    assert unit_of(request([1]), 16) == 1
    lengths = TracedRequest(20, 3)
    assert unit_of(lengths, 16) == 16 and unit_rows(lengths, 16) is None
    with pytest.raises(ValueError, match=r"block ids from 0 to 4,294,967,294 can be replayed.*4,294,967,295"):
        unit_rows(ids(8, 2**32 - 1), 8)
    with pytest.raises(ValueError, match="-1"):
        unit_rows(ids(8, -1), 8)


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=12),
       size=st.sampled_from((2, 4, 8, 16)), tail=st.integers(1, 8), index=st.sampled_from((PrefixPool, RadixPool)))
def test_a_unit_changes_no_figure(rows, size, tail, index):
    """The same trace with its tokens spelled out: hits, evictions and use are the same."""
    whole, units = index(size, 12), index(size, 12, min(size, 8))
    for n, row in enumerate(rows):
        one = ids(8 * (len(row) - 1) + tail, *row)
        whole.unit = 1
        results = [pool.begin(f"r{n}", one) for pool in (whole, units)]
        assert results[0] == results[1] and whole.use() == units.use()
        assert whole.evicted_blocks == units.evicted_blocks
        if results[0] is not None:
            whole.end(f"r{n}")
            units.end(f"r{n}")


def test_lengths_alone_occupy_blocks_and_hit_nothing():
    rows = [TracedRequest(20, 4, at=float(n)) for n in range(5)]
    for index in ("prefix", "radix"):
        found = run(rows, Setting(index, 8, 9, in_flight=2))
        assert (found.unknown, found.hit_tokens, found.peak_unique_blocks, found.peak_referenced_blocks) == (5, 0, 6, 6)
        assert "tell lengths and no content" in replay_report.words(found, "lengths")
    with pytest.raises(ValueError, match="one form"):
        run([rows[0], request([1, 2])], Setting())


def test_a_setting_refuses_what_there_is_not():
    for name, wrong, says in (("index", "trie", "prefix or radix"), ("policy", "sglang-0.5.11", "normative or vllm"),
                              ("eviction", "mru", "belong to the radix tree"), ("eviction", "best", "eviction order"),
                              ("pool_blocks", 0, "pool_blocks"), ("in_flight", 0, "in_flight")):
        with pytest.raises(ValueError, match=says):
            Setting(**{name: wrong})
    assert blocks_in(40, 16 * row_bytes("llama-3-8b")) == 20_480
    with pytest.raises(ValueError, match="not one block"):
        blocks_in(0.001, 2**30)


def test_few_moments_and_exact_peaks_however_long_the_trace():
    rows = [request([n % 7, n % 5, n % 3, n]) for n in range(3_000)] + [request(list(range(60)))]
    found = run(rows, Setting("radix", 2, 100))
    assert 100 < len(found.moments) <= MOST_POINTS and found.peak_unique_blocks == 30
    assert all(a.requests < b.requests for a, b in zip(found.moments, found.moments[1:], strict=False))
    assert replay_report.spark([0, 1, 7], 7) == "▁▂█" and len(replay_report.spark(range(1_000), 999)) <= 60


# ---------------------------------------------------------------- public reference figures
def test_mooncake_reference_figures_and_the_rules_that_part_ours_from_them():
    """Plain block LRU hits 8, 42, 62, 64 %. Ours differs by the rules of `ChainModel`, and by nothing else."""
    source = Source(str(Path(require("mooncake")) / "synthetic.jsonl"))
    rows = list(source.requests(source.open()))
    pools = [1_000, 10_000, 30_000, 50_000]
    assert [round(100 * share) for share in plain_lru(rows, 512, pools)] == [8, 42, 62, 64]
    model, found = ChainModel(512, 10_000), run(rows, Setting("prefix", 512, 10_000))
    assert found.hit_tokens == sum(model.serve(one) for one in rows) and found.evicted_blocks == model.evicted
    assert round(100 * found.ideal_hit_tokens / found.prompt_tokens, 1) == 65.1
    sums(found, exact=True)


def test_tau_bench_reference_figures_and_the_rules_that_part_ours_from_them():
    """43, 51, 70, 95 % of plain LRU, 95 % without a limit: a knee. Ours to the token by the rules of the chain."""
    require("smollm2")
    source = Source(require("tau-bench"), tokenizer="smollm2", waves=50)
    rows = list(source.requests(source.open()))
    assert [round(100 * share) for share in plain_lru(rows, 16, [1_000, 2_000, 4_000, 8_000])] == [43, 51, 70, 95]
    model, found = ChainModel(16, 4_000), run(rows, Setting("prefix", 16, 4_000))
    assert found.hit_tokens == sum(model.serve(one) for one in rows)
    assert found.different_blocks == 18_791 and round(100 * found.ideal_hit_tokens / found.prompt_tokens, 1) == 94.8
    tree = run(rows, Setting("radix", 16, 4_000))
    assert tree.optimal_hit_tokens == found.optimal_hit_tokens > tree.hit_tokens


# ---------------------------------------------------------------- the command
TRACE = "\n".join(json.dumps({"timestamp": n * 1000, "input_length": 1000 + n % 3, "output_length": 5,
                              "hash_ids": [n % 2, n % 4]}) for n in range(8)) + "\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


def test_the_command_prints_json_words_and_a_picture(trace, tmp_path, capsys):
    call = ["replay", str(trace), "--model", "llama-3-8b", "--block-size", "16", "--pool-gib", "0.5"]
    for index in ("prefix", "radix"):
        assert main([*call, "--index", index, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert {"requests", "prompt_tokens", "hit_tokens", "ideal_hit_tokens", "recomputed_tokens", "evicted_blocks",
                "peak_unique_blocks", "peak_referenced_blocks", "seconds"} <= said.keys()
        assert (said["requests"], said["setting"]["pool_blocks"]) == (8, 256)
    picture = tmp_path / "bytes.svg"
    assert main([*call, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "Mooncake trace" in out and "infinite cache" in out and "lost to policy" in out and "▁" in out
    assert picture.read_text().lstrip().startswith("<?xml") and "</svg>" in picture.read_text()


def test_a_wrong_call_is_one_line_and_status_2(trace, tmp_path, capsys):
    text = tmp_path / "chat.jsonl"
    text.write_text('[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]\n')
    broken = tmp_path / "broken.jsonl"
    broken.write_text(TRACE + '{"timestamp": 9, "input_length": -1, "output_length": 5, "hash_ids": []}\n')
    for call, says in (([str(tmp_path / "none")], "a readable file"), ([str(text)], "name a tokenizer"),
                       ([str(trace), "--index", "trie"], "prefix or radix"), ([str(trace), "--block-size", "48"], "48"),
                       ([str(trace), "--model", "gpt-9"], "one of the names"), ([str(trace), "--waves", "0"], "a wave"),
                       ([str(broken)], "line 9: input_length is -1")):
        assert main(["replay", *call]) == 2
        err = capsys.readouterr().err
        assert says in err and "Traceback" not in err
    assert main(["replay", str(broken), "--skip-bad", "--json"]) == 0
    captured = capsys.readouterr()
    assert "1 bad rows were left out" in captured.err and json.loads(captured.out)["requests"] == 8


def test_no_request_is_kept_once_it_is_played():
    def rows():
        for n in range(1_500):
            if n % 300 == 299:
                assert sum(type(one) is TracedRequest for one in gc.get_objects()) < 10
            yield request([n % 7, n, n, n])

    for index in ("prefix", "radix"):
        assert run(rows(), Setting(index, 2, 20), ceilings=False).requests == 1_500
