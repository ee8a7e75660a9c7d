"""The gate between two manifests: each field has its reason, the first in order wins, provenance never decides."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.contract import Rejected
from kvlab.reuse.compatibility import examine, require
from kvlab.reuse.manifests import PROVENANCE, LayoutIdentity, SideInput
from tests.reuse.worlds import CHANGES, LAYOUTS, OTHERS, RANK0, SIDES, identity, manifest

ORDER = list(CHANGES)
quick = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("name", ORDER)
def test_one_changed_field_is_another_digest_and_refused_by_its_own_reason(name):
    value, reason = CHANGES[name]
    consumer = manifest(**{name: value})
    verdict = examine(manifest(), consumer, LAYOUTS)
    assert consumer.digest != manifest().digest
    assert (verdict.reason, verdict.ran[-1]) == (reason, name)
    assert verdict.ran == tuple(ORDER[: ORDER.index(name) + 1])
    with pytest.raises(Rejected) as refused:
        require(manifest(), consumer, LAYOUTS)
    assert refused.value.reason == reason


@quick
@given(st.permutations(ORDER), st.integers(1, len(ORDER)), st.sampled_from([(), PROVENANCE]))
def test_whatever_else_changed_the_first_in_order_wins(names, how_many, noise):
    chosen = names[:how_many]
    consumer = manifest()
    for name in chosen:
        consumer = replace(consumer, **{name: CHANGES[name][0]})
    consumer = replace(consumer, **dict.fromkeys(noise, "another"))
    first = min(chosen, key=ORDER.index)
    assert examine(manifest(), consumer, LAYOUTS).reason == CHANGES[first][1]


@quick
@given(st.fixed_dictionaries({name: st.text(min_size=1, max_size=8) for name in PROVENANCE}))
def test_provenance_never_matters(labels):
    consumer = manifest(**labels)
    verdict = examine(manifest(), consumer, LAYOUTS)
    assert verdict.compatible and verdict.ran == tuple(ORDER)
    assert consumer.digest == manifest().digest
    assert (consumer.record_sha256 == manifest().record_sha256) == (consumer == manifest())


@pytest.mark.parametrize("reason", OTHERS)
def test_a_layout_difference_is_refused_by_what_differs(reason):
    verdict = examine(manifest(), manifest(cache_layout_sha256=OTHERS[reason].digest), LAYOUTS)
    assert verdict.reason == reason
    assert verdict.ran == ("cache_abi_sha256", "cache_layout_sha256")


@pytest.mark.parametrize(("change", "reason"), [
    ({"model_generation": "weights-2"}, "model_generation_mismatch"),
    ({"positions": "moved"}, "position_contract_mismatch"),
    ({"abi": "other"}, "cache_abi_mismatch"),
    ({"groups": 1}, "cache_group_mismatch"),
])
def test_a_layout_that_differs_in_what_it_names_says_so(change, reason):
    if "groups" in change:
        other = replace(RANK0, manifest_id="one", cache_groups=RANK0.cache_groups[:1])
    elif "positions" in change:
        other = replace(RANK0, manifest_id="moved", position_contract_identity="0" * 64)
    elif "abi" in change:
        other = replace(RANK0, manifest_id="other", logical_cache_abi_sha256="0" * 64)
    else:
        other = identity("other", **change)
    verdict = examine(manifest(), manifest(cache_layout_sha256=other.digest), LAYOUTS | {other.digest: other})
    assert verdict.reason == reason


def test_an_undeclared_layout_is_a_layout_mismatch():
    assert examine(manifest(), manifest(cache_layout_sha256="0" * 64), LAYOUTS).reason == "layout_mismatch"


def test_the_consumers_prompt_may_be_longer_and_only_what_is_covered_counts():
    longer = manifest(covered_token_ids=(*manifest().covered_token_ids, 9, 9, 9, 9),
                      input_side_data_identity=(*SIDES, SideInput("multimodal", 9, 1, "a later picture")))
    assert examine(manifest(), longer, LAYOUTS).compatible
    shorter = manifest(covered_token_ids=manifest().covered_token_ids[:4])
    verdict = examine(manifest(), shorter, LAYOUTS)
    assert verdict.reason == "covered_token_mismatch" and "ends before" in verdict.detail


@pytest.mark.parametrize(("sides", "reason"), [
    ((replace(SIDES[0], start=2), SIDES[1]), "multimodal_feature_mismatch"),
    ((SIDES[0], replace(SIDES[1], identity="row 2")), "prompt_embedding_mismatch"),
    ((SIDES[0],), "prompt_embedding_mismatch"),
    ((), "multimodal_feature_mismatch"),
    ((*SIDES, SideInput("multimodal", 7, 4, "it begins inside and goes on")), "multimodal_feature_mismatch"),
])
def test_side_inputs_are_part_of_what_was_computed(sides, reason):
    assert examine(manifest(), manifest(input_side_data_identity=sides), LAYOUTS).reason == reason


def test_every_field_of_a_layout_changes_its_digest():
    digest, other = "1" * 64, {"physical_mode": "rectangular", "tp_rank": 1, "quantization_schema": "int8"}
    for f in fields(LayoutIdentity):
        if f.name in ("digest", "physical_page_bytes"):
            continue
        before = getattr(RANK0, f.name)
        after = other.get(f.name) or (before + 1 if isinstance(before, int) else
                                      before[:1] if isinstance(before, tuple) else
                                      digest if len(before) == 64 else f"{before}x")
        assert replace(RANK0, **{f.name: after}).digest != RANK0.digest, f.name
    virtual = replace(RANK0, physical_mode="virtual_pages", token_block_size=None, physical_page_bytes=65536)
    assert replace(virtual, physical_page_bytes=2097152).digest != virtual.digest
