"""Train a model in FP8 and in BF16, and tell how far losses and gradients are apart.

Each run, a variant and a seed, trains the model of `examples/train.py`. A seed decides about the
first weights; the text comes in the same order in all runs, so that curves differ by nothing else.

With `--minutes`, no step begins after so long: the run that is not done is kept in `--state`, and
the same call goes on from there, to the same bits. Runs that `--out` has are not made again.
`--report` puts files together that runs were kept in, and prints their table.

Variants are `benchmarks.convergence.VARIANTS`; `--variant 'mine={"wgrad": "bf16"}'` adds one, by
options of `moefp8.convert` as JSON.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence import BF16, FP8, RESULTS, VARIANTS
from benchmarks.convergence.example import train
from benchmarks.convergence.runs import Plan, Run, Text
from benchmarks.convergence.table import tables
from benchmarks.session import write

Results = dict[str, Any]
SEEDS = 0, 1, 2


def a_run(text: str) -> tuple[str, int]:
    """A variant and a seed, such as fp8:1."""
    variant, _, seed = text.partition(":")
    if not variant or not seed.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be VARIANT:SEED, such as {FP8}:1")
    return variant, int(seed)


def some_runs(text: str) -> list[tuple[str, int]]:
    return [a_run(part) for part in text.split(",")]


def a_variant(text: str) -> tuple[str, dict[str, Any] | None]:
    """A name, and options of `convert` as JSON, NAME={"option": "value"}; null: BF16."""
    name, _, options = text.partition("=")
    try:
        found = json.loads(options)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text}: must be NAME={{...}}, {error}") from None
    if not name or name in VARIANTS or type(found) not in (dict, type(None)):
        raise argparse.ArgumentTypeError(f"{text}: must be a new NAME={{...}}, a JSON object")
    return name, found


def with_run(results: Results, settings: Results, run: Results) -> Results:
    """The results and one more run, in place of a run of its name.

    Raises ValueError if what is there has other settings.
    """
    if results and results["settings"] != settings:
        raise ValueError(
            f"runs of one file must have equal settings, got {results['settings']} and {settings}"
        )
    name = run["variant"], run["seed"]
    others = [x for x in results.get("runs", ()) if (x["variant"], x["seed"]) != name]
    return {"settings": settings, "runs": [*others, run]}


def read(path: Path | None) -> Results:
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def train_all(options: argparse.Namespace) -> bool:
    """Train what is asked for, and keep each run as soon as it is done; False: time was over."""
    until_s = time.perf_counter() + 60 * options.minutes
    size = train.SIZES[options.size]
    if options.length or options.rows:
        size = replace(size, length=options.length or size.length, rows=options.rows or size.rows)
    text = Text.read(size, torch.device(options.device))
    plan = Plan(
        *(size, options.steps or size.steps, options.lr or size.lr, options.probes),
        shares_gpu=options.shares_gpu,
    )
    settings = plan.settings(text)
    variants = {**VARIANTS, **dict(options.variant)}
    for variant, seed in options.run:
        results = read(options.out)
        if any((x["variant"], x["seed"]) == (variant, seed) for x in results.get("runs", ())):
            print(f"{variant}:{seed} is in {options.out} already")
            continue
        run = Run(plan, text, variant, seed, variants[variant])
        kept = options.state / f"{variant}-{seed}.pt" if options.state else None
        if kept is not None and kept.exists():
            run.restore(kept)
            print(f"{variant}:{seed} goes on behind step {run.step}")
        if not run.go_on(until_s):
            if kept is not None:
                run.save(kept)
            return False
        results = with_run(results, settings, run.result())
        if options.out:
            write(results, options.out)
        if kept is not None:
            kept.unlink(missing_ok=True)
    return True


def report(files: list[Path], out: Path) -> None:
    """Put the runs of all files together."""
    results: Results = {}
    for file in files:
        found = json.loads(file.read_text())
        for run in found["runs"]:
            results = with_run(results, found["settings"], run)
    write(results, out)
    print(tables(results))


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    usage = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=usage[0], epilog=usage[2])
    add = parser.add_argument
    add("--run", type=some_runs, metavar="V:S,...", help=f"default: {BF16} and {FP8}, three seeds")
    add("--variant", type=a_variant, action="append", default=[], metavar="NAME=JSON")
    add("--steps", type=int, help="default: by size")
    add("--size", choices=train.SIZES, default="large")
    add("--rows", type=int, help="of a batch; default: by size")
    add("--length", type=int, help="bytes in a row; default: by size")
    add("--lr", type=float, help="default: by size")
    add("--probes", type=int, default=5, help="how often gradients are compared (%(default)s)")
    add("--shares-gpu", action="store_true", help="with other runs: do not tell tokens/s")
    add("--minutes", type=float, default=float("inf"), help="when to stop; needs --state")
    add("--state", type=Path, help="a folder for a run that is not done")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", "--json", type=Path, help="for the results, which are added to those there")
    add("--report", type=Path, nargs="+", metavar="FILE", help=f"of --out; into {RESULTS}")
    options = parser.parse_args(arguments)
    if options.run is None:
        options.run = [(variant, seed) for seed in SEEDS for variant in (BF16, FP8)]
    known = {*VARIANTS, *dict(options.variant)}
    if unknown := {variant for variant, _ in options.run} - known:
        parser.error(f"--run names {sorted(unknown)}, which no --variant explains")
    if options.minutes < float("inf") and options.state is None:
        parser.error("--minutes needs --state, where a run that is not done is kept")
    return options


def main() -> None:
    options = options_of()
    if options.report:
        report(options.report, options.out or RESULTS)
        return
    if not options.out:
        print("the results are not kept: --out FILE keeps them")
    if not train_all(options):
        sys.exit("the time is over: the same call goes on")


if __name__ == "__main__":
    main()
