"""`precompile`: compile ahead what a model's layers can need, so that no request waits."""

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..kernels import E4M3
from ..kernels.common.checks import FLOATS
from ..kernels.jit import JitError, Kernel, compile_kernels, keep_kernels
from ..kernels.program import Target
from ..kernels.targets import ANY_TARGET, targets_here
from ..layers import FP8Linear, GroupedExperts, TopKRouter
from ..layers.experts import BIASES
from ..layers.module import FixedDtypeModule, check_dtype
from ..layers.moe import SharedExperts
from ..layers.parts import parts_of
from ..layers.router import TOP_K_NAMES
from ..layers.trainable import TrainableModule
from ..quant.each import each_kernels
from ..quant.quantize import BLOCK_ROWS, quantize_kernels
from ..system.progress import Progress
from .variants import (
    Demand,
    Exchange,
    Experts,
    ExpertsInSteps,
    ExpertsOfRank,
    FeedForward,
    Layer,
    Linear,
    Master,
    Router,
    TrainedExperts,
    TrainedFeedForward,
    TrainedLinear,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_OPS = {"softmax": "softmax_topk", "sigmoid": "sigmoid_group_topk"}


@dataclass(frozen=True)
class Precompiled:
    """num_kernels: how many were compiled or already in the cache; seconds: the time it took.

    problem: why the kernels are not on disk, but in this process alone; None: they are on disk.
    """

    num_kernels: int
    seconds: float
    problem: str | None = None


def precompile(
    model: nn.Module,
    max_tokens: int,
    *,
    dtype: torch.dtype | None = None,
    top_k: int | None = None,
    backward: bool = False,
    updating: torch.dtype | None = None,
    num_sms: int | None = None,
    num_threads: int | None = None,
    progress: bool | None = None,
) -> Precompiled:
    """Compile every kernel that calls of `model` with 1 to `max_tokens` tokens can need.

    It launches nothing and needs no GPU, only NVRTC (`pip install nvidia-cuda-nvrtc`), so that a
    container image can be built with a warm cache. The model may be on any device, also
    meta: only sizes count. Kernels in the cache are not compiled again. Kernels that cannot be kept
    on disk serve this process alone: a UserWarning and the result's `problem` say why.

    Args:
        max_tokens: batch times sequence length of one call. A call with more works, too, and
            compiles what it lacks. Where ranks share experts, of a call on any of them.
        dtype: of activations; None: those of the model's other parameters, or bf16 without any.
        top_k: experts of a token; None: as a router beside the experts says, or the model's config.
        backward: whether also for gradients through the layers, and in master weights that ask
            for them now; in FP32 where they have `main_grad` now.
        updating: bf16, fp16 or fp32: also for weights of that dtype which `updating` brings.
        num_sms: of the GPU to compile for; None: of every Hopper GPU here, or 132 (H100 SXM, H200)
            without one. What was tuned on a GPU here is compiled, too.
        num_threads: how many compile; None: as many as there are processors.
        progress: show a line on stderr; None: where that is a terminal.

    Raises:
        ValueError: one of the numbers is below 1, nothing says `top_k`, or the model has no layer
            of moefp8.
        TypeError: `dtype` or `updating` is no bf16, fp16 or fp32.
        JitError: there is no compiler, or a kernel does not compile.
    """
    started = time.perf_counter()
    _check_numbers(num_threads=num_threads, num_sms=num_sms)
    kernels: dict[str, dict[Kernel, None]] = {}  # by architecture, each once
    for target in targets_here(num_sms):
        needed = kernels_of(
            model,
            max_tokens,
            target,
            dtype=dtype,
            top_k=top_k,
            backward=backward,
            updating=updating,
        )
        kernels.setdefault(target.arch, {}).update(dict.fromkeys(needed))
    num_kernels = sum(map(len, kernels.values()))
    with Progress("compiling", num_kernels, "kernels", shown=progress) as bar:
        for arch, some in kernels.items():
            compile_kernels(some, arch, num_threads, bar.advance)
    problem = None
    try:
        keep_kernels(kernels)
    except JitError as error:
        problem = str(error)
        warnings.warn(f"precompile: this process alone has its kernels: {problem}", stacklevel=2)
    return Precompiled(num_kernels, time.perf_counter() - started, problem)


def kernels_of(
    model: nn.Module,
    max_tokens: int,
    target: Target = ANY_TARGET,
    *,
    dtype: torch.dtype | None = None,
    top_k: int | None = None,
    backward: bool = False,
    updating: torch.dtype | None = None,
) -> list[Kernel]:
    """The kernels that `precompile` compiles for a GPU; first come those that take long."""
    _check_numbers(max_tokens=max_tokens, top_k=top_k)
    for x in (dtype, updating):
        if x is not None:
            check_dtype("precompile", x)
    dtypes = _dtypes_of(model) if dtype is None else frozenset({dtype})
    layers = dict.fromkeys(_layers_of(model, top_k))
    if not layers:
        raise ValueError(
            "precompile: the model must have a layer of moefp8 (FP8Linear, GroupedExperts, "
            f"TopKRouter, MoE), got {type(model).__name__} without any, which needs no kernel; "
            "moefp8.convert(model) makes some"
        )
    demand = Demand(max_tokens, dtypes, target, backward)
    kernels = [kernel for layer in layers for kernel in layer.kernels(demand)]
    if updating is not None:
        kernels += _kernels_of_new_weights(target, model, updating, backward)
    return sorted(dict.fromkeys(kernels), key=lambda kernel: kernel.source.name != "gemm.cu")


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"precompile: {name} must be at least 1, got {value}")


def _kernels_of_new_weights(
    target: Target, model: nn.Module, dtype: torch.dtype, backward: bool
) -> Iterator[Kernel]:
    """Kernels that quantize the weights of `updating`, and W^T, which a backward may have kept."""
    for module in model.modules():
        for name in module.fp8_names if isinstance(module, FixedDtypeModule) else ():
            weight, is_cut = getattr(module, name), bool(parts_of(module))
            if weight is None or weight.dtype != E4M3 or not weight.numel():
                continue
            k = weight.shape[-1]
            yield from each_kernels(target, dtype, k, transposed=backward)
            if is_cut:  # blocks may have rows of other ranks, so whole weights are quantized
                yield from quantize_kernels(target, dtype, 1, k, BLOCK_ROWS)


# ---- What kernels depend on ----


def _layers_of(model: nn.Module, top_k: int | None) -> Iterator[Layer]:
    modules = dict(model.named_modules())
    parts: set[nn.Module] = set()  # linears of shared experts that are one op
    in_fp32: set[nn.Module] = set()  # linears whose input is SwiGLU's output
    for name, module in modules.items():
        if module in parts:
            continue
        if isinstance(module, SharedExperts) and module.is_one_op:
            parts.update(module.children())
            down = module.down_proj
            h, i = down.weight.shape  # a sharded one counts its zeros, too
            frozen = FeedForward(h, i, down.batch_invariant, module.activation._replace(limit=None))
            if down.trainable:
                projections = module.gate_proj, module.up_proj, down
                yield TrainedFeedForward(frozen, tuple(map(_master_of, projections)))
            else:
                yield frozen
        elif isinstance(module, SharedExperts):
            in_fp32.add(module.down_proj)
        elif isinstance(module, FP8Linear):
            bias = None if module.bias is None else module.bias.dtype
            n, k = module.weight.shape
            takes = frozenset({torch.float32}) if module in in_fp32 else None
            linear = Linear(n, k, bias, takes, module.batch_invariant)
            yield TrainedLinear(linear, _master_of(module)) if module.trainable else linear
        elif isinstance(module, TopKRouter):
            yield Router(_OPS[module.scoring], module.num_experts, module.hidden_size)
        elif isinstance(module, GroupedExperts):
            experts = _experts_of(module, top_k or _top_k_of(model, modules, name))
            parallel = module.parallel
            yield experts if parallel is None else ExpertsOfRank(experts, Exchange.of(parallel))


def _experts_of(module: GroupedExperts, top_k: int) -> Experts | TrainedExperts | ExpertsInSteps:
    sizes = top_k, module.num_experts, module.hidden_size, module.intermediate_size
    activation = module.activation._replace(limit=None)  # kernels differ in its kind alone
    held = module.biases
    gate_up_bias, down_bias = (held[name].dtype if name in held else None for name in BIASES)
    biases = gate_up_bias, down_bias
    if module.runs_in_steps:
        return ExpertsInSteps(*sizes, activation, biases)
    rank = module.layout == "masked", module.num_global_experts
    experts = Experts(*sizes, *rank, activation, biases)
    return TrainedExperts(experts, _master_of(module)) if module.trainable else experts


def _master_of(module: TrainableModule) -> Master:
    """How gradients of the weights are computed, for weights that require them now."""
    weights = [module.get_parameter(name) for name in module.master_names]
    trained = [x for x in weights if x.requires_grad]
    outputs = set()
    for weight in trained:
        if getattr(weight, "main_grad", None) is not None:  # written in the first step, or added
            outputs |= {(torch.float32, False), (torch.float32, True)}
        else:  # the GEMM writes no FP16
            is_fp16 = weight.dtype == torch.float16
            outputs.add((torch.float32 if is_fp16 else weight.dtype, False))
    return Master(weights[0].dtype, module.wgrad, frozenset(outputs))


def _top_k_of(model: nn.Module, modules: dict[str, nn.Module], name: str) -> int:
    """top_k as a module beside the experts `name` has it, else as the model's config has it."""
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
    """The dtypes of activations: those of other parameters, of 16 bits if there are any."""
    others = (x for x in model.modules() if not isinstance(x, FixedDtypeModule))
    dtypes = {x.dtype for module in others for x in module.parameters(recurse=False)}
    dtypes &= set(FLOATS)
    return frozenset(dtypes - {torch.float32} or dtypes or {torch.bfloat16})
