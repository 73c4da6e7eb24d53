"""Write the tables of three pages, draw the plots: `python -m benchmarks.report`.

The pages are README.md, benchmarks/README.md and docs/families.md; the tables are made of the JSON
files in `benchmarks/results`.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import floors, grouped_peers, headlines, moe, moe_peers, roofline, speedups
from benchmarks.families import table as families
from benchmarks.gemm import AGAINST, HOST_CASE, case_of, compare, fastest_us, geomean, ratio
from benchmarks.grouped import GOALS, against_deep_gemm, by_setting, errors_of, shape_of
from benchmarks.interleaving import AS_COMPILED, SHIPPED
from benchmarks.moe_cases import FLOOR_TBPS, FLOOR_TFLOPS, MODELS
from benchmarks.peers import BLOCK_SCALED, DEEP_GEMM, OURS, PEERS
from benchmarks.session import titles_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = tuple(ROOT / page for page in ("README.md", "benchmarks/README.md", "docs/families.md"))


def accuracy_table(results: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {error['worst']:.1e} | {error['median']:.1e} |"
        for name, error in results["relative_error_of_rows"].items()
    ]
    return "\n".join(["| relative error of a row | worst | median |", "|---|---|---|", *rows])


def load_table(results: dict[str, Any]) -> str:
    where = results.get("gpu", results["cpu"]) + (", to the GPU" if "gpu" in results else "")
    titles = {
        "moefp8": "`load_checkpoint`",
        "safetensors": "safetensors' `load_file`, then stack",
        "BF16 scales": "`load_checkpoint`, BF16 scales",
        "E8M0 scales": "`load_checkpoint`, E8M0 scales",
        "1/8 of experts": "one rank of 8, a part of the experts",
        "1/8 of I": "one rank of 8, a part of each expert",
    }
    rows = [
        f"| {title} | {x['gib']:.2f} | {x['gib_per_s']:.1f} | {x['extra_percent']:.1f} % |"
        for name, title in titles.items()
        if (x := results.get(name))
    ]
    head = f"| experts, warm page cache, {where} | GiB read | GiB/s | extra host memory |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def cpu_table(results: dict[str, Any]) -> str:
    head = f"| `FP8Linear` 7168 -> 4096, {results['cpu']} | FP8, ms | BF16, ms |"
    rows = [f"| {r['tokens']} tokens | {r['fp8']:.0f} | {r['bf16']:.1f} |" for r in results["ms"]]
    return "\n".join([head, "|---|---|---|", *rows])


def gemm_tables(results: dict[str, Any]) -> str:
    """How many times as fast as each peer, the plot, and all times folded away."""
    rows, host = results["rows"], results["host_us"]
    num_shapes = len({(row["n"], row["k"]) for row in rows})
    errors = {
        PEERS[name].title: max(found, default=None)
        for name in (OURS, DEEP_GEMM)
        if (found := [e["error"] for row in rows if "error" in (e := row["peers"].get(name, {}))])
    }
    return "\n".join(
        [
            _gemm_speedups(rows),
            "",
            f"`fp8_gemm_nt` on one {results['gpu']}: how many times as fast as each, geometric "
            f"mean over {num_shapes} shapes of DeepSeek-V3, and the worst of them. cuBLASLt "
            "per-tensor applies no block scales: it gives another result, and is a ceiling to "
            "reach for. Worst row against FP64 sums of the same FP8 operands: "
            + ", ".join(f"{title} {error:.1e}" for title, error in errors.items())
            + f". Host time of one call ({HOST_CASE}), us: "
            + ", ".join(f"{PEERS[name].title} {us:.1f}" for name, us in host.items())
            + ".",
            "",
            f"![Roofline of the GEMM on one {results['gpu']}](results/gemm.png)",
            "",
            f"<details><summary>All {len(rows)} times</summary>",
            "",
            f"Device time in us, L2 flushed before every call. Bold: the fastest that applies "
            f"block scales. {_circumstances(results)}",
            "",
            _gemm_times(rows),
            "",
            "</details>",
        ]
    )


def _circumstances(results: dict[str, Any]) -> str:
    return (
        f"{results['gpu']}, driver {results['driver']}, torch {results['torch']}, "
        f"{results['deep_gemm']}; {results['date'][:10]}, commit {results['commit']}."
    )


def _gemm_speedups(rows: list[dict[str, Any]]) -> str:
    def cell(m: int, against: str) -> str:
        found = compare(rows, (m,), against)
        return f"{found.geomean:.3f}, worst {found.worst:.3f}" if found else "-"

    head = "| times as fast as | " + " | ".join(title for title, _ in AGAINST.values()) + " |"
    lines = [
        f"| M = {m} | " + " | ".join(cell(m, against) for against in AGAINST) + " |"
        for m in sorted({row["m"] for row in rows})
    ]
    return "\n".join([head, "|---" * (1 + len(AGAINST)) + "|", *lines])


def _gemm_times(rows: list[dict[str, Any]]) -> str:
    def cell(row: dict[str, Any], name: str) -> str:
        us = fastest_us(row, (name,))
        if us is None:
            return "-"
        is_best = name in same_result and us == fastest_us(row, same_result)
        return f"**{us:.1f}**" if is_best else f"{us:.1f}"

    same_result = (OURS, DEEP_GEMM, BLOCK_SCALED)
    names = [name for name in PEERS if any("us" in row["peers"].get(name, {}) for row in rows)]
    head = "| M | N x K | " + " | ".join(PEERS[name].title for name in names) + " |"
    lines = []
    for row in rows:
        m, n, k = case_of(row)
        lines.append(f"| {m} | {n}x{k} | " + " | ".join(cell(row, name) for name in names) + " |")
    return "\n".join([head, "|---" * (2 + len(names)) + "|", *lines])


def grouped_tables(results: dict[str, Any]) -> str:
    """How many times as fast as DeepGEMM, the plot, and all times folded away."""
    rows = results["rows"]
    errors = ", ".join(f"{title} {error:.1e}" for title, error in errors_of(rows).items())
    return "\n".join(
        [
            _grouped_speedups(rows),
            "",
            f"`m_grouped_fp8_gemm_nt_contiguous` and `_masked` on one {results['gpu']}: how many "
            "times as fast as DeepGEMM, for each N x K. A case is so many groups x so many tokens "
            "of one: 0.7 to 1.3 times their mean, or by Zipf's law, or any number from a to b. "
            "DeepGEMM's contiguous form takes padded groups, ours does not. Worst row against "
            f"FP64 sums of the same operands: {errors}.",
            "",
            f"![Grouped GEMMs on one {results['gpu']}](results/grouped.png)",
            "",
            f"<details><summary>All {len(rows)} cases</summary>",
            "",
            "Device time in us, L2 flushed before every call. TFLOP/s and GB/s are moefp8's, and "
            "padding is no work. `moefp8 (padded rows)` multiplies rows that are padded for "
            f"DeepGEMM, by `grouped_layout`. {_circumstances(results)}",
            "",
            _grouped_times(rows),
            "",
            "</details>",
        ]
    )


def _grouped_speedups(rows: list[dict[str, Any]]) -> str:
    shapes = list(dict.fromkeys(shape_of(row) for row in rows))
    lines = ["| case | goal | " + " | ".join(shapes) + " |", "|---" * (2 + len(shapes)) + "|"]
    for setting, of_setting in by_setting(rows).items():
        ratios, goal = against_deep_gemm(of_setting), GOALS.get(setting)
        cells = [f"{ratios[shape]:.3f}" if shape in ratios else "" for shape in shapes]
        lines.append(f"| {setting} | {f'{goal:.2f}' if goal else ''} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _grouped_times(rows: list[dict[str, Any]]) -> str:
    titles = titles_of(grouped_peers.PEERS, rows)
    others = [name for name in titles if name != OURS]
    head = "| case | tokens | N x K | moefp8 | TFLOP/s | GB/s | "
    lines = [head + " | ".join(titles[name] for name in others) + " |"]
    lines.append("|---" * (6 + len(others)) + "|")
    for setting, of_setting in by_setting(rows).items():
        for row in of_setting:
            ours = row["peers"][OURS]
            times = [fastest_us(row, (name,)) for name in others]
            cells = [setting, str(row["tokens"]), shape_of(row), f"{ours['us']:.1f}"]
            cells += [f"{ours['tflops']:.0f}", f"{ours['gbps']:.0f}"]
            cells += ["-" if us is None else f"{us:.1f}" for us in times]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def moe_tables(results: dict[str, Any]) -> str:
    """How many times as fast as each peer, the plot, and all times folded away."""
    rows, titles = results["rows"], titles_of(moe_peers.PEERS, results["rows"])
    errors, of_fp8 = (
        ", ".join(f"{title} {error:.1e}" for title, error in moe.worst_of(rows, key).items())
        for key in ("error", "fp8_error")
    )
    return "\n".join(
        [
            _moe_speedups(rows, titles),
            "",
            f"Routed experts of whole layers on one {results['gpu']}, the router's choice given, "
            "BF16 in and out. The floor is what takes longer: reading the weights of all experts "
            f"that have a token once at {FLOOR_TBPS:g} TB/s, or all products at {FLOOR_TFLOPS:g} "
            "TFLOP/s. Goals are against the mega-kernel. Error against an FP32 layer with the same "
            f"FP8 weights, worst case: {errors}. Against FP8 activations with FP32 sums: {of_fp8}.",
            "",
            f"![Layers of routed experts on one {results['gpu']}](results/moe.png)",
            "",
            f"<details><summary>All {len(rows)} cases</summary>",
            "",
            "Device time / stream time of one eager call from an idle start / replay of a CUDA "
            "graph, us, L2 flushed before every call; what overlaps counts once. "
            f"{_circumstances(results)}",
            "",
            _moe_times(rows, titles),
            "",
            "</details>",
        ]
    )


def _moe_speedups(rows: list[dict[str, Any]], titles: dict[str, str]) -> str:
    others = [name for name in titles if name != OURS]
    head = "| model | tokens | floor, us | moefp8, us | goal |"
    lines = [head + "".join(f" times as fast as {titles[name]} |" for name in others)]
    lines.append("|---" * (5 + len(others)) + "|")
    for row in rows:
        ratios, goal = [ratio(row, (name,)) for name in others], moe.goal_of(row)
        cells = [MODELS[row["model"]].title, str(row["tokens"]), f"{row['floor_us']:.1f}"]
        cells += [f"{row['peers'][OURS]['us']:.1f}", f"{goal:.2f}" if goal else ""]
        cells += ["-" if value is None else f"{value:.2f}" for value in ratios]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _moe_times(rows: list[dict[str, Any]], titles: dict[str, str]) -> str:
    def cell(found: dict[str, Any]) -> str:
        times = [found.get(key) for key in ("us", "eager_us", "graph_us")]
        return " / ".join(f"{us:.1f}" if us else "-" for us in times) if times[0] else "-"

    lines = ["| model | tokens | active experts | " + " | ".join(titles.values()) + " |"]
    lines.append("|---" * (3 + len(titles)) + "|")
    for row in rows:
        cells = [MODELS[row["model"]].title, str(row["tokens"]), str(row["active"])]
        cells += [cell(row["peers"].get(name, {})) for name in titles]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def interleaving_table(results: dict[str, Any]) -> str:
    """As each compiler lets FFMAs yield, and as we do; how many times as fast that is."""
    compilers, lines = results["compilers"], []
    for row in results["rows"]:
        cells = [row["case"]]
        for compiler in compilers:
            before, after = (
                row["us"][f"NVRTC {compiler}, {pattern}"] for pattern in (AS_COMPILED, SHIPPED)
            )
            cells += [f"{before:.1f}", f"{after:.1f}", f"{before / after:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    head = "| us | " + " | ".join(f"NVRTC {x} | interleaved | gain" for x in compilers) + " |"
    return "\n".join([head, "|---" * (1 + 3 * len(compilers)) + "|", *lines])


def precompile_table(results: dict[str, Any]) -> str:
    lines = [
        f"| {row['layer']} | {row['max_tokens']} | {row['kernels']} | {row['seconds']:.1f} | "
        f"{row['bytes'] / 2**20:.1f} |"
        for row in results["rows"]
    ]
    head = f"| DeepSeek-V3 layer, {results['cpu']} | up to tokens | kernels | s | MiB |"
    return "\n".join([head, "|---|---|---|---|---|", *lines])


def tuning_table(results: dict[str, Any]) -> str:
    """Of each layer: how many sizes another choice is faster at, and by how much."""
    layers: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        layers.setdefault(row["layer"], []).append(row)

    def gain(rows: list[dict[str, Any]], key: str) -> str:
        ratios = [row[key] for row in rows if key in row]
        if not ratios:
            return "-"
        return f"{geomean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"

    lines = []
    for name, rows in layers.items():
        num_tuned = sum("again" in row for row in rows)
        gains = f"{gain(rows, 'again')} | {gain(rows, 'again_by_device_clock')}"
        lines.append(f"| `{name}` | {len(rows)} | {num_tuned} | {gains} |")
    head = "| layer | sizes | tuned | times as fast as by default | by the kernels' time alone |"
    return "\n".join([head, "|---|---|---|---|---|", *lines])


def host_time_table(results: dict[str, Any]) -> str:
    """Microseconds of a call, and how many times those of a repeated one they are."""
    rows: dict[str, dict[str, float]] = results["rows"]
    kinds = list(next(iter(rows.values())))
    lines = []
    for name, us in rows.items():
        cells = [f"{us[kind]:.1f} ({us[kind] / us['repeated']:.2f})" for kind in kinds]
        lines.append(" | ".join([f"| {name}", *cells]) + " |")
    head = " | ".join([f"| us of the host, {results['cpu']}, {results['gpu']}", *kinds]) + " |"
    return "\n".join([head, "|---" * (1 + len(kinds)) + "|", *lines])


TABLES: dict[str, Callable[..., str]] = {
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
    "families": families.table,
}
SOURCES = {"headlines": headlines.SOURCES}  # others are made of the results of their own name
PLOTS = {"gemm": roofline.draw, "grouped": speedups.draw, "moe": floors.draw}


def with_tables(text: str, directory: Path = RESULTS) -> str:
    """`text` with what stands between `<!-- NAME -->` and `<!-- /NAME -->` made anew.

    What was not measured, and so has no JSON file in `directory`, stays as it is.
    """
    for name, table in TABLES.items():
        marks = f"<!-- {name} -->", f"<!-- /{name} -->"
        files = [directory / f"{source}.json" for source in SOURCES.get(name, (name,))]
        if marks[0] not in text or not all(file.exists() for file in files):
            continue
        results = [json.loads(file.read_text()) for file in files]
        block = "\n".join((marks[0], table(*results), marks[1]))
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
