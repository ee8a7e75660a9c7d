"""What the replay rows measure is what they say; how fast it is, no test asserts."""

from __future__ import annotations

from kvlab.study import bench_replay
from kvlab.study.draw_agents import draw_agents


def test_our_own_trace_is_always_measured_and_the_others_say_that_they_are_not_here(monkeypatch):
    monkeypatch.delenv("KVLAB_TRACES", raising=False)
    asked = []
    monkeypatch.setattr(bench_replay, "measured", lambda *call: asked.append(call) or (1.5, 300.0))
    rows = list(bench_replay.replay())
    assert [r.name.strip() for r in rows if r.note] == ["replay all Mooncake rows, blocks of 512",
                                                        "replay tau-bench, blocks of 16"]
    assert [(call[0], call[1]) for call in asked] == [("prefix", 16), ("radix", 16)]
    assert [r.holds for r in rows if not r.note] == [None, True, None, True]


def test_a_folder_of_traces_is_found_by_the_public_names(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_TRACES", str(tmp_path))
    assert bench_replay.folder(*bench_replay.MOONCAKE) == []
    for name in bench_replay.MOONCAKE:
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "deep" / name).write_text("".join(line + "\n" for line in list(draw_agents())[:30]))
    paths = bench_replay.folder(*bench_replay.MOONCAKE)
    assert [p.name for p in paths] == list(bench_replay.MOONCAKE)
    seconds, mib = bench_replay.measured("radix", 512, 200, 0, *paths)
    assert 0 < seconds < 60 and 30 < mib < 1_024
