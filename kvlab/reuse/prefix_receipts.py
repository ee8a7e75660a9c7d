"""The four prefix lengths, the receipt that a lookup leaves behind, and what neither of them may claim.

It owns the arithmetic of article 0x07A and the frozen `PrefixMatchReceipt` (0x07G). It refuses to look anything up, and
a receipt never holds a scheduling decision.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from kvlab.contract import Json, Rejected, canonical
from kvlab.memory.block_pool import GENERATION_SHIFT, INDEX_MASK

FULL_BLOCK, IMMUTABLE_PARTIAL, VLLM = "full_block", "immutable_partial", "vllm-0.23"
HANDLE_BYTES = 8
RECOMPUTE_TAIL, NOT_REQUIRED = "recompute_tail", "not_required"


def logits_cap(prompt: int, requires_logits: bool) -> int:
    """How much of a prompt may be taken from the cache: all but the row whose logits are wanted (formula F6.02)."""
    if prompt < 1:
        raise Rejected("empty_prompt", f"a prompt of {prompt} tokens has no row to compute logits from")
    return prompt - 1 if requires_logits else prompt


def aligned(tokens: int, unit: int) -> int:
    """The largest multiple of `unit` that is at most `tokens` (formula F6.03)."""
    return tokens - tokens % unit


def bundles(rows: int, block_size: int) -> int:
    """Fresh blocks a group for `rows` rows, where no writable tail is owned already (formula F6.06)."""
    return -(-rows // block_size)


def common_frontier(finders: Iterable[Callable[[int], int]], candidate: int) -> int:
    """The longest length that every cache group can serve: lowered, never raised, until all groups agree.

    `finder(n)` is the longest length <= n at which its group has what it needs. Groups that keep whole prefixes give
    min(n, own); groups that keep states at some boundaries only have nothing in between, so one pass is not enough.
    """
    finders = tuple(finders)
    while True:
        before = candidate
        for find in finders:
            candidate = find(candidate)
        if candidate == before:
            return candidate


@dataclass(frozen=True, slots=True)
class PrefixLengths:
    """0 <= runtime <= min(semantic, indexed, cap) <= prompt, in tokens (formula F6.01).

    `semantic`: how much of an equal computation has been published. `indexed`: how much of it this index can find now.
    `cap`: how much may be taken if logits are wanted. `runtime`: how much the design really takes.
    """

    prompt: int
    semantic: int
    indexed: int
    cap: int
    runtime: int

    @property
    def recompute(self) -> int:
        return self.prompt - self.runtime

    def to_dict(self) -> Json:
        return {"S_prompt": self.prompt, "S_sem": self.semantic, "S_indexed": self.indexed, "S_cap": self.cap,
                "S_runtime": self.runtime, "S_recompute": self.recompute}


def lengths(prompt: int, semantic: int, indexed: int, *, requires_logits: bool, unit: int) -> PrefixLengths:
    """The four lengths of one prompt; `unit` is the alignment of the design, 1 where a partial tail may be taken."""
    cap = logits_cap(prompt, requires_logits)
    return PrefixLengths(prompt, semantic, indexed, cap, aligned(min(semantic, indexed, cap), unit))


def check_lengths(own: PrefixLengths, *, unit: int, block_size: int, copy_rows: int, new_bundles: int) -> None:
    """`Rejected` for the first thing that a claim may not say.

    Order: prompt, logits row, semantic, index, alignment, copy intent, bundles.
    """
    if own.prompt < 1:
        raise Rejected("empty_prompt", f"S_prompt is {own.prompt}")
    if own.runtime > own.cap:
        raise Rejected("full_prompt_hit_without_logits_row", f"{own.runtime} of {own.prompt} tokens, yet logits wanted")
    if own.runtime > own.semantic:
        raise Rejected("runtime_exceeds_semantic", f"{own.runtime} taken, {own.semantic} are of an equal computation")
    if own.runtime > own.indexed:
        raise Rejected("runtime_exceeds_index", f"{own.runtime} taken, the index holds {own.indexed}")
    if own.runtime % unit:
        raise Rejected("unaligned_runtime_hit", f"{own.runtime} tokens are not whole units of {unit}")
    if copy_rows != own.runtime % block_size:
        raise Rejected("partial_hit_without_copy_intent",
                       f"{own.runtime % block_size} rows of a block that is not owned, {copy_rows} to be copied")
    wanted = bundles(own.recompute + copy_rows, block_size)
    if new_bundles != wanted:
        raise Rejected("bundle_count_drift", f"{new_bundles} new bundles for {own.recompute} rows, {wanted} needed")


@dataclass(frozen=True, slots=True)
class MatchedHandles:
    """The blocks of a match: a row of handles a cache group, 8 bytes each, in ancestry order; worded when asked."""

    groups: tuple[str, ...]
    first_block_ids: tuple[int, ...]
    rows: tuple[bytes, ...]

    @property
    def words(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(array("q", row)) for row in self.rows)

    def to_dict(self) -> Json:
        return {group: [f"{first + (w & INDEX_MASK)}@{w >> GENERATION_SHIFT}" for w in words]
                for group, first, words in zip(self.groups, self.first_block_ids, self.words, strict=True)}

    def bundles(self, count: int) -> list[list[str]]:
        """The first `count` bundles as the allocator names them: one handle a group."""
        rows = self.to_dict().values()
        return [list(row) for row in zip(*(handles[:count] for handles in rows), strict=True)]

    def packed(self) -> bytes:
        return b"".join([(len(row) // HANDLE_BYTES).to_bytes(8, "little") + row for row in self.rows])


@dataclass(frozen=True, slots=True)
class PrefixMatchReceipt:
    """What a lookup found, frozen (article 0x07G): physical facts for a scheduler, and no decision of one.

    Lengths in tokens; `copy_valid_partial_rows` in rows of the last matched bundle, which somebody else owns;
    `new_block_bundles` counts blocks of one group. `receipt_sha256` covers every other field.
    """

    request_id: str
    request_generation: int
    index_snapshot_id: str
    index_publication_generation: int
    compatibility_manifest_sha256: str
    namespace_id: str
    namespace_generation: int
    policy_id: str
    semantic_match_tokens: int
    runtime_hit_tokens: int
    prompt_rows_recomputed: int
    matched_group_handles: MatchedHandles
    new_block_bundles: int
    copy_valid_partial_rows: int
    logits_path: str
    receipt_sha256: str = ""

    @property
    def policy_decision(self) -> None:
        """Always None: whether and when the request runs is not this index's business."""
        return None

    @property
    def prompt(self) -> int:
        return self.runtime_hit_tokens + self.prompt_rows_recomputed

    def _seal(self) -> str:
        said = [scalars(self), self.matched_group_handles.groups]
        return hashlib.sha256(canonical(said) + self.matched_group_handles.packed()).hexdigest()

    @classmethod
    def sealed(cls, *said: Any) -> PrefixMatchReceipt:
        """A receipt from its fields in order, with its own digest in it."""
        receipt = cls(*said)
        object.__setattr__(receipt, "receipt_sha256", receipt._seal())  # it is not anybody's yet
        return receipt

    def verify(self) -> None:
        """`receipt_tampering` where a field is not the one that was sealed."""
        if self.receipt_sha256 != self._seal():
            raise Rejected("receipt_tampering", f"the receipt of {self.request_id} is not the one that was sealed")

    def to_dict(self) -> Json:
        out: Json = {f.name: getattr(self, f.name) for f in fields(self)}
        return out | {"matched_group_handles": self.matched_group_handles.to_dict(), "policy_decision": None}


scalars = attrgetter(*[f.name for f in fields(PrefixMatchReceipt)
                       if f.name not in ("matched_group_handles", "receipt_sha256")])
"""What a seal covers beside the handles."""


def read_receipt(data: Json, pools: Any) -> PrefixMatchReceipt:
    """A receipt from its plain form, unverified. `malformed_snapshot` where a handle is none of these pools'."""
    said = data["matched_group_handles"]
    handles = MatchedHandles(tuple(p.group for p in pools), tuple(p.first_block_id for p in pools),
                             tuple(array("q", [p.word(text) for text in said[p.group]]).tobytes() for p in pools))
    known = {f.name: data[f.name] for f in fields(PrefixMatchReceipt)}
    return PrefixMatchReceipt(**known | {"matched_group_handles": handles})
