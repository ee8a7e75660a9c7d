"""Which outside work we lean on, pinned: name, version, commit, and what was read there; it quotes nothing.

A claim about an engine holds at its pin and nowhere else. Papers have no commit: what they report is paper-reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

PAPER, SOURCE_OBSERVED, REWRITE = "paper", "source-observed", "rewrite"
CLAIMS = MappingProxyType({
    PAPER: "a paper's contract",
    SOURCE_OBSERVED: "seen in pinned source",
    REWRITE: "ours: the article's rewrite demands it",
})
"""Where a field of a teaching record comes from (article 0x00C)."""


@dataclass(frozen=True, slots=True)
class Source:
    """One outside source. `commit` is "" for a paper; `reads` names what we took from it, in the field's words."""

    name: str
    version: str
    commit: str
    reads: tuple[str, ...]

    @property
    def label(self) -> str:
        """How a table's head names it, such as "vLLM v0.23.0"."""
        return f"{self.name} {self.version or self.commit}".strip()

    @property
    def claim(self) -> str:
        return SOURCE_OBSERVED if self.commit else PAPER


SOURCES = MappingProxyType({
    "vllm": Source("vLLM", "v0.23.0", "0fc695fc6d1d82e9a5ac6835ac8e4e1c83703665", (
        "block tables and slot mapping by KV cache group", "ref_cnt and the free queue",
        "block hash of parent, tokens and extra keys", "at least one token of a prompt is computed",
        "reset_prefix_cache")),
    "sglang": Source("SGLang", "v0.5.11", "612785ffdcaf35552f1ed433a981d596ca9fe900", (
        "the radix tree and its splits", "lock_ref from a node up to the root", "evictable and protected size")),
    "vattention": Source("vAttention", "", "ef3fff25", (
        "a virtual range reserved for each request slot", "physical pages mapped as rows come",
        "deferred reclamation")),
    "pagedattention": Source("PagedAttention (Kwon et al., SOSP 2023)", "", "", (
        "block tables with filled counts", "reference counts and copy-on-write", "attention over blocks")),
})
"""By short name. The versions and commits are the article's (0x00E)."""
