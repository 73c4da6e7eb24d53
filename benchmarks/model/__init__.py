"""Whole models of transformers on one GPU: `python -m benchmarks.model`.

    python -m benchmarks.model               # all: seven minutes on one GPU, 31 GB of disk
    python -m benchmarks.model --layers 2    # fewer layers of each model
    python -m benchmarks.model --tiny        # tiny models, also without a GPU; times mean nothing

Reading order: `checkpoint` (what is written), `providers` (who loads it), `phases` (what is timed
of it), `timeline` (where the time goes), `worker` (a process for each provider), `table`, `plot`.
"""

from pathlib import Path

from benchmarks.peers import OURS

RESULTS = Path(__file__).parents[1] / "results" / "model.json"
HF_FP8, HF_HUB, HF_BF16 = "hf_deepgemm", "hf_hub", "hf_bf16"
TITLES = {
    OURS: "moefp8",
    HF_FP8: "transformers FP8, DeepGEMM",
    HF_HUB: "transformers FP8, hub kernels",
    HF_BF16: "transformers BF16",
}
# The ways in which a phase runs.
MODES = {
    "eager": "as it is called",
    "graph": "in CUDA graphs",
    "compiled": "compiled, in CUDA graphs",
}
# How many times as fast as transformers' FP8 path ours is to be, as it is called and in graphs.
GOALS = {"eager": 2.0, "graph": 1.3}
# Decoding of the first model in its fastest mode: beside BF16 in its fastest, and, for a batch of
# 1, beside BF16 as it is called.
DECODE_GOAL, AS_CALLED_GOAL = 1.7, 8.0
MOE_GOAL = 1.05  # a model's MoE layers take at most so many times as long as alone
PREFILL = "prefill"


def decode_name(batch: int) -> str:
    """The name of the phase in which one token of each of `batch` sequences is decoded."""
    return f"decode {batch}"
