"""Write the tables of three pages, draw the plots: `python -m benchmarks.report`.

The pages are README.md, benchmarks/README.md and docs/families.md; the tables are made of the JSON
files in `benchmarks/results`.
"""

import json
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import floors, grouped_peers, headlines, moe, moe_peers, roofline, speedups
from benchmarks.families import table as families
from benchmarks.gemm import AGAINST, HOST_CASE, compare, fastest_us, geomean, ratio
from benchmarks.grouped import GOALS, against_deep_gemm, by_setting, errors_of, shape_of
from benchmarks.interleaving import AS_COMPILED, SHIPPED
from benchmarks.markdown import number, table
from benchmarks.model import plot as model_plot
from benchmarks.model import table as model_table
from benchmarks.moe_cases import FLOOR_TBPS, FLOOR_TFLOPS, MODELS
from benchmarks.peers import BLOCK_SCALED, DEEP_GEMM, OURS, PEERS
from benchmarks.session import Row, titles_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Results = dict[str, Any]  # a file in RESULTS
PAGES = tuple(ROOT / page for page in ("README.md", "benchmarks/README.md", "docs/families.md"))


def accuracy_table(results: Results) -> str:
    rows = results["relative_error_of_rows"]
    cells = [
        (name, f"{error['worst']:.1e}", f"{error['median']:.1e}") for name, error in rows.items()
    ]
    return table(("relative error of a row", "worst", "median"), cells)


def load_table(results: Results) -> str:
    where = results.get("gpu", results["cpu"]) + (", to the GPU" if "gpu" in results else "")
    titles = {
        "moefp8": "`load_checkpoint`",
        "safetensors": "safetensors' `load_file`, then stack",
        "BF16 scales": "`load_checkpoint`, BF16 scales",
        "E8M0 scales": "`load_checkpoint`, E8M0 scales",
        "1/8 of experts": "one rank of 8, a part of the experts",
        "1/8 of I": "one rank of 8, a part of each expert",
    }
    head = f"experts, warm page cache, {where}", "GiB read", "GiB/s", "extra host memory"
    return table(
        head,
        [
            (title, f"{x['gib']:.2f}", f"{x['gib_per_s']:.1f}", f"{x['extra_percent']:.1f} %")
            for name, title in titles.items()
            if (x := results.get(name))
        ],
    )


def cpu_table(results: Results) -> str:
    rows = [
        (f"{row['tokens']} tokens", f"{row['fp8']:.0f}", f"{row['bf16']:.1f}")
        for row in results["ms"]
    ]
    return table((f"`FP8Linear` 7168 -> 4096, {results['cpu']}", "FP8, ms", "BF16, ms"), rows)


def _page(
    results: Results,
    name: str,
    *,
    speedups: str,
    told: str,
    plot: str,
    cases: str,
    how: str,
    times: str,
) -> str:
    """Speedups and what they are, the plot, and all times folded away."""
    where = (
        f"{results['gpu']}, driver {results['driver']}, torch {results['torch']}, "
        f"{results['deep_gemm']}; {results['date'][:10]}, commit {results['commit']}."
    )
    parts = [
        speedups,
        told,
        f"![{plot} on one {results['gpu']}](results/{name}.png)",
        f"<details><summary>All {len(results['rows'])} {cases}</summary>",
        f"{how} {where}",
        times,
        "</details>",
    ]
    return "\n\n".join(parts)


def _listed(values: dict[str, float], form: str) -> str:
    return ", ".join(f"{title} {value:{form}}" for title, value in values.items())


def gemm_tables(results: Results) -> str:
    rows = results["rows"]
    num_shapes = len({(row["n"], row["k"]) for row in rows})
    errors = {
        PEERS[name].title: max(found, default=None)
        for name in (OURS, DEEP_GEMM)
        if (found := [e["error"] for row in rows if "error" in (e := row["peers"].get(name, {}))])
    }
    host = {PEERS[name].title: us for name, us in results["host_us"].items()}
    return _page(
        results,
        "gemm",
        speedups=_gemm_speedups(rows),
        told=f"`fp8_gemm_nt` on one {results['gpu']}: how many times as fast as each, geometric "
        f"mean over {num_shapes} shapes of DeepSeek-V3, and the worst of them. cuBLASLt "
        "per-tensor applies no block scales: it gives another result, and is a ceiling to "
        "reach for. Worst row against FP64 sums of the same FP8 operands: "
        f"{_listed(errors, '.1e')}. Host time of one call ({HOST_CASE}), us: "
        f"{_listed(host, '.1f')}.",
        plot="Roofline of the GEMM",
        cases="times",
        how="Device time in us, L2 flushed before every call. Bold: the fastest that applies "
        "block scales.",
        times=_gemm_times(rows),
    )


def _gemm_speedups(rows: list[Row]) -> str:
    def cell(m: int, against: str) -> str:
        found = compare(rows, (m,), against)
        return f"{found.geomean:.3f}, worst {found.worst:.3f}" if found else "-"

    return table(
        ["times as fast as", *(title for title, _ in AGAINST.values())],
        [
            [f"M = {m}", *(cell(m, against) for against in AGAINST)]
            for m in sorted({row["m"] for row in rows})
        ],
    )


def _gemm_times(rows: list[Row]) -> str:
    same_result = (OURS, DEEP_GEMM, BLOCK_SCALED)

    def cell(row: Row, name: str) -> str:
        us = fastest_us(row, (name,))
        is_best = us is not None and name in same_result and us == fastest_us(row, same_result)
        return f"**{us:.1f}**" if is_best else number(us, 1)

    titles = titles_of(PEERS, rows)
    cells = [[str(row["m"]), shape_of(row), *(cell(row, name) for name in titles)] for row in rows]
    return table(["M", "N x K", *titles.values()], cells)


def grouped_tables(results: Results) -> str:
    rows = results["rows"]
    return _page(
        results,
        "grouped",
        speedups=_grouped_speedups(rows),
        told=f"`m_grouped_fp8_gemm_nt_contiguous` and `_masked` on one {results['gpu']}: how many "
        "times as fast as DeepGEMM, for each N x K. A case is so many groups x so many tokens "
        "of one: 0.7 to 1.3 times their mean, or by Zipf's law, or any number from a to b. "
        "DeepGEMM's contiguous form takes padded groups, ours does not. Worst row against "
        f"FP64 sums of the same operands: {_listed(errors_of(rows), '.1e')}.",
        plot="Grouped GEMMs",
        cases="cases",
        how="Device time in us, L2 flushed before every call. TFLOP/s and GB/s are moefp8's, and "
        "padding is no work. `moefp8 (padded rows)` multiplies rows that are padded for "
        "DeepGEMM, by `grouped_layout`.",
        times=_grouped_times(rows),
    )


def _grouped_speedups(rows: list[Row]) -> str:
    shapes = list(dict.fromkeys(shape_of(row) for row in rows))
    lines = []
    for setting, of_setting in by_setting(rows).items():
        ratios, goal = against_deep_gemm(of_setting), GOALS.get(setting)
        cells = [f"{ratios[shape]:.3f}" if shape in ratios else "" for shape in shapes]
        lines.append([setting, f"{goal:.2f}" if goal else "", *cells])
    return table(["case", "goal", *shapes], lines)


def _grouped_times(rows: list[Row]) -> str:
    titles = titles_of(grouped_peers.PEERS, rows)
    ours_title = titles.pop(OURS)
    lines = []
    for setting, of_setting in by_setting(rows).items():
        for row in of_setting:
            ours = row["peers"][OURS]
            figures = f"{ours['us']:.1f}", f"{ours['tflops']:.0f}", f"{ours['gbps']:.0f}"
            others = [number(fastest_us(row, (name,)), 1) for name in titles]
            lines.append([setting, str(row["tokens"]), shape_of(row), *figures, *others])
    head = "case", "tokens", "N x K", ours_title, "TFLOP/s", "GB/s", *titles.values()
    return table(head, lines)


def moe_tables(results: Results) -> str:
    rows, titles = results["rows"], titles_of(moe_peers.PEERS, results["rows"])
    errors, of_fp8 = (_listed(moe.worst_of(rows, key), ".1e") for key in ("error", "fp8_error"))
    return _page(
        results,
        "moe",
        speedups=_moe_speedups(rows, titles),
        told=f"Routed experts of whole layers on one {results['gpu']}, the router's choice given, "
        "BF16 in and out. The floor is what takes longer: reading the weights of all experts "
        f"that have a token once at {FLOOR_TBPS:g} TB/s, or all products at {FLOOR_TFLOPS:g} "
        "TFLOP/s. Goals are against the mega-kernel. Error against an FP32 layer with the same "
        f"FP8 weights, worst case: {errors}. Against FP8 activations with FP32 sums: {of_fp8}.",
        plot="Layers of routed experts",
        cases="cases",
        how="Device time / stream time of one eager call from an idle start / replay of a CUDA "
        "graph, us, L2 flushed before every call; what overlaps counts once.",
        times=_moe_times(rows, titles),
    )


def _moe_speedups(rows: list[Row], titles: dict[str, str]) -> str:
    others = {name: title for name, title in titles.items() if name != OURS}
    lines = []
    for row in rows:
        goal, ours = moe.goal_of(row), row["peers"][OURS]["us"]
        cells = [MODELS[row["model"]].title, str(row["tokens"]), f"{row['floor_us']:.1f}"]
        ratios = [number(ratio(row, (name,)), 2) for name in others]
        lines.append([*cells, f"{ours:.1f}", f"{goal:.2f}" if goal else "", *ratios])
    head = "model", "tokens", "floor, us", "moefp8, us", "goal"
    return table([*head, *(f"times as fast as {title}" for title in others.values())], lines)


def _moe_times(rows: list[Row], titles: dict[str, str]) -> str:
    def cell(found: Row) -> str:
        times = [found.get(key) for key in ("us", "eager_us", "graph_us")]
        return " / ".join(number(us, 1) for us in times) if times[0] else "-"

    lines = []
    for row in rows:
        about = MODELS[row["model"]].title, str(row["tokens"]), str(row["active"])
        lines.append([*about, *(cell(row["peers"].get(name, {})) for name in titles)])
    return table(["model", "tokens", "active experts", *titles.values()], lines)


def interleaving_table(results: Results) -> str:
    """Times as each compiler lets FFMAs yield and as we do; how many times as fast that is."""
    compilers, lines = results["compilers"], []
    for row in results["rows"]:
        cells = [row["case"]]
        for compiler in compilers:
            before, after = (
                row["us"][f"NVRTC {compiler}, {pattern}"] for pattern in (AS_COMPILED, SHIPPED)
            )
            cells += [f"{before:.1f}", f"{after:.1f}", f"{before / after:.3f}"]
        lines.append(cells)
    columns = ((f"NVRTC {compiler}", "interleaved", "gain") for compiler in compilers)
    return table(["us", *chain.from_iterable(columns)], lines)


def precompile_table(results: Results) -> str:
    lines = []
    for row in results["rows"]:
        cells = row["layer"], str(row["max_tokens"]), str(row["kernels"])
        lines.append([*cells, f"{row['seconds']:.1f}", f"{row['bytes'] / 2**20:.1f}"])
    head = f"DeepSeek-V3 layer, {results['cpu']}", "up to tokens", "kernels", "s", "MiB"
    return table(head, lines)


def tuning_table(results: Results) -> str:
    """At how many sizes of each layer another choice is faster, and by how much."""
    layers: dict[str, list[Row]] = {}
    for row in results["rows"]:
        layers.setdefault(row["layer"], []).append(row)

    def gain(rows: list[Row], key: str) -> str:
        ratios = [row[key] for row in rows if key in row]
        if not ratios:
            return "-"
        return f"{geomean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"

    lines = []
    for name, rows in layers.items():
        num_tuned = sum("again" in row for row in rows)
        gains = [gain(rows, key) for key in ("again", "again_by_device_clock")]
        lines.append([f"`{name}`", str(len(rows)), str(num_tuned), *gains])
    gains = "times as fast as by default", "by the kernels' time alone"
    return table(["layer", "sizes", "tuned", *gains], lines)


def host_time_table(results: Results) -> str:
    """Microseconds of a call, and how many times those of a repeated one they are."""
    rows: dict[str, dict[str, float]] = results["rows"]
    kinds = list(next(iter(rows.values())))
    lines = [
        [name, *(f"{us[kind]:.1f} ({us[kind] / us['repeated']:.2f})" for kind in kinds)]
        for name, us in rows.items()
    ]
    return table([f"us of the host, {results['cpu']}, {results['gpu']}", *kinds], lines)


def versions_table(results: Results) -> str:
    """Microseconds of both checkouts, and how many times as fast as the other one this is."""
    of_case: dict[str, list[str]] = {}
    for row in results["rows"]:
        cell = f"{row['us']:.1f}, {row['other_us']:.1f} ({row['ratio']:.2f})"
        of_case.setdefault(row["case"], []).append(cell)
    about = f"{results['commit']} beside {results['other']}, {results['gpu']}, us"
    return table([about, "graph", "eager"], ([case, *cells] for case, cells in of_case.items()))


TABLES: dict[str, Callable[..., str]] = {
    "versions": versions_table,
    "headlines": headlines.headlines,
    "host_time": host_time_table,
    "interleaving": interleaving_table,
    "precompile": precompile_table,
    "tuning": tuning_table,
    "accuracy": accuracy_table,
    "load": load_table,
    "load_gpu": load_table,
    "cpu": cpu_table,
    "gemm": gemm_tables,
    "grouped": grouped_tables,
    "moe": moe_tables,
    "model": model_table.tables,
    "families": families.table,
}
SOURCES = {"headlines": headlines.SOURCES}  # others are made of the results of their own name
PLOTS = {
    "gemm": roofline.draw,
    "grouped": speedups.draw,
    "moe": floors.draw,
    "model": model_plot.draw,
}


def with_tables(text: str, directory: Path = RESULTS) -> str:
    """`text` with what stands between `<!-- NAME -->` and `<!-- /NAME -->` made anew.

    What was not measured, and so has no JSON file in `directory`, stays as it is.
    """
    for name, make in TABLES.items():
        marks = f"<!-- {name} -->", f"<!-- /{name} -->"
        files = [directory / f"{source}.json" for source in SOURCES.get(name, (name,))]
        if marks[0] not in text or not all(file.exists() for file in files):
            continue
        results = [json.loads(file.read_text()) for file in files]
        block = "\n".join((marks[0], make(*results), marks[1]))
        before, rest = text.split(marks[0])
        text = before + block + rest.split(marks[1])[1]
    return text


def draw_plots(directory: Path = RESULTS) -> None:
    for name, draw in PLOTS.items():
        file = directory / f"{name}.json"
        if file.exists():
            draw(json.loads(file.read_text()), file.with_suffix(".png"))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    try:
        draw_plots()
    except ImportError as error:
        sys.exit(f"the tables are written, the plots are not ({error}): pip install '.[bench]'")
