"""What the identity gate answers without changing anything: keys, verdicts, geometry, telemetry; it decides nothing.

A question about a published record names a principal, who must be authorised for its namespace, as a lookup must.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlab.contract import Json, Rejected
from kvlab.reuse.compatibility import examine
from kvlab.reuse.compatibility import require as require_compatible
from kvlab.reuse.gate_operations import Draft, Manifest, Telemetry, enter, manifest_of
from kvlab.reuse.gate_state import Published, State
from kvlab.reuse.keys import ConcretePrefixKey, KeyInputs, block_hashes, bytes_identity
from kvlab.reuse.manifests import LayoutIdentity, SideInput, plain, read_record


def answer(state: State, telemetry: Telemetry, question: Json) -> Any:
    """The answer as plain data. `unknown_operation` where there is no such question, or it lacks something."""
    ask = QUESTIONS.get(str(question.get("ask")))
    if ask is None:
        raise Rejected("unknown_operation", f"{question.get('ask')!r}")
    try:
        return ask(state, telemetry, question)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Rejected("unknown_operation", f"{question['ask']}: {type(error).__name__}: {error}") from error


def _record(state: State, telemetry: Telemetry, question: Json) -> Published:
    """A published record, for somebody who may look into its namespace."""
    enter(Draft(state, telemetry), question["principal"], question["namespace"])
    record = state.get(("record", question["record"]))
    if record is None or record.manifest.cache_isolation_namespace != question["namespace"]:
        raise Rejected("unknown_request", f"{question['namespace']} has published no {question['record']}")
    return record


def _consumer(producer: Manifest, question: Json) -> Manifest:
    """The consumer's manifest: given whole, or as what it changes in the producer's."""
    if "consumer" in question:
        return manifest_of(question["consumer"])
    return read_record(Manifest, plain(producer) | question.get("change", {}))


def _compatible(state: State, telemetry: Telemetry, question: Json) -> Json:
    """{record, consumer or change} -> may the consumer read the record's rows, which checks ran, what the digests are.

    `candidate` says whether the consumer's concrete key would have led to this record.
    """
    record = _record(state, telemetry, question)
    consumer = _consumer(record.manifest, question)
    verdict = examine(record.manifest, consumer, state.layouts)
    inputs = KeyInputs(question.get("adapter_name", record.adapter_name), consumer.cache_salt,
                       consumer.input_side_data_identity)
    tokens = consumer.covered_token_ids[: len(record.manifest.covered_token_ids)]
    size = state.layouts[record.manifest.cache_layout_sha256].hash_block_size
    hashes = block_hashes(tokens, size, inputs, state.hash_name)
    key = hashes[-1] if hashes else "none"
    return verdict.to_dict() | {
        "candidate": key == record.key.block_hash, "key": key, "same_digest": consumer.digest == record.manifest.digest,
        "checks": [{"field": c.field, "producer": _plain(c.producer), "consumer": _plain(c.consumer), "held": c.held}
                   for c in verdict.checks]}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [plain(v) if isinstance(v, SideInput) else v for v in value]
    return value


def _require(state: State, telemetry: Telemetry, question: Json) -> Json:
    """As `compatible`, but a difference is refused with its own reason."""
    record = _record(state, telemetry, question)
    return require_compatible(record.manifest, _consumer(record.manifest, question), state.layouts).to_dict()


def _evaluate(state: State, telemetry: Telemetry, question: Json) -> list[Json]:
    """{record, candidates: [change]} -> a verdict each, all against the record's one immutable manifest."""
    record = _record(state, telemetry, question)
    changes = [_consumer(record.manifest, {"change": change}) for change in question["candidates"]]
    return [examine(record.manifest, consumer, state.layouts).to_dict() for consumer in changes]


def _inputs(question: Json) -> KeyInputs:
    sides = tuple(read_record(SideInput, s) for s in question.get("side_inputs", ()))
    return KeyInputs(question.get("adapter_name"), question.get("cache_salt"), sides)


def _keys(state: State, telemetry: Telemetry, question: Json) -> Json:
    """{tokens, block_size, groups?, adapter_name?, cache_salt?, side_inputs?} -> block hashes and lookup keys."""
    hashes = block_hashes(question["tokens"], question["block_size"], _inputs(question), state.hash_name)
    keys = {str(ConcretePrefixKey(h, group)) for h in hashes[-1:] for group in question.get("groups", ())}
    return {"hashes": hashes, "count": len(hashes), "distinct_lookup_keys": len(keys)}


def _key_difference(state: State, telemetry: Telemetry, question: Json) -> Json:
    """{one, other}, each as for `keys` -> at which blocks their hashes differ."""
    one, other = (_keys(state, telemetry, question[side])["hashes"] for side in ("one", "other"))
    return {"changed_hashes": [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]}


def _side_identity(state: State, telemetry: Telemetry, question: Json) -> str:
    """{kind, dtype, shape, data: hex} -> the identity of such a side input."""
    data = bytes.fromhex(question["data"])
    return bytes_identity(question["kind"], question["dtype"], question["shape"], data)


def _layout(state: State, telemetry: Telemetry, question: Json) -> Json:
    """{manifest_id} -> its geometry and its digest."""
    found = [layout for layout in state.layouts.values() if layout.manifest_id == question["manifest_id"]]
    if not found:
        raise Rejected("layout_mismatch", f"no layout {question['manifest_id']!r} was declared here")
    layout: LayoutIdentity = found[0]
    groups = layout.cache_groups
    return {"layers": sum(g.layer_interval[1] - g.layer_interval[0] for g in groups),
            "kv_heads_local": groups[0].kv_heads_local, "head_dim": groups[0].head_dim,
            "dtype": groups[0].storage_dtype, "bytes_per_scalar": WIDTHS[groups[0].storage_dtype],
            "tp_world_size": layout.tp_world_size, "tp_rank": layout.tp_rank, "digest": layout.digest}


def _serve(state: State, telemetry: Telemetry, question: Json) -> Json:
    """{request, record} -> the manifest digest under which this request may go on reading the record it holds."""
    record = state.get(("record", question["record"]))
    if record is None or question["request"] not in record.owners:
        raise Rejected("unknown_request", f"{question['request']} holds no {question['record']}")
    made = record.manifest
    return {"handle": record.handle, "manifest": made.digest, "generation": made.namespace_generation,
            "listed": record.listed, "owners": list(record.owners)}


def _telemetry(state: State, telemetry: Telemetry, question: Json) -> Json:
    """How often the index was read since the gate began or was loaded, and where."""
    return dict(telemetry.counters) | {"accesses": [list(place) for place in telemetry.accesses]}


WIDTHS = {"FP32": 4, "FP16": 2, "BF16": 2, "INT8": 1, "FP8": 1}
"""Bytes of one stored scalar by the name of its dtype."""

QUESTIONS: dict[str, Callable[[State, Telemetry, Json], Any]] = {
    "compatible": _compatible, "require": _require, "evaluate": _evaluate, "keys": _keys,
    "key_difference": _key_difference, "side_identity": _side_identity, "layout": _layout, "serve": _serve,
    "telemetry": _telemetry,
}
