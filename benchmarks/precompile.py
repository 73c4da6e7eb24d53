"""How long `moefp8.precompile` takes from an empty cache: `python -m benchmarks.precompile`.

No GPU takes part. It compiles for DeepSeek-V3: the feed-forward alone (router, routed and shared
experts), and with the linears of attention.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from benchmarks.circumstances import circumstances
from moefp8 import FP8Linear, MoE
from moefp8.precompile import layers as ahead

MAX_TOKENS = (512, 4096, 16384)
ATTENTION = ((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384))  # N x K


def layers() -> dict[str, nn.Module]:
    router = {"scoring": "sigmoid", "num_groups": 8, "topk_groups": 4, "correction_bias": True}
    with torch.device("meta"):
        moe = MoE(7168, 2048, 256, 8, shared_intermediate_size=2048, **router)
        attention = nn.ModuleList(FP8Linear(k, n, bias=False) for n, k in ATTENTION)
    return {"MoE": moe, "attention and MoE": nn.ModuleList([attention, moe])}


def measure(name: str, model: nn.Module, max_tokens: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOEFP8_CACHE_DIR"] = folder
        done = ahead.precompile(model, max_tokens)
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    print(f"{name}, {max_tokens} tokens: {done.num_kernels} kernels, {done.seconds:.1f} s")
    row = {"layer": name, "max_tokens": max_tokens, "kernels": done.num_kernels}
    return row | {"seconds": round(done.seconds, 2), "bytes": num_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--one", nargs=2, metavar=("LAYER", "TOKENS"), help="used by itself")
    options = parser.parse_args()
    if options.one:
        name, tokens = options.one
        print(json.dumps(measure(name, layers()[name], int(tokens))))
        return
    rows = [_in_a_process(name, max_tokens) for name in layers() for max_tokens in MAX_TOKENS]
    if options.json:
        options.json.write_text(json.dumps({**circumstances(), "rows": rows}, indent=1) + "\n")


def _in_a_process(name: str, max_tokens: int) -> dict[str, object]:
    """Measure in a process of its own, since a process keeps what it has compiled in memory."""
    command = [sys.executable, "-m", "benchmarks.precompile", "--one", name, str(max_tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    told, row = done.stdout.splitlines()
    print(told, flush=True)
    found: dict[str, object] = json.loads(row)
    return found


if __name__ == "__main__":
    main()
