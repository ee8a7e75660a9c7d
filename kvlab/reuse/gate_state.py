"""The rows that the identity gate holds, their plain form, and the validator that every load and check calls.

It recomputes each digest and key from the records themselves, and holds no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvlab.contract import Json, Rejected, digest_of, fact_hash
from kvlab.reuse.keys import HASHES, ConcretePrefixKey, KeyInputs, block_hashes
from kvlab.reuse.manifests import (
    CacheCompatibilityManifest,
    CacheIsolationNamespace,
    LayoutIdentity,
    LogicalCacheABI,
    plain,
    read_record,
)

Cell = tuple[str, str]
"""A place in the state: the kind of row and its id. A change touches only the cells it names."""


@dataclass(frozen=True, slots=True)
class Grant:
    """That somebody may look into a namespace, as it stood when they were authorised."""

    principal: str
    namespace: str
    generation: int

    def facts(self) -> tuple[str | int, ...]:
        return (self.generation,)


@dataclass(frozen=True, slots=True)
class Directory:
    """One namespace as it stands now: who belongs to it, what its present generation admits, who is still served.

    `frozen` are old namespace generations whose rows some request still holds.
    """

    namespace: CacheIsolationNamespace
    members: tuple[str, ...]
    abis: tuple[str, ...]
    layouts: tuple[str, ...]
    publication_generation: int
    frozen: tuple[int, ...] = ()

    def facts(self) -> tuple[str | int, ...]:
        return (digest_of(plain(self)),)


@dataclass(frozen=True, slots=True)
class Published:
    """One published object: the handle of its rows, its key, the manifest it is read under, who holds it.

    `listed`: new lookups may find it. `owners` are request ids; their number is the reference count.
    """

    handle: str
    key: ConcretePrefixKey
    adapter_name: str | None
    manifest: CacheCompatibilityManifest
    owners: tuple[str, ...]
    listed: bool = True

    def facts(self) -> tuple[str | int | None, ...]:
        return (str(self.key), self.adapter_name, self.manifest.record_sha256, int(self.listed), *self.owners)

    @property
    def place(self) -> tuple[str, str]:
        """Where an index keeps it: namespace and lookup key."""
        return self.manifest.cache_isolation_namespace, str(self.key)


@dataclass(frozen=True, slots=True)
class Declared:
    """An ABI or a layout that this gate knows by its digest."""

    record: LogicalCacheABI | LayoutIdentity

    def facts(self) -> tuple[str | int, ...]:
        return (self.record.digest,)


Row = Grant | Directory | Published | Declared
KINDS = ("abi", "layout", "directory", "grant", "record")


@dataclass(slots=True)
class State:
    """All committed rows by kind and id; and what is derived from them, so is in no digest: who is found where.

    `index`: namespace and lookup key -> listed handles. `listed`, `ended`: namespace -> handles. `held`: request ->
    handles. `layouts`: digest -> layout.
    """

    hash_name: str = "sha256"
    rows: dict[str, dict[str, Any]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    index: dict[tuple[str, str], dict[str, None]] = field(default_factory=dict)
    listed: dict[str, dict[str, None]] = field(default_factory=dict)
    ended: dict[str, dict[str, None]] = field(default_factory=dict)
    held: dict[str, dict[str, None]] = field(default_factory=dict)
    layouts: dict[str, LayoutIdentity] = field(default_factory=dict)

    def get(self, cell: Cell) -> Row | None:
        return self.rows[cell[0]].get(cell[1])

    def fact(self, cell: Cell) -> int:
        """The fact that a cell contributes to the digest; 0 where it is empty."""
        row = self.get(cell)
        return 0 if row is None else fact_hash(*cell, *row.facts())

    def put(self, cell: Cell, row: Row | None) -> None:
        """Set or remove one row and keep what is derived in step. O(owners)."""
        kind, name = cell
        before = self.rows[kind].pop(name, None)
        if row is not None:
            self.rows[kind][name] = row
        if kind == "layout" and row is not None:
            self.layouts[name] = row.record
        if kind == "record":
            for shelf, key in self._shelves(before):
                del shelf[key][name]
                if not shelf[key]:
                    del shelf[key]
            for shelf, key in self._shelves(row):
                shelf.setdefault(key, {})[name] = None

    def _shelves(self, row: Published | None) -> Iterator[tuple[dict[Any, dict[str, None]], Any]]:
        if row is None:
            return
        space = row.manifest.cache_isolation_namespace
        if row.listed:
            yield self.index, row.place
            yield self.listed, space
        else:
            yield self.ended, space
        for request in row.owners:
            yield self.held, request

    def cells(self) -> list[Cell]:
        return [(kind, name) for kind in KINDS for name in self.rows[kind]]

    def snapshot(self) -> Json:
        """Plain data in a stable order; each published manifest with the digest it was published under."""
        rows = {kind: dict(sorted(self.rows[kind].items())) for kind in KINDS}
        return {
            "kind": "identity", "hash": self.hash_name,
            "abis": {d: plain(r.record) for d, r in rows["abi"].items()},
            "layouts": {d: plain(r.record) for d, r in rows["layout"].items()},
            "directories": {name: plain(r) for name, r in rows["directory"].items()},
            "grants": [plain(r) for r in rows["grant"].values()],
            "records": {h: {"key": plain(r.key), "adapter_name": r.adapter_name, "manifest": plain(r.manifest),
                            "manifest_sha256": r.manifest.record_sha256, "owners": list(r.owners), "listed": r.listed}
                        for h, r in rows["record"].items()},
        }


def grant_cell(principal: str, namespace: str) -> Cell:
    return "grant", f"{principal} in {namespace}"


def key_of(manifest: CacheCompatibilityManifest, group: str, layout: LayoutIdentity, adapter_name: str | None,
           hash_name: str) -> ConcretePrefixKey:
    """The concrete key of all that a manifest covers. `cache_partial_block` where that is not whole hash blocks.

    `cache_group_mismatch` where the layout has no such group. O(covered tokens).
    """
    if group not in {g.cache_group_id for g in layout.cache_groups}:
        raise Rejected("cache_group_mismatch", f"the layout {layout.manifest_id} has no cache group {group!r}")
    tokens, size = manifest.covered_token_ids, layout.hash_block_size
    if not tokens or len(tokens) % size:
        raise Rejected("cache_partial_block", f"{len(tokens)} tokens are not whole blocks of {size}")
    inputs = KeyInputs(adapter_name, manifest.cache_salt, manifest.input_side_data_identity)
    return ConcretePrefixKey(block_hashes(tokens, size, inputs, hash_name)[-1], group)


# ---------------------------------------------------------------- reading a snapshot
def read_state(snapshot: Json) -> State:
    """The state that a snapshot describes, validated; `Rejected` for the first thing that is wrong with it.

    Order: form, declared digests, directories, grants, published records. O(snapshot).
    """
    try:
        state = State(snapshot["hash"])
        HASHES[state.hash_name]
        _read_declared(state, "abi", LogicalCacheABI, snapshot["abis"])
        _read_declared(state, "layout", LayoutIdentity, snapshot["layouts"])
        for name, data in snapshot["directories"].items():
            state.put(("directory", name), _directory(name, data))
        for data in snapshot["grants"]:
            grant = read_record(Grant, data)
            state.put(grant_cell(grant.principal, grant.namespace), grant)
        for handle, data in snapshot["records"].items():
            state.put(("record", handle), _published(handle, data))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Rejected("malformed_snapshot", f"{type(error).__name__}: {error}") from error
    for validate in (_check_directories, _check_grants, _check_records):
        validate(state)
    return state


def _read_declared(state: State, kind: str, make: type, rows: Json) -> None:
    for digest, data in rows.items():
        record = read_record(make, data)
        if record.digest != digest:
            raise Rejected("in_place_relabel", f"the {kind} declared as {digest[:12]} now says {record.digest[:12]}")
        state.put((kind, digest), Declared(record))


def _directory(name: str, data: Json) -> Directory:
    space = read_record(CacheIsolationNamespace, data["namespace"])
    made = read_record(Directory, data | {"namespace": space} | {
        k: tuple(data[k]) for k in ("members", "abis", "layouts", "frozen")})
    whole = all(type(n) is int and n >= 1 for n in (made.publication_generation, *made.frozen))
    if space.name != name or not whole or any(g >= space.namespace_generation for g in made.frozen):
        raise ValueError(f"directory {name}: its name, or one of its generations, is wrong")
    return made


def _published(handle: str, data: Json) -> Published:
    manifest = read_record(CacheCompatibilityManifest, data["manifest"])
    if manifest.record_sha256 != data["manifest_sha256"]:
        raise Rejected("in_place_relabel", f"the manifest of {handle} is not the one it was published under")
    owners, listed = tuple(data["owners"]), data["listed"]
    if len(set(owners)) < len(owners) or not all(isinstance(o, str) for o in owners) or not isinstance(listed, bool):
        raise ValueError(f"record {handle}: owners are distinct request ids, listed is true or false")
    return Published(handle, read_record(ConcretePrefixKey, data["key"]), data["adapter_name"], manifest, owners,
                     listed)


def _check_directories(state: State) -> None:
    for name, directory in state.rows["directory"].items():
        if any(d not in state.rows["layout"] for d in directory.layouts):
            raise Rejected("layout_mismatch", f"{name} admits a layout that was never declared")
        if any(d not in state.rows["abi"] for d in directory.abis):
            raise Rejected("cache_abi_mismatch", f"{name} admits a cache ABI that was never declared")


def _check_grants(state: State) -> None:
    for grant in state.rows["grant"].values():
        directory = state.rows["directory"].get(grant.namespace)
        if directory is None or grant.principal not in directory.members:
            raise Rejected("unauthorized_namespace", f"{grant.principal} has a grant for {grant.namespace}")
        if not 1 <= grant.generation <= directory.namespace.namespace_generation:
            raise Rejected("malformed_snapshot", f"a grant for a generation that {grant.namespace} never had")


def _check_records(state: State) -> None:
    for handle, row in state.rows["record"].items():
        made = row.manifest
        directory = state.rows["directory"].get(made.cache_isolation_namespace)
        if directory is None:
            raise Rejected("namespace_mismatch", f"{handle} belongs to {made.cache_isolation_namespace}")
        now = (directory.namespace.namespace_generation, directory.publication_generation)
        then = (made.namespace_generation, made.publication_generation)
        if then[1] > now[1]:
            raise Rejected("stale_publication_generation", f"{handle} claims a generation that was not reached yet")
        served = bool(row.owners) and then[0] in (now[0], *directory.frozen)
        if then != now and (row.listed or not served):
            raise Rejected("stale_namespace_generation", f"{handle} is of an ended generation, {then} before {now}")
        if then == now and not row.listed:
            raise Rejected("malformed_snapshot", f"{handle} is of the present generation, yet not listed")
        layout = state.rows["layout"].get(made.cache_layout_sha256)
        if layout is None:
            raise Rejected("layout_mismatch", f"{handle} follows a layout that was never declared")
        if key_of(made, row.key.cache_group_id, layout.record, row.adapter_name, state.hash_name) != row.key:
            raise Rejected("in_place_relabel", f"the key of {handle} is not that of its manifest")
