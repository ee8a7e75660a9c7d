"""Holds plain torch attention to a dense softmax written here: ragged, permuted, shared, strided and full of NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from kernels import reference
from kernels.reference import attention_oracle, contiguous_attention, paged_attention

# Against the float64 oracle on the same (already rounded) inputs. The values are averages of standard normal
# rows, so below 4 in size: the half types may lose one rounding of the weights and one of the output.
ATOL = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAN = float("nan")


@dataclass
class World:
    """A random packed batch, its rows laid in NaN-filled caches in a permuted order, and the dense rows beside."""

    contexts: list[int]
    queries: list[int]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    layout: str = "layer_major"
    shared: int = 0  # leading tokens, in whole blocks, that every sequence reads from sequence 0's blocks
    pad: int = -1
    seed: int = 0
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        self.scale = 1.3 / math.sqrt(self.head_dim)
        self.q = torch.randn(sum(self.queries), self.heads, self.head_dim, generator=draw).to(self.dtype)
        shape = (self.kv_heads, self.head_dim)
        self.k, self.v = (
            [torch.randn(n, *shape, generator=draw).to(self.dtype) for n in self.contexts] for _ in range(2)
        )
        blocks = [-(-n // self.block_size) for n in self.contexts]
        free = iter((torch.randperm(sum(blocks) + 3, generator=draw)).tolist())
        self.num_blocks = sum(blocks) + 3
        self.k_cache, self.v_cache = self._caches()
        self.tables = torch.full((len(blocks), max(blocks) + 2), self.pad, dtype=torch.int64)
        for i, count in enumerate(blocks):
            for logical in range(count):
                first = logical * self.block_size
                if i and first + self.block_size <= min(self.shared, self.contexts[0], self.contexts[i]):
                    end = first + self.block_size
                    self.k[i][first:end], self.v[i][first:end] = self.k[0][first:end], self.v[0][first:end]
                    self.tables[i, logical] = self.tables[0, logical]
                    continue
                physical = self.tables[i, logical] = next(free)
                rows = min(self.block_size, self.contexts[i] - first)
                self.k_cache[physical, :rows] = self.k[i][first : first + rows]
                self.v_cache[physical, :rows] = self.v[i][first : first + rows]

    def _caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer 1 of a store of three layers, as [num_blocks, block_size, kv_heads, head_dim] views."""
        n, b, h, d = self.num_blocks, self.block_size, self.kv_heads, self.head_dim
        if self.layout == "layer_major":
            store = torch.full((3, 2, n, b, h, d), NAN, dtype=self.dtype)
            return store[1, 0], store[1, 1]
        if self.layout == "block_major":
            store = torch.full((n, 3, 2, b, h, d), NAN, dtype=self.dtype)
            return store[:, 1, 0], store[:, 1, 1]
        store = torch.full((n, 3, 2, h, b, d), NAN, dtype=self.dtype)  # head_major: a head's rows side by side
        return store[:, 1, 0].transpose(1, 2), store[:, 1, 1].transpose(1, 2)

    def paged(self, tile_tokens: int | None = None) -> torch.Tensor:
        caches = (self.k_cache, self.v_cache, self.tables)
        return paged_attention(self.q, *caches, self.contexts, self.queries, self.scale, tile_tokens)

    def contiguous(self) -> torch.Tensor:
        """Over slices of a rectangular store that is longer than any context and NaN behind each."""
        longest = max(self.contexts) + 3
        store = torch.full((2, len(self.contexts), longest, self.kv_heads, self.head_dim), NAN, dtype=self.dtype)
        for i, n in enumerate(self.contexts):
            store[0, i, :n], store[1, i, :n] = self.k[i], self.v[i]
        pieces = (store[0].unbind(0), store[1].unbind(0))
        return contiguous_attention(self.q, *pieces, self.contexts, self.queries, self.scale)

    def oracle(self) -> torch.Tensor:
        parts = zip(self.q.split(self.queries), self.tables, self.contexts, self.queries, strict=True)
        return torch.cat(
            [
                attention_oracle(q, self.k_cache, self.v_cache, table, context, context - n, self.scale)
                for q, table, context, n in parts
            ]
        )

    def dense(self) -> torch.Tensor:
        """Every query alone: torch's own softmax over the rows as drawn, without blocks, caches or masks."""
        out, queries = [], iter(self.q.double())
        kv_head = [head * self.kv_heads // self.heads for head in range(self.heads)]
        for k, v, context, n in zip(self.k, self.v, self.contexts, self.queries, strict=True):
            keys, values = k[:, kv_head].double(), v[:, kv_head].double()
            for seen in range(context - n + 1, context + 1):
                weights = torch.softmax((keys[:seen] * next(queries)).sum(-1) * self.scale, 0)
                out.append((weights[..., None] * values[:seen]).sum(0))
        return torch.stack(out)

    def holds(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        assert out.dtype == self.dtype
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=ATOL[self.dtype])


@st.composite
def worlds(draw: st.DrawFn) -> World:
    lengths = draw(st.lists(st.tuples(st.integers(1, 33), st.integers(1, 33)), min_size=1, max_size=3))
    contexts = [max(pair) for pair in lengths]
    decode = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    return World(
        contexts=contexts,
        queries=[1 if one else min(pair) for one, pair in zip(decode, lengths, strict=True)],
        heads=draw(st.sampled_from([1, 2, 3])) * (kv_heads := draw(st.sampled_from([1, 2, 3]))),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 5, 8])),
        block_size=draw(st.sampled_from([1, 3, 4, 16])),
        dtype=draw(st.sampled_from(list(ATOL))),
        layout=draw(st.sampled_from(["layer_major", "block_major", "head_major"])),
        shared=draw(st.sampled_from([0, 8, 40])),
        pad=draw(st.sampled_from([-1, 0, 10**12])),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(world=worlds(), tile_tokens=st.sampled_from([1, 5, 7, 16, None]))
def test_all_three_agree_with_a_dense_softmax(world: World, tile_tokens: int | None):
    dense = world.dense()
    torch.testing.assert_close(world.oracle(), dense, rtol=0, atol=1e-12)
    world.holds(world.paged(tile_tokens), dense)
    world.holds(world.contiguous(), dense)


MIXED = {"contexts": [29, 1, 14, 33, 18], "queries": [1, 1, 14, 6, 2]}  # decode, first token, prefill, two suffixes


@pytest.mark.parametrize("dtype", list(ATOL), ids=str)
@pytest.mark.parametrize("tile_tokens", [1, 6, 28, None])
def test_a_mixed_batch_in_every_type_and_tile(dtype: torch.dtype, tile_tokens: int | None):
    world = World(**MIXED, dtype=dtype, shared=12)
    world.holds(world.paged(tile_tokens), world.oracle())
    world.holds(world.contiguous(), world.oracle())


@pytest.mark.parametrize("layout", ["layer_major", "block_major", "head_major"])
@pytest.mark.parametrize("tile_tokens", [8, None])
def test_a_cache_may_be_any_view_of_a_store(layout: str, tile_tokens: int | None):
    world = World(**MIXED, layout=layout)
    assert world.k_cache.is_contiguous() == (layout == "layer_major")
    world.holds(world.paged(tile_tokens), world.oracle())


@pytest.mark.parametrize("tile_tokens", [8, None])
def test_a_long_suffix_runs_in_chunks_of_queries(monkeypatch: pytest.MonkeyPatch, tile_tokens: int | None):
    monkeypatch.setattr(reference, "QUERY_ROWS", 3)
    world = World(contexts=[31, 22, 16], queries=[8, 9, 16])
    world.holds(world.paged(tile_tokens), world.oracle())
    world.holds(world.contiguous(), world.oracle())


def test_a_tile_left_out_is_sized_in_bytes(monkeypatch: pytest.MonkeyPatch):
    world = World(contexts=[30, 30], queries=[1, 7])
    seen = []
    gather = reference._gather
    monkeypatch.setattr(reference, "_gather", lambda *args: seen.append(len(args[1])) or gather(*args))
    world.paged()
    assert seen == [8, 8, 8, 8], "30 tokens are 8 blocks of 4 and one tile: K and V, for two sequences"
    seen.clear()
    row_bytes = 2 * 8 * 4
    monkeypatch.setattr(reference, "DECODE_TILE_BYTES", 9 * row_bytes)
    monkeypatch.setattr(reference, "PREFILL_TILE_BYTES", 13 * row_bytes)
    world.holds(world.paged(), world.oracle())
    assert seen == [2] * 8 + [3, 3] * 2 + [2, 2], "9 tokens hold two whole blocks, 13 hold three"
    seen.clear()
    monkeypatch.setattr(reference, "DECODE_TILE_BYTES", 15 * row_bytes)
    monkeypatch.setattr(reference, "PREFILL_TILE_BYTES", 15 * row_bytes)
    world.paged()
    assert seen == [8, 8, 8, 8], "two tiles are gathered as one"


def test_large_scores_stay_finite_and_keep_the_rescale():
    """exp(score) overflows float64 from 710 on; the largest score stands in the last tile, in the first, between."""
    for hot in (0, 11, 28):
        world = World(contexts=[29], queries=[1], kv_heads=1, heads=1, dtype=torch.float64)
        world.k[0][hot] = 4000 * world.q[0]
        world.k_cache[world.tables[0, hot // 4], hot % 4] = world.k[0][hot]
        dense = world.dense()
        assert dense.isfinite().all()
        torch.testing.assert_close(dense[0, 0], world.v[0][hot, 0], rtol=0, atol=1e-12)
        torch.testing.assert_close(world.oracle(), dense, rtol=0, atol=1e-12)
        world.holds(world.paged(5), dense)


def test_the_empty_state_is_an_identity_on_both_sides():
    scores, v = torch.randn(3, 2, 5, dtype=torch.float64), torch.randn(5, 2, 4, dtype=torch.float64)
    state = reference.block_state(scores, v)
    empty = reference.block_state(torch.full_like(scores, -math.inf), v)
    assert (empty.m == -math.inf).all() and (empty.l == 0).all() and (empty.u == 0).all()
    for merged in (reference.merge_state(state, empty), reference.merge_state(empty, state)):
        assert all(torch.equal(getattr(merged, part), getattr(state, part)) for part in ("m", "l", "u"))
    both = reference.merge_state(empty, empty)
    assert (both.m == -math.inf).all() and (both.l == 0).all() and (both.u == 0).all()


def test_the_oracle_takes_queries_from_the_middle_of_a_context():
    world = World(contexts=[21], queries=[21])
    q = world.q[9:13]
    middle = attention_oracle(q, world.k_cache, world.v_cache, world.tables[0], 21, 9, world.scale)
    torch.testing.assert_close(middle, world.dense()[9:13], rtol=0, atol=1e-12)


def test_lengths_may_be_tensors_and_queries_may_be_a_view():
    world = World(**MIXED)
    wide = torch.full((world.q.shape[0], 3 * world.heads, world.head_dim), NAN)
    wide[:, 6:12] = world.q
    lengths = (torch.tensor(world.contexts), torch.tensor(world.queries))
    caches = (world.k_cache, world.v_cache, world.tables)
    assert torch.equal(paged_attention(wide[:, 6:12], *caches, *lengths, world.scale, 8), world.paged(8))
    assert torch.equal(paged_attention(wide[:, 6:12], *caches, *lengths, world.scale), world.paged())


class Largest(TorchFunctionMode):
    """The size in bytes of the largest tensor that a call makes; a view of what was there before makes none."""

    def __init__(self, *old: torch.Tensor):
        super().__init__()
        self.old, self.size = {x.untyped_storage().data_ptr() for x in old}, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in self.old:
            self.size = max(self.size, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("queries", [1, 12], ids=["decode", "suffix"])
def test_scratch_does_not_grow_with_the_context(queries: int):
    sizes = []
    for context in (64, 640):
        world = World(contexts=[context], queries=[queries])
        with Largest(world.q, world.k_cache, world.v_cache, world.tables) as largest:
            world.paged(16)
        sizes.append(largest.size)
    tile = 16 * 2 * 8 * 4
    scores = queries * 6 * 16 * 4
    positions = queries * 3 * 16 * 8
    assert sizes[0] == sizes[1] <= max(tile, scores, positions)


def test_a_mask_does_not_grow_with_the_suffix(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "QUERY_ROWS", 4)
    world = World(contexts=[128], queries=[64], heads=1, kv_heads=1, head_dim=1)
    lengths = (world.contexts, world.queries)
    with Largest(world.q, world.k[0], world.v[0]) as largest:
        contiguous_attention(world.q, world.k, world.v, *lengths, world.scale)
    assert largest.size <= 4 * 128 < 64 * 128


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_summed_in_float32(dtype: torch.dtype):
    """Near equal weights over 900 keys: a bfloat16 sum would stand still at 256, and the mean come out wrong."""
    world = World(contexts=[900], queries=[1], dtype=dtype)
    world.scale = 0.01
    for out in (world.paged(4), world.paged()):
        torch.testing.assert_close(out.double(), world.oracle(), rtol=0, atol=1e-3)


REFUSED = {  # argument -> what makes it wrong
    "q": [
        lambda w: {"q": w.q[0]},
        lambda w: {"q": w.q[:0]},
        lambda w: {"q": w.q[:, :5]},
        lambda w: {"q": w.q[:, :0]},
        lambda w: {"q": w.q[..., :7]},
        lambda w: {"q": w.q.double()},
    ],
    "k_cache": [lambda w: {"k_cache": w.k_cache[0]}, lambda w: {"k_cache": w.k_cache[:0]}],
    "v_cache": [lambda w: {"v_cache": w.v_cache[:, :3]}, lambda w: {"v_cache": w.v_cache.half()}],
    "block_tables": [
        lambda w: {"block_tables": w.tables[0]},
        lambda w: {"block_tables": w.tables[:1]},
        lambda w: {"block_tables": w.tables.int()},
        lambda w: {"block_tables": w.tables[:, :2]},
        lambda w: {"block_tables": torch.where(w.tables == w.tables[0, 1], -1, w.tables)},
        lambda w: {"block_tables": torch.where(w.tables == w.tables[0, 1], w.num_blocks, w.tables)},
    ],
    "query_lengths": [
        lambda w: {"query_lengths": [3, 3]},
        lambda w: {"query_lengths": [5, 0]},
        lambda w: {"query_lengths": [5]},
        lambda w: {"query_lengths": [], "context_lengths": []},
    ],
    "context_lengths": [lambda w: {"context_lengths": [3, 9]}, lambda w: {"context_lengths": [11, 0]}],
    "tile_tokens": [lambda w: {"tile_tokens": 0}],
}


@pytest.mark.parametrize(("argument", "case"), [(name, i) for name in REFUSED for i in range(len(REFUSED[name]))])
@pytest.mark.parametrize("tile_tokens", [4, None])
def test_paged_attention_names_what_it_refuses(argument: str, case: int, tile_tokens: int | None):
    world = World(contexts=[11, 9], queries=[4, 1], pad=0)
    good = {
        "q": world.q,
        "k_cache": world.k_cache,
        "v_cache": world.v_cache,
        "block_tables": world.tables,
        "context_lengths": world.contexts,
        "query_lengths": world.queries,
        "scale": world.scale,
        "tile_tokens": tile_tokens,
    }
    paged_attention(**good)
    with pytest.raises(ValueError, match=f"^{argument}:"):
        paged_attention(**good | REFUSED[argument][case](world))


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("q", lambda w: {"q": w.q[:, :5]}),
        ("k", lambda w: {"k": [w.k[0], w.k[1][:, :1]]}),
        ("k", lambda w: {"k": [w.k[0], w.k[1].double()]}),
        ("k", lambda w: {"k": [w.k[0][0], w.k[1]]}),
        ("k, v", lambda w: {"k": w.k[:1]}),
        ("k, v", lambda w: {"k": [], "v": [], "context_lengths": [], "query_lengths": []}),
        ("v", lambda w: {"v": [w.v[0], w.v[1][:8]]}),
        ("context_lengths", lambda w: {"context_lengths": [11, 10]}),
        ("context_lengths", lambda w: {"context_lengths": [3, 9]}),
        ("query_lengths", lambda w: {"query_lengths": [3, 1]}),
        ("query_lengths", lambda w: {"query_lengths": [5, 0]}),
    ],
)
def test_contiguous_attention_names_what_it_refuses(argument: str, wrong):
    world = World(contexts=[11, 9], queries=[4, 1])
    lengths = {"context_lengths": world.contexts, "query_lengths": world.queries}
    good = {"q": world.q, "k": world.k, "v": world.v, "scale": world.scale} | lengths
    contiguous_attention(**good)
    with pytest.raises(ValueError, match=f"^{argument}:"):
        contiguous_attention(**good | wrong(world))


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("q", lambda w: {"q": w.q[:, :5]}),
        ("k_cache", lambda w: {"k_cache": w.k_cache[0]}),
        ("v_cache", lambda w: {"v_cache": w.v_cache[:2]}),
        ("block_table", lambda w: {"block_table": w.tables}),
        ("block_table", lambda w: {"block_table": w.tables[0].int()}),
        ("block_table", lambda w: {"block_table": w.tables[0, :2]}),
        ("block_table", lambda w: {"block_table": torch.tensor([0, -1, 1])}),
        ("block_table", lambda w: {"block_table": torch.tensor([0, w.num_blocks, 1])}),
        ("query_start", lambda w: {"query_start": -1}),
        ("query_start", lambda w: {"query_start": 8}),
        ("query_start", lambda w: {"context_length": 0, "query_start": 0}),
    ],
)
def test_the_oracle_names_what_it_refuses(argument: str, wrong):
    world = World(contexts=[11], queries=[4])
    caches = {"k_cache": world.k_cache, "v_cache": world.v_cache, "block_table": world.tables[0]}
    good = {"q": world.q, "context_length": 11, "query_start": 7, "scale": world.scale} | caches
    attention_oracle(**good)
    with pytest.raises(ValueError, match=f"^{argument}:"):
        attention_oracle(**good | wrong(world))
