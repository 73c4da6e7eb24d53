"""Draw what each layer costs: the KL divergence of each alone, and errors from layer to layer."""

from pathlib import Path
from typing import Any

_BLUE, _ORANGE, _RED, _GREEN = "#0072B2", "#E69F00", "#D55E00", "#009E73"  # Okabe and Ito's


def check_plot(path: str) -> None:
    """Raise ValueError for what cannot be drawn, before hours of work."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ValueError(f"matplotlib draws the plot ({error}): pip install matplotlib") from error
    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in formats:
        raise ValueError(f"the plot must end in one of .{', .'.join(formats)}, got {path}")


def draw(comparison: dict[str, Any], path: str, title: str) -> None:
    """Write a picture of a `Comparison.to_dict()`; the ending of path is its format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.6), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    draw_costs(above, comparison)
    draw_errors(below, comparison)
    below.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    below.set_xlabel("layer")
    figure.suptitle(f"{title}\n{headline(comparison)}", fontsize=10)
    figure.savefig(path)


def headline(comparison: dict[str, Any]) -> str:
    """The figures of the whole model, in a line."""
    c = comparison
    return (
        f"perplexity {c['perplexity_a']:.3f} to {c['perplexity_b']:.3f} ({100 * c['change']:+.2f} "
        f"%), same top-1 {100 * c['same_top_1']:.1f} %, KL {c['kl_mean']:.1e}"
    )


def draw_costs(axes: Any, comparison: dict[str, Any]) -> None:
    """Bars of the KL divergence of each layer alone; the costliest has its name."""
    costs = [layer["kl"] for layer in comparison["layers"]]
    most = costs.index(max(costs))
    colours = [_RED if i == most else _BLUE for i in range(len(costs))]
    axes.bar(range(len(costs)), costs, color=colours, width=0.8)
    name = comparison["layers"][most]["name"]
    side = "left" if most < len(costs) / 2 else "right"
    axes.annotate(
        f"costs most: {name}", (most, costs[most]), ha=side, va="bottom", color=_RED, fontsize=9
    )
    floor = comparison["kl_floor"]
    axes.axhline(floor, color="#555555", linestyle="--", linewidth=1)
    place = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "center"}
    axes.annotate(" rounding\n alone", (1, floor), fontsize=7, color="#555555", **place)
    axes.set_ylabel("KL of this layer alone,\nnats a token")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    axes.margins(y=0.12)
    _plain(axes)


def draw_errors(axes: Any, comparison: dict[str, Any]) -> None:
    """Lines of errors in percent: of layers, on their own and in all, and of their parts."""
    layers = comparison["layers"]
    places = range(len(layers))
    lines = {
        "in all, with the layers before": ([x["total"] for x in layers], _BLUE, "-"),
        "layer's own": ([x["own"] for x in layers], _ORANGE, "-"),
    }
    parts = [*dict.fromkeys(part for layer in layers for part in layer["parts"])]
    colours = _GREEN, "#CC79A7", "#56B4E9", "#999999", "#F0E442"
    for part, colour in zip(parts, colours, strict=False):
        lines[f"own, {part}"] = ([x["parts"].get(part) for x in layers], colour, ":")
    for label, (errors, colour, style) in lines.items():
        percent = [float("nan") if x is None else 100 * x["median"] for x in errors]
        axes.plot(places, percent, style, color=colour, marker=".", label=label)
    axes.set_ylabel("median relative error, %")
    axes.set_ylim(bottom=0)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(which="major", axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
