"""A walk through the identity gate as plain data: what it compares when one consumer asks for one record's rows.

It loads a gate of its own, so the caller's stays as it is, and needs no model and no tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvlab.contract import Json, Rejected
from kvlab.reasons import REASONS
from kvlab.reuse.compatibility import EQUALITY
from kvlab.reuse.identity import IdentityGate
from kvlab.reuse.manifests import CacheCompatibilityManifest, plain, read_record
from kvlab.views import identity as view
from kvlab.views.scene import Recording


def walk(snapshot: Json, *, principal: str, namespace: str, record: str, change: Json,
         adapter_name: str | None = None) -> Json:
    """What a gate does when a consumer, the record's manifest with a change, asks for the record's rows.

    Plain data for `kvlab.views.identity`; refusals are part of it. ValueError for a change that is no manifest.
    """
    gate = IdentityGate.of(snapshot)
    row = gate.state.get(("record", record))
    consumer = read_record(CacheCompatibilityManifest, plain(row.manifest) | {"request_id": "c1"} | change)
    values = {name: [_bare(row.manifest, name), _bare(consumer, name)] for name in EQUALITY}
    out = {"handle": record, "principal": principal, "request": consumer.request_id, "order": list(EQUALITY),
           "values": values, "held": False, "reads": 0, "digest": gate.digest, "digest_after": gate.digest}
    adapter = row.adapter_name if adapter_name is None else adapter_name
    asked = {"principal": principal, "namespace": namespace, "adapter_name": adapter}
    values |= {"authorised": [namespace, principal], "concrete key": [row.key.block_hash, "not derived"]}
    try:
        verdict = gate.ask({"ask": "compatible", "record": record, "consumer": plain(consumer), **asked})
    except Rejected as no:
        return out | {"checks": [_check("authorised", no.reason, no.detail)]}
    values["concrete key"][1] = verdict["key"]
    checks = [_check("authorised"), _check("concrete key") | {"held": verdict["candidate"]}]
    last = len(verdict["checks"]) - 1
    checks += [_check(c["field"], *((verdict["reason"], verdict["detail"]) if i == last else ()))
               for i, c in enumerate(verdict["checks"])]
    if verdict["candidate"] and verdict["compatible"]:
        wanted = consumer.covered_token_ids[: len(row.manifest.covered_token_ids)]
        gate.apply({"op": "lookup", "group": row.key.cache_group_id, **asked,
                    "consumer": replace(consumer, covered_token_ids=wanted)})
        out |= {"held": True, "digest_after": gate.digest}
    return out | {"checks": checks, "reads": 1}


def _check(name: str, reason: str = "", detail: str = "") -> Json:
    return {"field": name, "held": not reason, "reason": reason, "detail": detail}


def _bare(manifest: CacheCompatibilityManifest, name: str) -> Any:
    value = getattr(manifest, name)
    return [plain(v) if hasattr(v, "__dataclass_fields__") else v for v in value] if isinstance(value, tuple) else value


def played(made: Json, title: str = "May these bytes be reused?") -> Recording:
    """The recording of a walk."""
    return view.recording(made, title=title, question="Which check stops it?", reasons=REASONS)
