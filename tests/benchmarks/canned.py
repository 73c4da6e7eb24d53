"""Results as the benchmarks write them, made up, and what the tests of several benchmarks share."""

import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks import gemm, grouped_cases, grouped_peers, moe_peers, peers
from benchmarks.grouped_cases import SETTINGS, Setting
from benchmarks.peers import BF16, DEEP_GEMM, OURS
from moefp8 import deep_gemm

ABOUT = {
    "date": "2026-11-21T10:00:00+00:00",
    "commit": "abc1234",
    "torch": "2.11.0+cu130",
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "deep_gemm": "deep-gemm 1.0",
    "copy_gbps": 4300.0,
}
Found = dict[str, Any]


def found(known: Mapping[str, Any], case: Any, us: dict[str, float], **more: object) -> Found:
    """What each peer came to: moefp8 takes 10 us; the others what `us` says, or refuse."""
    result: Found = {name: {"refused": "it does"} for name in known}
    for name, taken in {OURS: 10.0, **us}.items():
        num_bytes = case.num_bytes(known[name].operands)
        result[name] = gemm.figures(taken, case.flops, num_bytes, 1.7e-3) | more
    result[OURS]["repeatable"] = True
    return result


def gemm_row(m: int, n: int, k: int, **us: float) -> Found:
    case = peers.Case(m, n, k)
    return {**case._asdict(), "peers": found(peers.PEERS, case, us)}


def grouped_row(setting: Setting, n: int, k: int, **us: float) -> Found:
    known = {name: grouped_peers.PEERS[name] for name in grouped_peers.FORMS[setting.form]}
    about = {"form": setting.form, "loads": setting.loads, "tokens": setting.num_tokens}
    case = grouped_cases.Case(setting, n, k)
    return {**about, "n": n, "k": k, "peers": found(known, case, us, untouched=True)}


def moe_row(model: str, tokens: int, **us: float) -> Found:
    case = SimpleNamespace(flops=10**9, num_bytes=lambda operands: 10**8)
    errors = {"error": 0.04, "worst_row": 0.06, "fp8_error": 0.002}
    of_peers = found(moe_peers.PEERS, case, us, **errors)
    for name in (OURS, *us):
        taken = of_peers[name]["us"]
        of_peers[name] |= {"eager_us": taken + 50, "graph_us": taken + 1}
    return {"model": model, "tokens": tokens, "active": 8, "floor_us": 5.0, "peers": of_peers}


def gemm_results() -> Found:
    slow = {"deep_gemm": 11.0, "torch_bf16": 20.0}
    rows = [
        gemm_row(1, 2112, 7168, deep_gemm=20.0, cublaslt_per_tensor=8.0, torch_bf16=30.0),
        gemm_row(16, 2112, 7168, deep_gemm=12, cublaslt_block_scaled=5, cublaslt_per_tensor=8),
        gemm_row(16, 4096, 7168, cublaslt_block_scaled=40.0),
        gemm_row(256, 4096, 7168, deep_gemm=9.0),
        gemm_row(4096, 2112, 7168, **slow),
        gemm_row(4096, 7168, 16384, **slow),
    ]
    return {**ABOUT, "host_us": {OURS: 12.0, DEEP_GEMM: 21.0, BF16: 15.7}, "rows": rows}


def grouped_results() -> Found:
    large, qwen, masked = SETTINGS[0], SETTINGS[4], SETTINGS[6]
    rows = [
        grouped_row(large, 4096, 7168, deep_gemm=12.0, moefp8_padded=11.0, torch_bf16=30.0),
        grouped_row(large, 7168, 2048, deep_gemm=10.0, moefp8_padded=11.0),
        grouped_row(qwen, 1536, 2048, moefp8_padded=12.0, deep_gemm=13.0),
        grouped_row(masked, 4096, 7168, deep_gemm=20.0),
        grouped_row(masked, 7168, 2048),
    ]
    return {**ABOUT, "rows": rows}


def moe_results() -> Found:
    rows = [
        moe_row("qwen3_30b_a3b", 1, sgl_megamoe=20.0, hf_deepgemm=40.0, hf_bf16=30.0),
        moe_row("qwen3_30b_a3b", 128, sgl_megamoe=12.0, hf_deepgemm=40.0),
        moe_row("qwen3_30b_a3b", 16384, sgl_megamoe=12.0, hf_deepgemm=40.0),
        moe_row("deepseek_v3", 1, sgl_megamoe=13.0),
        moe_row("mixtral_8x7b", 16, hf_deepgemm=15.0),
    ]
    return {**ABOUT, "rows": rows}


RESULTS = {"gemm": gemm_results, "grouped": grouped_results, "moe": moe_results}


def run_main(monkeypatch, benchmark: ModuleType, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, *arguments])
    benchmark.main()


def failing(error: Exception) -> Callable[..., None]:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    return fail


def fake_deep_gemm(monkeypatch, **names: object) -> SimpleNamespace:
    """What `import deep_gemm` gives: `names`, or our drop-in, which runs on the CPU."""
    ours = {name: getattr(deep_gemm, name) for name in deep_gemm.__all__}
    module = SimpleNamespace(**{**ours, "__version__": "1.0", **names})
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module
