"""What FP8 costs on a CPU, beside BF16: `python -m benchmarks.cpu`.

`FP8Linear` against `nn.Linear` in BF16, 7168 -> 4096; best of several calls, in one process.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.circumstances import circumstances
from moefp8 import FP8Linear

IN_FEATURES, OUT_FEATURES = 7168, 4096
NUM_TOKENS = (1, 16, 128, 512)


def milliseconds(call: Callable[[], object], repeats: int = 9) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    torch.manual_seed(0)
    bf16 = nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False).bfloat16()
    layers, rows = {"fp8": FP8Linear.from_linear(bf16), "bf16": bf16}, []
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, IN_FEATURES).bfloat16()
        times = {name: milliseconds(partial(layer, x)) for name, layer in layers.items()}
        rows.append({"tokens": num_tokens, **times})
        print(f"{num_tokens:4} tokens   FP8 {times['fp8']:7.1f} ms   BF16 {times['bf16']:7.1f} ms")
    if options.json:
        options.json.write_text(json.dumps({**circumstances(), "ms": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
