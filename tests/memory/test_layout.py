"""Byte geometry by hand: the article's two groups, strides in every axis order, and what is no geometry."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from kvlab.memory.layout import (
    AXES,
    BLOCK_MAJOR,
    CacheGroup,
    CacheLayoutManifest,
    quarter_split,
    row_major_strides,
)

KIB = 1024


@pytest.fixture
def article() -> CacheLayoutManifest:
    """24 and 8 layers, 4 heads of 128 lanes, fp16, blocks of 16 tokens."""
    return CacheLayoutManifest((CacheGroup("g0", 0, 24, 4, 128, 2, 16, 4, 1000),
                                CacheGroup("g1", 24, 32, 4, 128, 2, 16, 4, 2000)))


def test_the_articles_bytes(article):
    assert [g.row_bytes for g in article.groups] == [48 * KIB, 16 * KIB]
    assert article.row_bytes == 64 * KIB
    assert [g.page_size_bytes for g in article.groups] == [768 * KIB, 256 * KIB]
    assert article.bundle_bytes == KIB * KIB


def test_strides_by_hand():
    assert row_major_strides((2, 3, 5)) == (15, 5, 1)
    assert row_major_strides((7,)) == (1,)
    assert row_major_strides(()) == ()
    group = CacheGroup("g0", 0, 2, 3, 5, 2, 4, 7)
    assert group.shape() == (2, 7, 4, 3, 5)
    assert group.strides() == {"layer_local": 420, "physical_slot": 60, "token_offset": 15, "kv_head_local": 5,
                               "head_dim": 1}
    other = CacheGroup("g0", 0, 2, 3, 5, 2, 4, 7, axis_order=BLOCK_MAJOR)
    assert other.shape() == (7, 2, 4, 3, 5)
    assert (other.strides()["physical_slot"], other.strides()["layer_local"]) == (120, 60)


@pytest.mark.parametrize("order", list(itertools.permutations(AXES)))
def test_strides_are_those_of_a_dense_array_in_every_order(order):
    group = CacheGroup("g0", 0, 2, 3, 4, 2, 5, 6, axis_order=order)
    dense = np.empty(group.shape(), dtype=np.int8)
    assert [group.strides()[axis] for axis in order] == list(dense.strides)
    assert dense.size * 2 * group.scalar_bytes == group.page_size_bytes * group.num_blocks


@pytest.mark.parametrize("field", ["kv_heads", "head_dim", "scalar_bytes", "block_size", "num_blocks"])
@pytest.mark.parametrize("size", [0, -1, 1.5, "4", None])
def test_a_size_is_a_positive_whole_number(field, size):
    good = {"kv_heads": 4, "head_dim": 128, "scalar_bytes": 2, "block_size": 16, "num_blocks": 4}
    with pytest.raises(ValueError, match=f"cache group g0: {field} must be"):
        CacheGroup("g0", 0, 24, **(good | {field: size}))


@pytest.mark.parametrize("end", [0, -2])
def test_a_group_has_layers(end):
    with pytest.raises(ValueError, match="layers must be"):
        CacheGroup("g0", 0, end, 4, 128, 2, 16, 4)


@pytest.mark.parametrize("order", [AXES[:4], (*AXES[:4], "layer_local"), (*AXES, "head_dim"), (*AXES[:4], "lane")])
def test_an_axis_order_names_each_axis_once(order):
    with pytest.raises(ValueError, match="axis_order"):
        CacheGroup("g0", 0, 24, 4, 128, 2, 16, 4, axis_order=order)


@pytest.mark.parametrize("edges", [
    pytest.param([(0, 24), (25, 32)], id="gap"), pytest.param([(0, 24), (23, 32)], id="overlap"),
    pytest.param([(1, 24)], id="late start"), pytest.param([(24, 32), (0, 24)], id="wrong order"),
    pytest.param([], id="no group"),
])
def test_groups_cover_the_layers_once_and_in_order(edges):
    with pytest.raises(ValueError, match="cache group"):
        CacheLayoutManifest(tuple(CacheGroup(f"g{i}", a, b, 4, 128, 2, 16, 4) for i, (a, b) in enumerate(edges)))


def test_group_ids_are_distinct():
    with pytest.raises(ValueError, match="distinct ids"):
        CacheLayoutManifest((CacheGroup("g", 0, 1, 1, 1, 1, 1, 1), CacheGroup("g", 1, 2, 1, 1, 1, 1, 1)))


def test_a_manifest_survives_json_and_its_digest_names_it(article):
    back = CacheLayoutManifest.from_dict(json.loads(json.dumps(article.to_dict())))
    assert back == article
    assert back.digest == article.digest
    other = CacheLayoutManifest((*article.groups[:1], CacheGroup("g1", 24, 32, 4, 128, 2, 16, 5, 2000)))
    assert other.digest != article.digest


@pytest.mark.parametrize(("layers", "edges"), [(1, [(0, 1)]), (2, [(0, 1), (1, 2)]), (30, [(0, 22), (22, 30)]),
                                               (32, [(0, 24), (24, 32)])])
def test_quarter_split(layers, edges):
    layout = quarter_split(layers, 4, 128, 2, block_size=16, num_blocks=4)
    assert [(g.layer_start, g.layer_end) for g in layout.groups] == edges
    assert sum(g.layers for g in layout.groups) == layers


@pytest.mark.parametrize("num_blocks", [1, 999, 1000, 1001, 2500])
def test_the_groups_never_print_the_same_block_number(num_blocks):
    first, second = quarter_split(4, 1, 1, 2, block_size=1, num_blocks=num_blocks).groups
    assert first.first_block_id + num_blocks <= second.first_block_id
    assert second.first_block_id % 1000 == 0
