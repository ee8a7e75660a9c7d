"""A sweep: every setting once, each result whole in a file of its own, and after a kill only what is missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow.dataset as dataset
import pytest
from joblib import parallel_config
from joblib.parallel import ThreadingBackend

from kvlab.__main__ import main
from kvlab.study import sweep as sweeping
from kvlab.study.replay import run
from kvlab.study.replay_source import Source
from kvlab.study.sweep import finished, grid, one, sweep


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": n, "input_length": 1_500, "output_length": 9, "hash_ids": [n % 2, n % 5, n % 3]}
            for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(str(path))


SETTINGS = grid([16, 64], [0.001, 0.002], 100, indexes=["prefix", "radix"])


def test_the_grid_has_every_setting_that_there_is():
    assert len(SETTINGS) == 8 and len(set(SETTINGS)) == 8
    more = grid([16], [1.0], 100, indexes=["prefix", "radix"], policies=["normative", "observed"],
                evictions=["lru", "mru"], in_flight=[1, 4])
    assert {s.policy for s in more} == {"normative", "vllm-0.23", "sglang-0.5.11"}
    assert len(more) == 2 * 2 + 2 * 2 * 2  # a chain has no eviction order but its queue
    with pytest.raises(ValueError, match="not one block"):
        grid([16], [1e-9], 100)


def test_processes_give_what_one_run_gives(source):
    rows = dict(sweep(source, SETTINGS, jobs=2))
    assert rows.keys() == set(SETTINGS)
    for setting in SETTINGS[::3]:
        alone = run(source.requests(source.open()), setting)
        assert rows[setting]["hit_tokens"] == alone.hit_tokens > 0
        assert rows[setting]["lost_to_policy"] == alone.losses["policy"] and rows[setting]["digest"] == alone.digest


def counted(monkeypatch):
    ran = []
    monkeypatch.setattr(sweeping, "one", lambda source, setting: ran.append(setting) or one(source, setting))
    return ran


def test_results_stream_to_parquet_and_a_killed_sweep_goes_on(source, tmp_path, monkeypatch):
    folder, ran = tmp_path / "out", counted(monkeypatch)
    begun = sweep(source, SETTINGS, folder, jobs=1)
    first = [next(begun) for _ in range(3)]
    begun.close()  # as a kill would: what was running is lost, what was finished is whole
    kept = dataset.dataset(folder, format="parquet").to_table().to_pylist()
    assert {row["digest"] for row in kept} >= {row["digest"] for _, row in first}
    already = len(kept)
    (folder / "0broken.parquet").write_bytes(b"PAR1 half a file")
    (folder / ".half.123").write_bytes(b"of a writer that was killed")
    ran.clear()
    rows = dict(sweep(source, SETTINGS, folder, jobs=1))
    assert len(ran) == len(SETTINGS) - already and rows.keys() == set(SETTINGS)
    ran.clear()
    assert dict(sweep(source, SETTINGS, folder, jobs=1)) == rows and not ran
    assert len(finished(folder)) == len(SETTINGS)


def test_another_trace_or_another_order_is_another_sweep(source, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    list(sweep(source, SETTINGS[:1], folder, jobs=1))
    ran = counted(monkeypatch)
    list(sweep(Source(source.path, limit=20), SETTINGS[:1], folder, jobs=1))
    assert len(ran) == 1
    with open(source.path, "a") as file:
        file.write(json.dumps({"timestamp": 99, "input_length": 5, "output_length": 1, "hash_ids": [1]}) + "\n")
    sweeping.requests_of.cache_clear()
    list(sweep(source, SETTINGS[:1], folder, jobs=1))
    assert len(ran) == 2 and len(finished(folder)) == 3


def test_a_process_that_is_really_killed_leaves_whole_files_only(source, tmp_path):
    folder = tmp_path / "out"
    code = ("import os, sys; from pathlib import Path; from kvlab.study.replay_source import Source; "
            "from kvlab.study.sweep import grid, sweep\n"
            "settings = grid([16, 64], [0.001, 0.002], 100, indexes=['prefix', 'radix'])\n"
            "for n, _ in enumerate(sweep(Source(sys.argv[1]), settings, Path(sys.argv[2]), jobs=1)):\n"
            "    if n == 2: os.kill(os.getpid(), 9)\n")
    done = subprocess.run([sys.executable, "-c", code, source.path, str(folder)], capture_output=True)
    assert done.returncode == -9, done.stderr
    assert len(finished(folder)) == 3
    assert len(dict(sweep(source, SETTINGS, folder, jobs=1))) == len(SETTINGS)


def test_a_place_that_is_not_there_is_named():
    for wrong in ("moon", "processes:3"):
        with pytest.raises(ValueError, match="dask:ADDRESS"), sweeping.place(wrong):
            pass


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_a_cluster_without_its_package_says_what_to_install(name, monkeypatch):
    for module in ("dask.distributed", "ray"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"pip install {name}"), sweeping.place(f"{name}:somewhere"):
        pass


class OnlyWhole(ThreadingBackend):
    """As Ray's: nothing is handed over before a whole call is done."""

    supports_return_generator = False


def test_a_cluster_that_hands_over_whole_calls_gets_a_round_at_a_time(source, tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "place", lambda on: parallel_config(backend=OnlyWhole()))
    ran: list[object] = []
    monkeypatch.setattr(sweeping, "one", lambda source, setting: ran.append(setting) or one(source, setting))
    begun = sweep(source, SETTINGS, tmp_path / "out", on="ray", jobs=2)
    first = [next(begun) for _ in range(2)]
    assert len(finished(tmp_path / "out")) == len(ran) == 2  # the first round is safe before the next one begins
    assert dict([*first, *begun]).keys() == set(SETTINGS) and len(finished(tmp_path / "out")) == len(SETTINGS)


def test_the_command_prints_a_table_of_what_if(source, tmp_path, capsys):
    call = ["sweep", source.path, "--model", "smollm2", "--block-size", "16", "64", "--pool-gib", "0.1", "0.2",
            "--jobs", "1", "--out", str(tmp_path / "out")]
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "prefix, normative, lru, 1 in flight" in out and "block 16" in out and "0.2 " in out and "%" in out
    assert main([*call, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 4 and {row["block_size"] for row in rows} == {16, 64}
    assert main([*call, "--on", "moon"]) == 2
