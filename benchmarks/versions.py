"""Two checkouts of this project in turns on one GPU: `python -m benchmarks.versions OTHER`.

OTHER is the folder of another checkout. Each runs in a process of its own, with its own kernels;
one works while the other waits. Each call is timed back to back, without rest: as a replay of a
CUDA graph, and eagerly, where the host may be what takes long. A ratio above 1 says that this
checkout is faster than the other. `--json` stores the result.

The host is slow for seconds at a time, which hits one of the two: of eager calls the fastest round
counts, of replays the median.

Only names that every version has are used: `FP8Linear`, `GroupedExperts`, `kernels.fp8_gemm_nt`.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "versions.json"
SECONDS = 0.15  # each measurement lasts so long, without rest
ROUNDS = 5
LINEARS = ((7168, 2048), (2048, 7168), (4096, 4096))  # (K, N)
EXPERTS = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "DeepSeek-V3": (256, 8, 7168, 2048)}
TOKENS = (1, 16, 128, 1024, 4096)
CASES = [
    *(f"FP8Linear {k} -> {n}, {m} tokens" for k, n in LINEARS for m in TOKENS),
    *(f"fp8_gemm_nt {m} x {n} x {k}" for k, n in LINEARS for m in TOKENS),
    *(f"experts of {name}, {m} tokens" for name in EXPERTS for m in TOKENS),
]
MODES = ("graph", "eager")


# ---- In a process of each checkout ----


def work() -> None:
    """Answer each line `case<TAB>mode` of stdin by the microseconds of a call."""
    import torch

    calls: dict[tuple[str, str], Callable[[], object]] = {}
    with torch.no_grad():
        for line in sys.stdin:
            case, mode = line.rstrip("\n").split("\t")
            if (case, mode) not in calls:
                calls[case, mode] = _captured(_call_of(case)) if mode == "graph" else _call_of(case)
            print(_us_without_rest(calls[case, mode]), flush=True)


def _call_of(case: str) -> Callable[[], object]:
    import torch

    from moefp8 import FP8Linear, GroupedExperts, kernels, quant

    torch.manual_seed(0)
    kind, *rest = case.split(" ")
    if kind == "FP8Linear":
        k, _, n, tokens, _ = rest
        layer = FP8Linear(int(k), int(n.rstrip(",")), bias=False, device="cuda")
        x = torch.randn(int(tokens), int(k), device="cuda").bfloat16()
        return lambda: layer(x)
    if kind == "fp8_gemm_nt":
        m, n, k = map(int, rest[::2])
        a = quant.quantize_1x128(torch.randn(m, k, device="cuda").bfloat16())
        b = quant.quantize_128x128(torch.randn(n, k, device="cuda").bfloat16())
        d = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        return lambda: kernels.fp8_gemm_nt(a, b, d)
    e, top_k, h, i = EXPERTS[rest[1].rstrip(",")]
    m = int(rest[2])
    experts = _experts(e, h, i, GroupedExperts)
    x = torch.randn(m, h, device="cuda").bfloat16()
    scores, index = torch.rand(m, e, device="cuda").topk(top_k)
    return lambda: experts(x, index, scores)


_made: dict[tuple[int, int, int], Any] = {}


def _experts(e: int, h: int, i: int, layer: Any) -> Any:
    if (e, h, i) not in _made:
        _made[e, h, i] = layer(e, h, i, device="cuda")
    return _made[e, h, i]


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _us_without_rest(call: Callable[[], object]) -> float:
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start, num_calls = time.perf_counter(), 0
    begin.record()
    while time.perf_counter() - start < SECONDS:
        for _ in range(10):
            call()
        num_calls += 10
        if num_calls % 200 == 0:  # so that no more is queued than time is left for
            torch.cuda.synchronize()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / num_calls * 1e3


# ---- In turns ----


class Worker:
    """This file in a process of its own, with the moefp8 of a checkout."""

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout
        paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def us(self, case: str, mode: str) -> float:
        print(case, mode, sep="\t", file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline() if self._process.stdout else ""
        if not answer:
            sys.exit(f"benchmarks.versions: {self._checkout} cannot run {case}, {mode}")
        return float(answer)


def measure(this: Worker, other: Worker) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        for mode in MODES:
            pairs = []
            for turn in range(ROUNDS):
                in_order = (this, other) if turn % 2 else (other, this)
                us = {worker: worker.us(case, mode) for worker in in_order}
                pairs.append((us[this], us[other]))
            ratios = sorted(y / x for x, y in pairs)
            figure = min if mode == "eager" else statistics.median
            this_us, other_us = (figure(some) for some in zip(*pairs, strict=True))
            row = {
                "case": case,
                "mode": mode,
                "us": this_us,
                "other_us": other_us,
                "ratio": other_us / this_us if mode == "eager" else statistics.median(ratios),
                "ratio_spread": [ratios[1], ratios[-2]],
            }
            print("{case}, {mode}: {us:.1f} us, {other_us:.1f} us, {ratio:.3f}".format(**row))
            rows.append(row)
    return rows


def main() -> None:
    if sys.argv[1:] == ["--work"]:
        work()
        return
    from benchmarks.circumstances import circumstances, require_gpu

    require_gpu("benchmarks.versions")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--json", action="store_true", help=f"store it in {RESULTS.name}")
    options = parser.parse_args()
    rows = measure(Worker(ROOT), Worker(options.other.resolve()))
    for mode in MODES:
        ratios = [row["ratio"] for row in rows if row["mode"] == mode]
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        print(f"{mode}: {mean:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if options.json:
        other = os.environ.get("MOEFP8_OTHER_COMMIT") or options.other.name
        results = {**circumstances(), "other": other, "rows": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
