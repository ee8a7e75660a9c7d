"""What lesson and page on the prefix chain share: an index that is asked, predictions, small trials, the lab's cases.

It owns no rule: the index decides, the fixtures say what is forbidden, and this module asks and keeps the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvlab.contract import Json, Receipt
from kvlab.memory.allocator import Allocator
from kvlab.memory.layout import CacheGroup, CacheLayoutManifest
from kvlab.reuse.chain import HASHES
from kvlab.reuse.one_tenant import one_tenant
from kvlab.reuse.prefix_cache import IndexReceipt, PrefixCache
from kvlab.reuse.prefix_lookup import Asker, PrefixMatch
from kvlab.reuse.prefix_receipts import PrefixLengths, lengths
from kvlab.reuse.token_keys import pack
from kvlab.study import fixtures
from kvlab.study.lesson_ownership import Case
from kvlab.study.replay import Replay, Setting
from kvlab.study.traced_request import TracedRequest, in_turn

QUESTION = "All 48 tokens are cached; why does it compute 16?"
NORMATIVE, OBSERVED = "normative", "vllm-0.23"
POLICIES = {NORMATIVE: "kvlab (normative)", OBSERVED: "vLLM v0.23.0 (source-observed)"}
TOKENS = tuple(range(100, 166))
"""A prompt in numbers: four full blocks of 16 tokens and two rows of a fifth."""


def changed(tokens: Sequence[int], at: int) -> list[int]:
    """The same tokens with another one at one place."""
    return [*tokens[:at], tokens[at] + 100_000, *tokens[at + 1 :]]


# ---------------------------------------------------------------- an index that is asked
class Server:
    """A real index over a real pool, without a model. A salt is part of who asks; `design` as for `PrefixCache`."""

    def __init__(self, blocks: int = 16, *, block_size: int = 16, groups: int = 2, **design: str | bool | int) -> None:
        layout = tuple(CacheGroup(f"g{n}", n, n + 1, 1, 1, 2, block_size, blocks, 1_000 * (n + 1))
                       for n in range(groups))
        self.cache: PrefixCache
        self.cache, self.owner = one_tenant(Allocator(CacheLayoutManifest(layout)), **design)
        self.asked = 0

    def asker(self, salt: str | None = None) -> Asker:
        """Who asks with this salt."""
        return replace(self.owner, manifest=replace(self.owner.manifest, cache_salt=salt)) if salt else self.owner

    def match(self, tokens: Sequence[int], *, salt: str | None = None, requires_logits: bool = True) -> PrefixMatch:
        """A lookup and nothing else."""
        self.asked += len(tokens)
        return self.cache.lookup(self.asker(salt), "?", tokens, requires_logits=requires_logits)

    def find(self, tokens: Sequence[int], *, salt: str | None = None, requires_logits: bool = True) -> PrefixLengths:
        """The four lengths that a lookup gives."""
        return self.match(tokens, salt=salt, requires_logits=requires_logits).lengths

    def start(self, request: str, tokens: Sequence[int], *, salt: str | None = None) -> int:
        """A request begins over what is found for it; how many tokens that is."""
        self.asked += len(tokens)
        return self.cache.start(self.asker(salt), request, tokens).match.lengths.runtime

    def publish(self, request: str, tokens: Sequence[int], *, salt: str | None = None) -> IndexReceipt:
        """Its rows are written; its full blocks may be found."""
        return self.cache.publish(self.asker(salt), request, tokens)

    def end(self, request: str) -> None:
        self.cache.apply({"op": "release", "request": request})

    def serve(self, request: str, tokens: Sequence[int], *, salt: str | None = None, ends: bool = True) -> int:
        """A whole request: start, publish, end. How many of its tokens were found."""
        found = self.start(request, tokens, salt=salt)
        self.publish(request, tokens, salt=salt)
        if ends:
            self.end(request)
        return found

    def take(self, request: str, tokens: int) -> Receipt:
        """Somebody who needs blocks and publishes nothing; the receipt names the identities that were evicted."""
        return self.cache.apply({"op": "allocate", "request": request, "tokens": tokens}).parts[0]

    def evict(self, tokens: Sequence[int], block: int) -> None:
        """One cached block of a prompt, in every group, loses its identity."""
        handles = self.match(tokens, requires_logits=False).receipt.matched_group_handles.bundles(block + 1)
        self.cache.apply({"op": "evict", "blocks": [handles[block]]})

    def keys(self, tokens: Sequence[int], *, salt: str | None = None) -> list[str]:
        """The key of every full block, in hex."""
        return self.cache.ask({"ask": "keys", "tokens": list(tokens), "cache_salt": salt})

    def pool(self) -> dict[str, int]:
        """Blocks of the first group: in use, free with an identity, free without."""
        pool = self.cache.allocator.pools[0]
        named = sum(pool.is_free(i) for i in pool.keys)
        return {"in use": pool.num_blocks - pool.free_count, "free, still named": named,
                "free, no name": pool.free_count - named}

    def rates(self) -> tuple[float, float]:
        """Two hit rates: requests that found anything, of those that asked; tokens found, of those asked for."""
        seen = self.cache.telemetry
        return seen["hits"] / max(1, seen["lookups"]), seen["hit_tokens"] / max(1, self.asked)


def warm(tokens: Sequence[int] = TOKENS, **design: str | bool | int) -> Server:
    """A server where a request with these tokens has run and is still there."""
    server = Server(**design)
    server.serve("A", tokens, ends=False)
    return server


# ---------------------------------------------------------------- predictions, graded by running
PROMPTS: dict[str, tuple[str, Sequence[int]]] = {
    "all": ("the same 64 tokens", TOKENS[:64]), "rest": ("its first 50 tokens", TOKENS[:50]),
    "one": ("its first 16 tokens", TOKENS[:16]),
    "edit": ("its first 50 tokens, with another one at place 37", changed(TOKENS[:50], 37)),
    "front": ("its first 50 tokens, with another one at place 0", changed(TOKENS[:50], 0))}
"""The five prompts to predict, asked of a server that has run `TOKENS`."""
BECAUSE = {
    "all": "Four full blocks are there. One row at least must be computed, and a hit is whole blocks.",
    "rest": "Three full blocks are there. Two rows are left, and one of them gives the logits.",
    "one": "Its only block is there, and its last row is wanted. Without that block nothing is left.",
    "edit": "Place 37 is in block 2 (places 32 to 47). That key is another, and nothing behind it is asked for.",
    "front": "Every key is made of the one before it, so a first token changes all of them."}
PREDICTIONS: tuple[dict[str, str], ...] = tuple(
    {"key": key, "ask": f"A prompt comes in: {what}. How many tokens are computed?", "because": BECAUSE[key],
     "unit": "tokens"} for key, (what, _) in PROMPTS.items())


def answers() -> dict[str, int]:
    """The truth about the predictions, found by asking the index now."""
    server = warm()
    return {key: server.find(tokens).recompute for key, (_, tokens) in PROMPTS.items()}


def reveal() -> list[list[str | int]]:
    """What each of the five prompts finds and computes, and how many fresh blocks a group that takes."""
    server, out = warm(), []
    for what, tokens in PROMPTS.values():
        match = server.match(tokens)
        out.append([what, len(tokens), match.lengths.runtime, match.lengths.recompute,
                    match.receipt.new_block_bundles])
    return out


# ---------------------------------------------------------------- four lengths
def four_lengths() -> dict[str, PrefixLengths]:
    """One published prompt, asked for in several ways: which of the four lengths is the short one each time."""
    prompt, short = TOKENS[:48], warm()
    short.evict(prompt, 2)
    return {
        "all 48 tokens": warm().find(prompt),
        "all 48, no logits wanted": warm().find(prompt, requires_logits=False),
        "50 tokens": warm().find(TOKENS[:50]),
        "48, another one at place 37": warm().find(changed(prompt, 37)),
        "48, block 2 was evicted": short.find(prompt),
        "48, hits of whole 32s only": lengths(48, 48, 48, requires_logits=True, unit=32),
    }


# ---------------------------------------------------------------- why a hit rate is 0
def zero_rates() -> list[tuple[str, int, int]]:
    """(what was done, tokens asked for, tokens found): a long prompt has run, and its rows are there."""
    prompt = TOKENS[:48]
    stamped, salted = Server(), Server()
    stamped.serve("A", [1_201, *prompt])
    salted.serve("A", prompt, salt="anna")
    return [
        ("the same prompt again", 48, warm(prompt).find(prompt).runtime),
        ("a clock at the front: 12:01, then 12:02", 49, stamped.find([1_202, *prompt]).runtime),
        ("the clock at the end", 49, warm(prompt).find([*prompt, 1_202]).runtime),
        ("another salt", 48, salted.find(prompt, salt="ben").runtime),
        ("a prompt of 12 tokens, again", 12, warm(prompt[:12]).find(prompt[:12]).runtime),
        ("a prompt of 16 tokens, again", 16, warm(prompt[:16]).find(prompt[:16]).runtime),
    ]


def two_rates(requests: int = 10) -> tuple[float, float]:
    """Many users behind one short instruction, each with a long text: hit rate by requests and by tokens."""
    server = Server(blocks=400)
    for n in range(requests):
        server.serve(f"r{n}", [*TOKENS[:16], *range(1_000 * (n + 1), 1_000 * (n + 1) + 484)])
    return server.rates()


# ---------------------------------------------------------------- free is not forgotten; who is evicted first
def idle() -> list[tuple[str, dict[str, int], int]]:
    """(what happened, blocks of a pool of 8, tokens that the prompt would find) until its last block is taken."""
    prompt, server = TOKENS[:50], Server(blocks=8)
    out = [("an empty server", server.pool(), server.find(prompt).runtime)]
    for what, do in (("A runs 50 tokens", lambda: server.serve("A", prompt, ends=False)),
                     ("A ends: nobody is there", lambda: server.end("A")),
                     ("B takes 4 blocks", lambda: server.take("B", 64)),
                     ("C takes the other 4", lambda: server.take("C", 64))):
        do()
        out.append((what, server.pool(), server.find(prompt).runtime))
    return out


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction left: the free queue before it, places of the prompt that went, tokens that are still found.

    `orphans`: blocks that keep their rows and their name and can no longer be reached from the front.
    """

    queue: tuple[int, ...]
    gone: tuple[int, ...]
    found: int
    orphans: int


def eviction(policy: str, taken: int = 2) -> Evicted:
    """A prompt of four blocks has ended in a pool of four; then somebody takes some of them."""
    prompt, server = TOKENS[:64], Server(blocks=4, policy=policy)
    server.serve("A", prompt)
    pool = server.cache.allocator.pools[0]
    place = {i: n for n, i in enumerate(range(pool.num_blocks))}  # a fresh pool gives its blocks out in order
    queue = tuple(place[int(pool.text(word).partition("@")[0]) - pool.first_block_id] for word in pool.queue())
    server.take("B", 16 * taken)
    found = server.find([*prompt, 1]).runtime
    return Evicted(queue, queue[:taken], found, 4 - taken - found // 16)


# ---------------------------------------------------------------- full blocks or partial tails
def tails() -> list[tuple[str, str, int, int, int]]:
    """(what is asked, design, tokens taken, computed, rows copied) for both designs, the tail's owner alive or gone."""
    out = []
    for name, partial in (("full blocks", False), ("partial tails", True)):
        server = warm(TOKENS[:50], partial_tails=partial)
        asked = {"A's 50 tokens": TOKENS[:50], "A's first 48": TOKENS[:48], "A's 50, then 30 more": [*TOKENS[:50],
                 *range(900, 930)]}
        for what, tokens in asked.items():
            out.append(_tail_row(what, name, server.match(tokens)))
        server.end("A")
        out.append(_tail_row("A's 50, then 30 more; A has ended", name,
                             server.match([*TOKENS[:50], *range(900, 930)])))
    return sorted(out, key=lambda row: list(dict.fromkeys(r[0] for r in out)).index(row[0]))


def _tail_row(what: str, name: str, match: PrefixMatch) -> tuple[str, str, int, int, int]:
    told = match.lengths
    return what, name, told.runtime, told.recompute, match.receipt.copy_valid_partial_rows


# ---------------------------------------------------------------- two at once, and two with one hash
def at_once() -> list[tuple[str, int, int, int]]:
    """(what happened, tokens found, blocks in use, keys that had a block already): two equal prompts in one step."""
    prompt, server = TOKENS[:50], Server()
    found = {name: server.start(name, prompt) for name in "AB"}
    out = []
    for name in "AB":
        twice = len(server.publish(name, prompt).duplicates)
        out.append((f"{name}, in the same step", found[name], server.pool()["in use"], twice))
    hit = server.start("C", prompt)
    return [*out, ("C, one step later", hit, server.pool()["in use"], len(server.publish("C", prompt).duplicates))]


def twins() -> tuple[list[int], list[int]]:
    """Two different blocks of tokens that have one CRC-32 key; from the fixture."""
    trace = {step["name"]: step for step in weak_hash()["trace"]}
    return trace["one publishes"]["op"]["tokens"], trace["the other may not publish"]["op"]["tokens"]


def collision() -> list[tuple[str, str, str]]:
    """(hash, key of the first block of one prompt, of the other): the same two prompts under each hash."""
    return [(name, *(HASHES[name].make(HASHES[name].root + pack(tokens)).hex()[:16] for tokens in twins()))
            for name in HASHES]


def without_witness() -> str:
    """What the index says to a weak hash whose keys are to be believed."""
    try:
        Server(hash_name="crc32", witness=False)
    except ValueError as no:
        return str(no)
    return ""


# ---------------------------------------------------------------- turn after turn
Encode = Callable[[str], Sequence[int]]


def written(encode: Encode, head: str, chats: Mapping[str, Sequence[tuple[str, str]]]) -> Iterable[TracedRequest]:
    """Chats as a server sees them, one request of each in turn: a turn's prompt is all that was said before it."""
    out = []
    for session, turns in chats.items():
        said, requests = head, []
        for turn, (ask, answer) in enumerate(turns, 1):
            said += ask
            prompt, reply = list(encode(said)), list(encode(said + answer))
            requests.append(TracedRequest(len(prompt), len(reply) - len(prompt), None, session, turn, pack(prompt),
                                          pack(reply[len(prompt) :])))
            said += answer
        out.append(requests)
    return in_turn(out)


def by_turn(requests: Iterable[TracedRequest], setting: Setting) -> list[tuple[int, int, int, int]]:
    """(turn, requests, prompt tokens, tokens found) of a trace that tells turns, replayed on a real index."""
    replay, rows = Replay(setting, ceilings=False), {}
    for request in requests:
        row = rows.setdefault(request.turn or 0, [0, 0, 0])
        found = replay.play(request)
        row[:] = row[0] + 1, row[1] + request.prompt_tokens, row[2] + (found or 0)
    return [(turn, *row) for turn, row in sorted(rows.items())]


def share(part: int, of: int) -> str:
    """One number of another, in per cent."""
    return f"{part / of:.1%}" if of else "–"


# ---------------------------------------------------------------- the failure lab
def article() -> Json:
    """The article's traces: 48 and 50 tokens, eight hits, and what may not be said of one (0x07)."""
    return fixtures.load_fixture(fixtures.FIXTURES / "loop6_prefix_chain.json")


def partial_tails() -> Json:
    """The article's second design: immutable partial tails (0x07D)."""
    return fixtures.load_fixture(fixtures.FIXTURES / "loop6_partial_tails.json")


def weak_hash() -> Json:
    """Two blocks of tokens with one CRC-32, behind token witnesses (0x07C)."""
    return fixtures.load_fixture(fixtures.FIXTURES / "loop6_weak_hash.json")


def malformed() -> list[Case]:
    """The malformed inputs of the article's loop, those of its second design and of weak hashes among them."""
    return [case for fixture in (article(), partial_tails(), weak_hash()) for case in _cases(fixture)]


def _cases(fixture: Json) -> list[Case]:
    return [Case(n["id"], n["what"], fixture, n) for n in fixture["negatives"]]


BUGS: dict[str, tuple[str, str]] = {
    "vllm-project/vllm#4764": ("a block was given to new content, and its old key still led there",
                               "an entry ends with its block's lifetime"),
    "GeeeekExplorer/nano-vllm#163": ("a block was filled again with the same tokens after another prefix, and found",
                                     "the parent is part of the key"),
    "vllm-project/vllm#11186": ("after a full hit the last block was no longer cached",
                                "the whole last block is computed, and only then published"),
    "vllm-project/vllm#50359": ("a hit ended where one cache group had nothing",
                                "lowered until all groups agree"),
    "CVE-2025-46570 / GHSA-4qjh-9fv9-r85r (vLLM)": ("the time to the first token told what a neighbour had asked",
                                                    "another salt, another chain"),
    "vllm-project/vllm#44701": ("an adapter named like a tenant's salt opened that tenant's prefixes",
                                "each extra key says what it is"),
    "kvcache-ai/ktransformers#2184": ("the salt was accepted and never reached the key",
                                      "five salts, five chains; one salt, one chain")}
"""Public bugs of prefix indexes: what people saw, and what holds here. Each is in a fixture, by its id."""


def bugs() -> list[tuple[str, str, str, bool]]:
    """(id, what people saw, what holds here, whether every value and refusal of it held just now)."""
    held: dict[str, list[bool]] = {}
    for name in ("incidents_index", "incidents_index_one_block", "incidents_isolation"):
        found = fixtures.check_fixture(fixtures.load_fixture(fixtures.FIXTURES / f"{name}.json"))
        for verdict in [v for kind in found.values() for v in kind]:
            held.setdefault(verdict.id, []).append(verdict.held)
    return [(bug, saw, here, bool(held.get(bug)) and all(held[bug])) for bug, (saw, here) in BUGS.items()]

