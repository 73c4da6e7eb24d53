"""Does training in FP8 converge as in BF16 does? `python -m benchmarks.convergence`.

    python -m benchmarks.convergence --run bf16:0,fp8:0 --out FILE     # two runs of one seed
    python -m benchmarks.convergence --report FILE FILE                # puts files together

It trains the model of `examples/train.py`. Reading order: `example` (what is trained), `runs` (one
run, in parts if need be), `probes` (gradients and underflow at the same weights), `figures` (what
curves say), `table`, `plot`.
"""

from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "convergence.json"
BF16, FP8 = "bf16", "fp8"
BF16_AGAIN, FP8_AGAIN = "bf16-again", "fp8-again"
# Options of `convert`, by variant; None: BF16. What is run again tells how far runs with the same
# weights drift apart as a GPU adds in another order.
VARIANTS: dict[str, dict[str, Any] | None] = {
    BF16: None,
    BF16_AGAIN: None,
    FP8: {},
    FP8_AGAIN: {},
    "fp8-128x128": {"wgrad": "128x128"},
    "fp8-bf16-wgrad": {"wgrad": "bf16"},
    "fp8-experts": {"overrides": {"*.attention.*": False}},  # linears of attention stay BF16
}
EVERY = 10  # steps of which the mean loss is kept
SMOOTH = 10  # so many of these means are averaged: 100 steps
GOAL_PERCENT = 0.25  # of the difference to BF16; DeepSeek-V3 (arXiv 2412.19437, section 3.3)
HELD_OUT_BATCHES = 32
