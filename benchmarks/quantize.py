"""Quantization on a Hopper GPU, beside a copy: `python -m benchmarks.quantize`.

BF16 becomes E4M3; device time counts, with L2 flushed before every call. GB/s are of all bytes that
must move (elements read, codes and scales written), and their share is of what a plain copy moves.
`--sweep` times every way to cut the 1x128 kernel, to choose `quantize_launch.cut_1x128` by.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.circumstances import circumstances, require_gpu
from benchmarks.timing import copy_gbps, device_us, device_us_many, host_us
from moefp8.quant import quantize
from moefp8.quant.quantize_launch import Cut

K = 7168
ROWS = 1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384
WEIGHTS = (4096, K), (24576, K), (K, 16384), (32, 4096, K)
CUTS = [
    Cut(rows, lanes, threads)
    for rows, lanes in ((1, 16), (1, 8), (2, 16), (2, 8), (4, 16), (4, 8), (8, 16))
    for threads in (32, 64, 128, 256)
]
RESULTS = Path(__file__).parent / "results" / "quantize.json"
GOAL_BYTES, GOAL_SHARE = 64e6, 0.85  # share of a copy's speed, for inputs of that size and above

Row = dict[str, Any]
OPS: dict[str, Callable[[torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]] = {
    "1x128": quantize.quantize_1x128,
    "128x128": quantize.quantize_128x128,
}


class Case(NamedTuple):
    block: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.block:>7}  {' x '.join(map(str, self.shape)):>16}"


CASES = [Case("1x128", (m, K)) for m in ROWS] + [Case("128x128", shape) for shape in WEIGHTS]


def random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure(case: Case, copy: float) -> Row:
    x = random(case.shape)
    call = partial(OPS[case.block], x, False)
    us, moved = device_us(call), num_bytes(x, *call())
    gbps = moved / us / 1e3
    return {
        "block": case.block,
        "shape": list(case.shape),
        "input_bytes": num_bytes(x),
        "us": round(us, 3),
        "gbps": round(gbps, 1),
        "share_of_copy": round(gbps / copy, 4),
        "host_us": round(host_us(call), 2),
    }


def lines_of_goals(rows: list[Row]) -> Iterator[str]:
    for block in OPS:
        large = [r for r in rows if r["block"] == block and r["input_bytes"] >= GOAL_BYTES]
        if large:
            worst = min(large, key=lambda row: row["share_of_copy"])
            share = worst["share_of_copy"]
            yield (
                f"{block}, inputs of {GOAL_BYTES / 1e6:.0f} MB and up: at least {share:.1%} of the "
                f"copy bandwidth, at {worst['shape']}  goal {GOAL_SHARE:.0%}: "
                + ("met" if share >= GOAL_SHARE else "MISSED")
            )


def sweep() -> None:
    for m in ROWS:
        x = random((m, K))
        calls = {
            str(cut): partial(quantize.launch_quantize_1x128, x, False, cut=cut) for cut in CUTS
        }
        calls["chosen"] = partial(quantize.launch_quantize_1x128, x, False)
        times = device_us_many(calls)
        chosen = times.pop("chosen")
        best = ", ".join(
            f"{us:.2f} {cut}" for us, cut in sorted((t, c) for c, t in times.items())[:5]
        )
        print(f"{m:>6} rows, us: chosen {chosen:.2f}; {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time every cut of the 1x128 kernel")
    parser.add_argument("--out", type=Path, default=RESULTS, help="for the results, in JSON")
    options = parser.parse_args()
    require_gpu("benchmarks.quantize")
    torch.manual_seed(0)
    if options.sweep:
        sweep()
        return
    copy = copy_gbps()
    print(f"copies on this GPU: {copy:.0f} GB/s, read and written")
    rows = []
    for case in CASES:
        row = measure(case, copy)
        rows.append(row)
        print(
            f"{case}  {row['us']:9.2f} us  {row['gbps']:6.0f} GB/s  {row['share_of_copy']:6.1%} of "
            f"a copy  host {row['host_us']:5.1f} us",
            flush=True,
        )
    print(*lines_of_goals(rows), sep="\n")
    results = {**circumstances(), "copy_gbps": round(copy, 1), "rows": rows}
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
