"""The compatibility gate: every equality-bearing field, one after another, first difference wins; it looks nothing up.

The order is the article's (0x01A). It is also the log: each check writes its name down before it compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvlab.contract import Json, Rejected
from kvlab.reuse.manifests import CacheCompatibilityManifest, LayoutIdentity, covered

Manifest = CacheCompatibilityManifest
Layouts = Mapping[str, LayoutIdentity]

EQUALITY = {
    "cache_abi_sha256": "cache_abi_mismatch",
    "cache_layout_sha256": "layout_mismatch",
    "model_generation": "model_generation_mismatch",
    "adapter_identity": "adapter_mismatch",
    "weight_transform_identity": "weight_transform_mismatch",
    "position_contract_sha256": "position_contract_mismatch",
    "covered_token_ids": "covered_token_mismatch",
    "input_side_data_identity": "multimodal_feature_mismatch",
    "cache_isolation_namespace": "namespace_mismatch",
    "namespace_generation": "stale_namespace_generation",
    "cache_salt": "cache_salt_mismatch",
    "publication_generation": "stale_publication_generation",
}
"""Field -> reason, in the order of comparison. The namespace's generation is our addition: the article's manifest
holds it, its printed predicate does not compare it."""

LAYOUT_DETAILS = (
    (("axis_order", "stride_identity"), "axis_stride_mismatch"),
    (("storage_dtype",), "storage_dtype_mismatch"),
    (("quantization_schema",), "quantization_schema_mismatch"),
    (("tp_world_size", "tp_rank"), "tp_rank_mismatch"),
    (("cache_group_id", "layer_interval", "kv_heads_local", "head_dim"), "cache_group_mismatch"),
    (("model_generation",), "model_generation_mismatch"),
    (("position_contract_identity",), "position_contract_mismatch"),
    (("logical_cache_abi_sha256",), "cache_abi_mismatch"),
)
"""What two different layout digests are refused with: the first of these that differs, else `layout_mismatch`."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison that was made: the field, both values as they were compared, whether they agreed."""

    field: str
    producer: Any
    consumer: Any
    held: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found: the checks really made, in order, and the reason of the last where it did not hold."""

    checks: tuple[Check, ...]
    reason: str = ""
    detail: str = ""

    @property
    def compatible(self) -> bool:
        return not self.reason

    @property
    def ran(self) -> tuple[str, ...]:
        """The log: names of the checks that were made, in the order in which they were made."""
        return tuple(check.field for check in self.checks)

    def to_dict(self) -> Json:
        return {"compatible": self.compatible, "ran": list(self.ran), "field": "" if self.compatible else self.ran[-1],
                "reason": self.reason, "detail": self.detail}


def examine(producer: Manifest, consumer: Manifest, layouts: Layouts) -> Verdict:
    """May rows published under `producer` be read under `consumer`? Never raises: the verdict says why not.

    Tokens and side inputs are compared on what the producer covers; the consumer's prompt may be longer. Cost:
    one comparison of precomputed digests a field, O(covered tokens + side inputs) for the inputs.
    """
    checks: list[Check] = []
    tokens = len(producer.covered_token_ids)
    for name, reason in EQUALITY.items():
        ours, theirs = _value(producer, name, tokens), _value(consumer, name, tokens)
        checks.append(Check(name, ours, theirs, ours == theirs))
        if ours != theirs:
            return Verdict(tuple(checks), *_why(name, reason, ours, theirs, layouts))
    return Verdict(tuple(checks))


def require(producer: Manifest, consumer: Manifest, layouts: Layouts) -> Verdict:
    """As `examine`, but a difference is `Rejected` with its own reason."""
    verdict = examine(producer, consumer, layouts)
    if not verdict.compatible:
        raise Rejected(verdict.reason, verdict.detail)
    return verdict


def _value(manifest: Manifest, name: str, tokens: int) -> Any:
    if name == "covered_token_ids":
        return covered(manifest, tokens)[0]
    if name == "input_side_data_identity":
        return covered(manifest, tokens)[1]
    return getattr(manifest, name)


def _why(name: str, reason: str, ours: Any, theirs: Any, layouts: Layouts) -> tuple[str, str]:
    if name == "cache_layout_sha256":
        return refine(layouts.get(ours), layouts.get(theirs))
    if name == "covered_token_ids":
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), len(theirs))
        other = f"the consumer has {theirs[at]}" if at < len(theirs) else "the consumer's prompt ends before it"
        return reason, f"token {at} is {ours[at]}, {other}"
    if name == "input_side_data_identity":
        pictures = [[s for s in sides if s.kind == "multimodal"] for sides in (ours, theirs)]
        if pictures[0] == pictures[1]:
            return "prompt_embedding_mismatch", "the rows that stand for the same placeholder tokens differ"
        return reason, "the items that stand for the same placeholder tokens differ, or begin elsewhere"
    return reason, f"produced under {_short(ours)}, wanted under {_short(theirs)}"


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def refine(ours: LayoutIdentity | None, theirs: LayoutIdentity | None) -> tuple[str, str]:
    """Which difference makes two layouts different, by its own reason; `layout_mismatch` where none has a name."""
    if ours is None or theirs is None:
        return "layout_mismatch", "no layout with this digest was ever declared here"
    differ = {f.name for f in fields(LayoutIdentity) if f.init and getattr(ours, f.name) != getattr(theirs, f.name)}
    if "cache_groups" in differ:
        if len(ours.cache_groups) != len(theirs.cache_groups):
            return "cache_group_mismatch", f"{len(ours.cache_groups)} groups and {len(theirs.cache_groups)}"
        for one, other in zip(ours.cache_groups, theirs.cache_groups, strict=True):
            differ |= {f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)}
    for names, reason in LAYOUT_DETAILS:
        if found := [name for name in names if name in differ]:
            return reason, f"the layouts differ in {', '.join(found)}"
    return "layout_mismatch", f"the layouts differ in {', '.join(sorted(differ - {'cache_groups'}))}"
