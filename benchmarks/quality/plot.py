"""Draw what FP8 costs each trained model, layer by layer."""

from pathlib import Path
from typing import Any

from benchmarks.quality.table import name_of
from moefp8.testing.compare_plot import draw_costs, draw_errors, headline


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    rows = results["rows"]
    figure = Figure(figsize=(11, 3.0 * len(rows) + 0.4), dpi=110, layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for row, (left, right) in zip(rows, panels, strict=True):
        draw_costs(left, row["comparison"])
        draw_errors(right, row["comparison"])
        left.set_title(f"{name_of(row)}\n{headline(row['comparison'])}", fontsize=8, loc="left")
        right.legend(
            frameon=False, fontsize=7, ncols=3, loc="lower left", bbox_to_anchor=(0.0, 1.0)
        )
    for axes in panels[-1]:
        axes.set_xlabel("layer")
    figure.savefig(path)
