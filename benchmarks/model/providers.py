"""Who loads a checkpoint and runs the model: moefp8, and transformers in FP8 and BF16.

Each runs in a process of its own, since some change what transformers does for all.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks import moe_peers
from benchmarks.model import HF_BF16, HF_FP8, HF_HUB
from benchmarks.model.checkpoint import on_meta, tensors_of
from benchmarks.moe_cases import Case as ExpertsCase
from benchmarks.moe_cases import Model as ExpertsModel
from benchmarks.peers import OURS, Case, compile_kernels, first_line
from moefp8 import GroupedExperts, dequantize
from moefp8.kernels import E4M3

_SPARE_BYTES = 10 << 30  # for caches and what lies between layers


@dataclass(frozen=True)
class Provider:
    """load: a checkpoint's model on a device. refuses: why it cannot be loaded there, or None."""

    load: Callable[[Path, torch.device], Any]
    refuses: Callable[[Path, torch.device], str | None] = lambda path, device: None


def _load_ours(path: Path, device: torch.device) -> Any:
    from moefp8.hf import FP8Config

    return _from_pretrained(path, device, quantization_config=FP8Config())


def _load_hf_fp8(path: Path, device: torch.device) -> Any:
    moe_peers.deep_gemm_of_transformers()
    return _from_pretrained(path, device, experts_implementation="deepgemm")


def _load_bf16(path: Path, device: torch.device) -> Any:
    """The FP8 weights dequantized, and transformers' own experts.

    transformers itself dequantizes no weight whose sizes 128 does not divide.
    """
    model = dequantize(_load_ours(path, device))
    plain = on_meta(model.config)
    for name, experts in plain.named_modules():
        if name.endswith(".experts"):
            dequantized = model.get_submodule(name)
            for leaf in ("gate_up_proj", "down_proj"):
                setattr(experts, leaf, getattr(dequantized, leaf))
            model.set_submodule(name, experts.eval())
    return model


def _from_pretrained(path: Path, device: torch.device, **options: Any) -> Any:
    place = {} if device.type == "cpu" else {"device_map": device.type}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **place, **options)


def _refuses_hf_fp8(path: Path, device: torch.device) -> str | None:
    return _needs_gpu(device) or moe_peers.PEERS[moe_peers.HF_FP8].why_missing()


def _refuses_hf_hub(path: Path, device: torch.device) -> str | None:
    if why := _needs_gpu(device):
        return why
    try:
        from transformers.integrations.finegrained_fp8 import load_finegrained_fp8_kernel

        load_finegrained_fp8_kernel()
    except Exception as error:
        return first_line(error)
    return None


def _needs_gpu(device: torch.device) -> str | None:
    return "without a GPU, transformers dequantizes to BF16" if device.type == "cpu" else None


def _refuses_bf16(path: Path, device: torch.device) -> str | None:
    """It holds twice the bytes, and for a moment a layer's FP8 weights."""
    if device.type == "cpu":
        return None
    needed = _SPARE_BYTES + 2 * sum(file.stat().st_size for file in path.glob("*.safetensors"))
    free, _ = torch.cuda.mem_get_info()
    if needed <= free:
        return None
    return f"it would take about {needed / 1e9:.0f} GB, and {free / 1e9:.0f} are free"


PROVIDERS = {
    OURS: Provider(_load_ours),
    HF_FP8: Provider(_load_hf_fp8, _refuses_hf_fp8),
    HF_HUB: Provider(_from_pretrained, _refuses_hf_hub),
    HF_BF16: Provider(_load_bf16, _refuses_bf16),
}


def compile_ahead(
    config: PretrainedConfig, tokens: Iterable[int], cached_tokens: Iterable[int]
) -> None:
    """Fill the disk caches of moefp8 and DeepGEMM, so that no provider waits for a compiler.

    A process takes all linears of one shape, or experts for some numbers of tokens. What fails is
    compiled when a provider calls it.

    cached_tokens: how many a model with compressed caches expands at once.
    """
    tokens, cached_tokens = sorted(set(tokens)), sorted(set(cached_tokens))
    linears = {
        x.shape: cached_tokens if x.key.endswith("kv_b_proj.weight") else tokens
        for x in tensors_of(config)
        if x.dtype == E4M3 and ".mlp.experts." not in x.key
    }
    experts = ExpertsModel(
        "",
        config.num_local_experts,
        config.num_experts_per_tok,
        config.hidden_size,
        config.moe_intermediate_size,
    )
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        try:
            for (n, k), each in linears.items():
                pool.submit(compile_kernels, [Case(m, n, k) for m in each])
            for some in (tokens[::2], tokens[1::2]):
                pool.submit(_compile_experts, experts, some)
        except Exception as error:
            print(f"compiling ahead was cut short: {first_line(error)}")


def _compile_experts(model: ExpertsModel, tokens: Iterable[int]) -> None:
    sizes = model.num_experts, model.hidden_size, model.intermediate_size
    experts = GroupedExperts(*sizes, device="meta").to_empty(device="cuda")
    for num_tokens in tokens:
        case = ExpertsCase.random(model, experts, num_tokens)
        for name in (OURS, moe_peers.HF_FP8):
            try:
                moe_peers.PEERS[name].prepare(case)()
                torch.cuda.synchronize()
            except Exception:
                continue
