"""The FP8 GEMM as a lesson: compile, check and time each level of this folder.

python examples/hopper_gemm/run.py
python examples/hopper_gemm/run.py --m 512 --n 7168 --k 2048 --levels 4,5
python examples/hopper_gemm/run.py --try --json FILE

Read the levels in order, beside docs/hopper-fp8-gemm.md. On a Hopper GPU each is checked, then all
are timed in turns with `moefp8.kernels.fp8_gemm_nt`, cuBLASLt and, if it is installed, DeepGEMM.
Without such a GPU the levels are compiled for one, and what the compiler made of them is shown.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

# The folders of `benchmarks` and of `hopper_gemm`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hopper_gemm.levels import LEVELS, Level, check_shape

from benchmarks.circumstances import circumstances
from benchmarks.hopper_gemm import LEVEL, PEER, VARIANT, draw, timed
from benchmarks.peers import (
    BLOCK_SCALED,
    DEEP_GEMM,
    OURS,
    PEERS,
    PER_TENSOR,
    Case,
    Operands,
    Peer,
    available,
    deep_gemm_version,
)
from benchmarks.session import first_calls, write
from benchmarks.without_rest import ROUNDS, SECONDS, Loop, num_copies, without_rest
from moefp8.kernels import jit
from moefp8.kernels.targets import runs_kernels
from moefp8.quant import BlockScaled
from moefp8.testing import relative_error, row_errors

ARCH = "sm_90a"
MOST_ERROR = 4e-3  # of a row, by rounding to BF16: see `moefp8.testing.relative_error`
ODD_SHAPE = Case(392, 1352, 1152)  # tiles end beyond every edge
BESIDE = OURS, DEEP_GEMM, BLOCK_SCALED, PER_TENSOR

_FOUR, _FIVE = LEVELS[3:]
VARIANTS = (
    replace(_FOUR, title="4 without multicast", kernel_name="cluster<1>", cluster=1),
    replace(_FIVE, title="5 in bands of 1024 rows", band_rows=1024),
    replace(_FIVE, title="5 in bands of 4096 rows", band_rows=4096),
    replace(_FIVE, title="5 with FFMAs interleaved as in moefp8", interleaving="01111111"),
    replace(
        _FIVE, title="5 in tiles of 128 x 128", kernel_name="overlap<2, 1, 5>", tile=(128, 128)
    ),
    replace(
        _FIVE,
        title="5 in tiles of 192 x 128",
        kernel_name="overlap<3, 1, 4>",
        tile=(192, 128),
        threads=512,
    ),
)


# ---- What the compiler made ----


def nvdisasm() -> str | None:
    """Where NVIDIA's disassembler is, or None."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility as find
    except ImportError:  # there is none, or an older one
        find = shutil.which
    return shutil.which("nvdisasm") or find("nvdisasm")


def instructions(image: bytes) -> Counter[str] | None:
    """How often a cubin has each opcode; None without nvdisasm."""
    tool = nvdisasm()
    if tool is None:
        return None
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [tool, "--print-code", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    opcode = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(\w+)"
    return Counter(re.findall(opcode, text, re.MULTILINE))


def compiled(levels: Sequence[Level]) -> Iterable[dict[str, Any]]:
    """Of each level its lines, registers, spilled bytes, problems, and opcodes if these are known.

    Registers are those with which threads start; `take_registers` in the source says how many a
    math warpgroup has then.
    """
    kernels = [level.kernel for level in levels]
    for level, cubin in zip(levels, jit.compile_kernels(kernels, ARCH), strict=True):
        registers, spills = (
            int(re.findall(pattern, cubin.log)[-1])
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
        )
        yield {
            "title": level.title,
            "file": level.source,
            "lines": level.kernel.source.read_text().count("\n"),
            "registers": registers,
            "spills": spills,
            "problems": cubin.problems(),
            "instructions": instructions(cubin.image),
        }


def print_compiled(rows: Iterable[dict[str, Any]]) -> None:
    shown = "QGMMA", "FFMA", "UTMALDG", "UTMASTG", "LDG", "SYNCS", "BAR"
    print(f"{'':38}lines registers spilled  SASS" + "".join(f"{x:>8}" for x in shown))
    for row in rows:
        line = f"{row['title']:38}{row['lines']:5} {row['registers']:9} {row['spills']:7} "
        if row["instructions"] is None:
            line += "  to count them, pip install nvidia-cuda-nvdisasm"
        else:
            counts = Counter(row["instructions"])
            line += f"{counts.total():5}" + "".join(f"{counts[x]:8}" for x in shown)
        print(line, *row["problems"], sep="\n  ")


# ---- Whether it is right ----


def call_of(level: Level, operands: Operands) -> Callable[[], torch.Tensor]:
    """A call of a level; what it does not write stays NaN."""
    a, b = operands.a, operands.b
    d = operands.x.new_full((len(a.data), len(b.data)), torch.nan)
    write_d = level.prepare(a, b, d)

    def call() -> torch.Tensor:
        write_d()
        return d

    return call


def with_wrong_scale(x: BlockScaled) -> BlockScaled:
    """The same with one scale, drawn at random, that is 8 times too large."""
    row, k_block = (int(torch.randint(size, ())) for size in x.scale_inv.shape)
    scales = torch.empty_strided(x.scale_inv.shape, x.scale_inv.stride(), device=x.data.device)
    scales.copy_(x.scale_inv)
    scales[row, k_block] *= 8
    return x._replace(scale_inv=scales)


def check(level: Level, operands: Operands, exact: torch.Tensor) -> float:
    """The error of the worst row.

    exact: fp64 [M, N]. Raises RuntimeError if a row is wrong, or none is where a scale is.
    """
    d = call_of(level, operands)()
    errors = row_errors(d, exact)
    wrong_rows = (errors > MOST_ERROR).nonzero().flatten().tolist()
    if wrong_rows:
        raise RuntimeError(
            f"{len(wrong_rows)} of {len(d)} rows are wrong, the first is row {wrong_rows[0]}, the "
            f"worst is off by {float(errors.max()):.1e}; {int(d.isnan().sum())} numbers are NaN"
        )
    for name in ("a", "b"):
        wrong = replace(operands, **{name: with_wrong_scale(getattr(operands, name))})
        if relative_error(call_of(level, wrong)(), exact) <= MOST_ERROR:
            raise RuntimeError(f"a wrong scale of {name} changes no row")
    return float(errors.max())


def right_ones(levels: Iterable[Level], case: Case) -> list[Level]:
    """Those that compute the case right; what is wrong with the others is printed."""
    operands, right = Operands.random(case), []
    x, w = operands.exact("block_scaled")
    exact = x @ w.T
    print(f"\n{case}: worst row against FP64 sums, at most {MOST_ERROR:.0e}; wrong scales are seen")
    for level in levels:
        print(f"  {level.title:38}", end="", flush=True)
        try:
            print(f"{check(level, operands, exact):.1e}")
            right.append(level)
        except RuntimeError as error:
            print(f"WRONG: {error}")
    return right


# ---- How fast it is ----


def first_us(call: Callable[[], object]) -> float:
    """About how long a call takes, to know how many of them make a turn."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def measure(
    case: Case, levels: Iterable[Level], variants: Iterable[Level], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """A row of each that ran: "kind", "name", "title", "us", "tflops", "error" and sensors."""
    beside = {name: PEERS[name] for name in available({x: PEERS[x] for x in BESIDE})}
    kinds = dict.fromkeys(beside, PEER)
    peers = dict(beside)
    for kind, some in ((LEVEL, levels), (VARIANT, variants)):
        for level in some:
            peers[level.title] = Peer(level.title, "block_scaled", partial(call_of, level))
            kinds[level.title] = kind
    operands = Operands.random(case)
    needed = [name for name, kind in kinds.items() if kind != PEER or name == OURS]
    calls, first, refused = first_calls(peers, peers, case, operands, needed)
    errors = {}
    for kind in {peers[name].operands for name in calls}:
        x, w = operands.exact(kind)
        exact = x @ w.T
        names = [name for name in calls if peers[name].operands == kind]
        errors |= {name: relative_error(first.pop(name), exact) for name in names}
    for name in set(peers) - set(calls):
        print(f"{peers[name].title} is left out: {refused[name]['refused']}")
    copies = [Operands.random(case) for _ in range(num_copies(case.num_bytes("block_scaled")) - 1)]
    loops = {}
    for name, call in calls.items():
        others = [peers[name].prepare(each) for each in copies]
        loops[name] = Loop.over([call, *others], first_us(call))
    rows = []
    for name, figures in without_rest(loops, OURS, rounds, seconds).items():
        about = {"kind": kinds[name], "name": name, "title": peers[name].title}
        speed = {"tflops": round(case.flops / figures["us"] / 1e6, 1), "error": errors[name]}
        rows.append(about | figures | speed)
    return rows


def some_levels(text: str) -> list[Level]:
    numbers = {str(i + 1): level for i, level in enumerate(LEVELS)}
    for x in text.split(","):
        if x not in numbers:
            raise argparse.ArgumentTypeError(f"a level must be 1 to {len(LEVELS)}, got {x}")
    return [numbers[x] for x in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in (("m", 4096), ("n", 4096), ("k", 7168)):
        parser.add_argument(f"--{name}", type=int, default=size, help="(%(default)s)")
    parser.add_argument("--levels", type=some_levels, default=LEVELS, help="such as 4,5; all else")
    parser.add_argument("--try", dest="tries", action="store_true", help="variants of 4 and 5, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each (%(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a turn (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as PNG, PDF or SVG")
    options = parser.parse_args()
    try:
        check_shape(options.m, options.n, options.k)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    options = parse()
    levels, variants = options.levels, VARIANTS if options.tries else ()
    has_gpu = torch.cuda.is_available() and runs_kernels(torch.cuda.current_device())
    made = list(compiled([*levels, *variants]))
    print(f"compiled for {ARCH} by {jit.compiler_description()}")
    print_compiled(made)
    if not has_gpu:
        print("\nnothing ran: torch finds no Hopper GPU (H100, H200) here")
    about = circumstances() | {"compiler": jit.compiler_description().partition(",")[0]}
    results: dict[str, Any] = {**about, **Case(options.m, options.n, options.k)._asdict()}
    results |= {"kernels": made, "rows": []}
    if has_gpu:
        torch.manual_seed(0)
        case, right = Case(options.m, options.n, options.k), [*levels, *variants]
        for each in (ODD_SHAPE, case):
            right = right_ones(right, each)
        print(flush=True)
        levels, variants = ([x for x in some if x in right] for some in (levels, variants))
        results["turns"] = {"rounds": options.rounds, "seconds": options.seconds}
        results["rows"] = measure(case, levels, variants, options.rounds, options.seconds)
        peers = {row["name"] for row in results["rows"]}
        results["deep_gemm"] = deep_gemm_version() if DEEP_GEMM in peers else "without DeepGEMM"
        print(timed(results))
        if BLOCK_SCALED not in peers and PER_TENSOR in peers:
            print("cuBLASLt has no block scales here: per-tensor is a ceiling, and no substitute")
        plot = options.plot or (options.json and options.json.with_suffix(".png"))
        if plot:
            try:
                draw(results, plot)
            except ImportError as error:
                print(f"no plot ({error}): pip install matplotlib")
    if options.json:
        write(results, options.json)
    if len(levels) + len(variants) < len(made):
        sys.exit("some are wrong, and were not timed: see above")


if __name__ == "__main__":
    main()
