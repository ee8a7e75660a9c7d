"""The records: frozen, strict about their form, digested over canonical JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import FrozenInstanceError, replace

import pytest

from kvlab.memory.layout import BLOCK_MAJOR
from kvlab.reuse.manifests import (
    CacheCompatibilityManifest,
    GroupIdentity,
    LayoutIdentity,
    LogicalCacheABI,
    SideInput,
    plain,
    read_record,
)
from tests.reuse.worlds import ABI, POSITIONS, RANK0, geometry, manifest, space


@pytest.mark.parametrize("record", [ABI, POSITIONS, RANK0, manifest(), space()])
def test_a_record_is_frozen_and_returns_from_its_plain_form(record):
    again = read_record(type(record), json.loads(json.dumps(plain(record))))
    assert again == record and hash(again) == hash(record)
    name = next(iter(plain(record)))
    with pytest.raises(FrozenInstanceError):
        setattr(record, name, getattr(record, name))


def test_a_digest_is_sha256_of_canonical_json():
    text = json.dumps(plain(RANK0), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert RANK0.digest == hashlib.sha256(text.encode()).hexdigest()


def test_a_group_identity_holds_the_strides_that_memory_computes():
    one, other = (geometry(order).groups[0] for order in (None, BLOCK_MAJOR))
    made = [GroupIdentity.of(g, "FP16") for g in (one, other)]
    text = json.dumps(one.strides(), sort_keys=True, separators=(",", ":"))
    assert made[0].stride_identity == hashlib.sha256(text.encode()).hexdigest()
    assert made[0].stride_identity != made[1].stride_identity


@pytest.mark.parametrize("change", [
    {"physical_mode": "heap"}, {"tp_rank": 2}, {"token_block_size": None}, {"physical_page_bytes": 4096},
    {"physical_mode": "virtual_pages"}, {"cache_groups": ()}, {"hash_block_size": 0}, {"scheduler_block_size": True},
    {"logical_cache_abi_sha256": "short"}, {"manifest_id": ""}, {"quantization_schema": ""},
    {"cache_groups": (RANK0.cache_groups[0], RANK0.cache_groups[0])},
])
def test_a_malformed_layout_is_no_record(change):
    with pytest.raises(ValueError):
        replace(RANK0, **change)


@pytest.mark.parametrize("change", [
    {"cache_abi_sha256": "AB" * 32}, {"covered_token_ids": (1, -1)}, {"covered_token_ids": (1, True)},
    {"namespace_generation": 0}, {"cache_salt": ""}, {"request_id": ""}, {"adapter_identity": None},
])
def test_a_malformed_manifest_is_no_record(change):
    with pytest.raises(ValueError):
        manifest(**change)


def test_unknown_and_missing_fields_are_named():
    for data in (plain(ABI) | {"extra": 1}, {k: v for k, v in plain(ABI).items() if k != "layers"}, None):
        with pytest.raises(ValueError, match="LogicalCacheABI"):
            read_record(LogicalCacheABI, data)


def test_other_malformed_records():
    group = RANK0.cache_groups[0]
    for make in (lambda: SideInput("smell", 0, 1, "x"), lambda: SideInput("prompt_embedding", 0, 2, "x"),
                 lambda: replace(group, axis_order=("head_dim",)), lambda: replace(group, layer_interval=(3, 3)),
                 lambda: replace(space(), publication_policy="everything"), lambda: replace(space(), cache_salt=""),
                 lambda: replace(ABI, layers=0), lambda: replace(POSITIONS, first_position=-1)):
        with pytest.raises(ValueError):
            make()


def test_side_inputs_have_one_order():
    sides = (SideInput("multimodal", 4, 1, "b"), SideInput("multimodal", 0, 1, "a"))
    assert manifest(input_side_data_identity=sides).digest == manifest(input_side_data_identity=sides[::-1]).digest
    assert isinstance(LayoutIdentity.paged(geometry(), "FP16", abi=ABI, positions=POSITIONS, manifest_id="x",
                                           model_generation="y"), LayoutIdentity)
    assert CacheCompatibilityManifest is type(manifest())
