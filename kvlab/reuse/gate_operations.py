"""The operations of the identity gate: each validates against the committed state and writes a draft; none publishes.

A draft is all that an operation would change. `kvlab.reuse.identity` publishes it at one point, or drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlab.contract import Json, Operation, Rejected
from kvlab.reuse.compatibility import Verdict, examine, refine
from kvlab.reuse.gate_state import Cell, Declared, Directory, Grant, Published, Row, State, grant_cell, key_of
from kvlab.reuse.manifests import (
    CacheCompatibilityManifest,
    CacheIsolationNamespace,
    LayoutIdentity,
    LogicalCacheABI,
    read_record,
)

Manifest = CacheCompatibilityManifest


@dataclass(slots=True)
class Telemetry:
    """How often the index was really read, and where: what a neighbour could see of it."""

    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(
        ("lookups", "candidates", "hits", "misses"), 0))
    accesses: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """An operation on its way: its changes lie over the committed state, and nobody sees them before publication."""

    state: State
    telemetry: Telemetry
    changes: dict[Cell, Row | None] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    facts: Json = field(default_factory=lambda: {"outcome": "done"})

    def get(self, kind: str, name: str) -> Any:
        cell = (kind, name)
        return self.changes[cell] if cell in self.changes else self.state.get(cell)

    def put(self, kind: str, name: str, row: Row | None) -> None:
        self.changes[kind, name] = row


# ---------------------------------------------------------------- parts that operations share
def enter(draft: Draft, principal: str, namespace: str) -> Directory:
    """The directory that somebody may look into. Nothing of it is read before they are known to may."""
    directory, grant = draft.get("directory", namespace), draft.get(*grant_cell(principal, namespace))
    if directory is None or principal not in directory.members:
        raise Rejected("unauthorized_namespace", f"{principal} in {namespace}")
    if grant is None:
        raise Rejected("lookup_before_authorization", f"{principal} was not authorised for {namespace}")
    if grant.generation != directory.namespace.namespace_generation:
        raise Rejected("stale_namespace_generation", f"{principal} was authorised for generation "
                       f"{grant.generation}, {namespace} is at {directory.namespace.namespace_generation}")
    draft.steps.append("enter_authorized_namespace")
    return directory

def admit(draft: Draft, directory: Directory, manifest: Manifest) -> LayoutIdentity:
    """Is a manifest one of this namespace and of its present generation? Returns its layout."""
    space = directory.namespace
    if manifest.cache_isolation_namespace != space.name:
        raise Rejected("namespace_mismatch", f"{manifest.cache_isolation_namespace}, not {space.name}")
    if manifest.namespace_generation != space.namespace_generation:
        raise Rejected("stale_namespace_generation", f"the manifest says {manifest.namespace_generation}, "
                       f"{space.name} is at {space.namespace_generation}")
    if manifest.cache_abi_sha256 not in directory.abis:
        raise Rejected("cache_abi_mismatch", f"{space.name} does not admit {manifest.cache_abi_sha256[:12]}")
    layouts = draft.state.layouts
    if manifest.cache_layout_sha256 not in directory.layouts:
        admitted = layouts.get(directory.layouts[0]) if directory.layouts else None
        raise Rejected(*refine(admitted, layouts.get(manifest.cache_layout_sha256)))
    if manifest.publication_generation != directory.publication_generation:
        raise Rejected("stale_publication_generation", f"the manifest says {manifest.publication_generation}, "
                       f"{space.name} is at {directory.publication_generation}")
    draft.steps.append("validate_logical_abi_and_layout_generation")
    return layouts[manifest.cache_layout_sha256]


def manifest_of(value: Manifest | Json) -> Manifest:
    """A compatibility manifest, as it is or from its plain form; ValueError for anything else."""
    return value if isinstance(value, Manifest) else read_record(Manifest, value)


# ---------------------------------------------------------------- operations
def _create(draft: Draft, op: Operation) -> None:
    """A namespace, who belongs to it, and the ABIs and layouts that it admits."""
    space = read_record(CacheIsolationNamespace, op["namespace"])
    if draft.get("directory", space.name) is not None:
        raise Rejected("in_place_relabel", f"{space.name} exists; a change of it makes a successor")
    abis = _declare(draft, "abi", LogicalCacheABI, op["abis"])
    layouts = _declare(draft, "layout", LayoutIdentity, op["layouts"])
    draft.put("directory", space.name, Directory(space, tuple(op["members"]), abis, layouts, 1))
    draft.facts |= {"generation": space.namespace_generation}


def _declare(draft: Draft, kind: str, make: type, rows: Sequence[Json]) -> tuple[str, ...]:
    """Make ABIs or layouts known by their digests. A layout's manifest_id is given once and never again."""
    digests = []
    for data in rows:
        record = data if isinstance(data, make) else read_record(make, data)
        known = [r.record for r in (*draft.state.rows[kind].values(), *draft.changes.values())
                 if isinstance(r, Declared)]
        same = [r for r in known if kind == "layout" and isinstance(r, make) and r.manifest_id == record.manifest_id]
        if any(r.digest != record.digest for r in same):
            raise Rejected("in_place_relabel", f"layout {record.manifest_id} says something else already")
        draft.put(kind, record.digest, Declared(record))
        digests.append(record.digest)
    return tuple(digests)


def _admit_layout(draft: Draft, op: Operation) -> None:
    """One more layout of the same generation, such as another rank's."""
    directory = _directory(draft, op["namespace"])
    digests = _declare(draft, "layout", LayoutIdentity, [op["layout"]])
    draft.put("directory", op["namespace"], replace(directory, layouts=directory.layouts + digests))


def _directory(draft: Draft, name: str) -> Directory:
    directory = draft.get("directory", name)
    if directory is None:
        raise Rejected("namespace_mismatch", f"there is no namespace {name!r}")
    return directory


def _authorize(draft: Draft, op: Operation) -> None:
    principal, name = op["principal"], op["namespace"]
    directory = draft.get("directory", name)
    if directory is None or principal not in directory.members:
        raise Rejected("unauthorized_namespace", f"{principal} in {name}")
    generation = directory.namespace.namespace_generation
    draft.put(*grant_cell(principal, name), Grant(principal, name, generation))
    draft.facts |= {"generation": generation}


def _publish(draft: Draft, op: Operation) -> None:
    """Offer an object under a manifest. Its producer, the manifest's request, holds it until release."""
    made, handle = manifest_of(op["manifest"]), op["handle"]
    layout = admit(draft, enter(draft, op["principal"], op["namespace"]), made)
    adapter = op.get("adapter_name")
    key = key_of(made, op["group"], layout, adapter, draft.state.hash_name)
    if draft.get("record", handle) is not None:
        raise Rejected("in_place_relabel", f"{handle} is published already, and a live object keeps its manifest")
    draft.put("record", handle, Published(handle, key, adapter, made, (made.request_id,)))
    draft.facts |= {"handle": handle, "request": made.request_id}


def _lookup(draft: Draft, op: Operation) -> None:
    """Find an object for a consumer, in the six steps of article 0x01A; it is held for the consumer's request.

    A key without candidates is a miss. Candidates that the manifest refuses, every one of them, are
    `concrete_key_not_sufficient`: the detail names each with its own reason.
    """
    consumer, seen = manifest_of(op["consumer"]), draft.telemetry
    directory = enter(draft, op["principal"], op["namespace"])
    layout = admit(draft, directory, consumer)
    key = key_of(consumer, op["group"], layout, op.get("adapter_name"), draft.state.hash_name)
    seen.counters["lookups"] += 1
    seen.accesses.append((op["namespace"], str(key)))
    handles = sorted(draft.state.index.get((op["namespace"], str(key)), ()))
    seen.counters["candidates"] += len(handles)
    draft.steps.append("derive_key_and_find_candidate")
    draft.facts |= {"request": consumer.request_id}
    if not handles:
        seen.counters["misses"] += 1
        draft.facts |= {"outcome": "miss"}
        return
    verdicts, found = _evaluate(draft, handles, consumer, draft.state.layouts)
    draft.steps.append("validate_equality_bearing_facts")
    if found is None:
        said = "; ".join(f"{handle}: {verdict.reason}" for handle, verdict in verdicts)
        raise Rejected("concrete_key_not_sufficient", said)
    owners = found.owners if consumer.request_id in found.owners else (*found.owners, consumer.request_id)
    draft.put("record", found.handle, replace(found, owners=owners))
    draft.steps.append("lock_or_reference_object")
    seen.counters["hits"] += 1
    draft.steps.append("return_PrefixMatchReceipt")
    draft.facts |= {"outcome": "hit", "handle": found.handle,
                    "verdicts": tuple((handle, verdict.reason) for handle, verdict in verdicts)}


def _evaluate(draft: Draft, handles: Sequence[str], consumer: Manifest,
              layouts: Mapping[str, LayoutIdentity]) -> tuple[list[tuple[str, Verdict]], Published | None]:
    """Candidates in the order of their handles against one immutable consumer, until the first that may be read."""
    verdicts = []
    for handle in handles:
        record = draft.get("record", handle)
        verdicts.append((handle, examine(record.manifest, consumer, layouts)))
        if verdicts[-1][1].compatible:
            return verdicts, record
    return verdicts, None


def _release(draft: Draft, op: Operation) -> None:
    """A request gives back all it holds; what an ended generation held for it alone is reclaimed."""
    request = op["request"]
    held = [draft.get("record", handle) for handle in draft.state.held.get(request, ())]
    if not held:
        raise Rejected("unknown_request", f"{request} holds nothing")
    for record in held:
        draft.put("record", record.handle, replace(record, owners=tuple(o for o in record.owners if o != request)))
    draft.facts |= {"request": request}
    for name in sorted({r.manifest.cache_isolation_namespace for r in held if not r.listed}):
        _reclaim(draft, name)


def _reset_prefix_cache(draft: Draft, op: Operation) -> None:
    """Advance the publication generation: what is held stays readable to its owners, the rest goes.

    The name is vLLM v0.23.0's, which has it for weight updates among others; there it empties one process's cache.
    """
    name = op["namespace"]
    directory = _directory(draft, name)
    generation = directory.publication_generation + 1
    draft.put("directory", name, replace(directory, publication_generation=generation))
    _unlist(draft, name)
    _reclaim(draft, name)


def _unlist(draft: Draft, namespace: str) -> None:
    """No new lookup finds what the namespace has published so far."""
    for handle in draft.state.listed.get(namespace, ()):
        draft.put("record", handle, replace(draft.get("record", handle), listed=False))


def _successor(draft: Draft, op: Operation) -> None:
    """End a namespace's generation and begin the next, in the six steps of article 0x01A.

    `layouts`, `abis`: what the successor admits (default: as before). `cache_salt`: its new salt, if given.
    The sixth step is taken now where nobody holds an old row, else by the release that ends the last hold.
    """
    name = op["namespace"]
    before = _directory(draft, name)
    space, old = before.namespace, before.namespace.namespace_generation
    draft.put("directory", name, replace(before, frozen=(*before.frozen, old)))
    draft.steps.append("freeze_old_for_live_owners")
    _unlist(draft, name)
    draft.steps.append("stop_publishing_old_to_new_lookups")
    space = replace(space, namespace_generation=old + 1, model_cache_generation=space.model_cache_generation + 1,
                    cache_salt=op.get("cache_salt", space.cache_salt))
    following = replace(draft.get("directory", name), namespace=space,
                        publication_generation=before.publication_generation + 1)
    draft.put("directory", name, following)
    draft.steps.append("advance_generation")
    abis = _declare(draft, "abi", LogicalCacheABI, op["abis"]) if "abis" in op else before.abis
    layouts = _declare(draft, "layout", LayoutIdentity, op["layouts"]) if "layouts" in op else before.layouts
    draft.steps.append("create_new_layout_and_compat_manifests")
    draft.put("directory", name, replace(following, abis=abis, layouts=layouts))
    draft.steps.append("admit_only_against_successor")
    draft.facts |= {"generation": old + 1}
    _reclaim(draft, name)


def _reclaim(draft: Draft, name: str) -> None:
    """Drop what has ended and nobody holds; thaw an ended generation once none of its records is left."""
    directory = draft.get("directory", name)
    touched = [cell[1] for cell in draft.changes if cell[0] == "record"]
    rows = [draft.get("record", handle) for handle in dict.fromkeys([*draft.state.ended.get(name, ()), *touched])]
    ended = [r for r in rows if not r.listed and r.manifest.cache_isolation_namespace == name]
    gone = [r.handle for r in ended if not r.owners]
    for handle in gone:
        draft.put("record", handle, None)
    left = {r.manifest.namespace_generation for r in ended if r.owners}
    draft.facts |= {"reclaimed": (*draft.facts.get("reclaimed", ()), *gone)}
    if not left.issuperset(directory.frozen):
        draft.put("directory", name, replace(directory, frozen=tuple(g for g in directory.frozen if g in left)))
        draft.steps.append("reclaim_old_when_refs_zero")


OPERATIONS: dict[str, Callable[[Draft, Operation], None]] = {
    "create": _create, "admit_layout": _admit_layout, "authorize": _authorize, "publish": _publish,
    "lookup": _lookup, "release": _release, "reset_prefix_cache": _reset_prefix_cache, "successor": _successor,
}
