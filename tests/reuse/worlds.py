"""A small valid gate and manifests for tests: two tenants, one published record, and one change for every field."""

from __future__ import annotations

from dataclasses import replace

from kvlab.contract import digest_of
from kvlab.memory.layout import BLOCK_MAJOR, CacheLayoutManifest, quarter_split
from kvlab.reuse.identity import IdentityGate
from kvlab.reuse.manifests import (
    CacheCompatibilityManifest,
    CacheIsolationNamespace,
    LayoutIdentity,
    LogicalCacheABI,
    PositionContract,
    SideInput,
    plain,
)

ABI = LogicalCacheABI(1, "llama", 4, 2, 8, "after RoPE")
POSITIONS = PositionContract("rope", 10_000.0, "half", 0)


def geometry(axis_order=None) -> CacheLayoutManifest:
    more = {"axis_order": axis_order} if axis_order else {}
    return quarter_split(4, 2, 8, 2, block_size=4, num_blocks=6, **more)


def identity(manifest_id="rank0", *, axis_order=None, dtype="FP16", **more) -> LayoutIdentity:
    made = {"abi": ABI, "positions": POSITIONS, "manifest_id": manifest_id, "model_generation": "weights-1",
            "tp_world_size": 2} | more
    return LayoutIdentity.paged(geometry(axis_order), dtype, **made)


RANK0 = identity()
OTHERS = {
    "axis_stride_mismatch": identity("block-major", axis_order=BLOCK_MAJOR),
    "storage_dtype_mismatch": identity("bf16", dtype="BF16"),
    "quantization_schema_mismatch": identity("int8", quantization_schema="int8"),
    "tp_rank_mismatch": identity("rank1", tp_rank=1),
    "cache_group_mismatch": replace(RANK0, manifest_id="renamed", cache_groups=tuple(
        replace(g, cache_group_id=f"x{g.cache_group_id}") for g in RANK0.cache_groups)),
    "layout_mismatch": replace(RANK0, manifest_id="scheduler", scheduler_block_size=8),
}
LAYOUTS = {layout.digest: layout for layout in (RANK0, *OTHERS.values())}
SIDES = (SideInput("multimodal", 1, 2, "picture x"), SideInput("prompt_embedding", 5, 1, "row 1"))


def manifest(**changes) -> CacheCompatibilityManifest:
    """Eight covered tokens of tenant a, a picture behind two of them, an embedding row behind another."""
    return CacheCompatibilityManifest(**{
        "cache_abi_sha256": ABI.digest, "cache_layout_sha256": RANK0.digest, "model_generation": "weights-1",
        "adapter_identity": "none", "weight_transform_identity": "none", "position_contract_sha256": POSITIONS.digest,
        "covered_token_ids": (5, 7, 7, 6, 1, 0, 2, 3), "input_side_data_identity": SIDES,
        "cache_isolation_namespace": "prod/a", "namespace_generation": 1, "cache_salt": "salt",
        "publication_generation": 1, "tokenizer_revision": "tok-1", "chat_template_revision": "chat-1",
        "request_id": "p1", "sampling_and_stopping_policy": "greedy"} | changes)


CHANGES = {
    "cache_abi_sha256": (digest_of("another"), "cache_abi_mismatch"),
    "cache_layout_sha256": (OTHERS["tp_rank_mismatch"].digest, "tp_rank_mismatch"),
    "model_generation": ("weights-2", "model_generation_mismatch"),
    "adapter_identity": ("adapter-2", "adapter_mismatch"),
    "weight_transform_identity": ("smoothed", "weight_transform_mismatch"),
    "position_contract_sha256": (digest_of("shifted"), "position_contract_mismatch"),
    "covered_token_ids": ((5, 7, 7, 6, 1, 0, 2, 9), "covered_token_mismatch"),
    "input_side_data_identity": ((replace(SIDES[0], identity="picture y"), SIDES[1]), "multimodal_feature_mismatch"),
    "cache_isolation_namespace": ("prod/b", "namespace_mismatch"),
    "namespace_generation": (2, "stale_namespace_generation"),
    "cache_salt": (None, "cache_salt_mismatch"),
    "publication_generation": (2, "stale_publication_generation"),
}
"""One change for every field that decides, and the reason it must be refused with: written by hand."""


def space(tenant="a", salt="salt") -> CacheIsolationNamespace:
    return CacheIsolationNamespace("prod", tenant, 1, salt, 1, "full_blocks")


def gate(hash_name="sha256", layouts=(RANK0, OTHERS["tp_rank_mismatch"])) -> IdentityGate:
    """Tenants a (ann, amy) and b (bob); nothing authorised, nothing published."""
    made = IdentityGate(hash_name)
    for tenant, members in (("a", ["ann", "amy"]), ("b", ["bob"])):
        made.apply({"op": "create", "namespace": plain(space(tenant)), "members": members, "abis": [plain(ABI)],
                    "layouts": [plain(layout) for layout in layouts]})
    return made


def published(**more) -> tuple[IdentityGate, object]:
    """A gate with p1's record under handle g0/1000@1, and Ann's grant."""
    made = gate(**more)
    grant = made.authorize("ann", "prod/a")
    made.publish(grant, "g0/1000@1", "g0", manifest())
    return made, grant
