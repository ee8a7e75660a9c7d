"""A replay over a grid of settings, on this machine's processes or on a cluster that you name; it resumes.

It owns which settings are still to be run and the folder of results: one Parquet file a finished setting, written whole
or not at all, so that a killed sweep loses only what was running. It refuses to know what a replay means.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import lru_cache
from itertools import product
from pathlib import Path

from kvlab.contract import Json, canonical
from kvlab.study.replay import OBSERVED, Replayed, Setting, run
from kvlab.study.replay_source import Source, blocks_in
from kvlab.study.traced_request import TracedRequest


def grid(block_sizes: Sequence[int], pools_gib: Sequence[float], row_bytes: int, *,
         indexes: Sequence[str] = ("prefix",), policies: Sequence[str] = ("normative",),
         evictions: Sequence[str] = ("lru",), in_flight: Sequence[int] = (1,)) -> list[Setting]:
    """Every setting of the given choices that there is: "observed" among `policies` is each index's own."""
    out = []
    for index, size, gib, policy, eviction, flying in product(indexes, block_sizes, pools_gib, policies, evictions,
                                                              in_flight):
        if index == "prefix" and eviction != "lru":
            continue
        named = OBSERVED.get(index, policy) if policy == "observed" else policy
        out.append(Setting(index, size, blocks_in(gib, size * row_bytes), named, eviction, flying, row_bytes))
    return list(dict.fromkeys(out))


@lru_cache(maxsize=1)
def requests_of(source: Source) -> tuple[TracedRequest, ...]:
    """A trace read and tokenised once a process. O(trace) memory."""
    return tuple(source.requests(source.open()))


def one(source: Source, setting: Setting) -> Replayed:
    """One setting, in whichever process it lands."""
    return run(requests_of(source), setting)


def key_of(trace: str, setting: Setting) -> str:
    """By which a finished setting is known again: the trace's content and every choice."""
    return hashlib.sha256(trace.encode() + canonical(asdict(setting))).hexdigest()[:24]


def sweep(source: Source, settings: Iterable[Setting], folder: Path | None = None, *, on: str = "processes",
          jobs: int = -1) -> Iterator[tuple[Setting, Json]]:
    """Run what is not in `folder` yet; settings and figures as they come, those from the folder first.

    `on`: "processes", "dask" or "dask:ADDRESS", "ray" or "ray:ADDRESS". `jobs`: workers, -1 one a core. ValueError
    where a cluster's package is missing, or the name says no place.
    """
    trace, wanted = source.digest, list(settings)
    done = {} if folder is None else finished(folder)
    left = []
    for setting in wanted:
        row = done.get(key_of(trace, setting))
        if row is None:
            left.append(setting)
        else:
            yield setting, row
    with place(on):
        for found in _as_they_come(source, left, jobs):
            row = flat(found) | {"key": key_of(trace, found.setting), "trace": Path(source.path).name}
            if folder is not None:
                keep(folder, row)
            yield found.setting, row


def _as_they_come(source: Source, settings: list[Setting], jobs: int) -> Iterator[Replayed]:
    """Replays from wherever joblib sends them now. Ray's backend hands nothing over before a whole call is done, so it
    gets as many settings a call as it has workers: what a killed sweep loses is one such round."""
    from joblib import Parallel, delayed, effective_n_jobs
    from joblib.parallel import get_active_backend

    if get_active_backend()[0].supports_return_generator:
        yield from Parallel(jobs, return_as="generator_unordered")(delayed(one)(source, s) for s in settings)
        return
    round_of = effective_n_jobs(jobs)
    for at in range(0, len(settings), round_of):
        yield from Parallel(jobs)(delayed(one)(source, s) for s in settings[at : at + round_of])


def flat(found: Replayed) -> Json:
    """A replay as one row of a table: setting and losses beside the figures."""
    row = found.to_dict()
    return row.pop("setting") | {f"lost_to_{k}": v for k, v in row.pop("losses").items()} | row


def finished(folder: Path) -> dict[str, Json]:
    """The rows of a folder by key; a file that is no row of a sweep is left out. Empty where there is no folder."""
    import pyarrow
    import pyarrow.parquet as parquet

    rows: dict[str, Json] = {}
    for path in sorted(folder.glob("*.parquet")):
        try:
            rows.update((row["key"], row) for row in parquet.read_table(path).to_pylist())
        except (pyarrow.ArrowException, KeyError, OSError):
            continue
    return rows


def keep(folder: Path, row: Json) -> None:
    """Write one row as a file of its own, under its name only when it is whole."""
    import pyarrow
    import pyarrow.parquet as parquet

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{row['key']}.{os.getpid()}"
    parquet.write_table(pyarrow.Table.from_pylist([row]), part)
    part.replace(folder / f"{row['key']}.parquet")


@contextmanager
def _dask(address: str) -> Iterator[None]:
    from dask.distributed import Client
    from joblib import parallel_config

    with Client(address or None) as client, parallel_config(backend="dask", client=client):
        yield


@contextmanager
def _ray(address: str) -> Iterator[None]:
    import ray
    from joblib import parallel_config
    from ray.util.joblib import register_ray

    with ray.init(address=address or None, ignore_reinit_error=True):
        register_ray()
        with parallel_config(backend="ray"):
            yield


@contextmanager
def place(on: str) -> Iterator[None]:
    """Where joblib sends the work, for as long as it lasts. ValueError as `sweep` has it."""
    name, _, address = on.partition(":")
    clusters = {"dask": _dask, "ray": _ray}
    if name not in clusters and on != "processes":
        raise ValueError(f'a sweep runs on "processes", "dask:ADDRESS" or "ray:ADDRESS", not {on!r}')
    with ExitStack() as stack:
        try:
            if name in clusters:
                stack.enter_context(clusters[name](address))
        except ImportError as error:
            raise ValueError(f"a sweep on {name} needs its package: pip install {name} ({error})") from None
        yield
