"""vLLM with and without moefp8 on one GPU: `python -m benchmarks.serving`.

    python -m benchmarks.serving                         # all: an hour on one GPU, 31 GB of disk
    python -m benchmarks.serving --runs 1 --engines moefp8,default
    python -m benchmarks.serving --tiny                  # tiny models, also without a GPU

It needs vLLM (pip install vllm). A checkpoint of random weights is written for each model, and each
engine serves it in a process of its own, in turns: prompts are drawn anew for each round, and no
prefix is cached. Reading order: `models`, `engine` (a process), `shares` (where a step goes),
`table`.
"""

from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results" / "serving.json"
OURS, DEFAULT = "moefp8", "default"
# The environment of each engine, and what `LLM` is given.
ENGINES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    OURS: ({"MOEFP8_VLLM": "1"}, {}),
    DEFAULT: ({}, {}),
    "triton": ({"VLLM_USE_DEEP_GEMM": "0"}, {}),
    # Its warm-up compiles 1,503 kernels at two a second; here its first rounds compile theirs.
    "deep_gemm": ({"VLLM_DEEP_GEMM_WARMUP": "skip"}, {"moe_backend": "deep_gemm"}),
}
TITLES = {
    OURS: "moefp8",
    DEFAULT: "vLLM's default",
    "triton": "without DeepGEMM",
    "deep_gemm": "experts of DeepGEMM",
}
PREFILLS = ((16, 1000), (4, 8000))  # (prompts, tokens of each)
BATCHES = (1, 16, 128)


def prefill_name(prompts: int, tokens: int) -> str:
    return f"prefill {prompts} x {tokens}"


def decode_name(batch: int) -> str:
    return f"decode {batch}"
