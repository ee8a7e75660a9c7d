"""`policy="vllm-0.23"` beside vLLM v0.23.0 itself: the same hits, the same blocks, whatever was evicted in between."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

from kvlab.contract import Rejected
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheLayoutManifest
from kvlab.reuse.prefix_cache import PrefixCache
from kvlab.study.peers import folders
from tests.reuse.prefix_worlds import asker, authorised, layout
from tests.support import ROOT, require

BLOCK_SIZE, BLOCKS, OPERATIONS = 4, 24, 1500


def workload(seed: int) -> list:
    """Prompts that begin alike, answers that grow, requests that end in any order; the pool is full all the time."""
    rng, live, ops = random.Random(seed), [], []
    stems = [[rng.randrange(9) for _ in range(24)] for _ in range(4)]
    for i in range(OPERATIONS):
        roll = rng.random()
        if roll < 0.35 or not live:
            tokens = rng.choice(stems)[: rng.randrange(1, 25)] + [rng.randrange(9) for _ in range(rng.randrange(0, 6))]
            live.append(f"r{i}")
            ops.append(["start", live[-1], tokens])
        elif roll < 0.7:
            ops.append(["append", rng.choice(live), rng.randrange(9)])
        else:
            ops.append(["end", live.pop(rng.randrange(len(live)))])
    return ops


def ours(ops: list) -> list:
    groups = tuple(replace(g, first_block_id=1) for g in layout(BLOCK_SIZE, (BLOCKS,)).groups)
    cache = PrefixCache(Allocator(CacheLayoutManifest(groups), audit="chain"), authorised(), policy="vllm-0.23")
    ann, live, said = asker(), {}, []
    for word, name, *rest in ops:
        hit, fits = 0, True
        try:
            if word == "start":
                hit = cache.start(ann, name, rest[0]).match.lengths.runtime
                live[name] = list(rest[0])
            elif name in live and word == "append":
                cache.apply({"op": "append", "request": name})
                live[name].append(rest[0])
            elif name in live:
                cache.apply({"op": "release", "request": name})
                del live[name]
            if name in live:
                cache.publish(ann, name, live[name])
        except Rejected as no:
            assert no.reason == "out_of_memory"
            fits = False
        table = cache.allocator.requests[name].tables[0] if name in live else ()
        pool = cache.allocator.pools[0]
        said.append([hit, [int(pool.text(w).split("@")[0]) for w in table]] if fits else None)
    cache.check()
    return said


def test_the_same_hits_and_the_same_blocks_as_vllm():
    require("vllm")
    path = os.pathsep.join([*folders(), str(ROOT)])
    for seed in (1, 2):
        ops = workload(seed)
        child = subprocess.run(
            [sys.executable, "-m", "tests.reuse.vllm_beside"], text=True, capture_output=True, cwd=ROOT, timeout=300,
            input=json.dumps({"block_size": BLOCK_SIZE, "blocks": BLOCKS, "ops": ops}),
            env=os.environ | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0"})
        line = next((text for text in child.stdout.splitlines() if text.startswith("kvlab:")), "")
        assert line, child.stderr[-2000:]
        theirs, mine = json.loads(line.removeprefix("kvlab:")), ours(ops)
        assert sum(1 for row in theirs if row is None) > 20 and sum(row[0] for row in theirs if row) > 500
        assert next(((ops[i], a, b) for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None) is None


def test_the_workload_runs_here_without_vllm():
    rows = ours(workload(3))
    assert sum(1 for row in rows if row is None) > 20 and sum(row[0] for row in rows if row) > 500
