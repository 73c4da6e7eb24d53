"""Launch an expert layer on a Hopper GPU: kernels in a row, none of which the host waits for.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.

1. `routing/dispatch.cu` plans the routing, quantizes every token once, unless it comes as codes,
   and copies it to its rows: one kernel, or two for many choices.
2. `gemm.cu`: gate and up, SwiGLU, quantization (`config.gate_up`).
3. `gemm.cu`: down.
4. `routing/combine.cu`: the weighted sum of every token's rows, to which `addend` is added.

Each is launched before the one before it ends, and waits where it needs its results: the code of
the next kernel and its first weights are on their way meanwhile. What lies between the kernels is
in one workspace. Its size grows with T; a large T is split.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import cast

import torch

from ..kernels.common.blocks import TMA_BYTES
from ..kernels.common.prepared import Launches, layout_of
from ..kernels.gemm.launch import GateUp
from ..kernels.gemm.tuned import ANY_TARGET, target_of
from ..kernels.jit import Kernel, current_driver
from ..kernels.program import (
    Codes,
    Place,
    Record,
    Span,
    Target,
    Tensor,
    Word,
    kernels_of,
    layouts,
    prepare_launches,
)
from ..routing.combine_launch import describe_combine
from ..routing.dispatch_launch import describe_dispatch
from .expert_configs import Sizes, describe_configs, matrix_of
from .expert_parts import (
    GIVEN,
    Choices,
    Combine,
    ExpertWeights,
    Given,
    Projections,
    Weights,
    describe_rows_gemm,
    fitting_weights,
    results_layout,
    split_weights,
)
from .experts_backward_launch import experts_backward_record
from .parts import parts_of, split

_OP = "experts"
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden states, choices, their scores
# The limit, infinite if there is none; then masked, expert_offset and num_global_experts.
Options = tuple[float, bool, int, int | None]

# The addresses of a call, in order; those of optional tensors are 0 where there are none.
INPUTS = (
    *("x", "ids", "scores"),
    *("gate", "gate_scales", "up", "up_scales", "down", "down_scales"),
    *("y", "addend", "saved", "x_scales", "word"),
)


@dataclass(frozen=True)
class _Prepared:
    """What is kept for one layout of a layer and its tokens.

    num_parts: in how many parts the tokens are computed; 0: there is nothing to compute.
    up, up_scales: bytes from gate to up, and from the scales of gate to those of up.
    fits: whether TMA can address the weights; if not, every call copies them.
    launches: the prepared launches; None if the tokens are split or copied first.
    """

    num_parts: int
    up: int = 0
    up_scales: int = 0
    fits: bool = True
    launches: Launches | None = None


def launch_experts(
    check: Callable[[], object],
    tokens: Tokens,
    projections: Projections,
    options: Options,
    addend: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    gate_up: torch.Tensor | None = None,
    x_scale_inv: torch.Tensor | None = None,
    combine: Combine | None = None,
    word: int = 0,
) -> torch.Tensor:
    """`experts` on the current stream, bf16 [T, H]; nothing waits for it.

    Weights that TMA cannot address (16 does not divide H, or I) are copied first, in every call.

    check: raises if the arguments are wrong; called for layouts that are new.
    y: contiguous memory for the result; None: it is allocated.
    gate_up: memory for what `experts_saving` gives beside the result; the layout is contiguous.
    x_scale_inv: the scales of tokens that come as codes.
    combine: stands for `describe_combine`; `y` is then what it needs, and neither tokens nor
        weights may be such that they are split or copied.
    word: a number for the kernel of `combine`, which may differ from call to call.
    """
    x, tensors, driver = tokens[0], (*tokens, *projections), current_driver()
    addresses = tuple([z.data_ptr() for z in tensors])
    x_address, _, _, gate, gate_scales, down, _ = addresses
    y_alignment = 0 if y is None else y.data_ptr() % 16
    added, of_addend = (0, None) if addend is None else (addend.data_ptr(), layout_of(addend))
    scales, of_scales = 0, None
    if x_scale_inv is not None:
        scales, of_scales = x_scale_inv.data_ptr(), layout_of(x_scale_inv)
    alignment = x_address % 16, gate % 16, down % 16, y_alignment, added % 16
    tensor_layouts = tuple([layout_of(z) for z in tensors])
    saves, of_others = gate_up is not None, (of_addend, of_scales, combine)
    key = (_OP, tensor_layouts, of_others, alignment, options, saves, driver.max_sms)
    found = driver.prepared().get(key)
    if found is None:
        check()
        given = tokens, projections, options, addend, x_scale_inv
        found = driver.keep(key, _prepare(*given, y_alignment, saves, combine))
    if y is None:
        y = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    if found.launches is None:
        parts = tokens, addend, y, gate_up, x_scale_inv
        _launch_parts(found.num_parts, check, projections, options, *parts)
        return y
    if found.fits:
        up, up_scales = gate + found.up, gate_scales + found.up_scales
        weights: tuple[int, ...] = (gate, gate_scales, up, up_scales, *addresses[5:])
    else:
        copies = fitting_weights(split_weights(projections))
        weights = tuple([z.data_ptr() for z in copies])
    saved = 0 if gate_up is None else gate_up.data_ptr()
    others = y.data_ptr(), added, saved, scales, word
    found.launches(x.get_device(), (*addresses[:3], *weights, *others))
    return y


def _launch_parts(
    num_parts: int,
    check: Callable[[], object],
    projections: Projections,
    options: Options,
    tokens: Tokens,
    addend: torch.Tensor | None,
    y: torch.Tensor,
    gate_up: torch.Tensor | None,
    x_scale_inv: torch.Tensor | None,
) -> None:
    """Launch part by part, or as a whole with hidden states and addend made contiguous."""
    x, ids, scores = tokens
    if num_parts == 0:
        y.zero_()
        if addend is not None:
            y.add_(addend.detach())
    elif num_parts == 1:
        addend = None if addend is None else addend.contiguous()
        whole = x.contiguous(), ids, scores
        launch_experts(check, whole, projections, options, addend, y, gate_up, x_scale_inv)
    else:
        for *part, added, some_y, saved, scales in split(
            num_parts, len(x), *tokens, addend, y, gate_up, x_scale_inv
        ):
            some = cast(Tokens, tuple(part))
            launch_experts(check, some, projections, options, added, some_y, saved, scales)


def _prepare(
    tokens: Tokens,
    projections: Projections,
    options: Options,
    addend: torch.Tensor | None,
    x_scale_inv: torch.Tensor | None,
    y_alignment: int,
    saves: bool,
    combine: Combine | None,
) -> _Prepared:
    x, ids, scores = tokens
    (num_tokens, top_k), (num_experts, h, i) = ids.shape, projections[2].shape
    limit, masked, expert_offset, num_global_experts = options
    layer = num_tokens, top_k, num_experts, h, i
    sizes = Sizes(*layer, masked, num_global_experts)
    if 0 in layer:
        return _Prepared(0)
    num_parts = num_parts_of(sizes, saves=saves)
    is_copied = (x.stride(1) != 1 and h > 1) or (addend is not None and not addend.is_contiguous())
    if num_parts > 1 or is_copied:
        if combine is not None:
            raise ValueError(f"{_OP}: what combine brings elsewhere must be computed in one part")
        return _Prepared(num_parts)
    halves = split_weights(projections)
    fitting = fitting_weights(halves)
    device_index = x.get_device()
    r = Record(target_of(device_index), INPUTS)
    describe_experts(
        r,
        sizes,
        Tensor.of(x, "x"),
        Choices(Tensor.of(ids, "ids"), Tensor.of(scores, "scores")),
        weights_layout(fitting),
        results_layout("y", (num_tokens, h), gcd(y_alignment, TMA_BYTES)),
        limit=limit,
        expert_offset=expert_offset,
        saved=Place("saved") if saves else None,
        combine=combine,
        **layouts(addend=addend, x_scales=x_scale_inv),
    )
    return _Prepared(
        1,
        up=halves.up.data_ptr() - halves.gate.data_ptr(),
        up_scales=halves.up_scale_inv.data_ptr() - halves.gate_scale_inv.data_ptr(),
        fits=all(a is b for a, b in zip(fitting, halves, strict=True)),
        launches=prepare_launches(r, device_index),
    )


def num_parts_of(sizes: Sizes, *, saves: bool) -> int:
    """In how many parts a forward is computed, 0 if there is nothing to compute.

    saves: a backward follows, which has the same parts.
    """
    return parts_of(sizes, experts_record, *([experts_backward_record] if saves else []))


def experts_record(
    sizes: Sizes, given: Given = GIVEN, target: Target = ANY_TARGET, span: Span | None = None
) -> Record:
    """The record of a forward of contiguous tensors."""
    e, h, i = sizes[2:5]
    r = Record(target, INPUTS, span=span)
    gate, up = (Codes.contiguous(name, e, i, h) for name in ("gate", "up"))
    describe_experts(
        r,
        sizes,
        given.tokens("x", sizes),
        given.choices(sizes),
        ExpertWeights(gate, up, Codes.contiguous("down", e, h, i)),
        given.results("y", sizes),
        x_scales=given.scales("x_scales", sizes),
        saved=None if given.saved is None else Place("saved"),
    )
    return r


def experts_kernels(target: Target, sizes: Sizes, given: Given) -> Iterator[Kernel]:
    """The kernels of a forward for up to as many tokens as `sizes` says."""

    def describe(span: Span) -> Record:
        return experts_record(sizes._replace(num_tokens=span.first), given, target, span)

    return kernels_of(describe, sizes.num_tokens)


def weights_layout(weights: Weights) -> ExpertWeights:
    """The layouts of the weights of a call."""
    gate, gate_scales, up, up_scales, down, down_scales = weights
    return ExpertWeights(
        Codes.of(gate, gate_scales, "gate"),
        Codes.of(up, up_scales, "up"),
        Codes.of(down, down_scales, "down"),
    )


def describe_experts(
    r: Record,
    sizes: Sizes,
    x: Tensor,
    choices: Choices,
    weights: ExpertWeights,
    y: Tensor,
    *,
    limit: float = math.inf,
    expert_offset: int = 0,
    addend: Tensor | None = None,
    x_scales: Tensor | None = None,
    saved: Place | None = None,
    combine: Combine | None = None,
) -> None:
    """The steps of a layer, as the head of this file says.

    Args:
        x: [T, H], columns contiguous; e4m3 with x_scales, fp32 [T, ceil(H/128)].
        y, addend: bf16 [T, H], contiguous.
        saved: memory for gate and up [T k, 2, I], which a backward needs, or None.
        combine: stands for `describe_combine`.
    """
    matrices, num_rows = matrix_of(sizes)
    h, i = sizes.hidden_size, sizes.intermediate_size
    gate_up_config, down_config = describe_configs(r, sizes, saves=saved is not None)
    rows = r.codes("rows", (matrices, num_rows, h))
    dispatched = describe_dispatch(
        r,
        x,
        choices.ids,
        rows,
        sizes.num_experts,
        x_scale_inv=x_scales,
        expert_offset=expert_offset,
        is_masked=sizes.masked,
    )
    activated = r.codes("activated", (matrices, num_rows, i))
    describe_rows_gemm(
        r,
        gate_up_config,
        rows,
        weights.gate,
        activated.data,
        sizes,
        dispatched,
        follows_dispatch=True,
        gate_up=GateUp(weights.up, limit, activated.scale_inv, saved),
    )
    results = r.matrices("results", (matrices, num_rows, h), torch.bfloat16)
    describe_rows_gemm(
        r, down_config, activated, weights.down, results, sizes, dispatched, follows_dispatch=False
    )
    token_to_row = dispatched.maps.token_to_row
    if combine is None:
        describe_combine(r, results, token_to_row, choices.scores, y, addend, programmatic=True)
    else:
        combine.describe(
            r, results, token_to_row, choices.scores, y, grad_weights=None, word=Word("word")
        )
