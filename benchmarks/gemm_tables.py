"""The tables of the dense GEMM: beside its peers, at random shapes, and by the power it needs."""

from collections.abc import Container
from itertools import chain

from benchmarks import power
from benchmarks.figures import PAUSES, WITHOUT_REST, Row, fastest_us
from benchmarks.gemm import HOST_CASE
from benchmarks.gemm_cases import LARGE_MS, MORE_SHAPES, SHAPES
from benchmarks.gemm_goals import AGAINST, compare, groups_of
from benchmarks.gemm_sweep import COMPARED, RANGES, num_slower
from benchmarks.grouped import shape_of
from benchmarks.markdown import number, table
from benchmarks.pages import (
    Results,
    how_without_rest,
    listed,
    page,
    times_without_rest,
    where,
)
from benchmarks.peers import BLOCK_SCALED, DEEP_GEMM, OURS, PEERS
from benchmarks.session import titles_of


def gemm_tables(results: Results) -> str:
    rows = results["rows"]
    errors = {
        PEERS[name].title: max(found, default=None)
        for name in (OURS, DEEP_GEMM)
        if (found := [e["error"] for row in rows if "error" in (e := row["peers"].get(name, {}))])
    }
    host = {PEERS[name].title: us for name, us in results["host_us"].items()}
    return page(
        results,
        "gemm",
        speedups=_gemm_speedups(rows),
        told=f"`fp8_gemm_nt` on one {results['gpu']}: how many times as fast as each, geometric "
        f"mean over {len(SHAPES)} shapes of DeepSeek-V3, and the worst of them"
        f"{_and_more_shapes(rows)}. cuBLASLt per-tensor applies no block scales: it gives another "
        "result, and is a ceiling to reach for. Worst row against FP64 sums of the same FP8 "
        f"operands: {listed(errors, '.1e')}. Host time of one call ({HOST_CASE}), us: "
        f"{listed(host, '.1f')}.",
        plot="Roofline of the GEMM",
        cases="times",
        how="Device time in us, L2 flushed before every call. Bold: the fastest that applies "
        "block scales.",
        times=_gemm_times(rows),
        without_rest=times_without_rest(
            rows, ("M", "N x K"), lambda row: [str(row["m"]), shape_of(row)], titles_of(PEERS, rows)
        ),
    )


def large_tables(results: Results) -> str:
    """Results of large M alone, which may be of another GPU."""
    rows, titles = results["rows"], titles_of(PEERS, results["rows"])
    cells = ("M", "N x K"), lambda row: [str(row["m"]), shape_of(row)]
    parts = [
        _gemm_speedups(rows),
        f"One {results['gpu']}{_and_more_shapes(rows)}.",
        f"<details><summary>All {len(rows)} times</summary>",
        f"Device time in us, L2 flushed before every call. {where(results)}",
        _gemm_times(rows),
        how_without_rest(results),
        times_without_rest(rows, *cells, titles),
        "</details>",
    ]
    return "\n\n".join(parts)


def _and_more_shapes(rows: list[Row]) -> str:
    ran = {(row["n"], row["k"]) for row in rows}
    more = " and ".join(f"{n}x{k}" for n, k in MORE_SHAPES if (n, k) in ran)
    return f"; for M of {LARGE_MS[0]} and more also over {more}" if more else ""


def _gemm_speedups(rows: list[Row]) -> str:
    """A line for each M with pauses, and for each M and group of M without rest."""

    def line(title: str, ms: Container[int], mode: str) -> list[str]:
        found = [compare(rows, ms, against, mode) for against in AGAINST]
        cells = [f"{x.geomean:.3f}, worst {x.worst:.3f}" if x else "-" for x in found]
        return [title, *cells] if any(found) else []

    each = [(m,) for m in sorted({row["m"] for row in rows})]
    lines = [line(f"M = {m}", (m,), PAUSES) for (m,) in each]
    groups = [ms for ms in groups_of(rows, WITHOUT_REST) if len({*chain(*each)} & {*ms}) > 1]
    for ms in each + groups:
        lines.append(line(f"M = {', '.join(map(str, ms))}, without rest", ms, WITHOUT_REST))
    head = "times as fast as", *(title for title, _ in AGAINST.values())
    return table(head, filter(None, lines))


def _gemm_times(rows: list[Row]) -> str:
    same_result = (OURS, DEEP_GEMM, BLOCK_SCALED)

    def cell(row: Row, name: str) -> str:
        us = fastest_us(row, (name,))
        is_best = us is not None and name in same_result and us == fastest_us(row, same_result)
        return f"**{us:.1f}**" if is_best else number(us, 1)

    titles = titles_of(PEERS, rows)
    cells = [[str(row["m"]), shape_of(row), *(cell(row, name) for name in titles)] for row in rows]
    return table(["M", "N x K", *titles.values()], cells)


def sweep_table(results: Results) -> str:
    rows = results["rows"]

    def cell(ms: range, against: str) -> str:
        found = compare(rows, ms, against)
        if found is None:
            return "-"
        slower = f"slower in {num_slower(rows, ms, against)} of {found.num_cases}"
        return f"{found.geomean:.3f}, worst {found.worst:.3f}, {slower}"

    lines = [[title, *(cell(ms, x) for x in COMPARED)] for title, ms in RANGES.items()]
    head = f"{len(rows)} random cases, {results['gpu']}, times as fast as"
    return table([head, *(AGAINST[x][0] for x in COMPARED)], lines)


def power_table(results: Results) -> str:
    """Times without rest by data, and how many times as fast as random data that is."""

    def cell(row: Row, data: str) -> str:
        found = row["data"][data]
        gain = "" if data == power.RANDOM else f", {1 / found['ratio']:.3f} times as fast"
        sensed = f", {found['mhz']} MHz, {found['watts']} W" if "mhz" in found else ""
        return f"{found['us']:.1f} us, {found['tflops']:.0f} TFLOP/s{gain}{sensed}"

    lines = [
        [f"{row['m']}x{row['n']}x{row['k']}", *(cell(row, data) for data in power.DATA)]
        for row in results["rows"]
    ]
    titles = ("random normal numbers", "constants", "zeros")
    return table([f"without rest, {results['gpu']}", *titles], lines)
