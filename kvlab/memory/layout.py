"""Cache groups and their byte geometry: which layers, how many bytes a row, which axis order; it allocates nothing.

A cache group is a run of layers whose K/V rows are allocated together, with a block pool of its own. A
bundle is one block per group: the unit that a request gains or loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvlab.contract import Json, digest_of

AXES = ("layer_local", "physical_slot", "token_offset", "kv_head_local", "head_dim")
"""The five coordinates of one K or V scalar inside a group."""

KV_KIND = "kv_kind"
"""An axis of two, where K and V of a group lie in one tensor: index 0 is K, index 1 is V."""

INNER_LANE = "inner_lane"
"""The inner axis of x lanes, where `head_dim` is packed as `head_dim / x` vectors of x lanes each."""

LAYER_MAJOR = AXES
BLOCK_MAJOR = ("physical_slot", "layer_local", "token_offset", "kv_head_local", "head_dim")


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a dense array whose last axis is contiguous (article 0x03E)."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One cache group: layers `[layer_start, layer_end)` with `num_blocks` blocks of `block_size` tokens.

    `scalar_bytes` is the width of one stored K or V scalar. `first_block_id` offsets the printed block ids,
    so that two groups never show the same number. `axis_order` names the memory order of the five axes.
    ValueError where a size is not a positive whole number or the axes are not a permutation of `AXES`.
    """

    group_id: str
    layer_start: int
    layer_end: int
    kv_heads: int
    head_dim: int
    scalar_bytes: int
    block_size: int
    num_blocks: int
    first_block_id: int = 0
    axis_order: tuple[str, ...] = LAYER_MAJOR

    def __post_init__(self) -> None:
        sizes = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
                 "scalar_bytes": self.scalar_bytes, "block_size": self.block_size, "num_blocks": self.num_blocks}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"cache group {self.group_id}: {name} must be a positive whole number, not {size!r}")
        if sorted(self.axis_order) != sorted(AXES):
            raise ValueError(f"cache group {self.group_id}: axis_order must name each of {', '.join(AXES)} once")

    @property
    def layers(self) -> int:
        return self.layer_end - self.layer_start

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K and V over all layers of the group (formula F3.01)."""
        return self.layers * self.kv_heads * self.head_dim * 2 * self.scalar_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: `block_size` rows."""
        return self.block_size * self.row_bytes

    def axis_sizes(self) -> dict[str, int]:
        sizes = (self.layers, self.num_blocks, self.block_size, self.kv_heads, self.head_dim)
        return dict(zip(AXES, sizes, strict=True))

    def shape(self) -> tuple[int, ...]:
        """Sizes of the K (or V) tensor in memory order."""
        sizes = self.axis_sizes()
        return tuple(sizes[axis] for axis in self.axis_order)

    def strides(self) -> dict[str, int]:
        """Stride in elements of each axis, whatever the memory order."""
        return dict(zip(self.axis_order, row_major_strides(self.shape()), strict=True))


@dataclass(frozen=True, slots=True)
class CacheLayoutManifest:
    """How a model's K/V rows are laid out in cache groups: the address contract as one record.

    ValueError where the groups do not cover the layers `[0, layers)` in order, without gap or overlap.
    """

    groups: tuple[CacheGroup, ...]

    def __post_init__(self) -> None:
        edge = 0
        for group in self.groups:
            if group.layer_start != edge:
                raise ValueError(f"cache group {group.group_id} starts at layer {group.layer_start}, expected {edge}")
            edge = group.layer_end
        if len({g.group_id for g in self.groups}) != len(self.groups) or not self.groups:
            raise ValueError("cache groups need distinct ids, and there must be one at least")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token over all groups (formula F3.02): one bundle row."""
        return sum(g.row_bytes for g in self.groups)

    @property
    def bundle_bytes(self) -> int:
        """Capacity of one block in every group (formula F5.02)."""
        return sum(g.page_size_bytes for g in self.groups)

    @property
    def digest(self) -> str:
        return digest_of(self.to_dict())

    def to_dict(self) -> Json:
        return {"groups": [asdict(g) | {"axis_order": list(g.axis_order)} for g in self.groups]}

    @classmethod
    def from_dict(cls, data: Json) -> CacheLayoutManifest:
        return cls(tuple(CacheGroup(**(g | {"axis_order": tuple(g["axis_order"])})) for g in data["groups"]))


def quarter_split(
    layers: int, kv_heads: int, head_dim: int, scalar_bytes: int, *, block_size: int, num_blocks: int,
    axis_order: tuple[str, ...] = LAYER_MAJOR,
) -> CacheLayoutManifest:
    """Two groups over one model: three quarters of the layers and one quarter, as in the article's fixture.

    Real hybrid models mix layers with different lifetimes; splitting a plain model the same way makes every
    real run go through the multi-group paths. Block ids start at 1000 and, past them, at the next thousand.
    """
    cut = max(1, layers * 3 // 4)
    edges = [(0, cut), (cut, layers)] if cut < layers else [(0, layers)]
    second = 1000 * (2 + (num_blocks - 1) // 1000)
    return CacheLayoutManifest(tuple(
        CacheGroup(f"g{i}", start, end, kv_heads, head_dim, scalar_bytes, block_size, num_blocks,
                   (1000, second)[i], axis_order)
        for i, (start, end) in enumerate(edges)
    ))
