"""`precompile`: compile ahead what a model's layers can need, so that no request waits for it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..kernels.common.checks import FLOATS
from ..kernels.common.registry import runs_our_kernels
from ..kernels.gemm.experts_sizes import Sizes
from ..kernels.gemm.tuned import ConfigSource, config_source_of
from ..kernels.jit import Kernel, compile_kernels, current_driver
from ..layers import FP8Linear, GroupedExperts, TopKRouter
from ..layers.module import FixedDtypeModule
from ..layers.moe import SharedExperts
from ..layers.router import TOP_K_NAMES
from ..progress import Progress
from . import variants
from .variants import Demand

DEFAULT_SMS = 132  # of H100 SXM, H200 and GH200; an H100 PCIe has 114, an H20 78
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_OPS = {"softmax": "softmax_topk", "sigmoid": "sigmoid_group_topk"}


@dataclass(frozen=True)
class Precompiled:
    """num_kernels: compiled, or found in the cache; seconds: that this took."""

    num_kernels: int
    seconds: float


def precompile(
    model: nn.Module,
    max_tokens: int,
    *,
    dtype: torch.dtype | None = None,
    top_k: int | None = None,
    num_sms: int | None = None,
    num_threads: int | None = None,
    progress: bool | None = None,
) -> Precompiled:
    """Compile every kernel that calls of `model` with 1 to `max_tokens` tokens can need.

    Launches nothing and needs no GPU, only NVRTC (`pip install nvidia-cuda-nvrtc`), so that a
    container image can be built with a warm cache. The model may lie anywhere, also on the meta
    device: only sizes count. What is in the cache is not compiled again.

    Args:
        max_tokens: of one call: batch times sequence length. Calls with more work, too, and compile
            what they lack.
        dtype: of activations; None: those of the model's other parameters, or bf16 without any.
        top_k: experts of a token; None: as a router beside the experts says, or the model's config.
        num_sms: of the GPU to compile for; None: of every Hopper GPU here, or 132 (H100 SXM, H200)
            without one. ConfigSource that were tuned on a GPU here are compiled, too.
        num_threads: that compile; None: as many as there are processors.
        progress: show a line on stderr; None: where that is a terminal.

    Raises:
        ValueError: one of the numbers is below 1, or nothing says `top_k`.
        TypeError: `dtype` is no bf16, fp16 or fp32.
        JitError: there is no compiler, or a kernel does not compile.
    """
    started = time.perf_counter()
    _check_numbers(num_threads=num_threads)
    kernels = kernels_of(model, max_tokens, dtype=dtype, top_k=top_k, num_sms=num_sms)
    with Progress("compiling", len(kernels), "kernels", shown=progress) as bar:
        compile_kernels(kernels, num_threads, bar.advance)
    return Precompiled(len(kernels), time.perf_counter() - started)


def kernels_of(
    model: nn.Module,
    max_tokens: int,
    *,
    dtype: torch.dtype | None = None,
    top_k: int | None = None,
    num_sms: int | None = None,
) -> list[Kernel]:
    """Those that `precompile` compiles, those that take long first."""
    _check_numbers(max_tokens=max_tokens, top_k=top_k, num_sms=num_sms)
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f"precompile: dtype must be bf16, fp16 or fp32, got {dtype}")
    dtypes = _dtypes_of(model) if dtype is None else frozenset({dtype})
    layers = dict.fromkeys(_layers_of(model, top_k))
    found: dict[Kernel, None] = {}
    for configs in _config_sources(num_sms):
        demand = Demand(max_tokens, dtypes, configs)
        for layer in layers:
            found.update(dict.fromkeys(layer.kernels(demand)))
    return sorted(found, key=lambda kernel: kernel.source.name != "gemm.cu")


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"precompile: {name} must be at least 1, got {value}")


# ---- What kernels depend on ----


class _Linear(NamedTuple):
    n: int
    k: int
    bias: torch.dtype | None

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        return variants.linear_kernels(demand, *self)


class _FeedForward(NamedTuple):
    hidden_size: int
    intermediate_size: int

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        return variants.feed_forward_kernels(demand, *self)


class _Experts(NamedTuple):
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    masked: bool

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        # Weights of a router of ours are FP32; others give what the activations are.
        sizes = Sizes(demand.max_tokens, *self)
        return variants.experts_kernels(demand, sizes, {*demand.dtypes, torch.float32})


class _Router(NamedTuple):
    op: str
    num_experts: int

    def kernels(self, demand: Demand) -> Iterator[Kernel]:
        return variants.router_kernels(*self)


def _layers_of(
    model: nn.Module, top_k: int | None
) -> Iterator[_Linear | _FeedForward | _Experts | _Router]:
    modules = dict(model.named_modules())
    parts: set[nn.Module] = set()  # of shared experts, which are one op
    for name, module in modules.items():
        if module in parts:
            continue
        if isinstance(module, SharedExperts) and module.is_one_op:
            parts.update(module.children())
            i, h = module.gate_proj.weight.shape  # with the zeros of a sharded one
            yield _FeedForward(h, i)
        elif isinstance(module, FP8Linear):
            bias = None if module.bias is None else module.bias.dtype
            n, k = module.weight.shape
            yield _Linear(n, k, bias)
        elif isinstance(module, TopKRouter):
            yield _Router(_OPS[module.scoring], module.num_experts)
        elif isinstance(module, GroupedExperts):
            yield _Experts(
                top_k or _top_k_of(model, modules, name),
                *(module.num_experts, module.hidden_size, module.intermediate_size),
                module.layout == "masked",
            )


def _top_k_of(model: nn.Module, modules: dict[str, nn.Module], name: str) -> int:
    """What is said beside the experts of that name, else by the model's config."""
    parent = modules[name.rpartition(".")[0]]
    config: Any = getattr(model, "config", None)
    places = (*parent.children(), parent, getattr(config, "text_config", None), config)
    for place in places:
        for attribute in TOP_K_NAMES:
            value = getattr(place, attribute, None)
            if isinstance(value, int) and value >= 1:
                return value
    raise ValueError(
        f"precompile: {f'GroupedExperts {name}'.strip()}: nothing beside it says how many experts "
        "a token goes to; pass top_k="
    )


def _dtypes_of(model: nn.Module) -> frozenset[torch.dtype]:
    """Of activations, which are those of other modules' parameters: of 16 bits, if any is."""
    others = (x for x in model.modules() if not isinstance(x, FixedDtypeModule))
    found = {x.dtype for module in others for x in module.parameters(recurse=False)}
    found &= set(FLOATS)
    return frozenset(found - {torch.float32} or found or {torch.bfloat16})


def _config_sources(num_sms: int | None) -> list[ConfigSource]:
    """For each kind of GPU; None: those that are here, or else the most common one."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    hoppers = [i for i in gpus if runs_our_kernels(i)]
    if num_sms is not None:
        hoppers = [i for i in hoppers if current_driver().num_sms(i) == num_sms]
    found = {config_source_of(i): None for i in hoppers}
    return list(found) or [ConfigSource(num_sms or DEFAULT_SMS, num_sms or DEFAULT_SMS)]
