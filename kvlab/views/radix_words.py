"""Says what a moment of a radix cache shows: title, why, scoreboard, twin; it draws nothing.

Every sentence comes from the receipt, the operation or the two states of its beat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.views.radix_beats import Beat
from kvlab.views.radix_grid import Layout
from kvlab.views.radix_names import Names, amount, spread

Json = Mapping[str, Any]
Said = tuple[str, str]

FIRST = {
    "lru": "used longest ago", "lfu": "used least often", "fifo": "made first", "mru": "used last",
    "filo": "made last", "priority": "of the lowest priority",
    "segmented-lru": "used longest ago, of those used only once",
}
"""Which unlocked leaf goes first, by eviction order; ties and details are the machine's."""


def words(beat: Beat, names: Names, reasons: Mapping[str, str]) -> Said:
    """Title and why of a beat."""
    if beat.what == "refused":
        meaning = reasons.get(beat.reason, "")
        return f"Refused: {asked(beat.op, names)}", " ".join(filter(None, (meaning, f"In detail: {beat.detail}.")))
    if beat.what == "start":
        return _start(beat)
    if beat.what == "commit":
        return _COMMITTED[beat.receipt["operation"]](beat, names)
    return {"ask": _ask, "arrive": _arrive, "split": _split, "evict": _evict}[beat.what](beat, names)


def asked(op: Json, names: Names) -> str:
    """An operation in words, whatever its arguments are: a refused one may have wrong ones."""
    name, who = str(op.get("op")), op.get("request")
    tokens = op.get("tokens")
    if name == "evict":
        return f"evict node {op['node']}" if op.get("node") is not None else f"evict {tokens} tokens"
    if name == "settle":
        receipt = op.get("receipt")
        who = receipt.get("request_id") if isinstance(receipt, Mapping) else None
        return f"{op.get('disposition')} {who}"
    if name in ("unlock", "lock", "split") and op.get("node") is not None:
        return f"{name} node {op['node']}" + (f" for {who}" if who else "")
    plain = isinstance(tokens, Sequence) and not isinstance(tokens, str) and all(
        isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in tokens)
    said = names.say(tokens) if plain else ""
    return " ".join(filter(None, (name.replace("_", " "), said, f"for {who}" if who else "")))


def query_says(beat: Beat, names: Names) -> str:
    """The line over a query or over the slots that a producer brings."""
    if beat.brought:
        brings = len(beat.brought)
        return f"a producer brings {amount(brings, 'slot')} of its own"
    who = beat.op.get("request")
    return f"{who or 'a request'} asks for {amount(len(beat.query), 'token')}"


# ---------------------------------------------------------------- before publication
def _start(beat: Beat) -> Said:
    state = beat.after
    if not state["nodes"]:
        size = state["block_size"]
        each = "a token each" if size == 1 else f"{size} tokens each"
        return "An empty tree", f"{amount(state['num_slots'], 'slot')} of K and V, {each}, and all of them are free."
    return (f"{amount(len(state['nodes']), 'edge')} at the start",
            "Each edge owns tokens, and under each block the slot that holds its K and V.")


def _found(beat: Beat) -> int:
    return beat.receipt["matched"]


def _ask(beat: Beat, names: Names) -> Said:
    found = _found(beat)
    rest = beat.query[found:]
    end = f"{names.say(rest[:1])} does not." if rest else "and the question ends there."
    return (f"Match: {amount(found, 'token')}, then {'a difference' if rest else 'the end'}",
            f"{names.say(beat.query[:found])} agrees with the tree, {end} The answer ends inside an edge.")


def _arrive(beat: Beat, names: Names) -> Said:
    told, mine = beat.receipt, sorted(beat.staged)
    if told["operation"] != "insert":
        one = len(mine) == 1
        return (f"{told['request']} computes {amount(len(mine), 'row')} more",
                f"The new {'row lies' if one else 'rows lie'} in {'slot' if one else 'slots'} {spread(mine)}, private "
                f"to {told['request']}. Nobody can find {'it' if one else 'them'} yet.")
    twice = _duplicates(beat)
    return (f"Insert {names.say(beat.query)}",
            f"{amount(len(mine), 'row')} computed into {'slot' if len(mine) == 1 else 'slots'} {spread(mine)}. "
            + (f"The tree has {twice} of these tokens already: {amount(twice, 'row')}, there twice." if twice else
               "The rest came from the tree, so nothing is there twice."))


def _split(beat: Beat, names: Names) -> Said:
    _, old, at = beat.parted
    locked = beat.tree["nodes"][str(old)]["lock"]
    return (f"Split after {amount(at, 'token')}" + (", and the lock goes with it" if locked else ""),
            "The common prefix ends inside an edge. "
            + (f"It was locked, so both halves carry its lock of {locked}." if locked else
               "No slot is allocated, copied or freed; only the boundary is new."))


def _evict(beat: Beat, names: Names) -> Said:
    last, tree = beat.gone[-1], beat.tree
    parent = beat.before["nodes"][str(last["node"])]["parent"]
    bare = parent and not tree["nodes"][str(parent)]["lock"] and all(
        n["parent"] != parent for n in tree["nodes"].values())
    wanted = amount(beat.op["tokens"], "token")
    rank = "first" if len(beat.gone) == 1 else "then"
    return (f"Evict {wanted}: {rank} {names.say(last['tokens'])}",
            f"{_which(beat)} {_home(last)}" + (" Its parent is a leaf now, and may go next." if bare else ""))


def _which(beat: Beat) -> str:
    order = beat.after["eviction"]
    return f"Of the unlocked leaves it is the one {FIRST[order]} ({order})."


def _home(edge: Json) -> str:
    slots = edge["slots"]
    return f"{'Slot' if len(slots) == 1 else 'Slots'} {spread(slots)} {'goes' if len(slots) == 1 else 'go'} home."


# ---------------------------------------------------------------- committed
def _duplicates(beat: Beat) -> int:
    """Tokens whose rows were computed although the tree had them; 0 for an operation that computes nothing."""
    told = beat.receipt
    if told["operation"] == "insert":
        return told["matched"] - beat.op.get("protected_len", 0)
    if told["operation"] in ("publish", "finish"):
        return max(0, told["matched"] - beat.before["requests"][told["request"]]["protected_len"])
    return 0


def _match(beat: Beat, names: Names) -> Said:
    found, asked_for = _found(beat), len(beat.query)
    if beat.parted:
        return _divided(beat, names)
    where = f"The answer is a list of slots that the tree owns: {spread(beat.receipt['slots'])}."
    if not found:
        return "Match: nothing is found", "No edge below the root begins with this token. Nothing splits."
    if found == asked_for:
        every = "its one token is" if found == 1 else f"all {found} tokens are"
        return f"Match: {every} found", f"Whole edges agree, so nothing splits. {where}"
    return f"Match: {found} of {amount(asked_for, 'token')}", f"The match ends where an edge ends. {where}"


def _divided(beat: Beat, names: Names) -> Said:
    new, old, at = beat.parted
    halves = [names.say(beat.tree["nodes"][str(n)]["tokens"]) for n in (new, old)]
    return (f"Split after {amount(at, 'token')}, where it stands",
            f"The edge divides into {halves[0]} and {halves[1]}. No slot is allocated, copied or freed; only the "
            "boundary is new.")


def _insert(beat: Beat, names: Names) -> Said:
    told, new = beat.receipt, beat.receipt["new_node"]
    twice, back = _duplicates(beat), told["released"]
    if new is None:
        return ("All of it was here", f"The tree keeps its own rows. {amount(len(back), 'slot')} "
                f"({spread(back)}) {'goes' if len(back) == 1 else 'go'} home.")
    kept = beat.after["nodes"][str(new)]["slots"]
    if twice:
        return (f"Keep {spread(kept)}, give {spread(back)} back",
                "Only the new suffix joins the tree. The duplicates go home: had they stayed, nobody would own them.")
    below = beat.after["nodes"][str(new)]["parent"]
    why = (f"It hangs below node {below}." if below else "Another first token, so another branch.")
    return (f"Insert {names.say(beat.op['tokens'])}",
            f"{why} The tree owns slots {spread(kept)} now. Nobody reads them, so they are evictable at once.")


def _lock(beat: Beat, names: Names) -> Said:
    told, who = beat.receipt, beat.receipt["request"]
    path = list(reversed(told["path"]))
    most = max((beat.after["nodes"][str(n)]["lock"] for n in path), default=0)
    if not path:
        return f"{who} is running on an empty path", "It found nothing, so it locks nothing."
    return (f"{who} is running: lock its path",
            f"A lock on every node from the leaf to the root: {', '.join(map(str, path))}. "
            f"None of these {amount(len(told['slots']), 'slot')} may be evicted."
            + (f" Where {most} requests stand, the count is {most}." if most > 1 else ""))


def _handoff(beat: Beat, names: Names) -> Said:
    told = beat.receipt
    return (f"Hand {told['request']} over: {told['matched']} of {amount(len(beat.query), 'token')} found",
            "Matched, locked, sealed as evidence. policy_decision is None: if and when it runs, the scheduler says.")


def _settle(beat: Beat, names: Names) -> Said:
    who, said = beat.receipt["request"], beat.op["disposition"]
    if said == "admit":
        return f"The scheduler admits {who}", "The lease stays, and now it serves a running request."
    return f"The scheduler says: {said} {who}", "So its lease ends at once. A lock without a request protects nothing."


def _unlock(beat: Beat, names: Names) -> Said:
    who, state = beat.receipt["request"], board_of(beat.after)
    free = state["evictable"] - board_of(beat.before)["evictable"]
    return (f"{who} has ended: its locks go",
            f"The tree keeps the rows. {amount(free, 'slot')} became evictable; {state['leaf-ready']} of all "
            f"{state['evictable']} evictable ones are in leaves and may go at once.")


def _extend(beat: Beat, names: Names) -> Said:
    told, who = beat.receipt, beat.receipt["request"]
    rows = len(beat.after["requests"][who]["tokens"]) - len(beat.before["requests"][who]["tokens"])
    where = f"New slots: {spread(told['allocated'])}. " if told["allocated"] else "There was room in its last slot. "
    return f"{who} computes {amount(rows, 'row')}", f"{where}They are private: nobody can find them yet."


def _publish(beat: Beat, names: Names) -> Said:
    told, who = beat.receipt, beat.receipt["request"]
    return (f"{who} publishes, and its lock moves",
            f"Its rows hang below its path now. The lock moves from node {told['lock_from']} to node "
            f"{told['lock_to']}, and again covers the whole path.{_gave_back(beat)}")


def _finish(beat: Beat, names: Names) -> Said:
    told, who = beat.receipt, beat.receipt["request"]
    new = f"Node {told['new_node']} is new" if told["new_node"] else "The tree had all of it"
    return f"{who} ends, its rows stay", f"{new}, and its locks go.{_gave_back(beat)}"


def _gave_back(beat: Beat) -> str:
    back = beat.receipt["released"]
    return f" {amount(len(back), 'slot')} ({spread(back)}) {'goes' if len(back) == 1 else 'go'} home." if back else ""


def _cancel(beat: Beat, names: Names) -> Said:
    return (f"{beat.receipt['request']} is called off",
            f"Nothing of it is published, and its locks go.{_gave_back(beat)}")


def _reserve(beat: Beat, names: Names) -> Said:
    slots = beat.receipt["allocated"]
    return f"Reserve {amount(len(slots), 'slot')}", f"{spread(slots)}: private to a producer that has no table here."


def _give_back(beat: Beat, names: Names) -> Said:
    return f"Give {amount(len(beat.receipt['released']), 'slot')} back", f"Never published.{_gave_back(beat)}"


def _evicted(beat: Beat, names: Names) -> Said:
    told, gone = beat.receipt, beat.receipt["evicted"]
    if beat.op.get("tokens") is None:
        return f"Evict node {beat.op['node']}", f"An unlocked leaf, by name. {_home(gone[0])}"
    wanted, got = beat.op["tokens"], told["evicted_tokens"]
    title = f"Evict {amount(wanted, 'token')}: "
    if not gone:
        return title + "nothing may go", "Every leaf is locked. Whoever needs room has to wait, or to be refused."
    if len(gone) > 1:
        more = len(gone) - len(beat.gone) + 1 if len(beat.gone) == len(gone) else 1
        title += f"then {names.say(gone[-1]['tokens'])}" if more == 1 else f"{len(gone)} edges"
        ends = f"{' + '.join(str(len(e['slots'])) for e in gone)} = {amount(len(told['released']), 'slot')}"
        never = " No locked edge was a candidate." if board_of(beat.after)["protected"] else ""
        return title, f"{ends if len(gone) < 7 else amount(len(told['released']), 'slot')}.{never}" + _short(told)
    whole = f" Asked for {wanted}, and {got} went: an edge goes whole." if got > wanted else ""
    return title + names.say(gone[0]["tokens"]), f"{_which(beat)} {_home(gone[0])}{whole}" + _short(told)


def _short(told: Json) -> str:
    return " It is less than was asked for: no other leaf is unlocked." if told["outcome"] == "short" else ""


_COMMITTED: dict[str, Callable[[Beat, Names], Said]] = {
    "match": _match, "insert": _insert, "split": _divided, "evict": _evicted, "lock": _lock, "unlock": _unlock,
    "handoff": _handoff, "settle": _settle, "reserve": _reserve, "give_back": _give_back, "extend": _extend,
    "publish": _publish, "finish": _finish, "cancel": _cancel,
}


# ---------------------------------------------------------------- the scoreboard
@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens found, and tokens computed although the tree had them, in all that was committed so far."""

    matched: int = 0
    recomputed: int = 0

    def with_beat(self, beat: Beat) -> Totals:
        if beat.what != "commit":
            return self
        found = beat.receipt["matched"] if beat.receipt["operation"] in ("match", "handoff") else 0
        return Totals(self.matched + found, self.recomputed + _duplicates(beat))


OWNERS = ("tree", "private", "free")


def board_of(state: Json) -> dict[str, int]:
    """The partition of the slots and the ledgers of the tree's part, in slots, from the edges alone (F7.03, F7.08)."""
    nodes = state["nodes"].values()
    parents = {row["parent"] for row in nodes}
    open_ = {name: len(row["slots"]) for name, row in state["nodes"].items() if not row["lock"]}
    tree = sum(len(row["slots"]) for row in nodes)
    return {"tree": tree, "private": len(state["private"]), "free": len(state["free"]),
            "protected": tree - sum(open_.values()), "evictable": sum(open_.values()),
            "leaf-ready": sum(n for name, n in open_.items() if int(name) not in parents)}


def board(state: Json, totals: Totals) -> tuple[dict[str, Any], ...]:
    """The scoreboard of a frame: committed numbers only."""
    counts = board_of(state)
    slots = [{"label": f"{name} slots" if name in OWNERS else name, "value": n} for name, n in counts.items()]
    return (*slots, {"label": "tokens matched", "value": totals.matched},
            {"label": "recomputed", "value": totals.recomputed})


# ---------------------------------------------------------------- the frame in sentences
def twin(beat: Beat, names: Names, layout: Layout, says: Mapping[str, str]) -> tuple[str, ...]:
    """What changed and what holds now: everything that the picture shows, in words. `says`: what the capsules say."""
    state, counts = beat.tree, board_of(beat.tree)
    lines = [*_happened(beat, names)]
    lines += [f"{says[f'n{item}']}." for item in layout.pills if isinstance(item, int)]
    lines += [f"Not in the picture: {amount(len(layout.hidden) + len(layout.stub), 'more edge')}."] * bool(
        layout.hidden or layout.stub)
    for request, row in sorted(state["requests"].items()):
        own = row["table"][row["protected_len"] // state["block_size"] :]
        lines.append(f"{request} refers to the path to node {row['terminal']}, {amount(row['protected_len'], 'token')}"
                     + (f", and has private slots {spread(own)}" if own else "")
                     + ("." if row["admitted"] else "; the scheduler has not decided."))
    total = f"{counts['tree']} in the tree, {counts['private']} private, {counts['free']} free; "
    head = f" The next free one is {state['free'][0]}." if state["free"] else ""
    return (*lines, f"Slots: {total}together {state['num_slots']}.{head}")


def _happened(beat: Beat, names: Names) -> Iterator[str]:
    if beat.what == "start":
        yield f"The history starts at tree version {beat.after['version']}."
    elif beat.what == "refused":
        yield f"Refused: {asked(beat.op, names)}. Reason: {beat.reason}. The state is unchanged."
    elif beat.what == "commit":
        yield (f"Committed: {asked(beat.op, names)}. Tree version {beat.before['version']} became "
               f"{beat.after['version']}.")
    else:
        yield f"On its way, not visible yet: {asked(beat.op, names)}. The state is unchanged."
    if beat.staged:
        yield f"Private so far, hatched: {'slot' if len(beat.staged) == 1 else 'slots'} {spread(sorted(beat.staged))}."
    if beat.query and not beat.brought and beat.receipt is not None:
        found = beat.receipt["matched"]
        yield f"Asked for {names.say(beat.query)}: {found} of {amount(len(beat.query), 'token')} found."
