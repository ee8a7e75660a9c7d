"""Allocator snapshots as plain data: writing, restoring, and the validator that every load and check calls.

It recomputes each invariant of the ownership contract from the block tables alone, and holds no state.
"""

from __future__ import annotations

from array import array
from collections import Counter

from kvlab.contract import Json, Rejected
from kvlab.memory.block_pool import BlockPool
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest

LARGEST = (1 << 31) - 1
"""The largest count or generation that a packed column can hold."""


def pool_columns(pool: BlockPool, views: dict[int, int]) -> Json:
    """Per-block columns of one pool, in block order; cached identities by block id.

    What a free block has comes from the queue, what a held one has from the pool's notes; `views` gives the rows
    that tables see. So the references are the pool's word, not the tables'. O(pool).
    """
    refs = [pool.refs(i) for i in range(pool.num_blocks)]
    rows = [pool.valid_rows(i, views.get(i, 0)) for i in range(pool.num_blocks)]
    for i in pool.queue():
        refs[i], rows[i] = pool.shared.get(i, 0), pool.block_size if i in pool.keys else 0
    keys = {str(pool.first_block_id + i): pool.keys[i] for i in sorted(pool.keys)}
    return {"generation": pool.generations().tolist(), "ref_cnt": refs, "valid_rows": rows, "keys": keys}


def restore_pool(pool: BlockPool, columns: Json, free: list[int], views: dict[int, int]) -> None:
    """Fill an empty pool from its columns and queue order, and the audit that follows it; `views` as above. O(pool)."""
    keys = {int(block) - pool.first_block_id: key for block, key in columns["keys"].items()}
    order = [block - pool.first_block_id for block in free]
    pool.restore(columns["generation"], order, keys)
    pool.shared = {i: refs - 1 for i, refs in enumerate(columns["ref_cnt"]) if refs > 1}
    pool.rows = {i: rows for i, seen in views.items() if (rows := columns["valid_rows"][i]) != pool.valid_rows(i, seen)}
    if pool.facts is not None:
        pool.facts.generation = array("I", columns["generation"])
        pool.facts.ref_cnt = array("i", columns["ref_cnt"])
        pool.facts.valid_rows = array("i", columns["valid_rows"])
        pool.facts.keys = dict(keys)
        pool.facts.link(order)


def restore_tables(row: Json, pools: tuple[BlockPool, ...]) -> list[array]:
    """The block tables of one request, as packed handles."""
    return [array("q", [p.word(text) for text in row["tables"][p.group]]) for p in pools]


def validate_snapshot(snapshot: Json) -> None:
    """Raise `Rejected` for the first broken invariant; return None for a legal committed state.

    Order: form, tables (length, published handles), references, free queues, valid rows, bundles (article 0x05G).
    """
    try:
        groups = CacheLayoutManifest.from_dict(snapshot).groups
        requests, whole = snapshot["requests"], isinstance(snapshot["epoch"], int)
        for group in groups:
            columns = snapshot["blocks"][group.group_id]
            names = {str(group.first_block_id + i) for i in range(group.num_blocks)}
            for column in (columns["generation"], columns["ref_cnt"], columns["valid_rows"]):
                whole &= len(column) == group.num_blocks
                whole &= all(isinstance(n, int) and 0 <= n <= LARGEST for n in column)
            whole &= columns["keys"].keys() <= names and all(isinstance(k, str) for k in columns["keys"].values())
            whole &= all(isinstance(b, int) for b in snapshot["free"][group.group_id])
        for row in requests.values():
            whole &= all(isinstance(row[k], int) for k in ("generation", "version", "context"))
            whole &= row["context"] >= 1 and set(row["tables"]) == {g.group_id for g in groups}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Rejected("malformed_snapshot", f"{type(error).__name__}: {error}") from error
    if not whole:
        raise Rejected("malformed_snapshot", "a column, a length or a table has the wrong form")
    for group in groups:
        _validate_group(group, snapshot)
    _validate_bundles(groups, snapshot)


def _validate_group(group: CacheGroup, snapshot: Json) -> None:
    columns, free = snapshot["blocks"][group.group_id], snapshot["free"][group.group_id]
    generation, first = columns["generation"], group.first_block_id
    held: Counter[int] = Counter()
    view: dict[int, int] = {}
    for request_id, row in snapshot["requests"].items():
        table, size = row["tables"][group.group_id], group.block_size
        if len(table) != -(-row["context"] // size):
            raise Rejected("table_length_drift", f"{request_id} has {len(table)} blocks in {group.group_id}")
        if len(set(table)) < len(table):
            raise Rejected("block_twice_in_table", f"{request_id} in {group.group_id}")
        for j, text in enumerate(table):
            index, gen = _handle(text, group)
            if gen != generation[index]:
                reason = "unpublished_block_reachable" if gen > generation[index] else "stale_block_generation"
                raise Rejected(reason, f"{request_id} names {text}, the block is at {generation[index]}")
            held[index] += 1
            view[index] = max(view.get(index, 0), min(size, row["context"] - j * size))
    queue = Counter(block - first for block in free)
    for index in range(group.num_blocks):
        _validate_block(group, index, columns, held[index], queue.pop(index, 0), view.get(index, 0))
    if queue:
        raise Rejected("malformed_snapshot", f"the free queue of {group.group_id} names blocks that do not exist")


def _handle(text: str, group: CacheGroup) -> tuple[int, int]:
    number, _, generation = str(text).partition("@")
    if not (number.isdigit() and generation.isdigit() and 0 <= int(number) - group.first_block_id < group.num_blocks):
        raise Rejected("malformed_snapshot", f"{text!r} is no handle of {group.group_id}")
    return int(number) - group.first_block_id, int(generation)


def _validate_block(group: CacheGroup, index: int, columns: Json, held: int, queued: int, view: int) -> None:
    name, refs, rows = group.first_block_id + index, columns["ref_cnt"][index], columns["valid_rows"][index]
    if queued and held:
        raise Rejected("free_with_live_refs", f"block {name} of {group.group_id} has {held} references")
    if queued > 1:
        raise Rejected("double_free", f"block {name} of {group.group_id}")
    if refs != held:
        raise Rejected("refcount_drift", f"block {name} of {group.group_id}: stored {refs}, reachable {held}")
    if not queued and not held:
        raise Rejected("free_queue_missing_handle", f"block {name} of {group.group_id}")
    if not 0 <= rows <= group.block_size:
        raise Rejected("valid_rows_exceed_block", f"block {name} of {group.group_id}: {rows} of {group.block_size}")
    if rows < view:
        raise Rejected("valid_rows_below_view", f"block {name} of {group.group_id}: {rows} valid, {view} seen")
    if str(name) in columns["keys"] and rows < group.block_size:
        raise Rejected("cache_partial_block", f"block {name} of {group.group_id} has an identity and {rows} rows")


def _validate_bundles(groups: tuple[CacheGroup, ...], snapshot: Json) -> None:
    """Blocks at the same place of one table are one bundle: groups of equal block size hold equal rows."""
    for request_id, row in snapshot["requests"].items():
        for other in groups[1:]:
            if other.block_size != groups[0].block_size:
                continue
            for j in range(len(row["tables"][other.group_id])):
                rows = []
                for group in (groups[0], other):
                    index, _ = _handle(row["tables"][group.group_id][j], group)
                    rows.append(snapshot["blocks"][group.group_id]["valid_rows"][index])
                if rows[0] != rows[1]:
                    detail = f"block {j} of {request_id}: {rows[0]} and {rows[1]} rows"
                    raise Rejected("cross_group_bundle_mismatch", detail)
