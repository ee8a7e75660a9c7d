"""One token's way through the five contracts in a real run, as plain data for a view; it draws and breaks nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.reference import attention_oracle, weight
from kvlab.contract import History, Json
from kvlab.memory.address import resolve
from kvlab.memory.address_bytes import address_snapshot, read_scalar
from kvlab.reuse.compatibility import examine
from kvlab.study.lesson_contracts import SIZE, Chats, in_two_parts, rows_of

LAYER, HEAD, LANE = 2, 1, 5
"""Which of the token's scalars is followed to its byte; layer 2 is the last of group g0 in the embedded model."""


def follow(world: Chats, parent: str, child: str, at: int, line: str, token: int) -> Json:
    """Branch `child` from the parent's first `at` tokens, let it say `line` and one word, and follow one of its tokens.

    `token` counts in the line. Everything in the result was read from the machines while it happened. The world needs
    a schedule (`combine`), so that the shared prefix is answered apart, and rows on the CPU, whose bytes can be read.
    ValueError without one of them, for no such token, or where the branch leaves no shared tail to copy.
    """
    ids = world.tokenizer.encode(line)
    if world.combine is None or world.store.device != "cpu" or not 0 <= token < len(ids) or at % SIZE == 0:
        raise ValueError(f"the walk needs a schedule, rows on the CPU, a shared tail, and a token below {len(ids)}")
    history = History(world.allocator)
    world.branch_at(parent, child, at, line)
    history.detach()
    committed = [step for step in history if step.kind == "committed"]
    staged = next(step for step in reversed(history.steps) if step.kind == "staged" and step.staged["copies"])
    seen = _speak(world, child)
    text = world.reply(child)
    return {
        "parent": parent, "chat": child, "position": at + token, "token": world.tokenizer.decode([ids[token]]),
        "line": line, "tokens": at + len(ids), "digest": committed[-1].receipt["predecessor_digest"],
        "digest_after": committed[-1].receipt["successor_digest"],
        "identity": _identity(world, parent, child, at), "index": _index(world, parent, child, at),
        "ownership": _ownership(world, parent, staged.staged, committed[-1].receipt),
        "address": _address(world, child, at + token), "execution_reuse": _execution(world, seen), "said": text,
    }


def _identity(world: Chats, parent: str, child: str, at: int) -> Json:
    """May the child read the parent's rows? Asked of the manifests, about the tokens they share."""
    layout, whole = world.records.layout, at // SIZE * SIZE
    made, wanted = world.manifest(parent, whole), world.manifest(child, whole)
    verdict = examine(made, wanted, {layout.digest: layout})
    return {"facts": len(verdict.ran), "model": wanted.model_generation[:6], "adapter": wanted.adapter_identity[:6],
            "compatible": verdict.compatible}


def _index(world: Chats, parent: str, child: str, at: int) -> Json:
    """What the keys of the child's shared full blocks lead to, and whether its table names just that."""
    keys = world.keys(world.ids[child][:at])
    found = [world.published[key].bundle for key in keys]
    named = [world.bundle(child, j) for j in range(len(keys))]
    return {"keys": [key[:4] for key in keys], "blocks": [list(bundle) for bundle in found], "rows": SIZE * len(keys),
            "named": found == named}


def _ownership(world: Chats, parent: str, staged: Json, receipt: Json) -> Json:
    """Which block was copied for the child, which it got, and what that moved; of the first group."""
    group = world.layout.groups[0].group_id
    copy = next(c for c in staged["copies"] if c["group"] == group)
    old, new = copy["src"], staged["reserved"][group][0]["handle"]
    kept = world.allocator.requests[parent]
    return {"from": old, "to": new, "rows": receipt["copied_rows"], "bytes": receipt["copy_payload_bytes"],
            "written": receipt["useful_new_rows"],
            "from_fill": kept.context % SIZE or SIZE, "to_fill": min(SIZE, copy["rows"] + receipt["useful_new_rows"])}


def _address(world: Chats, child: str, position: int) -> Json:
    snapshot = address_snapshot(world.store, world.allocator.snapshot())
    trace = resolve(snapshot, child, position, LAYER, "K", HEAD, LANE)
    g, keys, _ = world.store.layers[LAYER]
    shown = keys[trace.physical_slot, trace.token_offset, HEAD, LANE]
    read = read_scalar(trace, world.store.dtype)
    handle = f"{trace.physical_ref.physical_block_id}@{trace.physical_ref.block_generation}"
    return {"layer": LAYER, "head": HEAD, "lane": LANE, "block": handle, "row": trace.token_offset,
            "slot": trace.slot_id, "byte": trace.byte_offset, "checks": len(trace.checks),
            "value": round(float(read), 2), "same": bool(read == shown.cpu()), "group": world.layout.groups[g].group_id}


def _speak(world: Chats, child: str) -> list[tuple[Any, ...]]:
    """Let the child say one word and keep what each layer's attention was asked and what it answered."""
    seen: list[tuple[Any, ...]] = []
    answer = world.answer

    def watched(q: Tensor, *rows: Any) -> Tensor:
        out = answer(q, *rows)
        seen.append((q, *rows, out))
        return out

    world.answer = watched
    try:
        world.speak(child)
    finally:
        del world.answer
    return seen


def _execution(world: Chats, seen: list[tuple[Any, ...]]) -> Json:
    """How the followed layer's query was answered: the rows of each part, and the weight that the shared part got.

    `weight`: percent of a head's attention that fell on shared rows, the least and the most of all heads.
    """
    q, g, keys, values, table, context, out = seen[LAYER]
    exact = attention_oracle(q, keys, values, table, context, context - 1, q.shape[-1] ** -0.5)
    shared, rows = world.shared_rows(g, table, context), rows_of(keys, values, table, context)
    parts = []
    in_two_parts(q, *rows, shared, lambda *states: parts.extend(states))
    sums = [weight(part.m, parts[0].m.maximum(parts[1].m)) * part.l for part in parts]
    share = 100 * sums[0] / (sums[0] + sums[1])
    return {"shared": shared, "own": context - shared, "same": bool((out - exact).abs().max() < 1e-4),
            "weight": [round(float(share.min())), round(float(share.max()))]}
