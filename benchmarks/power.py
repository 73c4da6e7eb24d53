"""How much of a GEMM's speed its power costs: `python -m benchmarks.power` on a Hopper GPU.

Our GEMM runs without rest on random normal numbers, on constants and on zeros. The work is the
same, but a multiplier whose operands stay as they were needs less power, so the clock need not
fall: how much faster that is says what a kernel can gain that needs less power itself.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.circumstances import circumstances, require_gpu
from benchmarks.peers import OURS, PEERS, Case, Operands
from benchmarks.session import Rest, write
from benchmarks.without_rest import Loop, num_copies, without_rest

RESULTS = Path(__file__).parent / "results" / "power.json"
CASES = Case(4096, 4096, 7168), Case(8192, 7168, 16384), Case(16384, 24576, 1536)
RANDOM, CONSTANT, ZERO = "random", "constant", "zero"
DATA = RANDOM, CONSTANT, ZERO


def operands_of(case: Case, data: str, device: str = "cuda") -> Operands:
    if data == RANDOM:
        return Operands.random(case, device)
    value = 1.0 if data == CONSTANT else 0.0
    shapes = (case.m, case.k), (case.n, case.k)
    return Operands.of(*(torch.full(x, value, device=device).bfloat16() for x in shapes))


def measure(case: Case, rest: Rest) -> dict[str, Any]:
    """The case, and of each kind of data what `without_rest` gives, and "tflops"."""
    copies, loops = range(num_copies(case.num_bytes("block_scaled"))), {}
    for data in DATA:
        calls = [PEERS[OURS].prepare(operands_of(case, data)) for _ in copies]
        loops[data] = Loop.over(calls, case.flops / 1e9)  # at 1000 TFLOP/s
    found = without_rest(loops, RANDOM, *rest)
    for figures in found.values():
        figures["tflops"] = round(case.flops / figures["us"] / 1e6, 1)
    return {**case._asdict(), "data": found}


def line_of(row: dict[str, Any]) -> str:
    cells = [
        f"{data} {found['us']:.1f} us, {found['tflops']:.0f} TFLOP/s, "
        f"{found.get('mhz', '-')} MHz, {found.get('watts', '-')} W"
        for data, found in row["data"].items()
    ]
    return f"{Case(row['m'], row['n'], row['k'])!s:>18}: {'; '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Rest.add_options(parser)
    parser.add_argument("--out", type=Path, default=RESULTS, help="for the results, in JSON")
    options = parser.parse_args()
    require_gpu("benchmarks.power")
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for case in CASES:
            rows.append(measure(case, Rest.of(options)))
            print(line_of(rows[-1]), flush=True)
    write({**circumstances(), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
