"""What `python -m moefp8 bench --tune` gains on one Hopper GPU: `python -m benchmarks.tuning`.

Layers are tuned as the command does; then each choice and the default take turns once more, by the
same clock and by the device's, which leaves out what lies between kernels. Nothing is kept.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.circumstances import circumstances, require_gpu
from benchmarks.figures import geomean
from benchmarks.moe_cases import MODELS
from benchmarks.timing import FLUSH_BYTES, LONG_FLUSH_BYTES, device_us_many
from moefp8.kernels.gemm.sm90.expert_configs import experts_configs
from moefp8.kernels.gemm.sm90.tuned import Dense, Experts, Layer
from moefp8.tuning import tune as tuning
from moefp8.tuning.clock import us_in_turns

RESULTS = Path(__file__).parent / "results" / "tuning.json"
LINEARS = (4096, 7168), (7168, 2048)  # N x K
MAX_TOKENS = 4096


def layers() -> Iterator[Layer]:
    for n, k in LINEARS:
        yield Dense(n, k)
    for name in ("qwen3_30b_a3b", "deepseek_v3"):
        _, num_experts, top_k, h, i = MODELS[name]
        yield Experts(num_experts, top_k, h, i)


def measure(layer: Layer) -> list[dict[str, Any]]:
    base = tuning._heuristic()
    make, rows = tuning._maker(layer, base), []
    for found in tuning.tune_layer(layer, MAX_TOKENS):
        row = {"layer": str(layer), "tokens": found.tokens, "default_us": found.heuristic_us}
        row |= {"tuned_us": found.tuned_us, "config": repr(found.config)}
        if found.config is not None:
            row |= _again(make(found.tokens), layer, found, base)
        rows.append(row)
    ratios = [row["again"] for row in rows if "again" in row]
    told = f"{len(ratios)} of {len(rows)} sizes are tuned"
    if ratios:
        told += f": {geomean(ratios):.3f} times as fast, {min(ratios):.3f} to {max(ratios):.3f}"
    print(f"{layer}: {told}", flush=True)
    return rows


def _again(call_with: Any, layer: Layer, found: tuning.Measured, base: Any) -> dict[str, float]:
    is_dense = isinstance(layer, Dense)
    if is_dense:
        default = base.dense(found.tokens, *layer)
    else:
        default = experts_configs(base, tuning._sizes(layer, found.tokens))  # type: ignore[arg-type]
    calls = {"default_us": call_with(default), "tuned_us": call_with(found.config)}
    us = us_in_turns(calls, 25)
    flush_bytes = FLUSH_BYTES if is_dense else LONG_FLUSH_BYTES
    device_us = device_us_many(calls, 15, flush_bytes=flush_bytes)
    return {
        "again": us["default_us"] / us["tuned_us"],
        "again_by_device_clock": device_us["default_us"] / device_us["tuned_us"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    require_gpu("benchmarks.tuning")
    torch.manual_seed(0)
    rows = [row for layer in layers() for row in measure(layer)]
    out.write_text(json.dumps({**circumstances(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
