"""One teaching view over real machines: what is known of a K/V sequence, by contract; it owns no state at all.

No engine has one class with these fields (article 0x00C). Each is read out of a machine's snapshot or receipt, and says
whether a paper, pinned source or this rewrite asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.contract import Json
from kvlab.memory.ledger import tokens_skipped
from kvlab.study.sources import PAPER, REWRITE, SOURCE_OBSERVED

PhysicalState = dict[str, dict[str, "Field"]]

OBLIGATIONS = {
    "valid_token_tail": "kvlab.memory.block_pool:BlockPool.valid_rows",
    "per_layer_or_group_layout": "kvlab.memory.layout:CacheLayoutManifest",
    "reference_ownership": "kvlab.memory.allocator:Allocator.admit_writer",
    "copy_on_write_before_divergence": "kvlab.memory.records:append_path",
    "compatibility_identity_before_cross_request_reuse": "kvlab.reuse.compatibility:require",
    "kernel_visible_translation_metadata": "kvlab.memory.kv_store:PagedStep",
}
"""What paging K/V owes beyond an operating system's page table (article 0x00A), and who does it here: module:name."""


@dataclass(frozen=True, slots=True)
class Field:
    """One fact: its value as plain data, who asks for it (paper, source-observed, rewrite), and where to look."""

    value: Any
    claim: str
    source: str


def physical_state(allocator: Json, gate: Json | None = None, *, wanted: Sequence[str] = (), prompt_tokens: int = 0,
                   match: Json | None = None, allocation: Json | None = None, refused: str = "") -> PhysicalState:
    """KVPhysicalState of an allocator's snapshot and, where there is one, an identity gate's (article 0x00C).

    `wanted`: the keys of a prompt of `prompt_tokens` tokens, in order. `match`, `allocation`: the latest receipts, as
    data; `refused`: the reason instead of one. O(blocks + tables + records).
    """
    return {"identity": _identity(allocator, gate), "address": _address(allocator), "ownership": _ownership(allocator),
            "exact_reuse": _exact_reuse(allocator, gate, wanted, prompt_tokens),
            "transaction": _transaction(match, allocation, refused)}


def _identity(allocator: Json, gate: Json | None) -> dict[str, Field]:
    records = (gate or {}).get("records", {})
    directories = (gate or {}).get("directories", {})
    spaces = {name: row["namespace"]["namespace_generation"] for name, row in directories.items()}
    return {
        "allocator_epoch": Field(allocator["epoch"], REWRITE, "0x04D"),
        "request_and_publication_generation": Field(
            {"requests": {name: row["generation"] for name, row in allocator["requests"].items()},
             "publications": {h: row["manifest"]["publication_generation"] for h, row in records.items()}},
            REWRITE, "0x05F, 0x01A"),
        "logical_cache_abi_and_namespace": Field(
            {"abis": sorted((gate or {}).get("abis", {})), "namespaces": spaces}, REWRITE, "0x01A"),
    }


def _address(allocator: Json) -> dict[str, Field]:
    requests, sizes = allocator["requests"], {g["group_id"]: g["block_size"] for g in allocator["groups"]}
    groups = {g["group_id"]: [g["layer_start"], g["layer_end"]] for g in allocator["groups"]}
    tables = {name: row["tables"] for name, row in requests.items()}
    handles = sorted({h for t in tables.values() for table in t.values() for h in table})
    tails = {name: {g: (row["context"] - 1) % size + 1 for g, size in sizes.items()} for name, row in requests.items()}
    return {
        "cache_groups": Field(groups, SOURCE_OBSERVED, "vllm"),
        "logical_block_or_virtual_page_map": Field(tables, PAPER, "pagedattention"),
        "physical_handles": Field(handles, REWRITE, "0x05F"),
        "valid_token_tail": Field(tails, PAPER, "pagedattention"),
    }


def _ownership(allocator: Json) -> dict[str, Field]:
    refs = {f"{first + i}@{column['generation'][i]}": n for first, column in _pools(allocator)
            for i, n in enumerate(column["ref_cnt"]) if n}
    sizes = {g["group_id"]: g["block_size"] for g in allocator["groups"]}
    private = {name: {g: table[-1] for g, table in row["tables"].items()
                      if refs[table[-1]] == 1 and row["context"] % sizes[g]}
               for name, row in allocator["requests"].items()}
    named = {handle.partition("@")[0] for handle in refs}
    keys = [block for _, column in _pools(allocator) for block in column["keys"]]
    cached = {"cached": keys, "locked": [b for b in keys if b in named],
              "evictable": [b for b in keys if b not in named]}
    return {
        "request_refs": Field(refs, PAPER, "pagedattention"),
        "shared_prefix_refs": Field({h: n for h, n in refs.items() if n > 1}, SOURCE_OBSERVED, "vllm, sglang"),
        "mutable_private_tail": Field(private, PAPER, "pagedattention"),
        "cached_locked_evictable": Field(cached, SOURCE_OBSERVED, "vllm, sglang"),
    }


def _exact_reuse(allocator: Json, gate: Json | None, wanted: Sequence[str], prompt_tokens: int) -> dict[str, Field]:
    entries: dict[str, list[str]] = {}
    for first, column in _pools(allocator):
        for block, key in column["keys"].items():
            entries.setdefault(key, []).append(f"{block}@{column['generation'][int(block) - first]}")
    hit = next((n for n, key in enumerate(wanted) if key not in entries), len(wanted))
    size = allocator["groups"][0]["block_size"]
    published = [f"{row['key']['block_hash']}|{row['key']['cache_group_id']}"
                 for row in (gate or {}).get("records", {}).values()]
    return {
        "concrete_prefix_keys": Field(sorted({*entries, *published}), SOURCE_OBSERVED, "vllm"),
        "hash_chain_or_radix_entries": Field(entries, SOURCE_OBSERVED, "vllm, sglang"),
        "runtime_admissible_length": Field(tokens_skipped(hit, size, prompt_tokens) if prompt_tokens else 0,
                                           SOURCE_OBSERVED, "vllm"),
    }


def _transaction(match: Json | None, allocation: Json | None, refused: str) -> dict[str, Field]:
    outcome = refused or next((r["outcome"] for r in (allocation, match) if r), "nothing yet")
    return {
        "prefix_match_receipt": Field(match, REWRITE, "0x01A"),
        "allocation_or_release_receipt": Field(allocation, REWRITE, "0x04D"),
        "commit_or_explicit_failure": Field(outcome, REWRITE, "0x04D"),
    }


def _pools(allocator: Json) -> list[tuple[int, Json]]:
    """Each group's first block id and its per-block columns."""
    return [(g["first_block_id"], allocator["blocks"][g["group_id"]]) for g in allocator["groups"]]
