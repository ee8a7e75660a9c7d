"""The command line: `python -m kvlab check | cost | replay | sweep | bench | get-model | record`.

It only calls what the rooms offer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.study.replay_source import Source


def _check(args: argparse.Namespace) -> int:
    from kvlab.study import fixtures

    paths = [Path(args.fixture)] if args.fixture else fixtures.all_fixtures()
    results = []
    for path in paths:
        try:
            fixture = fixtures.load_fixture(path)
        except fixtures.FixtureError as error:
            print(error, file=sys.stderr)
            return 2
        if args.loop is None or fixture["loop"] == args.loop:
            results.append((fixture, fixtures.check_fixture(fixture)))
    if not results:
        print(f"no fixture of loop {args.loop}", file=sys.stderr)
        return 2
    results.sort(key=lambda row: row[0]["loop"])
    counts = fixtures.report([(fixture["loop"], kinds) for fixture, kinds in results])
    if args.json:
        print(json.dumps(counts, indent=1))
    else:
        _print_check(results)
    return int(any(kind["failed"] for row in counts.values() for kind in row.values()))


def _print_check(results: list) -> None:
    print(f"{'loop':<6}{'fixture':<28}{'values':>14}{'refusals':>14}")
    for fixture, kinds in results:
        cells = [f"{sum(v.held for v in verdicts)} of {len(verdicts)}" for verdicts in kinds.values()]
        print(f"{fixture['loop']:<6}{fixture['fixture']:<28}" + "".join(f"{cell:>14}" for cell in cells))
        for verdicts in kinds.values():
            for v in verdicts:
                if not v.held:
                    print(f"  FAILED {v.id}: got {v.got!r}, wanted {v.wanted!r}")


def _bench(args: argparse.Namespace) -> int:
    from kvlab.study import bench

    return bench.main(args.only, Path(args.out))


def _cost(args: argparse.Namespace) -> int:
    from kvlab.study.geometries import cost_line

    print(cost_line(args.model, args.tp, args.bytes))
    return 0


def _source(args: argparse.Namespace) -> Source:
    from kvlab.study.replay_source import Source

    return Source(args.trace, args.tokenizer, args.skip_bad, args.waves, args.limit)


def _replay(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from kvlab.study import replay, replay_report, replay_source

    source = _source(args)
    with tqdm(unit="B", unit_scale=True, disable=None, desc=Path(args.trace).name) as bar:
        def read(at: int, size: int) -> None:
            bar.total = size
            bar.update(at - bar.n)

        row = replay_source.row_bytes(args.model, args.tp, args.bytes)
        blocks = args.pool_blocks or replay_source.blocks_in(args.pool_gib, args.block_size * row)
        setting = replay.Setting(args.index, args.block_size, blocks, args.policy, args.eviction, args.in_flight, row)
        trace = source.open(read)
        found = replay.run(source.requests(trace), setting, ceilings=not args.no_ceilings)
    if trace.skipped:
        print(f"{trace.skipped:,} bad rows were left out; the first: {trace.first_skipped}", file=sys.stderr)
    title = f"{trace.title}, {trace.path.name}"
    if args.plot:
        replay_report.plot(found, Path(args.plot), title)
    print(json.dumps(found.to_dict(), indent=1) if args.json else replay_report.words(found, title))
    return 0


def _sweep(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from kvlab.study import replay_report, replay_source, sweep

    row = replay_source.row_bytes(args.model, args.tp, args.bytes)
    settings = sweep.grid(args.block_size, args.pool_gib, row, indexes=args.index, policies=args.policy,
                          evictions=args.eviction, in_flight=args.in_flight)
    rows = []
    folder = Path(args.out) if args.out else None
    for pair in tqdm(sweep.sweep(_source(args), settings, folder, on=args.on, jobs=args.jobs), total=len(settings),
                     disable=None):
        rows.append(pair)
        if args.json:
            print(json.dumps(pair[1]), flush=True)
    if not args.json:
        print(replay_report.grid_tables(rows))
    return 0


def _in_words(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A wrong call ends with one line that says what to change, and status 2."""
    def run(args: argparse.Namespace) -> int:
        from kvlab.execution.model_config import ModelFileError

        try:
            return command(args)
        except (ModelFileError, ValueError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
        except ModuleNotFoundError as error:
            print(f"{error.name} is not installed; `make test` and `make lab` install everything", file=sys.stderr)
            return 2

    return run


def _get_model(args: argparse.Namespace) -> int:
    from kvlab.execution import catalog

    print(catalog.get_model(args.name))
    return 0


def _record(args: argparse.Namespace) -> int:
    from kvlab.study import conversation

    Path(args.out).write_text(json.dumps(conversation.opening(), ensure_ascii=False, separators=(",", ":")) + "\n")
    print(args.out)
    return 0


def _add_trace(command: argparse.ArgumentParser) -> None:
    """What `replay` and `sweep` ask for alike."""
    command.add_argument("trace", help="Mooncake, Qwen-Bailian, Azure, BurstGPT, ShareGPT form or message lists")
    command.add_argument("--model", default="llama-3-8b", help="whose K/V bytes a token costs: as for `cost`")
    command.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    command.add_argument("--bytes", type=int, default=2, help="bytes of one stored scalar")
    command.add_argument("--tokenizer", help="for traces of text: a model's name or path, such as smollm2")
    command.add_argument("--waves", type=int, help="so many sessions at a time, one request of each in turn")
    command.add_argument("--limit", type=int, help="only the first requests")
    command.add_argument("--skip-bad", action="store_true", help="count bad rows and go on")
    command.add_argument("--json", action="store_true", help="figures for machines")


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser("replay", help="a serving trace through a real index over real blocks")
    _add_trace(replay)
    replay.add_argument("--block-size", type=int, default=16, help="tokens a block")
    replay.add_argument("--pool-gib", type=float, default=40.0, help="GiB of K/V memory on one rank")
    replay.add_argument("--pool-blocks", type=int, help="blocks of the pool, in place of GiB")
    replay.add_argument("--index", default="prefix", help="prefix or radix")
    replay.add_argument("--policy", default="normative", help="normative, vllm-0.23 (prefix), sglang-0.5.11 (radix)")
    replay.add_argument("--eviction", default="lru", help="the radix tree's order")
    replay.add_argument("--in-flight", type=int, default=1, help="requests at once, first come first served")
    replay.add_argument("--no-ceilings", action="store_true", help="less memory: no bound beside what was achieved")
    replay.add_argument("--plot", help="a picture of the bytes over time: a name ending in .svg, .png or .pdf")
    replay.set_defaults(run=_in_words(_replay))
    sweep = commands.add_parser("sweep", help="the same over a grid of settings: what if")
    _add_trace(sweep)
    sweep.add_argument("--block-size", type=int, nargs="+", default=[16], help="tokens a block")
    sweep.add_argument("--pool-gib", type=float, nargs="+", default=[10.0, 20.0, 40.0, 80.0])
    sweep.add_argument("--index", nargs="+", default=["prefix"], help="prefix, radix")
    sweep.add_argument("--policy", nargs="+", default=["normative"], help="normative, observed (the index's own)")
    sweep.add_argument("--eviction", nargs="+", default=["lru"], help="the radix tree's orders")
    sweep.add_argument("--in-flight", type=int, nargs="+", default=[1])
    sweep.add_argument("--out", help="a folder of Parquet files: results as they come; run again, it goes on")
    sweep.add_argument("--on", default="processes", help="processes, dask:ADDRESS or ray:ADDRESS")
    sweep.add_argument("--jobs", type=int, default=-1, help="workers; -1: one a core")
    sweep.set_defaults(run=_in_words(_sweep))


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 where all held, 1 where something failed, 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="python -m kvlab", description=__doc__)
    commands = parser.add_subparsers(required=True)
    check = commands.add_parser("check", help="play the fixtures: every value, every refusal")
    check.add_argument("loop", nargs="?", type=int, help="only this contract loop")
    check.add_argument("--fixture", help="play a fixture file of your own instead")
    check.add_argument("--json", action="store_true", help="counts and failed ids, for machines")
    check.set_defaults(run=_check)
    bench = commands.add_parser("bench", help="measure, as ratios in one run; writes bench.json")
    bench.add_argument("--only", default="", help="only rows whose name contains this")
    bench.add_argument("--out", default="bench.json")
    bench.set_defaults(run=_bench)
    cost = commands.add_parser("cost", help="what one token of K/V costs on a model")
    cost.add_argument("model", help="llama-3-8b, qwen2.5-7b, smollm2, austen, or the path of a config.json")
    cost.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    cost.add_argument("--bytes", type=int, default=2, help="bytes of one stored scalar")
    cost.set_defaults(run=_in_words(_cost))
    get_model = commands.add_parser("get-model", help="install a model that the lessons use")
    get_model.add_argument("name", nargs="?", default="smollm2")
    get_model.set_defaults(run=_get_model)
    _add_replay(commands)
    record = commands.add_parser("record", help="make the run again that the app opens on")
    record.add_argument("--out", default="fixtures/two_prompts.json")
    record.set_defaults(run=_record)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
