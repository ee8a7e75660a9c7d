"""Owns plain torch attention over paged and over contiguous K/V; refuses to own memory, tables or the model.

Three functions, from the one that is read to the ones that run:

    attention_oracle      float64, block by block, as the article loops over a block table (0x0A)
    paged_attention       the same rows at speed: whole blocks are gathered in tiles
    contiguous_attention  the baseline: the same attention where a request's rows already lie in one piece
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

Lengths = Sequence[int] | torch.Tensor

# Bytes of gathered keys. One decode query reads every gathered row once, so its tile should still lie in the
# core's cache when the product reads it. A prefill reads each row many times and wants one fused call more than
# a small tile.
DECODE_TILE_BYTES = 1 << 20
PREFILL_TILE_BYTES = 8 << 20
# Queries that share one mask or one block of scores: bounds that scratch where a prefill is long.
QUERY_ROWS = 256


# -- the oracle -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SoftmaxState:
    """What a set of keys leaves behind for each query and head (0x0BA).

    m: the largest score [n_q, heads]; l: the sum of exp(score - m) [n_q, heads]; u: the sum of
    exp(score - m) * value [n_q, heads, head_dim]. No key at all is (-inf, 0, 0), the identity of `merge_state`.
    """

    m: torch.Tensor
    l: torch.Tensor  # noqa: E741  the name that the article and the papers give it
    u: torch.Tensor


def weight(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """exp(x - m), and 0 where m = -inf: there x is -inf too, and -inf - -inf would be NaN."""
    return torch.exp(x - m.masked_fill(m == -torch.inf, 0.0))


def block_state(scores: torch.Tensor, v: torch.Tensor) -> SoftmaxState:
    """The state of one block: scores [n_q, heads, rows], -inf where hidden; v [rows, heads, head_dim]."""
    m = scores.amax(-1)
    p = weight(scores, m[..., None])
    return SoftmaxState(m, p.sum(-1), torch.einsum("nht,thd->nhd", p, v))


def merge_state(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """The state of both key sets together: each side is rescaled to the larger m (0x0BA, FlashAttention alg. 1)."""
    m = torch.maximum(a.m, b.m)
    wa, wb = weight(a.m, m), weight(b.m, m)
    return SoftmaxState(m, a.l * wa + b.l * wb, a.u * wa[..., None] + b.u * wb[..., None])


def normalize(state: SoftmaxState) -> torch.Tensor:
    """The attention row u / l [n_q, heads, head_dim]; defined where the query has seen at least one key."""
    return state.u / state.l[..., None]


def attention_oracle(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_length: int,
    query_start: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention of one sequence over its blocks, in float64 (0x0A's loop, for every query and head).

    q [n_q, heads, head_dim]; query i stands at position query_start + i and sees the keys 0..query_start + i.
    k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim]; head h reads K/V head h // (heads // kv_heads).
    block_table [>= ceil(context_length / block_size)] int64: physical ids in logical order; more entries are
    never read, and neither are rows at or after context_length. Returns [n_q, heads, head_dim] float64.
    Raises ValueError naming the argument. Time O(n_q * heads * context_length * head_dim); made to be read.
    """
    _check_caches(k_cache, v_cache)
    _check_query(q, k_cache)
    if not 0 <= query_start <= context_length - q.shape[0]:
        raise ValueError(f"query_start: {query_start} + {q.shape[0]} queries do not end within {context_length}")
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    blocks = _blocks(context_length, block_size)
    if block_table.dim() != 1 or block_table.shape[0] < blocks or block_table.dtype != torch.int64:
        shape = tuple(block_table.shape)
        raise ValueError(f"block_table: {block_table.dtype} {shape} is not int64 [at least {blocks} blocks]")
    table = block_table[:blocks].tolist()
    if not all(0 <= physical < num_blocks for physical in table):
        raise ValueError(f"block_table: names a block outside 0..{num_blocks - 1}")
    q, heads_per_kv_head = q.double(), q.shape[1] // kv_heads
    position = torch.arange(query_start, query_start + q.shape[0], device=q.device)
    state = SoftmaxState(q.new_full(q.shape[:2], -torch.inf), q.new_zeros(q.shape[:2]), q.new_zeros(q.shape))
    for logical, physical in enumerate(table):
        first = logical * block_size
        rows = min(block_size, context_length - first)
        k = k_cache[physical, :rows].double().repeat_interleave(heads_per_kv_head, dim=1)
        v = v_cache[physical, :rows].double().repeat_interleave(heads_per_kv_head, dim=1)
        key_position = torch.arange(first, first + rows, device=q.device)
        hidden = key_position > position[:, None, None]
        scores = (torch.einsum("nhd,thd->nht", q, k) * scale).masked_fill(hidden, -torch.inf)
        state = merge_state(state, block_state(scores, v))
    return normalize(state)


# -- at speed -------------------------------------------------------------------------------------------


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lengths: Lengths,
    query_lengths: Lengths,
    scale: float,
    tile_tokens: int | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged packed batch over paged K/V (0x0A, 0x0AB; PagedAttention fig. 5 and 6).

    q [sum(query_lengths), heads, head_dim]: the new tokens of every sequence, one sequence after the other;
    prefill, decode and any mixture. k_cache, v_cache [num_blocks, block_size, kv_heads, head_dim] with any
    strides: a layer's view of a larger store will do. block_tables [batch, max_blocks] int64. Entries past a
    sequence's blocks are never read (-1 will do), and rows past its context never reach a product (NaN will do).
    context_lengths [batch] include the new tokens; plain ints spare a device the wait that a tensor costs.
    tile_tokens: keys gathered at once, in whole blocks, at least one. Left out, a tile is sized in bytes for the
    cache of a CPU core. Returns [sum(query_lengths), heads, head_dim] in q's dtype; half types are summed in
    float32. For inference only: call it under torch.no_grad where anything asks for a gradient.

    A context within one tile is one gather and one fused call. A longer one runs through an online softmax
    over tiles, so scratch is O(tile_tokens * (kv_heads * head_dim + QUERY_ROWS * heads)) at most, and never grows
    with the context. Time O(heads * head_dim * sum of query * context).
    Raises ValueError naming the argument, and on CPUs also for a block id outside the cache.
    """
    contexts, queries = _ints(context_lengths), _ints(query_lengths)
    _check_caches(k_cache, v_cache)
    _check_query(q, k_cache)
    _check_lengths(q, contexts, queries)
    _check_table(block_tables, len(contexts), max(contexts), k_cache)
    if tile_tokens is not None and tile_tokens < 1:
        raise ValueError(f"tile_tokens: {tile_tokens} is not a positive number of tokens")
    outputs = []
    for i, rows, context in _sequences(q, queries, contexts):
        ids = block_tables[i, : _blocks(context, k_cache.shape[1])]
        tile = _tile_blocks(k_cache, rows, context, tile_tokens)
        outputs.append(_attend_blocks(rows, k_cache, v_cache, ids, context, scale, tile))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def contiguous_attention(
    q: torch.Tensor,
    k: Sequence[torch.Tensor],
    v: Sequence[torch.Tensor],
    context_lengths: Lengths,
    query_lengths: Lengths,
    scale: float,
) -> torch.Tensor:
    """The same batch over K/V that lies in one piece per sequence: rectangular memory (0x02), or no cache at all.

    k, v: one [>= context, kv_heads, head_dim] view per sequence, with any strides. Views, and not one
    [batch, max_len, ...] tensor, because that is what each owner has: a rectangular store slices its rows, a
    virtual range is one tensor per request, and rows just computed were never in a store. Rows past the context
    are never read. Everything else, and the code that runs, is that of `paged_attention` after its gather.
    Scratch O(QUERY_ROWS * context) for a masked suffix, else O(heads * context) at most. Raises ValueError
    naming the argument.
    """
    contexts, queries = _ints(context_lengths), _ints(query_lengths)
    _check_pieces(k, v, contexts)
    _check_query(q, k[0])
    _check_lengths(q, contexts, queries)
    outputs = [
        _attend(rows, k[i][:context], v[i][:context], scale) for i, rows, context in _sequences(q, queries, contexts)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The last n positions of one sequence over all its rows: q [n, heads, head_dim], k and v [context, ...]."""
    n, heads, head_dim = q.shape
    context, kv_heads, _ = k.shape
    if QUERY_ROWS < n < context:  # a long suffix: the mask stays [QUERY_ROWS, context]
        chunks = _query_chunks(q, context)
        return torch.cat([_attend(rows, k[:seen], v[:seen], scale) for rows, seen in chunks])
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    if n == 1:
        # One query hides no key, so the heads of a group can stand as the query rows of their K/V head: the
        # group then reads each row once.
        grouped = q.reshape(1, kv_heads, heads // kv_heads, head_dim)
        return scaled_dot_product_attention(grouped, k[None], v[None], scale=scale).view(1, heads, head_dim)
    mask = None if n == context else q.new_ones(n, context, dtype=torch.bool).tril(context - n)
    shape = (kv_heads, heads // kv_heads, context, head_dim)
    out = scaled_dot_product_attention(
        q.reshape(n, *shape[:2], head_dim).permute(1, 2, 0, 3),
        k[:, None].expand(shape),
        v[:, None].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(n, heads, head_dim)


def _attend_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ids: torch.Tensor,
    context: int,
    scale: float,
    tile_blocks: int,
) -> torch.Tensor:
    """The last n positions of one sequence over its blocks: one gather if they fit a tile, else tile after tile."""
    if len(ids) <= tile_blocks:
        return _attend(q, _gather(k_cache, ids, context), _gather(v_cache, ids, context), scale)
    chunks = _query_chunks(q, context)
    return torch.cat([_attend_tiles(rows, k_cache, v_cache, ids, seen, scale, tile_blocks) for rows, seen in chunks])


def _attend_tiles(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ids: torch.Tensor,
    context: int,
    scale: float,
    tile_blocks: int,
) -> torch.Tensor:
    """The last n positions of one sequence, tile after tile of its blocks, with the running m, l and u.

    Tile 0 holds key 0, which every query sees, so m is finite from there on and needs no guard against NaN.
    """
    n, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    # [kv_heads, n * group, head_dim]: row r belongs to query r // group
    q_rows = q.reshape(n, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, n * group, head_dim).to(exact)
    m = q_rows.new_full((kv_heads, n * group, 1), -torch.inf)
    l, u, unused = torch.zeros_like(m), torch.zeros_like(q_rows), q_rows.new_empty(())  # noqa: E741
    # K's tile is done with before V's is gathered: one piece of scratch serves both and stays in the core's cache.
    scratch = k_cache.new_empty(min(tile_blocks, len(ids)), *k_cache.shape[1:])
    for first in range(0, context, tile_blocks * block_size):
        tile_ids = ids[first // block_size :][:tile_blocks]
        rows = min(len(tile_ids) * block_size, context - first)
        k = _gather(k_cache, tile_ids, rows, scratch).to(exact)
        scores = torch.baddbmm(unused, q_rows, k.permute(1, 2, 0), beta=0, alpha=scale)
        if first + rows - 1 > context - n:
            _hide_later_keys(scores, first, context - n, group)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        p = scores.sub_(m_new).exp_()
        carried = m.sub_(m_new).exp_()
        l.mul_(carried).add_(p.sum(-1, keepdim=True))
        v = _gather(v_cache, tile_ids, rows, scratch).to(exact)
        u.mul_(carried).baddbmm_(p, v.transpose(0, 1))
        m = m_new
    out = u.div_(l).view(kv_heads, n, group, head_dim).transpose(0, 1)
    return out.reshape(n, heads, head_dim).to(q.dtype)


def _hide_later_keys(scores: torch.Tensor, first_key: int, first_query: int, group: int) -> None:
    """-inf, in place, wherever a key stands after its query: scores [kv_heads, n * group, keys]."""
    _, rows, keys = scores.shape
    key = torch.arange(first_key, first_key + keys, device=scores.device)
    query = torch.arange(first_query, first_query + rows // group, device=scores.device).repeat_interleave(group)
    scores.masked_fill_(key > query[:, None], -torch.inf)


def _gather(cache: torch.Tensor, ids: torch.Tensor, rows: int, scratch: torch.Tensor | None = None) -> torch.Tensor:
    """The first `rows` rows of the named blocks as [rows, kv_heads, head_dim]; later rows go no further than here."""
    out = None if scratch is None else scratch[: len(ids)]
    try:
        return torch.index_select(cache, 0, ids, out=out).flatten(0, 1)[:rows]
    except IndexError as error:
        raise ValueError(f"block_tables: names a block outside 0..{cache.shape[0] - 1}") from error


def _sequences(q: torch.Tensor, queries: list[int], contexts: list[int]) -> Iterator[tuple[int, torch.Tensor, int]]:
    """Each sequence's number, queries and context."""
    first = 0
    for i, (n, context) in enumerate(zip(queries, contexts, strict=True)):
        yield i, q[first : first + n], context
        first += n


def _query_chunks(q: torch.Tensor, context: int) -> Iterator[tuple[torch.Tensor, int]]:
    """The last n positions in chunks of QUERY_ROWS, each with the number of keys that its last query sees."""
    seen = context - q.shape[0]
    for rows in q.split(QUERY_ROWS):
        seen += rows.shape[0]
        yield rows, seen


def _tile_blocks(k_cache: torch.Tensor, q: torch.Tensor, context: int, tile_tokens: int | None) -> int:
    """Whole blocks in a tile, at least one. Left to us, two tiles are one: a second round of calls costs more."""
    _, block_size, kv_heads, head_dim = k_cache.shape
    if tile_tokens is None:
        decode_on_cpu = q.shape[0] == 1 and q.device.type == "cpu"
        row_bytes = kv_heads * head_dim * k_cache.element_size()
        tile_tokens = (DECODE_TILE_BYTES if decode_on_cpu else PREFILL_TILE_BYTES) // row_bytes
        if context <= 2 * tile_tokens:
            return _blocks(context, block_size)
    return max(1, tile_tokens // block_size)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _ints(lengths: Lengths) -> list[int]:
    return lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)


# -- what is refused ------------------------------------------------------------------------------------


def _check_query(q: torch.Tensor, keys: torch.Tensor) -> None:
    kv_heads, head_dim = keys.shape[-2:]
    if q.dim() != 3 or q.shape[0] == 0 or q.shape[2] != head_dim:
        raise ValueError(f"q: shape {tuple(q.shape)} is not [at least one query, heads, {head_dim}]")
    if q.shape[1] == 0 or q.shape[1] % kv_heads:
        raise ValueError(f"q: {q.shape[1]} heads do not divide among {kv_heads} K/V heads")
    if q.dtype != keys.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"q: {q.dtype} is not the floating point type of the keys, {keys.dtype}")


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    if k_cache.dim() != 4 or 0 in k_cache.shape:
        raise ValueError(f"k_cache: shape {tuple(k_cache.shape)} is not [num_blocks, block_size, kv_heads, head_dim]")
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(f"v_cache: {v_cache.dtype} {tuple(v_cache.shape)} is not the type and shape of k_cache")


def _check_pieces(k: Sequence[torch.Tensor], v: Sequence[torch.Tensor], contexts: list[int]) -> None:
    if not contexts or len(k) != len(contexts) or len(v) != len(contexts):
        raise ValueError(f"k, v: {len(k)} and {len(v)} pieces for {len(contexts)} sequences")
    for i, (k_rows, v_rows, context) in enumerate(zip(k, v, contexts, strict=True)):
        if k_rows.dim() != 3 or 0 in k_rows.shape or k_rows.shape[1:] != k[0].shape[1:] or k_rows.dtype != k[0].dtype:
            raise ValueError(f"k: piece {i} has shape {tuple(k_rows.shape)}, not [rows, kv_heads, head_dim] as piece 0")
        if v_rows.shape != k_rows.shape or v_rows.dtype != k_rows.dtype:
            raise ValueError(f"v: piece {i} is not of the type and shape of its keys")
        if k_rows.shape[0] < context:
            raise ValueError(f"context_lengths: sequence {i} has {k_rows.shape[0]} rows for a context of {context}")


def _check_lengths(q: torch.Tensor, contexts: list[int], queries: list[int]) -> None:
    if not queries or len(queries) != len(contexts):
        raise ValueError(f"query_lengths: {len(queries)} entries beside {len(contexts)} context lengths")
    for i, (n, context) in enumerate(zip(queries, contexts, strict=True)):
        if n < 1:
            raise ValueError(f"query_lengths: sequence {i} has {n} queries")
        if context < n:
            raise ValueError(f"context_lengths: sequence {i} has {context} tokens, fewer than its {n} queries")
    if sum(queries) != q.shape[0]:
        raise ValueError(f"query_lengths: {sum(queries)} in all for {q.shape[0]} packed queries")


def _check_table(block_tables: torch.Tensor, batch: int, longest: int, k_cache: torch.Tensor) -> None:
    if block_tables.dim() != 2 or block_tables.shape[0] != batch or block_tables.dtype != torch.int64:
        shape = tuple(block_tables.shape)
        raise ValueError(f"block_tables: {block_tables.dtype} {shape} is not int64 [{batch}, max_blocks]")
    if block_tables.device != k_cache.device:
        raise ValueError(f"block_tables: on {block_tables.device}, and the cache is on {k_cache.device}")
    block_size = k_cache.shape[1]
    if block_tables.shape[1] < _blocks(longest, block_size):
        columns = block_tables.shape[1]
        raise ValueError(f"block_tables: {columns} blocks of {block_size} do not hold a context of {longest}")
