"""Launch an expert layer on a Hopper GPU: kernels in a row, none of which the host waits for.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.

1. `dispatch.cu` plans the routing, quantizes every token once, and copies it to its rows: one
   kernel, or of many choices two.
2. `gemm.cu`: gate and up, SwiGLU, quantization (`config.gate_up`).
3. `gemm.cu`: down.
4. `combine.cu`: the weighted sum of every token's rows.

Each is launched before the one before it ends, and waits where it needs its results: the code of
the next kernel and its first weights are on their way meanwhile. What lies between the kernels is
in one workspace, which the caching allocator of PyTorch hands out anew for each call, and so safely
to any number of streams. Its size depends on T alone; a large T is split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.gemm import launch as gemm_plan
from ..kernels.gemm.experts_sizes import Sizes
from ..kernels.gemm.tuned import config_source_of
from ..kernels.jit import Launch, current_stream, launch_all
from .experts_prepare import (
    Projections,
    Tokens,
    Weights,
    Workspace,
    fitting_weights,
    make_steps,
    prepare_dispatch_and_combine,
    prepare_gemms,
    split_weights,
)

MAX_WORKSPACE_BYTES = 4 << 30
Kept = TypeVar("Kept")


class _Prepared(NamedTuple):
    """Launches in order; the addresses of tokens and results are written in right before."""

    launches: tuple[Launch, ...]
    dispatches: tuple[Any, ...]  # `Arguments` in dispatch.cu
    combine: Any  # `Arguments` in combine.cu
    copies: Weights | None  # of weights that TMA cannot address: for one call


@dataclass(frozen=True, eq=False)
class _Layer:
    """Of tensors of known layouts: in how many parts, with how much memory between the kernels.

    It is no other layer's equal: as part of a key it takes less time than all of its layouts.
    """

    sizes: Sizes
    num_parts: int
    workspace_bytes: int


# Both are forgotten when they are full: what comes and goes must not fill the memory. What is
# prepared takes some 13 KB. Its key names the thread: no other one may write into its arguments.
_layers: dict[Any, _Layer] = {}
_prepared: dict[Any, _Prepared] = {}
_MAX_KEPT = 4096


def launch_experts(
    check: Callable[[], object],
    tokens: Tokens,
    projections: Projections,
    limit: float,
    masked: bool,
    y: torch.Tensor | None = None,
) -> torch.Tensor:
    """`experts` on the current stream, bf16 [T, H]; nothing waits for it.

    Weights that TMA cannot address (16 does not divide H, or I) are copied first, in every call.

    check: raises if the arguments are wrong; called for layouts that are new.
    y: for the result, contiguous, if there is memory for it.
    """
    x, ids, top_k_weights = tokens
    tensors = (*tokens, *projections)
    key = masked, tuple([(z.shape, z.stride(), z.dtype, z.get_device()) for z in tensors])
    layer = _layers.get(key)
    if layer is None:
        check()
        layer = _keep(_layers, key, _layer_of(tokens, projections, masked))
    sizes, num_parts, device = layer.sizes, layer.num_parts, x.device
    if y is None:
        y = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    if num_parts == 0:
        return y.zero_()
    if num_parts > 1:
        split = ceil_div(sizes.num_tokens, num_parts)
        for *some, part in zip(*(z.split(split) for z in (*tokens, y)), strict=True):
            launch_experts(check, cast(Tokens, tuple(some)), projections, limit, masked, part)
        return y
    if x.stride(1) != 1 and sizes.hidden_size > 1:
        return launch_experts(check, (x.contiguous(), *tokens[1:]), projections, limit, masked, y)
    memory = torch.empty(layer.workspace_bytes, dtype=torch.uint8, device=device)
    stream = current_stream(device.index)
    x_address, y_address = x.data_ptr(), y.data_ptr()
    addresses = tuple([z.data_ptr() for z in projections])
    place = stream, memory.data_ptr(), x_address % 16, y_address % 16, get_ident()
    found = (layer, addresses, limit, gemm_plan.max_sms(), place)
    ready = _prepared.get(found)
    if ready is None:
        ready = _prepare(sizes, tokens, projections, memory, y, limit, stream)
        if ready.copies is None:
            _keep(_prepared, found, ready)
    for dispatch in ready.dispatches:
        dispatch.x, dispatch.routing.ids = x_address, ids.data_ptr()
    ready.combine.weights, ready.combine.out = top_k_weights.data_ptr(), y_address
    launch_all(ready.launches, device.index)
    return y


def _layer_of(tokens: Tokens, projections: Projections, masked: bool) -> _Layer:
    (num_tokens, top_k), (num_experts, h, i) = tokens[1].shape, projections[2].shape
    sizes = Sizes(num_tokens, top_k, num_experts, h, i, masked)
    if 0 in sizes[:-1]:
        return _Layer(sizes, 0, 0)
    size = Workspace.of(sizes).size
    # One token is never split.
    return _Layer(sizes, min(num_tokens, ceil_div(size, MAX_WORKSPACE_BYTES)), size)


def _keep(kept: dict[Any, Kept], key: Any, value: Kept) -> Kept:
    if len(kept) >= _MAX_KEPT:
        kept.clear()
    kept[key] = value
    return value


def _prepare(
    sizes: Sizes,
    tokens: Tokens,
    weights: Projections,
    memory: torch.Tensor,
    y: torch.Tensor,
    limit: float,
    stream: int,
) -> _Prepared:
    split = split_weights(weights)
    fitting = fitting_weights(split)
    fit = all(x is y for x, y in zip(fitting, split, strict=True))
    configs = config_source_of(memory.get_device())
    sms = configs.num_sms, configs.all_sms
    steps = make_steps(sizes, fitting, memory, configs.experts(sizes), sms)
    first, second = prepare_gemms(steps, sizes, fitting, memory, limit, stream)
    dispatch, combine = prepare_dispatch_and_combine(sizes, tokens, memory, y, stream)
    launches = (*dispatch, first, second, combine)
    arguments = tuple(launch.arguments[0] for launch in dispatch)
    copies = None if fit else fitting
    return _Prepared(launches, arguments, combine.arguments[0], copies)
