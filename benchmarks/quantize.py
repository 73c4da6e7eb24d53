"""Quantization on a Hopper GPU, beside a copy: `python -m benchmarks.quantize`.

BF16 becomes E4M3; device time counts, with L2 flushed before every call. GB/s are of all bytes that
must move (elements read, codes and scales written), and their share is of what a plain copy moves.
Column codes (128x1, and both ways of one read; then the same with scales of 128x128) are of tokens
of experts in random shares; a copy of as many bytes takes turns with them. `--blocks 128x1 both`
times these alone, and writes results only where `--out` says. `--sweep` times every way to cut the
1x128 kernel, to choose `quant.quantize.cut_1x128` by.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.circumstances import circumstances, require_gpu
from benchmarks.timing import copy_gbps, device_us, device_us_many, host_us
from moefp8.kernels.common.blocks import BLOCK, MIN_AMAX, ceil_div, num_blocks, round_up
from moefp8.quant import quantize
from moefp8.quant.columns import quantize_1x128_and_128x1, quantize_128x1
from moefp8.quant.quantize import QuantizeCut

K = 7168
ROWS = 1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384
WEIGHTS = (4096, K), (24576, K), (K, 16384), (32, 4096, K)
COLUMNS, BOTH = "128x1", "both"
COLUMNS_OF_BLOCKS, BOTH_OF_BLOCKS = "columns-128x128", "both-128x128"
OF_COLUMNS = COLUMNS, BOTH, COLUMNS_OF_BLOCKS, BOTH_OF_BLOCKS
# Rows, features, experts: DeepSeek-V3's and Qwen3-30B's layers, hidden and intermediate.
OF_EXPERTS = (
    (4096, K, 1), (32768, K, 32), (32768, 2048, 32), (32768, K, 256), (65536, 2048, 128),
    (65536, 768, 128), (131072, 2048, 128),
)  # fmt: skip
CUTS = [
    QuantizeCut(rows, lanes, threads)
    for rows, lanes in ((1, 16), (1, 8), (2, 16), (2, 8), (4, 16), (4, 8), (8, 16))
    for threads in (32, 64, 128, 256)
]
RESULTS = Path(__file__).parent / "results" / "quantize.json"
# Shares of a copy's speed, for inputs of that size and above.
GOAL_BYTES, GOAL_SHARE, GOAL_SHARE_OF_COLUMNS = 64e6, 0.85, 0.80

Row = dict[str, Any]
OPS: dict[str, Callable[[torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]] = {
    "1x128": quantize.quantize_1x128,
    "128x128": quantize.quantize_128x128,
}


class Case(NamedTuple):
    block: str
    shape: tuple[int, ...]
    num_experts: int = 0  # of column codes

    def __str__(self) -> str:
        experts = f" in {self.num_experts}" if self.num_experts else ""
        return f"{self.block:>15}  {' x '.join(map(str, self.shape)) + experts:>20}"


CASES = [Case("1x128", (m, K)) for m in ROWS] + [Case("128x128", shape) for shape in WEIGHTS]
CASES += [Case(block, (m, k), e) for block in OF_COLUMNS for m, k, e in OF_EXPERTS]


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


def measure_columns(case: Case) -> Row:
    (num_rows, k), num_experts = case.shape, case.num_experts
    x = random(case.shape)
    edges = torch.randint(num_rows + 1, (num_experts - 1,)).sort().values.tolist()
    offsets = [0, *edges, num_rows]
    counts = [end - begin for begin, end in pairwise(offsets)]
    on_device = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    blocks = case.block in (COLUMNS_OF_BLOCKS, BOTH_OF_BLOCKS)
    num_scales = num_blocks(k) if blocks else k
    moved = num_bytes(x) + sum(
        round_up(n, 32) * k + 4 * ceil_div(n, BLOCK) * num_scales for n in counts
    )
    call = partial(quantize_128x1, x, on_device, None, False, MIN_AMAX, blocks)
    if case.block in (BOTH, BOTH_OF_BLOCKS):
        call = partial(quantize_1x128_and_128x1, x, on_device, False, MIN_AMAX, blocks)
        moved += num_rows * (k + 4 * num_blocks(k))
    source = torch.ones(moved // 2, dtype=torch.uint8, device="cuda")
    times = device_us_many({"ours": call, "copy": source.clone})
    us = times["ours"]
    return {
        "block": case.block,
        "shape": list(case.shape),
        "num_experts": num_experts,
        "input_bytes": num_bytes(x),
        "us": round(us, 3),
        "gbps": round(moved / us / 1e3, 1),
        "share_of_copy": round(times["copy"] / us, 4),
        "host_us": round(host_us(call), 2),
    }


def lines_of_goals(rows: list[Row]) -> Iterator[str]:
    goals = dict.fromkeys(OPS, GOAL_SHARE) | dict.fromkeys(OF_COLUMNS, GOAL_SHARE_OF_COLUMNS)
    for block, goal in goals.items():
        large = [r for r in rows if r["block"] == block and r["input_bytes"] >= GOAL_BYTES]
        if large:
            worst = min(large, key=lambda row: row["share_of_copy"])
            share = worst["share_of_copy"]
            yield (
                f"{block}, inputs of {GOAL_BYTES / 1e6:.0f} MB and up: at least {share:.1%} of the "
                f"copy bandwidth, at {worst['shape']}  goal {goal:.0%}: "
                + ("met" if share >= goal else "MISSED")
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
    parser.add_argument("--blocks", nargs="+", choices=(*OPS, *OF_COLUMNS), help="only these")
    parser.add_argument("--out", type=Path, help="for the results, in JSON")
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
        if options.blocks and case.block not in options.blocks:
            continue
        row = measure_columns(case) if case.num_experts else measure(case, copy)
        rows.append(row)
        print(
            f"{case}  {row['us']:9.2f} us  {row['gbps']:6.0f} GB/s  {row['share_of_copy']:6.1%} of "
            f"a copy  host {row['host_us']:5.1f} us",
            flush=True,
        )
    print(*lines_of_goals(rows), sep="\n")
    results = {**circumstances(), "copy_gbps": round(copy, 1), "rows": rows}
    out = options.out or (None if options.blocks else RESULTS)
    if out:
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
