"""Draw how many times as fast as DeepGEMM each grouped GEMM is: a bar from 1 to the ratio."""

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import PAUSES, told_mode, told_ratio
from benchmarks.grouped import by_setting, shape_of
from benchmarks.peers import DEEP_GEMM

# These are colours of Okabe and Ito, as in `roofline`.
_OURS, _DEEP_GEMM, _GREY = "#0072B2", "#D55E00", "#555555"
_GAP = 0.6  # between settings, in bars


class Bar(NamedTuple):
    """y: the place from above; setting: nothing if it is that of the bar before."""

    y: float
    setting: str
    shape: str
    ratio: float


def bars(results: dict[str, Any], form: str) -> list[Bar]:
    """Those of the settings of a form, "contiguous" or "masked"."""
    form_bars, y = [], 0.0
    for setting, rows in by_setting(results["rows"]).items():
        name = setting.removeprefix(f"{form} ")
        if name == setting:
            continue
        for row in rows:
            ratio = told_ratio(row, (DEEP_GEMM,))
            if ratio is not None:
                form_bars.append(Bar(y, name, shape_of(row), ratio))
                name, y = "", y + 1
        if not name:
            y += _GAP
    return form_bars


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    forms = dict.fromkeys(row["form"] for row in results["rows"])
    by_form = {form: form_bars for form in forms if (form_bars := bars(results, form))}
    if not by_form:
        raise ValueError("grouped.json must have times of DeepGEMM: the plot is of ratios to them")
    ratios = [bar.ratio for form_bars in by_form.values() for bar in form_bars]
    height = max(form_bars[-1].y for form_bars in by_form.values()) + 1
    figure = Figure(figsize=(11, 1.8 + 0.24 * height), dpi=140, layout="constrained")
    panels = figure.subplots(1, len(by_form), sharex=True, squeeze=False)[0]
    for axes, (form, form_bars) in zip(panels, by_form.items(), strict=True):
        _draw_form(axes, form, form_bars)
        axes.set(ylim=(height - 0.3, -0.7), xlim=(min(0.98, *ratios), max(ratios) * 1.04))
    long = any(told_mode(row) != PAUSES for row in results["rows"])
    figure.supxlabel(
        "times as fast as DeepGEMM, the line at 1: longer is better"
        + ("; without rest where a call takes 100 us or more" * long),
        size=10,
    )
    speeds = f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as DeepGEMM"
    figure.suptitle(f"Grouped FP8 GEMMs on one {results['gpu']}: {speeds}")
    figure.savefig(path)


def _draw_form(axes: Any, form: str, form_bars: list[Bar]) -> None:
    places = [bar.y for bar in form_bars]
    axes.barh(places, [bar.ratio - 1 for bar in form_bars], 0.8, left=1, color=_OURS)
    axes.axvline(1, color=_DEEP_GEMM, linewidth=1.6)
    for bar in form_bars:
        end = max(bar.ratio, 1.0) + 0.006
        axes.text(end, bar.y, f"{bar.ratio:.2f}", va="center", fontsize=9)
        if bar.setting:
            axes.text(-0.43, bar.y, bar.setting, transform=axes.get_yaxis_transform(), va="center")
    axes.set_yticks(places, [bar.shape for bar in form_bars], fontsize=8, color=_GREY)
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{form}: groups x tokens of each, N x K", fontsize=10)
    axes.grid(which="major", axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
