"""An index for one tenant of one model, opened in one call; it owns no rule: gate and manifest are the real ones.

For engines, replays and benchmarks, which have nobody to keep apart and still go through the same door.
"""

from __future__ import annotations

from typing import Any

from kvlab.memory.allocator import Allocator
from kvlab.reuse.identity import IdentityGate
from kvlab.reuse.manifests import (
    CacheCompatibilityManifest,
    CacheIsolationNamespace,
    LayoutIdentity,
    LogicalCacheABI,
    PositionContract,
    plain,
)
from kvlab.reuse.prefix_cache import PrefixCache
from kvlab.reuse.prefix_lookup import Asker

DTYPES = {1: "FP8", 2: "FP16", 4: "FP32"}


def one_tenant(allocator: Allocator, *, model_generation: str = "model", **design: Any) -> tuple[PrefixCache, Asker]:
    """A prefix index over an allocator, and the one who may ask it. `design` as for `PrefixCache`. O(groups)."""
    groups = allocator.groups
    abi = LogicalCacheABI(1, "decoder", groups[-1].layer_end, groups[0].kv_heads, groups[0].head_dim, "after RoPE")
    positions = PositionContract("rope", 10_000.0, "half", 0)
    layout = LayoutIdentity.paged(allocator.layout, DTYPES[groups[0].scalar_bytes], abi=abi, positions=positions,
                                  manifest_id="only", model_generation=model_generation)
    space = CacheIsolationNamespace("local", "only", 1, None, 1, "full_blocks")
    gate = IdentityGate()
    gate.apply({"op": "create", "namespace": plain(space), "members": ["owner"], "abis": [plain(abi)],
                "layouts": [plain(layout)]})
    gate.authorize("owner", space.name)
    manifest = CacheCompatibilityManifest(
        abi.digest, layout.digest, model_generation, "none", "none", positions.digest, (), (), space.name, 1, None, 1,
        "any", "any", "any", "any")
    return PrefixCache(allocator, gate, **design), Asker("owner", space.name, manifest)
