"""A child process of a test: plays a workload on vLLM v0.23.0's own KV cache manager and prints what it did, as JSON.

stdin: {"block_size", "blocks", "ops": [["start", name, tokens] | ["append", name, token] | ["end", name]]}.
stdout: one row an operation: null where it did not fit, else [tokens hit, block ids].
"""

from __future__ import annotations

import json
import sys


def manager_of(block_size: int, blocks: int):
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=16, dtype=torch.float16)
    config = KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
    return KVCacheManager(config, max_model_len=1 << 20, scheduler_block_size=block_size, hash_block_size=block_size)


def play(block_size: int, blocks: int, ops: list) -> list:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_fn)
    hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_fn)
    manager, live, said = manager_of(block_size, blocks), {}, []
    for word, name, *rest in ops:
        hit, fits = 0, True
        if word == "start":
            request = Request(name, rest[0], SamplingParams(max_tokens=1 << 16), None, block_hasher=hasher)
            found, hit = manager.get_computed_blocks(request)
            fits = manager.allocate_slots(request, len(rest[0]) - hit, hit, found) is not None
            if fits:
                live[name] = request
                request.num_computed_tokens = len(rest[0])
        elif name in live and word == "append":
            request = live[name]
            free = manager.block_pool.get_num_free_blocks()
            if request.num_tokens % block_size == 0 and not free:
                fits = False
            else:
                request.append_output_token_ids(rest[0])
                manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
        elif name in live:
            manager.free(live.pop(name))
        ids = manager.get_block_ids(name)[0] if name in live else []
        said.append([hit, list(ids)] if fits else None)
    return said


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print("kvlab:" + json.dumps(play(**asked)))
