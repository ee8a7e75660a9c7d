"""The command line: `python -m kvlab check | cost | bench | get-model | record`; it only calls what the rooms offer."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


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
    from kvlab.execution.model_config import ModelFileError
    from kvlab.study.geometries import cost_line

    try:
        print(cost_line(args.model, args.tp, args.bytes))
    except (ModelFileError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _get_model(args: argparse.Namespace) -> int:
    from kvlab.execution import catalog

    print(catalog.get_model(args.name))
    return 0


def _record(args: argparse.Namespace) -> int:
    from kvlab.study import conversation

    Path(args.out).write_text(json.dumps(conversation.opening(), ensure_ascii=False, separators=(",", ":")) + "\n")
    print(args.out)
    return 0


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
    cost.set_defaults(run=_cost)
    get_model = commands.add_parser("get-model", help="install a model that the lessons use")
    get_model.add_argument("name", nargs="?", default="smollm2")
    get_model.set_defaults(run=_get_model)
    record = commands.add_parser("record", help="make the run again that the app opens on")
    record.add_argument("--out", default="fixtures/two_prompts.json")
    record.set_defaults(run=_record)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
