"""A replay in words, as a table and as a picture; it counts nothing that the replay did not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvlab.contract import Json
from kvlab.study.replay import Moment, Replayed, Setting

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
LOST = {"design": "only full blocks are found, a row is computed for logits, what outgrows the pool is not served",
        "capacity": "no evictions of this pool could keep it",
        "policy": "this index, its eviction order, and requests in flight"}


def share(tokens: int | None, of: int) -> str:
    return f"{100 * tokens / of:.1f} %" if of and tokens is not None else "–"


def ceilings(found: Replayed) -> list[tuple[str, int]]:
    """Name and hit tokens of each ceiling, the widest first, what was achieved last."""
    if found.ideal_hit_tokens is None:
        return [("this policy", found.hit_tokens)]
    return [("infinite cache", found.ideal_hit_tokens), ("the same by this design", found.design_hit_tokens),
            ("best evictions of this pool", found.optimal_hit_tokens), ("this policy", found.hit_tokens)]


def words(found: Replayed, title: str) -> str:
    """The whole report for a terminal."""
    s, of = found.setting, found.prompt_tokens
    named = f"{s.index}, {s.policy}" + (f", {s.eviction}" if s.index == "radix" else "")
    lines = [f"{title}: {found.requests:,} requests, {of:,} prompt and {found.output_tokens:,} output tokens",
             f"index: {named}; blocks of {s.block_size} tokens, {s.block_bytes:,} bytes; pool: {s.pool_blocks:,} "
             f"blocks, {s.pool_blocks * s.block_bytes / 2**30:.4g} GiB; {s.in_flight} in flight", ""]
    if found.unknown:
        lines.append(f"{found.unknown:,} requests tell lengths and no content: they can hit nothing here.")
    if found.refused:
        lines.append(f"{found.refused:,} requests are larger than the whole pool and were refused "
                     f"({found.refused_tokens:,} prompt tokens).")
    lines += [f"{'hit':<30}{share(found.hit_tokens, of):>8}  {found.hit_tokens:>15,} tokens",
              f"{'recomputed':<30}{share(found.recomputed_tokens, of):>8}  {found.recomputed_tokens:>15,} tokens",
              f"{'requests with any hit':<30}{share(found.requests_hit, found.requests):>8}  "
              f"{found.requests_hit:>15,} requests", ""]
    if found.unknown == found.requests:
        return "\n".join([*lines, *course(found)])
    for (name, tokens), why in zip(ceilings(found), ["", *LOST], strict=False):
        if why:
            lines.append(f"  {'lost to ' + why:<28}{share(-found.losses[why], of):>8}  {LOST[why]}")
        lines.append(f"{name:<30}{share(tokens, of):>8}")
    lines += ["", f"evicted: {found.evicted_blocks:,} blocks; ended early, for their blocks were needed: "
                  f"{found.ended_early:,} requests", *course(found), f"in the machines: {found.seconds:.2f} s; digest "
                  f"{found.digest[:12]}"]
    return "\n".join(lines)


USES: dict[str, Callable[[Moment], int]] = {
    "referenced": lambda m: m.use.referenced, "unique": lambda m: m.use.unique, "cached": lambda m: m.use.cached}


def course(found: Replayed) -> list[str]:
    """Blocks over the requests as small bars, and their peaks; each row has the scale of its own peak."""
    out = ["", f"over the requests{'':<13}{'peak':>10}  of {found.setting.pool_blocks:,} blocks"]
    peaks = {"referenced": found.peak_referenced_blocks, "unique": found.peak_unique_blocks,
             "cached": found.peak_cached_blocks}
    for name, of in USES.items():
        bars = spark([of(m) for m in found.moments], peaks[name])
        gib = peaks[name] * found.setting.block_bytes / 2**30
        out.append(f"  {name:<28}{peaks[name]:>10,}  {bars}  {gib:.3g} GiB")
    return out


def spark(values: Sequence[int], peak: int) -> str:
    """At most `WIDTH` bars; where there are more values, the largest of each run."""
    step = -(-len(values) // WIDTH) or 1
    runs = [max(values[at : at + step]) for at in range(0, len(values), step)]
    return "".join(BARS[min(len(BARS) - 1, v * len(BARS) // (peak + 1))] for v in runs)


def grid_tables(rows: Sequence[tuple[Setting, Json]]) -> str:
    """Hit shares of a sweep: a table for each index, policy and order; a pool a row, a block size a column."""
    out, groups = [], dict[str, dict[tuple[float, int], str]]()
    for s, row in rows:
        name = f"{s.index}, {s.policy}, {s.eviction}, {s.in_flight} in flight"
        pool = round(s.pool_blocks * s.block_bytes / 2**30, 3)
        groups.setdefault(name, {})[pool, s.block_size] = share(row["hit_tokens"], row["prompt_tokens"])
    for name, cells in groups.items():
        sizes = sorted({size for _, size in cells})
        out += [name, f"{'pool, GiB':<16}" + "".join(f"{f'block {size}':>12}" for size in sizes)]
        out += [f"{pool:<16g}" + "".join(f"{cells.get((pool, size), ''):>12}" for size in sizes)
                for pool in sorted({pool for pool, _ in cells})]
    return "\n".join(out)


def plot(found: Replayed, path: Path, title: str) -> None:
    """Bytes over the requests as a picture (SVG, PNG or PDF, by the name's ending). Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gib = found.setting.block_bytes / 2**30
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    at = [m.requests for m in found.moments]
    for (name, of), ink, line in zip(USES.items(), ("#d55e00", "#0072b2", "#009e73"), ("--", "-", "-."), strict=True):
        axes.plot(at, [of(m) * gib for m in found.moments], line, color=ink, label=name)
    axes.axhline(found.setting.pool_blocks * gib, color="#5b5e61", linewidth=1, label="pool")
    axes.set(xlabel="requests", ylabel="GiB", title=f"{title}: {share(found.hit_tokens, found.prompt_tokens)} hit")
    axes.legend(loc="best")
    figure.savefig(path)
    pyplot.close(figure)
