"""vLLM and SGLang with and without moefp8 on one GPU: `python -m benchmarks.serving`.

    python -m benchmarks.serving                         # vLLM: an hour on one GPU, 31 GB of disk
    python -m benchmarks.serving --runs 1 --engines moefp8,default
    python -m benchmarks.serving --engines sglang,sglang_moefp8 --out FILE
    python -m benchmarks.serving --tiny                  # tiny models, also without a GPU

It needs the packages of the engines that it runs (pip install vllm, pip install sglang). A
checkpoint of random weights is written for each model, and each engine serves it in a process of
its own, in turns: each round has new prompts, and no prefix is cached. Reading order:
`models`, `engine` (a process), `vllm` and `sglang` (what it calls), `shares` (where a step goes),
`table`.
"""

from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[1] / "results" / "serving.json"
VLLM, SGLANG = "vllm", "sglang"
PACKAGES = {VLLM: "vLLM", SGLANG: "SGLang"}  # and what they are called


class Engine(NamedTuple):
    """package: whose engine it is. environment: of its process. arguments: more ones for it."""

    title: str
    package: str
    environment: dict[str, str]
    arguments: dict[str, Any]


DEFAULT = "default"
OURS = {VLLM: "moefp8", SGLANG: "sglang_moefp8"}
ENGINES = {
    OURS[VLLM]: Engine("moefp8", VLLM, {"MOEFP8_VLLM": "1"}, {}),
    DEFAULT: Engine("vLLM's default", VLLM, {}, {}),
    "triton": Engine("without DeepGEMM", VLLM, {"VLLM_USE_DEEP_GEMM": "0"}, {}),
    # Its warm-up compiles 1,503 kernels at two a second; here its first rounds compile theirs.
    "deep_gemm": Engine(
        "experts of DeepGEMM",
        VLLM,
        {"VLLM_DEEP_GEMM_WARMUP": "skip"},
        {"moe_backend": "deep_gemm"},
    ),
    OURS[SGLANG]: Engine("SGLang with moefp8", SGLANG, {"MOEFP8_SGLANG": "1"}, {}),
    "sglang": Engine("SGLang's default", SGLANG, {"MOEFP8_SGLANG": "0"}, {}),
}
USUAL = tuple(name for name, engine in ENGINES.items() if engine.package == VLLM)
PREFILLS = ((16, 1000), (4, 8000))  # (prompts, tokens of each)
BATCHES = (1, 16, 128)


def prefill_name(prompts: int, tokens: int) -> str:
    return f"prefill {prompts} x {tokens}"


def decode_name(batch: int) -> str:
    return f"decode {batch}"
