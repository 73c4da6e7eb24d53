"""Write the tables of all pages, draw the plots: `python -m benchmarks.report`.

The pages are README.md, benchmarks/README.md, docs/families.md, docs/training.md,
docs/hopper-fp8-gemm.md and docs/design/goals.md; the tables are made of the JSON files in
`benchmarks/results`.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks import (
    batch_invariance,
    floors,
    goals,
    gradient_tables,
    headlines,
    hopper_gemm,
    roofline,
    speedups,
)
from benchmarks.convergence import plot as convergence_plot
from benchmarks.convergence import table as convergence_table
from benchmarks.expert_parallel import table as expert_parallel_table
from benchmarks.families import table as families
from benchmarks.figures import Row, geomean
from benchmarks.gemm_tables import gemm_tables, large_tables, power_table, sweep_table
from benchmarks.grouped_tables import grouped_tables
from benchmarks.interleaving import AS_COMPILED, SHIPPED
from benchmarks.markdown import table
from benchmarks.model import plot as model_plot
from benchmarks.model import table as model_table
from benchmarks.moe_tables import layers_tables, moe_tables
from benchmarks.pages import Results
from benchmarks.quality import plot as quality_plot
from benchmarks.quality import table as quality_table
from benchmarks.serving import table as serving_table
from benchmarks.training import table as training_table
from benchmarks.versions import MODES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_DOCS = (
    "docs/families.md",
    "docs/training.md",
    "docs/hopper-fp8-gemm.md",
    "docs/design/goals.md",
)
PAGES = tuple(ROOT / page for page in ("README.md", "benchmarks/README.md", *_DOCS))


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


def updating_table(results: Results) -> str:
    rows = [
        (
            name,
            str(row["num_tensors"]),
            f"{row['ms']:.1f}",
            f"{row['host_ms']:.1f}",
            f"{row['copy_ms']:.1f}",
            f"{row['share_of_copy']:.2f}",
        )
        for name, row in results["rows"].items()
    ]
    where = f"{results['layers']} layers of experts, {results.get('gpu', results['cpu'])}"
    return table((where, "tensors", "ms", "of them the host", "copy, ms", "share of it"), rows)


def cpu_table(results: Results) -> str:
    rows = [
        (f"{row['tokens']} tokens", f"{row['fp8']:.0f}", f"{row['bf16']:.1f}")
        for row in results["ms"]
    ]
    return table((f"`FP8Linear` 7168 -> 4096, {results['cpu']}", "FP8, ms", "BF16, ms"), rows)


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
    cells: dict[str, dict[str, str]] = {}  # a case that cannot be captured has no row of a graph
    for row in results["rows"]:
        cell = f"{row['us']:.1f}, {row['other_us']:.1f} ({row['ratio']:.2f})"
        cells.setdefault(row["case"], {})[row["mode"]] = cell
    about = f"{results['commit']} beside {results['other']}, {results['gpu']}, us"
    lines = ([case, *(by_mode.get(mode, "-") for mode in MODES)] for case, by_mode in cells.items())
    return table([about, *MODES], lines)


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
    "updating": updating_table,
    "cpu": cpu_table,
    "gemm": gemm_tables,
    "gemm_large": large_tables,
    "gemm_sweep": sweep_table,
    "power": power_table,
    "hopper_gemm": hopper_gemm.page,
    "grouped": grouped_tables,
    "moe": moe_tables,
    "moe_layers": layers_tables,
    "gradients": gradient_tables.gradients_tables,
    "training": training_table.tables,
    "expert_parallel": expert_parallel_table.tables,
    "model": model_table.tables,
    "serving": serving_table.tables,
    "batch_invariance": batch_invariance.price_table,
    "families": families.table,
    "convergence": convergence_table.tables,
    "quality": quality_table.tables,
    "quality_short": quality_table.short,
    **{
        f"goals of {name}": partial(goals.goals_table, verdicts)
        for name, verdicts in goals.VERDICTS.items()
    },
}
# Others are made of the results of their own name.
SOURCES = {"headlines": headlines.SOURCES, "quality_short": ("quality",)} | {
    f"goals of {name}": (name,) for name in goals.VERDICTS
}
MORE_SOURCES = {"headlines": headlines.MORE_SOURCES}  # which need not be there
PLOTS = {
    "gemm": roofline.draw,
    "hopper_gemm": hopper_gemm.draw,
    "grouped": speedups.draw,
    "moe": floors.draw,
    "model": model_plot.draw,
    "convergence": convergence_plot.draw,
    "quality": quality_plot.draw,
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
        more = {source: directory / f"{source}.json" for source in MORE_SOURCES.get(name, ())}
        results = [json.loads(file.read_text()) for file in files]
        others = {key: json.loads(file.read_text()) for key, file in more.items() if file.exists()}
        block = "\n".join((marks[0], make(*results, **others), marks[1]))
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
