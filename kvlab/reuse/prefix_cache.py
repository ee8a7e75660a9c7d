"""The index contract as a hash chain: which blocks hold the longest prefix of this prompt, told to who may know it.

It owns entries over the blocks of a real allocator, behind the gate that authorises first. It refuses to know where
rows lie (address), to hold a block alive (ownership: an entry is weak) and to say who runs next (scheduling).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from kvlab.contract import Event, Json, Operation, Receipt, Rejected, canonical
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheLayoutManifest
from kvlab.memory.transaction import AllocatorTxn
from kvlab.reuse.chain import HASHES
from kvlab.reuse.gate_operations import Draft, Telemetry, admit, enter
from kvlab.reuse.gate_state import Directory
from kvlab.reuse.identity import IdentityGate
from kvlab.reuse.manifests import plain
from kvlab.reuse.prefix_answers import answer
from kvlab.reuse.prefix_entries import Entries, Part
from kvlab.reuse.prefix_lookup import Asker, PrefixMatch, find
from kvlab.reuse.prefix_operations import OPERATIONS, admission
from kvlab.reuse.prefix_receipts import FULL_BLOCK, IMMUTABLE_PARTIAL, VLLM, PrefixMatchReceipt
from kvlab.reuse.prefix_snapshot import read_entries


@dataclass(frozen=True, slots=True)
class IndexReceipt:
    """What one committed operation did. `parts` are the receipts of the allocator or gate operations within it.

    `published` are the keys that new blocks stand under, `duplicates` those of them that another block had already.
    """

    operation: str
    predecessor_digest: str
    successor_digest: str
    request: str | None = None
    published: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    forgotten: int = 0
    parts: tuple[Receipt, ...] = ()
    match: PrefixMatch | None = None
    outcome: str = "committed"

    def to_dict(self) -> Json:
        return {"operation": self.operation, "predecessor_digest": self.predecessor_digest,
                "successor_digest": self.successor_digest, "request": self.request,
                "published": list(self.published), "duplicates": list(self.duplicates), "forgotten": self.forgotten,
                "match": self.match.to_dict() if self.match else None, "outcome": self.outcome,
                "parts": [part.to_dict() for part in self.parts]}


class PrefixCache:
    """A hash-chain index over one allocator; every cache group has the same block size.

    `policy="normative"`: the article's protocol. `policy="vllm-0.23"`: what vLLM v0.23.0 was seen to do - the cap
    holds whether or not logits are wanted, and a request that ends gives its blocks back tail first, so that the end
    of a prefix is evicted before its beginning. `partial_tails` is the article's second design: a live request's
    tail may be found too, and its rows are copied. `alignment` (tokens) is what a hit must be a multiple of.
    `witness` keeps what each key was made of; without it a key is believed. Whatever changes the gate goes through
    `apply` here, for entries of an ended generation go with it; the allocator may be used directly, but only the
    index gives its blocks identities. Operations (plain dicts): publish,
    admit, start (lookup and admit in one), gate, and the allocator's allocate, append, fork, truncate, release,
    cancel, evict.
    """

    def __init__(self, allocator: Allocator, gate: IdentityGate | None = None, *, policy: str = "normative",
                 hash_name: str = "sha256", witness: bool = True, partial_tails: bool = False,
                 alignment: int | None = None) -> None:
        self.allocator, self.gate, self.policy = allocator, gate or IdentityGate(), policy
        self.hashed, self.witness, self.partial_tails = HASHES[hash_name], witness, partial_tails
        self.observers: list[Callable[[Event], None]] = []
        self.block_size = allocator.groups[0].block_size
        self.alignment = alignment or self.block_size
        self._validate_design()
        self._take(self._entries([]))

    def _validate_design(self) -> None:
        if self.policy not in ("normative", VLLM):
            raise ValueError(f"policy is normative or {VLLM}, not {self.policy!r}")
        if any(g.block_size != self.block_size for g in self.allocator.groups):
            raise ValueError("every cache group of an index has the same block size")
        if self.alignment % self.block_size or self.alignment < 1:
            raise ValueError(f"an alignment of {self.alignment} tokens is not whole blocks of {self.block_size}")
        if self.partial_tails and (self.policy == VLLM or self.alignment != self.block_size):
            raise ValueError("partial tails are a design of their own: normative, aligned to nothing")
        if self.hashed.needs_witness and not self.witness:
            raise ValueError(f"{self.hashed.name} needs token witnesses: {self.hashed.gives_up}")

    def _take(self, entries: Entries) -> None:
        self.entries, self.changes, self._chain = entries, 0, b""
        self.recent: tuple[bytes, list[bytes]] = b"", []
        """The keys of bare blocks that the last lookup made, and of which prompt: a memo, no state."""
        self._known: tuple[tuple, str] | None = None
        self.telemetry = dict.fromkeys(("lookups", "probes", "hits", "misses", "hit_tokens"), 0)

    def _entries(self, rows: list[Json]) -> Entries:
        return read_entries(rows, self.allocator, self.gate.state, self.hashed, self.block_size, self.witness)

    @property
    def policy_id(self) -> str:
        """The design by which a match takes rows: full_block, immutable_partial, or the runtime it copies."""
        return VLLM if self.policy == VLLM else IMMUTABLE_PARTIAL if self.partial_tails else FULL_BLOCK

    # ------------------------------------------------------------------ who may look
    def enter(self, asker: Asker, log: list[str]) -> tuple[Directory, Part | None]:
        """Authorise, then compare generations and manifest; the part that may be read, None where there is none yet.

        `incompatible_manifest` where the namespace holds entries of this adapter and salt under another manifest.
        Nothing of the index is read before. O(1).
        """
        draft = Draft(self.gate.state, Telemetry())
        directory = enter(draft, asker.principal, asker.namespace)
        log.append("authorize_namespace")
        admit(draft, directory, asker.manifest)
        part = self.entries.parts.get(asker.manifest.digest)
        bound = self.entries.bindings.get((asker.namespace, asker.adapter_name, asker.manifest.cache_salt))
        if bound not in (None, asker.manifest.digest) or (part and part.adapter_name != asker.adapter_name):
            raise Rejected("incompatible_manifest", f"{asker.namespace} publishes {asker.adapter_name or 'its model'} "
                           f"under {str(bound)[:12]}, not {asker.manifest.digest[:12]}")
        log.append("validate_namespace_generation_and_manifest")
        return directory, part

    # ------------------------------------------------------------------ operations
    def lookup(self, asker: Asker, request: str, tokens: Sequence[int] | bytes, *, requires_logits: bool = True,
               request_generation: int = 1) -> PrefixMatch:
        """The longest prefix of a prompt that may be read and is found. It changes no table and holds nothing.

        O(hit tokens) hashing, one probe a block and group. See `kvlab.reuse.prefix_lookup`.
        """
        return find(self, asker, request, tokens, requires_logits, request_generation)

    def publish(self, asker: Asker, request: str, tokens: Sequence[int] | bytes) -> IndexReceipt:
        """Offer the full blocks of a live request, whose committed rows are those of `tokens`, to later lookups."""
        return self.apply({"op": "publish", "asker": asker, "request": request, "tokens": tokens})

    def admit(self, receipt: PrefixMatchReceipt, tokens: int | None = None) -> IndexReceipt:
        """Start the request of a match: its hit and fresh blocks for the rest in one transaction, or neither.

        `tokens`: rows to make room for, where the answer's length is known; else the prompt's.
        """
        return self.apply({"op": "admit", "receipt": receipt} | ({} if tokens is None else {"tokens": tokens}))

    def start(self, asker: Asker, request: str, tokens: Sequence[int] | bytes, *, requires_logits: bool = True,
              room: int | None = None) -> IndexReceipt:
        """Look up and admit in one call; the receipt's `match` says what was found. `room` as `tokens` of `admit`."""
        return self.apply({"op": "start", "asker": asker, "request": request, "tokens": tokens,
                           "requires_logits": requires_logits} | ({} if room is None else {"room": room}))

    def stage_admit(self, receipt: PrefixMatchReceipt) -> AllocatorTxn:
        """As `admit`, for whoever writes the rest's rows between staging and publication."""
        return self.allocator.stage(admission(self, receipt))

    def apply(self, op: Operation) -> IndexReceipt:
        """Validate an operation, then publish it at one point. `Rejected` leaves every digest as it was."""
        before = self.digest
        try:
            handler = OPERATIONS.get(str(op.get("op")))
            if handler is None:
                raise Rejected("unknown_operation", f"{op.get('op')!r}")
            facts = self._plain_errors(handler, op)
        except Rejected as no:
            self._emit(Event("refused", op, reason=no.reason, detail=no.detail))
            raise
        receipt = IndexReceipt(str(op["op"]), before, self.digest, **facts)
        self._emit(Event("committed", op, receipt=receipt))
        return receipt

    def ask(self, question: Json) -> Any:
        """Answer a question without changing anything: one of `kvlab.reuse.prefix_answers.QUESTIONS`."""
        return self._plain_errors(answer, question)

    def _plain_errors(self, handler: Callable[[PrefixCache, Any], Any], said: Operation) -> Any:
        try:
            return handler(self, said)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Rejected("unknown_operation", f"{type(error).__name__}: {error}") from error

    def _emit(self, event: Event) -> None:
        if self.observers:
            op = {k: plain(v) if is_dataclass(v) else v.hex() if isinstance(v, bytes) else v
                  for k, v in event.op.items()}
            for observer in tuple(self.observers):
                observer(replace(event, op=op))

    # ------------------------------------------------------------------ the face of a machine
    def moved(self, *said: bytes | array) -> None:
        """The entries have changed: `said` is what goes into the chain of transitions."""
        self.changes += 1
        if self.allocator.facts is None:
            self._chain = hashlib.blake2b(self._chain + b"".join(map(bytes, said)), digest_size=32).digest()

    @property
    def digest(self) -> str:
        """Digest of allocator, gate and live entries. O(entries) after a change; O(1) where the allocator chains."""
        state = (self.allocator.digest, self.gate.digest, self.changes)
        if self._known is None or self._known[0] != state:
            own = self._chain if self.allocator.facts is None else canonical(self._parts())
            self._known = state, hashlib.sha256(f"{state[0]}{state[1]}".encode() + own).hexdigest()
        return self._known[1]

    def _parts(self) -> list[Json]:
        return self.entries.snapshot(self.allocator.requests, self.block_size)

    def snapshot(self) -> Json:
        return {"kind": "prefix_cache", "policy": self.policy, "hash": self.hashed.name, "witness": self.witness,
                "partial_tails": self.partial_tails, "alignment": self.alignment,
                "allocator": self.allocator.snapshot(), "gate": self.gate.snapshot(), "parts": self._parts()}

    @classmethod
    def of(cls, snapshot: Json) -> PrefixCache:
        """An index that begins with a committed state, its own allocator and gate included."""
        try:
            allocator = Allocator(CacheLayoutManifest.from_dict(snapshot["allocator"]))
            cache = cls(allocator, policy=snapshot["policy"], hash_name=snapshot["hash"], witness=snapshot["witness"],
                        partial_tails=snapshot["partial_tails"], alignment=snapshot["alignment"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Rejected("malformed_snapshot", f"{type(error).__name__}: {error}") from error
        cache.load(snapshot)
        return cache

    def load(self, snapshot: Json) -> None:
        """Take over a committed state; telemetry starts anew. `Rejected` with the present state kept. O(snapshot)."""
        trial, gate = Allocator(self.allocator.layout), IdentityGate()
        try:
            design = (snapshot["policy"], snapshot["hash"], snapshot["witness"], snapshot["partial_tails"],
                      snapshot["alignment"])
            if design != (self.policy, self.hashed.name, self.witness, self.partial_tails, self.alignment):
                raise ValueError(f"a snapshot of another design: {design}")
            trial.load(snapshot["allocator"])
            gate.load(snapshot["gate"])
            read_entries(snapshot["parts"], trial, gate.state, self.hashed, self.block_size, self.witness)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Rejected("malformed_snapshot", f"{type(error).__name__}: {error}") from error
        self.allocator.load(snapshot["allocator"])
        self.gate.load(snapshot["gate"])
        self._take(self._entries(snapshot["parts"]))

    def check(self) -> None:
        """Recompute every invariant: blocks, gate, every key from what it was made of. `Rejected` where one drifted."""
        self.allocator.check()
        self.gate.check()
        self._entries(self._parts())


