"""The identity records with their different writers, frozen and digested; they compare nothing and grant nothing.

    LogicalCacheABI              the model's owner (M5.1)    what a K/V row means
    LayoutIdentity               the allocator's owner       how its bytes are addressed
    CacheCompatibilityManifest   the publication             may old K/V be reused
    CacheIsolationNamespace      the deployment              who may even look
    ConcretePrefixKey            the index                   which candidate to look at  (`kvlab.reuse.keys`)

A changed field is another digest, so another record: nothing published is ever edited (article 0x01A).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from kvlab.contract import Json, digest_of
from kvlab.memory.layout import AXES, CacheGroup, CacheLayoutManifest

Record = TypeVar("Record")

PHYSICAL_MODES = ("rectangular", "paged_blocks", "virtual_pages")
PUBLICATION_POLICIES = ("full_blocks",)
SIDE_INPUTS = ("multimodal", "prompt_embedding")
PROVENANCE = ("tokenizer_revision", "chat_template_revision", "request_id", "sampling_and_stopping_policy")
"""Recorded for audit and replay; they decide nothing, because none of them can change a row that exists."""


def _words(record: Any, *names: str) -> None:
    for name in names:
        if not isinstance(value := getattr(record, name), str) or not value:
            raise ValueError(f"{type(record).__name__}: {name} must be a word, not {value!r}")


def _digests(record: Any, *names: str) -> None:
    for name in names:
        if not re.fullmatch(r"[0-9a-f]{64}", str(value := getattr(record, name))):
            raise ValueError(f"{type(record).__name__}: {name} must be a SHA-256 in hex, not {value!r}")


def _wholes(record: Any, low: int, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{type(record).__name__}: {name} must be a whole number from {low}, not {value!r}")


def _set(record: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(record, name, value)


def read_record(kind: type[Record], data: Json) -> Record:
    """A record from its plain form, with exactly its fields; ValueError names what is missing or too many."""
    names = {f.name for f in fields(kind) if f.init}
    if not isinstance(data, Mapping) or data.keys() != names:
        odd = sorted(names ^ data.keys()) if isinstance(data, Mapping) else data
        raise ValueError(f"{kind.__name__}: these fields are missing or unknown: {odd}")
    return kind(**data)


def plain(record: Any) -> Json:
    """The plain form of a record: its fields, tuples as lists, records inside it likewise."""
    return {f.name: _plain(getattr(record, f.name)) for f in fields(record) if f.init}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return plain(value) if hasattr(value, "__dataclass_fields__") else value


# ---------------------------------------------------------------- what a row means
@dataclass(frozen=True, slots=True)
class LogicalCacheABI:
    """What one K/V row means, whoever stores it; `digest` is the `cache_abi_sha256` that others consume.

    M5.1 derives it. Weights, adapter, transforms and positions have fields of their own in the compatibility
    manifest and stay out of it here, so that a change there is refused by its own name (our choice).
    """

    schema_version: int
    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    key_rows: str
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _words(self, "architecture", "key_rows")
        _wholes(self, 1, "schema_version", "layers", "kv_heads", "head_dim")
        _set(self, digest=digest_of(plain(self)))


@dataclass(frozen=True, slots=True)
class PositionContract:
    """How a row got its position: two rows of one token under another contract are different keys.

    `first_position` is the position of the first covered token: a prefix that begins elsewhere is another one.
    """

    scheme: str
    theta: float
    pairing: str
    first_position: int
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _words(self, "scheme", "pairing")
        _wholes(self, 0, "first_position")
        _set(self, digest=digest_of(plain(self)))


# ---------------------------------------------------------------- how its bytes are addressed
@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """What must be known to read one cache group's bytes. `layer_interval` is half open, sizes count elements.

    `stride_identity` is the digest of the five strides, which `kvlab.memory.layout.CacheGroup` computes.
    """

    cache_group_id: str
    layer_interval: tuple[int, int]
    kv_heads_local: int
    head_dim: int
    storage_dtype: str
    axis_order: tuple[str, ...]
    stride_identity: str

    def __post_init__(self) -> None:
        _set(self, layer_interval=tuple(self.layer_interval), axis_order=tuple(self.axis_order))
        _words(self, "cache_group_id", "storage_dtype")
        _wholes(self, 1, "kv_heads_local", "head_dim")
        _digests(self, "stride_identity")
        first, end = self.layer_interval
        if not 0 <= first < end or sorted(self.axis_order) != sorted(AXES):
            raise ValueError(f"cache group {self.cache_group_id}: a layer interval and the {len(AXES)} axes are wanted")

    @classmethod
    def of(cls, group: CacheGroup, storage_dtype: str) -> GroupIdentity:
        """The identity of a group that memory has laid out."""
        return cls(group.group_id, (group.layer_start, group.layer_end), group.kv_heads, group.head_dim,
                   storage_dtype, group.axis_order, digest_of(group.strides()))


@dataclass(frozen=True, slots=True)
class LayoutIdentity:
    """The article's CacheLayoutManifest: what freezes how every later block table is to be read.

    `kvlab.memory.layout.CacheLayoutManifest` is its geometry; this record adds what makes two equal geometries
    different: dtype, quantiser, rank, model generation, positions. Exactly one of `token_block_size` (tokens) and
    `physical_page_bytes` is set, the second where `physical_mode` is virtual_pages. `hash_block_size` (tokens)
    need not be the block size. ValueError for anything malformed.
    """

    schema_version: int
    manifest_id: str
    logical_cache_abi_sha256: str
    model_generation: str
    cache_groups: tuple[GroupIdentity, ...]
    physical_mode: str
    token_block_size: int | None
    physical_page_bytes: int | None
    scheduler_block_size: int
    hash_block_size: int
    tp_world_size: int
    tp_rank: int
    quantization_schema: str | None
    position_contract_identity: str
    allocator_revision: str
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        groups = tuple(g if isinstance(g, GroupIdentity) else read_record(GroupIdentity, g) for g in self.cache_groups)
        _set(self, cache_groups=groups)
        _words(self, "manifest_id", "model_generation", "allocator_revision")
        _digests(self, "logical_cache_abi_sha256", "position_contract_identity")
        _wholes(self, 1, "schema_version", "scheduler_block_size", "hash_block_size", "tp_world_size")
        _wholes(self, 0, "tp_rank")
        if self.physical_mode not in PHYSICAL_MODES:
            raise ValueError(f"physical_mode is one of {', '.join(PHYSICAL_MODES)}, not {self.physical_mode!r}")
        size, other = ("physical_page_bytes", self.token_block_size) if self.physical_mode == "virtual_pages" else (
            "token_block_size", self.physical_page_bytes)
        _wholes(self, 1, size)
        if other is not None or self.tp_rank >= self.tp_world_size or not groups:
            raise ValueError(f"{self.physical_mode} is sized by {size} alone, for a rank below {self.tp_world_size}")
        if len({g.cache_group_id for g in groups}) < len(groups):
            raise ValueError("cache groups need distinct ids")
        if self.quantization_schema is not None:
            _words(self, "quantization_schema")
        _set(self, digest=digest_of(plain(self)))

    @classmethod
    def paged(cls, layout: CacheLayoutManifest, storage_dtype: str, *, abi: LogicalCacheABI,
              positions: PositionContract, manifest_id: str, model_generation: str, tp_world_size: int = 1,
              tp_rank: int = 0, quantization_schema: str | None = None) -> LayoutIdentity:
        """The identity of a paged layout that memory made; all three block sizes are its block size."""
        size = layout.groups[0].block_size
        return cls(1, manifest_id, abi.digest, model_generation,
                   tuple(GroupIdentity.of(g, storage_dtype) for g in layout.groups), "paged_blocks", size, None, size,
                   size, tp_world_size, tp_rank, quantization_schema, positions.digest, "kvlab-allocator/1")


# ---------------------------------------------------------------- may it be reused
@dataclass(frozen=True, slots=True)
class SideInput:
    """An input beside the token ids: the tokens `[start, start + length)` are placeholders for it.

    `kind` multimodal: one picture or sound, one identity however many placeholders. `kind` prompt_embedding: one
    row each (length 1), so that a covered interval can cut between two rows. Identities come from
    `kvlab.reuse.keys.tensor_identity`.
    """

    kind: str
    start: int
    length: int
    identity: str

    def __post_init__(self) -> None:
        _words(self, "identity")
        _wholes(self, 0, "start")
        _wholes(self, 1, "length")
        if self.kind not in SIDE_INPUTS or (self.kind == "prompt_embedding" and self.length > 1):
            raise ValueError(f"a side input is multimodal, or one row of a prompt embedding, not {self.kind!r}")


@dataclass(frozen=True, slots=True)
class CacheCompatibilityManifest:
    """What a producer published its rows under, or a consumer wants to read them under.

    The last four fields are provenance. `digest` covers the others: it is the identity of the rows.
    `record_sha256` covers all: it is the identity of this very record.
    """

    cache_abi_sha256: str
    cache_layout_sha256: str
    model_generation: str
    adapter_identity: str
    weight_transform_identity: str
    position_contract_sha256: str
    covered_token_ids: tuple[int, ...]
    input_side_data_identity: tuple[SideInput, ...]
    cache_isolation_namespace: str
    namespace_generation: int
    cache_salt: str | None
    publication_generation: int
    tokenizer_revision: str
    chat_template_revision: str
    request_id: str
    sampling_and_stopping_policy: str
    digest: str = field(init=False, repr=False)
    record_sha256: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sides = [s if isinstance(s, SideInput) else read_record(SideInput, s) for s in self.input_side_data_identity]
        _set(self, covered_token_ids=tuple(self.covered_token_ids),
             input_side_data_identity=tuple(sorted(sides, key=lambda s: (s.start, s.kind, s.length, s.identity))))
        _digests(self, "cache_abi_sha256", "cache_layout_sha256", "position_contract_sha256")
        _words(self, "model_generation", "adapter_identity", "weight_transform_identity", "cache_isolation_namespace",
               *PROVENANCE)
        _wholes(self, 1, "namespace_generation", "publication_generation")
        if self.cache_salt is not None:
            _words(self, "cache_salt")
        if not all(type(t) is int and t >= 0 for t in self.covered_token_ids):
            raise ValueError("covered_token_ids are whole numbers")
        whole = plain(self)
        _set(self, digest=digest_of({k: v for k, v in whole.items() if k not in PROVENANCE}),
             record_sha256=digest_of(whole))


# ---------------------------------------------------------------- who may even look
@dataclass(frozen=True, slots=True)
class CacheIsolationNamespace:
    """Whose cache this is, and which generation of it. `name` is what manifests carry: cluster/tenant."""

    cluster_namespace: str
    tenant: str
    namespace_generation: int
    cache_salt: str | None
    model_cache_generation: int
    publication_policy: str

    def __post_init__(self) -> None:
        _words(self, "cluster_namespace", "tenant")
        _wholes(self, 1, "namespace_generation", "model_cache_generation")
        if self.cache_salt is not None:
            _words(self, "cache_salt")
        if self.publication_policy not in PUBLICATION_POLICIES:
            raise ValueError(f"publication_policy is {' or '.join(PUBLICATION_POLICIES)}")

    @property
    def name(self) -> str:
        return f"{self.cluster_namespace}/{self.tenant}"


def covered(manifest: CacheCompatibilityManifest, tokens: int) -> tuple[tuple[int, ...], tuple[SideInput, ...]]:
    """What of a manifest's inputs reaches into its first `tokens` tokens. O(tokens + side inputs)."""
    sides: Sequence[SideInput] = manifest.input_side_data_identity
    return manifest.covered_token_ids[:tokens], tuple(s for s in sides if s.start < tokens)
