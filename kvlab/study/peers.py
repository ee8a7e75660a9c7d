"""Other engines' bookkeeping, run beside ours in a process of its own; never a dependency of the package or its tests.

`KVLAB_PEERS` names a folder of unpacked packages: it and each folder right below it go on the peer's import path.
Peers and how their cores are built: vLLM v0.23.0 (block pool, KV cache manager), SGLang v0.5.11 (token allocator),
mini-sglang and smol-vllm (block managers), and the trees of `kvlab.study.peer_trees`. A package that a core imports and
does not need here may be absent.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from kvlab.study.peer_trees import EVICT_TOKENS, lightllm_tree, mini_sglang_tree, sglang_cpp_tree, sglang_tree

BLOCK_SIZE, REQUESTS, POOL = 16, 256, 4096
CACHED = 50_000
"""Sequences that fill the pool in which vLLM evicts."""
Workloads = dict[str, tuple]
"""Name -> (one run of it, how many units it does), or with a third: what makes the state that each run starts from."""


def folders() -> list[str]:
    """The peers' import path; empty where `KVLAB_PEERS` is not set or names no folder."""
    root = Path(os.environ.get("KVLAB_PEERS", ""))
    if not os.environ.get("KVLAB_PEERS") or not root.is_dir():
        return []
    return [str(root), *(str(p) for p in sorted(root.iterdir()) if p.is_dir()),
            *(str(p) for p in sorted(root.glob("*/python")))]


def cpu_time(work: Callable[[], Any], units: int, least: float = 0.02) -> float:
    """Microseconds of processor time a unit, over at least `least` seconds of it."""
    runs, spent, clock = 0, 0.0, time.process_time
    while spent < least:
        began = clock()
        for _ in range(10):
            work()
        spent += clock() - began
        runs += 10
    return spent / runs / units * 1e6


def prepared_time(work: Callable[[Any], Any], units: int, prepare: Callable[[], Any], least: float = 0.05) -> float:
    """The same for work that uses its state up: each run gets a fresh one, and making that is not timed."""
    runs, spent, clock = 0, 0.0, time.process_time
    while spent < least or runs < 3:
        state = prepare()
        began = clock()
        work(state)
        spent += clock() - began
        runs += 1
    return spent / runs / units * 1e6


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages of GPU servers that are not here: every name of theirs is a mock."""

    NAMES = ("sgl_kernel", "flashinfer", "torchvision", "torchaudio", "decord", "soundfile", "av", "pynvml", "torchao",
             "modelscope", "timm", "zmq", "tvm_ffi", "uvloop", "orjson", "fastapi", "openai", "msgspec", "xgrammar",
             "interegular", "IPython", "pybase64", "setproctitle", "partial_json_parser", "outlines", "llguidance",
             "compressed_tensors", "sentencepiece", "tiktoken", "aiohttp", "prompt_toolkit", "accelerate", "triton")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self.NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


# ---------------------------------------------------------------- the peers
def vllm_core() -> tuple[Callable[[int, bool], Any], Callable[[str, list[int]], Any]]:
    """How to make a manager (blocks, caching) and a request (name, tokens) of vLLM, with SHA-256 hashing."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_fn)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_fn)
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.float16)

    def manager(blocks: int, caching: bool) -> Any:
        config = KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[],
                               kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        return KVCacheManager(config, max_model_len=1 << 20, scheduler_block_size=BLOCK_SIZE,
                              hash_block_size=BLOCK_SIZE, enable_caching=caching)

    def request(name: str, tokens: list[int]) -> Any:
        return Request(name, tokens, SamplingParams(max_tokens=1 << 16), None, block_hasher=hasher)

    return manager, request


def vllm() -> Workloads:
    """The manager without prefix caching for allocation, with caching and SHA-256 hashing for decoding."""
    from kvlab.study.bench_index import vllm_lookups

    manager, request = vllm_core()
    work: Workloads = {}
    small = manager(POOL, False)
    for blocks in (32, 256):
        whole, tokens = request("r", list(range(blocks * BLOCK_SIZE))), blocks * BLOCK_SIZE
        work[f"blocks {blocks}"] = (lambda r=whole, n=tokens: (
            small.allocate_slots(r, n), small.take_new_block_ids(), small.free(r)), 1)
    large, batch = manager(400_000, True), [request(f"d{i}", list(range(i, i + 100))) for i in range(REQUESTS)]
    for r in batch:
        large.allocate_slots(r, 100)
        r.num_computed_tokens = 100

    def decode() -> None:
        for r in batch:
            r.append_output_token_ids(7)
            large.allocate_slots(r, 1)
            r.num_computed_tokens += 1
        large.take_new_block_ids()

    work["append"] = (decode, REQUESTS)
    return work | vllm_lookups(manager(1024, True), request)


def vllm_eviction() -> Workloads:
    """A request of 256 tokens nobody has seen, in a pool full of 50,000 cached ones: hash it, allocate (which evicts
    the oldest 16 blocks), free it; its blocks stay cached. Making the request object is not part of a turn."""
    manager, request = vllm_core()
    full, fresh = manager(CACHED * EVICT_TOKENS // BLOCK_SIZE, True), count(1)
    asked = request("r", [7] * EVICT_TOKENS)

    def turn() -> None:
        asked._all_token_ids[0] = next(fresh)
        asked.block_hashes.clear()
        asked.update_block_hashes()
        full.allocate_slots(asked, EVICT_TOKENS)
        full.take_new_block_ids()
        full.free(asked)

    for _ in range(CACHED):
        turn()
    gc.collect()
    gc.freeze()  # as its engine does when it has started
    return {f"turn {CACHED}": (turn, 1)}


def sglang() -> Workloads:
    """Decode as the pinned scheduler does it at page size 1: take a slot each, write them into the request table."""
    import torch
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    size = 4_000_000
    pool = TokenToKVPoolAllocator(size, torch.int64, "cpu", None, False)
    table = torch.zeros((REQUESTS, 1 << 13), dtype=torch.int32)
    rows, lengths = torch.arange(REQUESTS), torch.full((REQUESTS,), 100)

    def decode() -> None:
        slots = pool.alloc(REQUESTS)
        if slots is None or int(lengths[0]) > 8000:
            pool.clear()
            lengths.fill_(100)
            return
        table[rows, lengths] = slots.to(torch.int32)
        lengths.add_(1)

    return {"append": (decode, REQUESTS)}


def mini_sglang() -> Workloads:
    """The cache manager's own allocation and freeing of pages, without its page table."""
    import torch
    from minisgl.scheduler.cache import CacheManager

    table = torch.zeros((4, 1 << 14), dtype=torch.int32)
    manager = CacheManager(POOL, BLOCK_SIZE, table, "naive")
    return {f"blocks {n}": (lambda n=n: manager._free(manager._page_to_token(manager._allocate(n))), 1)
            for n in (32, 256)}


def smol_vllm() -> Workloads:
    """The whole block manager: tables, counts, a deque; no receipts, generations or hashes."""
    where = next(Path(p, "smol_vllm", "block_manager.py") for p in sys.path
                 if Path(p, "smol_vllm", "block_manager.py").is_file())
    spec = importlib.util.spec_from_file_location("smol_vllm_block_manager", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    manager = module.BlockSpaceManager(POOL, BLOCK_SIZE)
    return {f"blocks {n}": (lambda n=n: (manager.allocate(1, n * BLOCK_SIZE), manager.free(1)), 1) for n in (32, 256)}


PEERS: dict[str, Callable[[], Workloads]] = {
    "vLLM v0.23.0": vllm, "vLLM v0.23.0, full pool": vllm_eviction, "SGLang v0.5.11": sglang,
    "SGLang v0.5.11 tree": sglang_tree, "SGLang v0.5.11 C++ tree": sglang_cpp_tree, "mini-sglang": mini_sglang,
    "mini-sglang tree": mini_sglang_tree, "LightLLM tree": lightllm_tree, "smol-vllm": smol_vllm}


# ---------------------------------------------------------------- in a process of its own
class Peer:
    """A peer in its own process: ask it for one measurement at a time, so that ours can be taken in between."""

    def __init__(self, name: str) -> None:
        path = os.pathsep.join([*folders(), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvlab.study.peers", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=os.environ | {
                "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0"})
        self.why = ""
        for line in self._process.stdout:
            if line.startswith("kvlab:"):
                self.why = line[6:].strip()
                break
        else:
            self.why = "it ended without a word"

    def measure(self, workload: str) -> float:
        """Microseconds a unit, measured now; NaN where this peer has no such workload."""
        self._process.stdin.write(workload + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline() or math.nan)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def serve(name: str) -> Iterator[str]:
    """What the child says: first why it cannot, or nothing; then a number for each workload it is asked for."""
    if "vLLM" not in name:  # vLLM looks at the versions of what it imports, so it gets the real packages or none
        sys.meta_path.append(Absent())
    try:
        work = PEERS[name]()
    except Exception as error:  # whatever a peer's import raises, the bench goes on without it
        yield f"kvlab: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return
    yield "kvlab:"
    for line in sys.stdin:
        found = work.get(line.strip(), ())
        timed = {2: cpu_time, 3: prepared_time}.get(len(found))
        yield repr(timed(*found) if timed else math.nan)


if __name__ == "__main__":
    for said in serve(sys.argv[1]):
        print(said, flush=True)
