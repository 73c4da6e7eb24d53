"""The section's tables, made of `benchmarks/results/convergence.json`."""

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

from benchmarks.convergence import BF16, BF16_AGAIN, EVERY, SMOOTH
from benchmarks.convergence.figures import (
    Results,
    Run,
    Spread,
    by_kind,
    curves,
    means,
    runs_of,
    smoothed,
    spread,
    trained_in_fp8,
    variants_of,
)
from benchmarks.markdown import table


def tables(results: Results) -> str:
    """Curves beside BF16, the plot, gradients and underflow folded away."""
    between = spread(results)
    settings, any_run = results["settings"], results["runs"][0]
    size = settings["size"]
    where = any_run.get("gpu", any_run["cpu"])
    tokens = settings["steps"] * size["rows"] * size["length"]
    parts = [
        table(_HEAD, _rows(results, between)),
        f"{any_run['parameters'] / 1e6:,.1f} M parameters ({size['layers']} layers of "
        f"{size['experts']} experts, {size['top_k']} chosen, H = {size['hidden']}, I = "
        f"{size['intermediate']}, and a shared expert), {settings['steps']} steps of {size['rows']}"
        f" x {size['length']} bytes, {tokens / 1e6:,.1f} M in all. Losses are in nats a byte, "
        f"smoothed over {EVERY * SMOOTH} steps; *largest* is behind the first tenth of the run. "
        f"{_ends(results, between)}{_of_means(results)}",
        f"![Losses, and their difference to BF16, on one {where}]"
        "(../benchmarks/results/convergence.png)",
        *_folded(results),
        f"{where}, torch {any_run['torch']}; {_dates(results)}.",
    ]
    return "\n\n".join(parts)


_HEAD = (
    "seed",
    "linears and experts",
    "loss at the end",
    "beside BF16",
    "largest",
    "held-out loss",
    "beside BF16",
    "tokens/s",
)


def _rows(results: Results, between: Spread | None) -> Iterator[list[str]]:
    for run in runs_of(results, BF16).values():
        yield [*_of_run(run, ""), _speed(run)]
    if between:
        apart = f"{between.end:.3f} % apart", "", "", f"{between.held_out:.3f} % apart", "", ""
        yield ["all", BF16, *apart]
    for variant in variants_of(results):
        found = curves(results, variant)
        for seed, run in runs_of(results, variant).items():
            cells = _of_run(run, "-")
            if seed in found:
                cells[3:5] = f"{found[seed].end:+.3f} %", f"{found[seed].largest:+.3f} %"
                cells[6] = f"{found[seed].held_out:+.3f} %"
            yield [*cells, _speed(run)]
        if len(found) > 1:
            end, held_out = (
                f"{fmean(values):+.3f} %"
                for values in zip(*((x.end, x.held_out) for x in found.values()), strict=True)
            )
            yield ["mean", variant, "", end, "", "", held_out, ""]


def _speed(run: Run) -> str:
    """Nothing where other runs had the GPU, too."""
    return f"{run['tokens_per_s']:,}" if "tokens_per_s" in run else ""


def _of_run(run: Run, beside: str) -> list[str]:
    loss, held_out = smoothed(run["loss"])[-1], run["held_out"][-1][1]
    names = str(run["seed"]), run["variant"]
    return [*names, f"{loss:.4f}", beside, beside, f"{held_out:.4f}", beside]


def _ends(results: Results, between: Spread | None) -> str:
    """How far from the BF16 run of their seed runs end at most, and how far seeds are apart."""

    def farthest(variants: Iterable[str]) -> list[str]:
        ends = [abs(x.end) for name in variants for x in curves(results, name).values()]
        return [f"{max(ends):.3f} %"] if ends else []

    at_most = "from the BF16 run of their seed by at most"
    clauses = [f"runs in FP8 differ {at_most} {x}" for x in farthest(trained_in_fp8(results))]
    clauses += [f"BF16 runs that are made again {at_most} {x}" for x in farthest([BF16_AGAIN])]
    clauses += [f"BF16 runs of other seeds are {between.end:.3f} % apart"] if between else []
    return f"At the end, {'; '.join(clauses)}." if clauses else ""


def _of_means(results: Results) -> str:
    """What runs that were made again say together; nothing where there are none."""
    found = means(results)
    if found is None:
        return ""
    return (
        f" Of seeds that were run twice in both ways, the mean of {found.num_runs} runs in FP8 is "
        f"{found.end:+.3f} % from that of as many in BF16 at the end, and {found.held_out:+.3f} % "
        "on what is held out."
    )


def _folded(results: Results) -> Iterator[str]:
    """Gradients and underflow at the last probe of each variant's first seed."""
    for variant in variants_of(results):
        runs = [run for run in runs_of(results, variant).values() if run["probes"]]
        if not runs:
            continue
        first, last = runs[0]["probes"][0], runs[0]["probes"][-1]
        yield f"<details><summary>Gradients and underflow: {variant}</summary>"
        yield (
            "Cosine of the FP8 gradient with that of BF16, at the weights of the FP8 run of seed "
            f"{runs[0]['seed']} and on the same batch, the lowest of all layers, before step "
            f"{first['step'] + 1} and before step {last['step'] + 1}; and before the latter, the "
            "codes that are 0 though their value is not, in percent, the most of all layers. x and "
            "dY are in blocks of 1x128 / of 128 tokens of one feature."
        )
        yield table(_PROBE_HEAD, _probe_rows(first, last))
        yield "</details>"


_PROBE_HEAD = "parameter", "cosine, first", "cosine, last", "x", "dY", "W"


def _probe_rows(first: dict[str, Any], last: dict[str, Any]) -> Iterator[list[str]]:
    cosines = by_kind(first["cosine"]), by_kind(last["cosine"])
    shares = by_kind(last["underflow"])
    for kind in cosines[0]:
        cells = [f"{min(found[kind]):.4f}" for found in cosines]
        worst = {
            name: 100 * max(each[name] for each in shares[kind])
            for name in ("x", "x columns", "dy", "dy columns", "w")
            if kind in shares
        }
        of_codes = ["-"] * 3
        if worst:
            of_codes = [
                f"{worst['x']:.3f} / {worst['x columns']:.3f}",
                f"{worst['dy']:.3f} / {worst['dy columns']:.3f}",
                f"{worst['w']:.3f}",
            ]
        yield [f"`{kind}`", *cells, *of_codes]


def _dates(results: Results) -> str:
    """From when and of which commits the runs are."""
    dates = sorted({run["date"][:10] for run in results["runs"]})
    commits = dict.fromkeys(run["commit"] for run in results["runs"])
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{when}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
