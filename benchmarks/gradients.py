"""Gradients through FP8 weights on one Hopper GPU: `python -m benchmarks.gradients`.

Forward and backward of frozen linears and experts, and of experts with adapters, beside their
peers, the GEMMs of dX beside those of the forward, and the transposition of weights and the
gradient of SwiGLU for trained experts beside copies: see `benchmarks.gradient_cases` and
`benchmarks.gradient_peers`. All of a case take turns in one
process, with pauses and without rest as in `benchmarks.gemm`. Whose results are wrong is not timed.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import gradient_peers as peers
from benchmarks.circumstances import require_gpu
from benchmarks.figures import WITHOUT_REST, Row, geomean, of_peer, told_mode, told_ratio, verdict
from benchmarks.gradient_cases import MODELS, TOKENS, ExpertsStep
from benchmarks.gradient_parts import (
    OF_EXPERTS,
    PARTS,
    UNITS,
    Part,
    cases_of,
    comparisons,
    gib_of,
    speed,
)
from benchmarks.memory import peak_bytes
from benchmarks.options import numbers, some_of
from benchmarks.peers import OURS, Call, first_line
from benchmarks.session import (
    Rest,
    about_this_run,
    finish,
    first_calls,
    leave_out_wrong,
    measured,
    write,
)
from benchmarks.timing import device_us_many, eager_us_many, layer_us_many
from benchmarks.without_rest import num_copies

RESULTS = Path(__file__).parent / "results" / "gradients.json"
SECONDS = 0.2  # of a turn without rest: there are many
QUICK_TOKENS = (4096,)
MOST_ERROR = 0.1
# Such calls need no CUDA graph, in which each would keep memory of its own, unless the host is what
# they wait for.
LONG_US, MOST_OF_HOST = 2000.0, 1.2


# ---- Measuring ----


def measure(name_of_part: str, case: Any, rest: Rest) -> Row:
    torch.cuda.empty_cache()
    part = PARTS[name_of_part]
    operands = part.operands(case)
    calls, first, found = first_calls(part.peers, part.peers, case, operands)
    for name, errors in operands.errors(first).items():
        found[name] |= errors
    first = {OURS: first[OURS]}  # others would take memory
    leave_out_wrong(calls, found, MOST_ERROR)
    repeats = 5 if operands.work.get("tflops", 0) > 1000 * LONG_US else 15
    if part.is_step:
        _add_memory(name_of_part, operands, calls, found)
        for name, us in eager_us_many(calls, repeats).items():
            found[name]["eager_us"] = round(us, 3)
    timer = layer_us_many if part.is_step else device_us_many
    for name, us in timer(calls, repeats).items():
        found[name]["us"] = round(us, 3)
        found[name] |= {unit: round(work / us, 1) for unit, work in operands.work.items()}
    found[OURS]["repeatable"] = calls[OURS]().equals(first[OURS])
    if rest.wants(found):
        _add_times_without_rest(part, case, operands, calls, found, rest)
    about = {"part": name_of_part, "case": str(case)}
    if name_of_part in OF_EXPERTS:
        about |= {"model": case.model.title, "tokens": case.num_tokens}
    return {**about, "peers": found}


def _add_memory(part: str, operands: Any, calls: dict[str, Call], found: dict[str, Row]) -> None:
    for name, call in calls.items():
        found[name]["step_bytes"] = peak_bytes(call)
        if part in OF_EXPERTS:
            num_weights = operands.case.model.num_experts * operands.case.model.weights_of_expert
            found[name]["weights_bytes"] = peers.WEIGHT_BYTES[name] * num_weights


def _is_long(found: Row) -> bool:
    return bool(found["us"] >= LONG_US and found["eager_us"] < MOST_OF_HOST * found["us"])


def _add_times_without_rest(
    part: Part, case: Any, operands: Any, calls: dict[str, Call], found: dict[str, Row], rest: Rest
) -> None:
    captures = None
    if part.is_step and all(map(_is_long, (found[name] for name in calls))):
        captures = []
    elif isinstance(operands, ExpertsStep):
        captures = [name for name in calls if not peers.makes_host_wait(name, operands)]
    try:
        copies = [part.operands(case) for _ in range(num_copies(operands.num_bytes) - 1)]
        rest.add_times(found, part.peers, calls, copies, captures)
    except torch.OutOfMemoryError as error:
        print(f"{case} is not timed without rest: {first_line(error)}")


# ---- Printing ----


def lines_of_row(row: Row) -> Iterator[str]:
    part = PARTS[row["part"]]
    yield f"{part.title}: {row['case']}"
    for name, found in row["peers"].items():
        title = part.peers[name].title
        if "refused" in found:
            yield f"  {title} is left out: {found['refused']}"
            continue
        told = [f"{speed(row, name):.1f}"]
        told += [f"{x:.1f} without rest" for x in [speed(row, name, WITHOUT_REST)] if x]
        told += [f"{found['eager_us']:.1f} eager"] if "eager_us" in found else []
        line = f"  {title:28} {UNITS[part.unit]}: {', '.join(told)}"
        line += "".join(f"  {key} {found[key]:.2g}" for key in found if key.startswith("error"))
        if "step_bytes" in found:
            line += f"  GiB {gib_of(found)}"
        yield line + _compared(row, name)


def _compared(row: Row, name: str) -> str:
    times = told_ratio(row, (name,))
    if name == OURS or times is None:
        return ""
    line = f"  x{times:.3f} {told_mode(row)}"
    spread = of_peer(row, name, WITHOUT_REST)
    if told_mode(row) == WITHOUT_REST and "least" in spread:
        line += f" ({spread['least']:.3f} to {spread['most']:.3f})"
    goal = PARTS[row["part"]].goals.get(name)
    return line + (f"  goal {goal:.2f}: {verdict(times >= goal)}" if goal else "")


def lines_of_the_rest(results: dict[str, Any]) -> Iterator[str]:
    """How each goal fares over all cases of its part; repeatability."""
    rows = results["rows"]
    for each in comparisons(rows):
        line = f"{each.part.title}, times as fast as {each.title}: geomean "
        line += f"{geomean(each.ratios.values()):.3f}  worst {min(each.ratios.values()):.3f} at "
        line += f"{each.worst_case}  goal {each.goal:.2f}: "
        line += verdict(each.num_met == len(each.ratios))
        yield f"{line} ({each.num_met} of {len(each.ratios)})"
    moved = [row["case"] for row in rows if not row["peers"][OURS]["repeatable"]]
    yield "the same bits before and after timing: " + (
        f"NOT at {'; '.join(moved)}" if moved else "yes"
    )
    yield f"copies on this GPU: {results['copy_gbps']:.0f} GB/s, read and written"


# ---- Running ----


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print each row when it is done, and write it to `options.out` if that is given."""
    rest = Rest.of(options)
    results: dict[str, Any] = {**about_this_run([], rest), "rows": []}
    for part in options.parts:

        def measure_at(case: Any, part: str = part) -> Row:
            return measure(part, case, rest)

        for row in measured(cases_of(part, options.models, options.tokens), measure_at):
            print(*lines_of_row(row), sep="\n", flush=True)
            results["rows"].append(row)
            if options.out:
                write(results, options.out)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    some_parts, some_models = some_of(PARTS), some_of(MODELS)
    parser.add_argument("--parts", type=some_parts, default=tuple(PARTS), metavar="P,...")
    parser.add_argument("--models", type=some_models, default=tuple(MODELS), metavar="M,...")
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="such as 16,4096")
    parser.add_argument("--quick", action="store_true", help="4096 tokens, with pauses alone")
    Rest.add_options(parser, SECONDS)
    parser.add_argument("--out", "--json", type=Path, help=f"for the results; if all: {RESULTS}")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = QUICK_TOKENS, 0
    require_gpu("benchmarks.gradients")
    torch.manual_seed(0)
    started = time.perf_counter()
    num_cases = sum(len(cases_of(part, options.models, options.tokens)) for part in options.parts)
    results = run(options)
    chosen = options.parts, options.models, options.tokens, Rest.of(options)
    is_all = chosen == (tuple(PARTS), tuple(MODELS), TOKENS, Rest(seconds=SECONDS))
    lines = lines_of_the_rest(results)
    finish(results, num_cases, lines, options.out, RESULTS, is_all=is_all, started=started)


if __name__ == "__main__":
    main()
