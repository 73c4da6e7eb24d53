"""Training steps beside their peers on one Hopper GPU: `python -m benchmarks.training`.

Steps of linears, grouped linears and whole expert layers, quantization included, beside BF16 and
the libraries that are there, then the kernels of a step alone. All of a case take turns in one
process, with pauses and without rest as in `benchmarks.gemm`. Each row is printed and kept as soon
as it is done; no case begins after `--minutes`, and what had no time is named. `--report` puts
files together that were made side by side, on several GPUs of one kind.
"""

import argparse
import importlib
import json
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.circumstances import require_gpu
from benchmarks.figures import PAUSES, WITHOUT_REST, Row, of_peer, ratio, speed
from benchmarks.gradient_parts import UNITS
from benchmarks.gradient_peers import COPY
from benchmarks.memory import peak_bytes, saved_bytes
from benchmarks.options import some_of
from benchmarks.peers import BF16, DEEP_GEMM, OURS, Call, Peer, first_line
from benchmarks.session import (
    Rest,
    about_this_run,
    finish,
    first_calls,
    leave_out_wrong,
    measured,
    write,
)
from benchmarks.timing import device_us_many, host_us, layer_us_many
from benchmarks.training import RESULTS, kernels, peers
from benchmarks.training.goals import judged, num_met
from benchmarks.training.parts import GROUPS, LAYERS, PARTS
from benchmarks.training.rows import Results, put_together, rows_of, with_row
from benchmarks.without_rest import num_copies

SECONDS, ROUNDS, MINUTES = 0.2, 3, 8.5
REPEATS, HOST_REPEATS = 8, 20
MOST_ERROR = 0.15
ALWAYS = OURS, BF16  # whatever `--peers` says: ratios are of them
MODULES = {"transformer_engine": "TransformerEngine", "torchao": "torchao", "sonicmoe": "SonicMoE"}
OURS_OF = {*peers.OF_OURS, *kernels.OF_OURS}


# ---- Measuring ----


def measure(name_of_part: str, case: Any, there: Mapping[str, Peer], rest: Rest) -> Row:
    """there: the peers that are asked for and can be imported."""
    torch.cuda.empty_cache()
    part = PARTS[name_of_part]
    operands = part.operands(case)
    needed = [name for name in there if name in (OURS, BF16)]
    calls, first, found = first_calls(there, there, case, operands, needed)
    compared = {name: x for name, x in first.items() if name not in peers.NOT_COMPARED}
    for name, errors in operands.errors(compared).items():
        found[name] |= errors
    first.clear()  # others need the memory
    compared.clear()
    leave_out_wrong(calls, found, MOST_ERROR, OURS_OF)
    print(f"{part.title}: {case}: {', '.join(calls)} are ready", flush=True)
    timer = layer_us_many if part.is_step else device_us_many
    for name, us in timer(calls, REPEATS).items():
        found[name]["us"] = round(us, 3)
        found[name] |= {unit: round(work / us, 1) for unit, work in operands.work.items()}
    if part.is_step:
        for name, call in calls.items():
            found[name]["host_us"] = round(host_us(call, HOST_REPEATS), 1)
    if name_of_part == LAYERS:
        _add_memory(operands, calls, found)
    if rest.wants(found):
        _add_times_without_rest(part, case, operands, calls, found, rest)
    return {"part": name_of_part, "case": str(case), "peers": found}


def _add_memory(operands: Any, calls: Mapping[str, Any], found: dict[str, Row]) -> None:
    for name, step in calls.items():
        found[name]["step_bytes"] = peak_bytes(step)
        kept = saved_bytes(step.forward, step.leaves[1:])
        found[name]["saved_bytes_per_token"] = round(kept / operands.num_tokens, 1)


def _add_times_without_rest(
    part: Any,
    case: Any,
    operands: Any,
    calls: dict[str, Call],
    found: dict[str, Row],
    rest: Rest,
) -> None:
    """No cache holds a step, which writes gradients of its weights, too."""
    captures = [name for name in calls if not part.is_step or name in peers.MAY_BE_CAPTURED]
    num = 0 if part.is_step else num_copies(operands.num_bytes) - 1
    try:
        copies = [part.operands(case) for _ in range(num)]
        rest.add_times(found, part.peers, calls, copies, captures)
    except torch.OutOfMemoryError as error:
        print(f"{case} is not timed without rest: {first_line(error)}", flush=True)


# ---- Printing ----


def lines_of_row(row: Row) -> Iterator[str]:
    part = PARTS[row["part"]]
    yield f"{part.title}: {row['case']}, {UNITS[part.unit]} without rest / with pauses"
    for name, found in row["peers"].items():
        title = part.peers[name].title
        if "refused" in found:
            yield f"  {title} is left out: {found['refused']}"
            continue
        speeds = (speed(row, name, part.unit, mode) for mode in (WITHOUT_REST, PAUSES))
        line = f"  {title:32} {' / '.join(f'{x:.1f}' for x in speeds if x is not None)}"
        line += " eager" if of_peer(row, name, WITHOUT_REST).get("eager") else ""
        line += f"  host {found['host_us']:.0f}" if "host_us" in found else ""
        errors = [key for key in found if key.startswith(("error", "of_"))]
        line += "".join(f"  {key} {found[key]:.2g}" for key in errors)
        if "step_bytes" in found:
            line += f"  GiB {found['step_bytes'] / 2**30:.2f}"
            line += f"  KiB a token {found['saved_bytes_per_token'] / 1024:.1f}"
        against = [x for x in (BF16, COPY) if x in row["peers"] and x != name]
        modes = (WITHOUT_REST, PAUSES)
        ratios = [x for mode in modes if (x := ratio(row, against, mode, name)) is not None]
        yield line + (f"  x{' x'.join(f'{x:.3f}' for x in ratios)}" if ratios else "")


def lines_of_the_rest(results: Results) -> Iterator[str]:
    """How each goal fares."""
    all_judged = [*judged(results["rows"])]
    for each in all_judged:
        part = PARTS[each.goal.part]
        for name, by_mode in each.found.items():
            told = "; ".join(f"{mode} {each.told(value)}" for mode, value in by_mode.items())
            what = f"{part.title} {each.case}: {part.peers[name].title}, {each.goal.what}"
            yield f"{what}, goal {each.least:g}: {told}"
    yield "goals met: {} of {}".format(*num_met(all_judged))
    yield from (f"not there: {why}" for why in results["missing"].values())
    yield f"copies on this GPU: {results['copy_gbps']:.0f} GB/s, read and written"


# ---- Running ----


def cases_of(options: argparse.Namespace) -> list[tuple[str, Any]]:
    """Parts and cases that are asked for; with `--quick`, the first one of each."""
    found = []
    for part in [part for group in options.parts for part in GROUPS[group]]:
        cases = [case for case in PARTS[part].cases if _is_wanted(str(case), options.only)]
        found += [(part, case) for case in cases[: 1 if options.quick else None]]
    return found


def _is_wanted(case: str, words: Iterable[str]) -> bool:
    words = tuple(words)
    return not words or any(word.lower() in case.lower() for word in words)


def _there(options: argparse.Namespace) -> tuple[dict[str, dict[str, Peer]], dict[str, str]]:
    """The peers of each part that are asked for and here, and why others are not, by title."""
    there: dict[str, dict[str, Peer]] = {}
    missing: dict[str, str] = {}
    for part in dict.fromkeys(part for part, _ in cases_of(options)):
        there[part] = {}
        for name, peer in PARTS[part].peers.items():
            if options.peers and name not in (*options.peers, *ALWAYS):
                continue
            why = peer.why_missing()
            if why is None:
                there[part][name] = peer
            else:
                missing[peer.title] = why
    return there, missing


def run(options: argparse.Namespace, until_s: float) -> Results:
    """Measure case after case; each row is printed and written when it is done."""
    rest = Rest.of(options)
    there, missing = _there(options)
    for why in missing.values():
        print(why, flush=True)
    has_deep_gemm = any(DEEP_GEMM in of_part for of_part in there.values())
    about = about_this_run([DEEP_GEMM] if has_deep_gemm else [], rest)
    results: Results = {**about, "libraries": _versions(), "missing": missing, "left_out": []}
    results["rows"] = _kept_rows(results, options)

    def keep() -> None:
        if options.out:
            write(results, options.out)

    def measure_at(given: tuple[str, Any]) -> Row:
        return measure(*given, there[given[0]], rest)

    waiting = cases_of(options)

    def in_time() -> Iterator[tuple[str, Any]]:
        while waiting and time.perf_counter() < until_s:
            yield waiting[0]
            waiting.pop(0)

    try:
        for row in measured(in_time(), measure_at, lambda given: f"{given[0]}: {given[1]}"):
            print(*lines_of_row(row), sep="\n", flush=True)
            results["rows"] = with_row(results["rows"], row)
            keep()
    except KeyboardInterrupt:
        print("stopped", flush=True)
    results["left_out"] = [f"{part}: {case}" for part, case in waiting]
    if waiting:
        print(f"there was no time for {'; '.join(results['left_out'])}", flush=True)
    keep()
    return results


def _kept_rows(results: Results, options: argparse.Namespace) -> list[Row]:
    """With `--keep`, the rows that `options.out` has."""
    if not (options.keep and options.out and options.out.exists()):
        return []
    others = json.loads(options.out.read_text())
    return rows_of(others, results, f"--keep: rows of {options.out}")


def _versions() -> dict[str, str]:
    """Of the libraries that are here."""
    found = {}
    for module, title in MODULES.items():
        with suppress(Exception):  # why it is missing is told elsewhere
            found[title] = str(getattr(importlib.import_module(module), "__version__", "unknown"))
    return found


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = dict.fromkeys(name for part in PARTS.values() for name in part.peers)
    groups, some_peers = some_of(GROUPS), some_of(names)
    parser.add_argument("--parts", type=groups, default=tuple(GROUPS), help=",".join(GROUPS))
    parser.add_argument("--only", type=words, default=(), help="cases that have one of these words")
    parser.add_argument("--peers", type=some_peers, default=(), help=f"beside {ALWAYS}")
    parser.add_argument("--quick", action="store_true", help="one case of each, with pauses alone")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no case begins after these")
    Rest.add_options(parser, SECONDS)
    parser.set_defaults(rounds=ROUNDS)
    parser.add_argument("--out", type=Path, help=f"for results; if all are asked for {RESULTS}")
    parser.add_argument("--keep", action="store_true", help="rows of --out that are not made anew")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="put together")
    options = parser.parse_args()
    if options.report:
        results = put_together(options.report)
        write(results, options.out or RESULTS)
        print(*lines_of_the_rest(results), sep="\n")
        return
    if options.quick:
        options.rounds = 0
    require_gpu("benchmarks.training")
    torch.manual_seed(0)
    started = time.perf_counter()
    asked = options.parts, options.only, options.peers, options.quick, Rest.of(options)
    is_all = asked == (tuple(GROUPS), (), (), False, Rest(ROUNDS, SECONDS))
    if is_all and not options.out:
        options.out = RESULTS
    handler = signal.signal(signal.SIGTERM, _stop)
    try:
        results = run(options, started + 60 * options.minutes)
    finally:
        signal.signal(signal.SIGTERM, handler)
    asked_for = {(part, str(case)) for part, case in cases_of(options)}
    num_cases = len(asked_for | {(row["part"], row["case"]) for row in results["rows"]})
    lines = lines_of_the_rest(results)
    finish(results, num_cases, lines, options.out, RESULTS, is_all=is_all, started=started)


if __name__ == "__main__":
    main()
