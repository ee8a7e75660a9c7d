"""Replays measured: seconds in the machines for public traces and for the embedded agents, and the memory they take.

`KVLAB_TRACES` names a folder with traces (looked for below it, by their public file names); without it only ours runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvlab.study.bench import Row
from kvlab.study.draw_agents import AGENTS

MOONCAKE = ("conversation_first6000.jsonl", "synthetic.jsonl")
TAU_BENCH = "airline_first100.jsonl"
PEAK = """
import json, sys, time
from kvlab.study.replay import Setting, run
from kvlab.study.replay_source import Source
index, size, blocks, waves, *paths = sys.argv[1:]
spent = 0.0
for path in paths:
    source = Source(path, "smollm2", waves=int(waves) or None)
    rows = tuple(source.requests(source.open())) if int(waves) else source.requests(source.open())
    began = time.process_time()
    run(rows, Setting(index, int(size), int(blocks)), ceilings=False)
    spent += time.process_time() - began
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # getrusage counts the parent's too
print(json.dumps([spent, int(peak.split()[1]) / 1024]))
"""


def measured(index: str, block_size: int, blocks: int, waves: int, *paths: Path) -> tuple[float, float]:
    """Seconds of processor time without tokenising, and MiB at the peak, in a process of its own on one thread."""
    call = [sys.executable, "-c", PEAK, index, str(block_size), str(blocks), str(waves), *map(str, paths)]
    done = subprocess.run(call, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return tuple(json.loads(done.stdout))


def folder(*names: str) -> list[Path]:
    """Where the files are below `KVLAB_TRACES`; empty unless all of them are there."""
    root = Path(os.environ.get("KVLAB_TRACES") or "/nowhere")
    found = [next(iter(sorted(root.rglob(name))), None) for name in names] if root.is_dir() else [None]
    return [] if None in found else found


def replay() -> Iterator[Row]:
    """Both indexes: all Mooncake rows at 512, tau-bench in waves of 50 at 16, our agents at 16."""
    cases = (("all Mooncake rows, blocks of 512", folder(*MOONCAKE), 512, 10_000, 0, 5.0),
             ("tau-bench, blocks of 16", folder(TAU_BENCH), 16, 4_096, 50, 20.0),
             ("our agents, blocks of 16", [AGENTS], 16, 3_072, 0, None))
    for name, paths, size, blocks, waves, limit in cases:
        if not paths:
            yield Row(f"replay {name}", note="not here (KVLAB_TRACES names no folder that has it)")
            continue
        for index in ("prefix", "radix"):
            seconds, mib = measured(index, size, blocks, waves, *paths)
            yield Row(f"replay {name}, {index}", "s", seconds, "limit" if limit else "", limit, 1.0 if limit else None,
                      "lower")
            yield Row(f"  its process at the peak, {index}", "MiB", mib, "limit", 1_024.0, 1.0, "lower")
