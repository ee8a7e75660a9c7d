"""Other engines' radix trees as workloads to be timed in a process of their own; never a dependency of the package.

It owns no measurement: `kvlab.study.peers` runs it, `kvlab.study.bench_radix` and `bench_turns` compare.

Trees: SGLang v0.5.11's in Python and in C++ (built from its sources), mini-sglang's, LightLLM's. Each behind the same
four calls (`Tree`), so that they are all asked for the same work.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

UNUSED = ("mem_cache.allocator", "mem_cache.memory_pool", "observability.metrics_collector", "disaggregation.kv_events")
"""Modules that SGLang's tree imports for their types only, and that drag the GPU stack in."""

BLOCK_SIZE = 16
LENGTHS = (4_096, 32_768)
EVICT_TOKENS = 256
CHATS, TURNS, SYSTEM_TOKENS = 16, 8, 512
Work = dict[str, tuple]
"""Name -> (one run, its units), or (one run, its units, what prepares what it runs on)."""


# ---------------------------------------------------------------- what is asked of every tree
def prompt(tokens: int) -> list[int]:
    """A prompt without repetition."""
    return list(range(1, tokens + 1))


def queries(tokens: int) -> dict[str, list[int]]:
    """The cached prompt, one that leaves it half way, one that never meets it."""
    whole = prompt(tokens)
    return {"full": whole, "half": [*whole[: tokens // 2], *[0] * (tokens - tokens // 2)], "miss": [0] * tokens}


def chat_turns() -> list[tuple[list[int], int]]:
    """Chats that grow: for each request the tokens after its answer, and how many of them are its prompt.

    One system prompt for all; 40-160 tokens from the user and 80-240 in the answer, a turn. The chats take turns.
    """
    rng = random.Random(7)
    system = [rng.randrange(1, 50_000) for _ in range(SYSTEM_TOKENS)]
    chats, asked = [list(system) for _ in range(CHATS)], []
    for _ in range(TURNS):
        for i in range(CHATS):
            said = chats[i] + [rng.randrange(1, 50_000) for _ in range(rng.randrange(40, 161))]
            chats[i] = said + [rng.randrange(1, 50_000) for _ in range(rng.randrange(80, 241))]
            asked.append((chats[i], len(said)))
    return asked


class Stock:
    """Token slots in whole blocks for a peer: a slice takes, and what came back is joined when the slice is used up."""

    def __init__(self, tokens: int) -> None:
        import torch

        self._cat, self._free, self._back = torch.cat, torch.arange(tokens), []

    def take(self, tokens: int) -> Any:
        if len(self._free) < tokens:
            self._free, self._back = self._cat([self._free, *self._back]), []
        taken, self._free = self._free[:tokens], self._free[tokens:]
        return taken

    def give(self, slots: Any) -> None:
        if len(slots):
            self._back.append(slots)


@dataclass(frozen=True, slots=True)
class Tree:
    """A peer's tree. A key is a `key(list)`; slots are a tensor with one a token.

    `match(key)` -> (slots of the cached prefix, node), `insert(key, slots)` -> how many tokens were there already.
    """

    key: Callable[[list[int]], Any]
    match: Callable[[Any], tuple[Any, Any]]
    lock: Callable[[Any], Any]
    unlock: Callable[[Any], Any]
    insert: Callable[[Any, Any], int]


def matches(make: Callable[[int], Tree]) -> Work:
    """`match N kind`: the slots of a cached prompt, of one that leaves it half way, of a stranger."""
    import torch

    work: Work = {}
    for tokens in LENGTHS:
        tree = make(BLOCK_SIZE)
        tree.insert(tree.key(prompt(tokens)), torch.arange(tokens))
        for kind, query in queries(tokens).items():
            key = tree.key(query)
            tree.match(key)
            work[f"match {tokens} {kind}"] = (lambda t=tree, k=key: t.match(k), 1)
    return work


def turns(make: Callable[[int], Tree], block_sizes: tuple[int, ...] = (16, 1)) -> Work:
    """`turns B`: every request of `chat_turns` on an empty tree, the engines' own sequence for a finished request.

    Match the prompt, lock its node, take slots for the rest and the answer, insert the whole blocks, give duplicates
    and the tail back, unlock. Neither making the keys nor the empty tree is timed.
    """
    asked = chat_turns()
    room = 2 * sum(len(tokens) for tokens, _ in asked[-CHATS:])

    def run(state: tuple[Tree, Stock, list]) -> None:
        (tree, stock, rows), cat = state, stock_cat
        for whole, said, full, aligned, rounded in rows:
            found, node = tree.match(said)
            tree.lock(node)
            held = len(found)
            slots = cat((found, stock.take(rounded - held)))
            there = tree.insert(whole[:aligned] if aligned < full else whole, slots[:aligned])
            stock.give(slots[held:there])
            stock.give(slots[aligned:])
            tree.unlock(node)

    def prepare(size: int) -> tuple[Tree, Stock, list]:
        tree = make(size)
        rows = [(tree.key(t), tree.key(t[:said]), len(t), len(t) // size * size, -(-len(t) // size) * size)
                for t, said in asked]
        return tree, Stock(room), rows

    import torch

    stock_cat = torch.cat
    return {f"turns {size}": (run, len(asked), lambda size=size: prepare(size)) for size in block_sizes}


# ---------------------------------------------------------------- SGLang in Python
def sglang_tree() -> Work:
    """SGLang v0.5.11's Python tree: match by list, turns of chats, evict and insert 256 tokens at 1,000 leaves."""
    sys.modules.update({f"sglang.srt.{name}": MagicMock() for name in UNUSED})
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    def core(block_size: int) -> Any:
        pool = SimpleNamespace(device="cpu", free=lambda slots: None)
        return RadixCache(CacheInitParams(disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=pool,
                                          page_size=block_size))

    def insert(cache: Any, tokens: list[int], slots: Any) -> int:
        return cache.insert(InsertParams(key=RadixKey(tokens, None), value=slots)).prefix_len

    def tree(block_size: int) -> Tree:
        cache = core(block_size)

        def match(tokens: list[int]) -> tuple[Any, Any]:
            found = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None)))
            return found.device_indices, found.last_device_node

        return Tree(list, match, cache.inc_lock_ref, cache.dec_lock_ref, lambda t, s: insert(cache, t, s))

    small, fresh = core(BLOCK_SIZE), count(1)

    def turn() -> None:
        small.evict(EvictParams(num_tokens=EVICT_TOKENS))
        insert(small, [next(fresh), *[7] * (EVICT_TOKENS - 1)], torch.arange(EVICT_TOKENS))

    for _ in range(1_000):
        insert(small, [next(fresh), *[7] * (EVICT_TOKENS - 1)], torch.arange(EVICT_TOKENS))
    return matches(tree) | turns(tree) | {"turn 1000": (turn, 1)}


# ---------------------------------------------------------------- SGLang in C++
CPP_FOLDER = "sglang/srt/mem_cache/cpp_radix_tree"
CPP_FILES = ("tree_v2_binding.cpp", "tree_v2_debug.cpp", "tree_v2.cpp")


@cache
def built(name: str) -> Path:
    """A folder for what this user compiles, one for each torch; it stays, so that the next run need not compile."""
    import torch

    folder = Path(tempfile.gettempdir(), f"kvlab-peers-{os.getuid()}-torch-{torch.__version__}", name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder.parent.name} belongs to somebody else")
    return folder


def sglang_cpp_module() -> ModuleType:
    """The C++ tree, compiled with the flags that its own loader gives. About 90 s of one core the first time."""
    home = next((p for p in (Path(q, CPP_FOLDER) for q in sys.path) if all((p / f).is_file() for f in CPP_FILES)), None)
    if home is None:
        raise ModuleNotFoundError(f"no sources in {CPP_FOLDER}")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None or shutil.which("ninja") is None:
        raise FileNotFoundError(f"it has to be compiled, and {compiler} or ninja is not here")
    from torch.utils.cpp_extension import load

    return load("radix_tree_cpp", [str(home / name) for name in CPP_FILES], extra_cflags=["-O3", "-std=c++20"],
                build_directory=str(built("sglang-cpp")))


def sglang_cpp_tree() -> Work:
    """SGLang v0.5.11's C++ tree, called as its `RadixCacheCpp` calls it: lists in, tensors joined on the way out."""
    module = sglang_cpp_module()
    import torch

    nothing = torch.empty(0, dtype=torch.int64)

    def tree(block_size: int) -> Tree:
        cache = module.RadixTree(False, None, block_size, 2)

        def match(tokens: list[int]) -> tuple[Any, int]:
            parts, _, node, _ = cache.match_prefix(tokens)
            return (parts[0] if len(parts) == 1 else torch.cat(parts) if parts else nothing), node

        return Tree(list, match, lambda n: cache.lock_ref(n, True), lambda n: cache.lock_ref(n, False),
                    lambda tokens, slots: cache.writing_through(tokens, slots)[1])

    return matches(tree) | turns(tree)


# ---------------------------------------------------------------- mini-sglang and LightLLM
def mini_sglang_tree() -> Work:
    """mini-sglang's prefix cache; its keys are ready int32 tensors, as its requests keep them."""
    from minisgl.kvcache import radix_cache

    os.environ["TVM_FFI_CACHE_DIR"] = str(built("mini-sglang"))  # where it compiles its comparison, on first use
    import torch

    def tree(block_size: int) -> Tree:
        radix_cache.get_global_ctx = lambda: SimpleNamespace(page_size=block_size)
        cache = radix_cache.RadixPrefixCache(torch.device("cpu"))

        def match(ids: Any) -> tuple[Any, Any]:
            handle = cache.match_prefix(ids).cuda_handle
            return (handle.get_matched_indices() if handle.cached_len else cache.empty_tensor), handle

        return Tree(lambda tokens: torch.tensor(tokens, dtype=torch.int32), match, cache.lock_handle,
                    lambda handle: cache.lock_handle(handle, unlock=True),
                    lambda ids, slots: cache.insert_prefix(ids, slots).cached_len)

    return matches(tree) | turns(tree)


class HeldArray:
    """What LightLLM keeps in shared memory, in this process."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        import numpy as np

        self.arr = np.zeros(shape, dtype)


def lightllm_tree() -> Work:
    """LightLLM's tree, at its only block size 1; ready int64 tensors as keys, its match locks what it finds."""
    here = "lightllm.server.router.dynamic_prompt"
    sys.modules |= {"lightllm.common.mem_manager": MagicMock(), f"{here}.shared_arr": MagicMock(SharedArray=HeldArray)}
    import torch
    from lightllm.server.router.dynamic_prompt.radix_cache import RadixCache

    nothing = torch.empty(0, dtype=torch.int64)

    def tree(block_size: int) -> Tree:
        cache = RadixCache("bench", 1 << 20, 0)

        def match(ids: Any) -> tuple[Any, Any]:
            node, _, slots = cache.match_prefix(ids, update_refs=True)
            return (nothing if slots is None else slots), node

        return Tree(lambda tokens: torch.tensor(tokens, dtype=torch.int64), match, lambda node: None,
                    cache.dec_node_ref_counter, cache.insert)

    return turns(tree, (1,))
