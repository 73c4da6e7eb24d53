"""The routed experts of a MoE layer, from tokens and the router's choices to the output.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple, cast

import torch

from ..kernels.common.activation import Activation, check_activation
from ..kernels.common.blocks import E4M3, TMA_BYTES
from ..kernels.common.checks import (
    FLOATS,
    check_choices,
    check_group_bias,
    check_quantized_or_not,
    check_rank,
    check_rows_contiguous,
    check_same_device,
    check_shape,
    check_tensor,
)
from ..kernels.common.prepared import Launches, layout_of
from ..kernels.gemm.dense import block_scaled_matmul
from ..kernels.gemm.sizes import Sizes
from ..kernels.jit import current_driver
from ..kernels.program import Place, Record, Tensor, layouts, prepare_launches
from ..kernels.registry import register_inputs
from ..kernels.targets import target_of
from ..quant.numerics import quantize_1x128
from ..quant.quantize import quantize_1x128 as quantize_op
from ..quant.weight_format import check_weight_scales, tile_scales
from ..routing.combine import combine_rows
from ..routing.dispatch import dispatch_rows
from ..routing.plan import build_maps
from .activation import activate, empty_gate_up
from .autograd import first_order, no_gradients, records
from .expert_biases import empty_bias_gradients
from .expert_parts import (
    Choices,
    Combine,
    fitting_weights,
    results_layout,
    split_weights,
    weights_layout,
)
from .experts_backward import experts_backward
from .experts_records import INPUTS, describe_experts, num_parts_of
from .parts import split

_OP = "experts"


class ExpertsInputs(NamedTuple):
    """The inputs of `experts`.

    hidden_states: [T, H] bf16, fp16 or fp32, quantized to 1x128; activated values stay FP32 until
        they are quantized likewise. Or e4m3 codes from `quantize_1x128`, with the same result, bit
        for bit, as the tokens that they were made from.
    top_k_index: int32 or int64 [T, k] in [0, E]. E marks a choice of an expert held elsewhere; its
        score counts as 0. Values are checked on the CPU; on a GPU other ids count as E. A rank of
        expert parallelism takes the ids of the whole model.
    top_k_weights: [T, k] bf16, fp16 or fp32.
    gate_up_proj: e4m3 [E, 2I, H], gate first. down_proj: e4m3 [E, H, I].
    gate_up_proj_scale_inv, down_proj_scale_inv: fp32, in any of `FORMATS`; those of gate come
        before those of up, e.g. [E, 2 ceil(I/128), ceil(H/128)] for blocks of 128x128.
    masked: whether, on a GPU, every expert has T rows of memory, and not only one for each of its
        tokens; the result is the same.
    expert_offset, num_global_experts: for a rank of expert parallelism, the id of its first expert,
        and the number of experts of the whole model, by which tiles are chosen; None: E. Ids are
        in [0, num_global_experts]; all but [expert_offset, expert_offset + E) are held elsewhere.
    addend: bf16 [T, H], such as the output of shared experts, or None. The result is the same, bit
        for bit, as that of a separate addition: the sum over choices is rounded to BF16, then the
        sum with `addend`.
    hidden_states_scale_inv: fp32 [T, ceil(H/128)], any strides: the scales of e4m3 hidden states;
        None for others.
    gate_up_proj_bias, down_proj_bias: [E, 2I], gate first, and [E, H], bf16, fp16 or fp32, any
        strides; or None. They are added in FP32 to the sums of the GEMMs.
    """

    hidden_states: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    gate_up_proj: torch.Tensor
    gate_up_proj_scale_inv: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scale_inv: torch.Tensor
    activation: Activation
    masked: bool
    expert_offset: int = 0
    num_global_experts: int | None = None
    addend: torch.Tensor | None = None
    hidden_states_scale_inv: torch.Tensor | None = None
    gate_up_proj_bias: torch.Tensor | None = None
    down_proj_bias: torch.Tensor | None = None


def _allocate(inputs: ExpertsInputs) -> torch.Tensor:
    """Check, then allocate the result; this is also the fake body."""
    hidden_states, down, addend = inputs.hidden_states, inputs.down_proj, inputs.addend
    fp32, ids = (torch.float32,), (torch.int32, torch.int64)
    dtypes = ((hidden_states.dtype,), ids, FLOATS, (E4M3,), fp32, (E4M3,), fp32)
    named = dict(zip(inputs._fields, inputs[:7], strict=False))
    scale_inv = inputs.hidden_states_scale_inv
    biases = {x: getattr(inputs, x) for x in ("gate_up_proj_bias", "down_proj_bias")}
    check_same_device(_OP, **named, addend=addend, hidden_states_scale_inv=scale_inv, **biases)
    check_quantized_or_not(_OP, "hidden_states", hidden_states, scale_inv)
    for (name, x), allowed in zip(named.items(), dtypes, strict=True):
        check_tensor(_OP, name, x, allowed, 3 if "proj" in name else 2)
    (num_tokens, _), (e, h, i) = hidden_states.shape, down.shape
    top_k = inputs.top_k_index.shape[1]
    rules = {
        "hidden_states": ([num_tokens, h], "[T, H]"),
        "top_k_index": ([num_tokens, top_k], "[T, k]"),
        "top_k_weights": ([num_tokens, top_k], "[T, k] as top_k_index"),
        "gate_up_proj": ([e, 2 * i, h], "[E, 2I, H] for down_proj [E, H, I]"),
    }
    for name, (shape, rule) in rules.items():
        check_shape(_OP, name, named[name], shape, rule)
    for name, axes, parts in (("gate_up_proj", "E I H", 2), ("down_proj", "E H I", 1)):
        scale_inv = named[f"{name}_scale_inv"]
        check_weight_scales(_OP, f"{name}_scale_inv", scale_inv, named[name], axes, parts)
    if addend is not None:
        check_tensor(_OP, "addend", addend, (torch.bfloat16,), 2)
        check_shape(_OP, "addend", addend, [num_tokens, h], "[T, H] as hidden_states")
    check_group_bias(_OP, "gate_up_proj_bias", inputs.gate_up_proj_bias, [e, 2 * i], "[E, 2I]")
    check_group_bias(_OP, "down_proj_bias", inputs.down_proj_bias, [e, h], "[E, H]")
    check_activation(_OP, inputs.activation)
    if top_k < 1 or e < 1:
        raise ValueError(f"{_OP}: k and E must be at least 1, got k = {top_k} and E = {e}")
    check_rank(_OP, e, inputs.expert_offset, inputs.num_global_experts)
    check_rows_contiguous(_OP, "gate_up_proj", inputs.gate_up_proj)
    check_rows_contiguous(_OP, "down_proj", down)
    return hidden_states.new_empty((num_tokens, h), dtype=torch.bfloat16)


def _body(inputs: ExpertsInputs, gate_up: torch.Tensor | None = None) -> torch.Tensor:
    y = _allocate(inputs)
    hidden_states, top_k_index, top_k_weights = inputs[:3]
    gate_up_proj, gate_up_scales, down_proj, down_scales = inputs[3:7]
    gate_up_scales = tile_scales(gate_up_proj, gate_up_scales, 2)
    down_scales = tile_scales(down_proj, down_scales)
    num_experts, h, i = down_proj.shape
    if is_on_cpu := hidden_states.device.type == "cpu":
        check_choices(_OP, top_k_index, inputs.num_global_experts or num_experts)
    if i == 0 and inputs.down_proj_bias is None:
        return y.zero_() if inputs.addend is None else y.zero_().add_(inputs.addend)
    maps = build_maps(top_k_index, num_experts, 1, None, inputs.expert_offset)
    _, expert_offsets, row_to_token, _, token_to_row = maps
    if len(row_to_token) == 0:
        return y
    data, scale_inv = hidden_states, inputs.hidden_states_scale_inv
    if scale_inv is None:
        data, scale_inv = quantize_1x128(hidden_states)
    data, scale_inv = (dispatch_rows(x, row_to_token) for x in (data, scale_inv))
    rows = y.new_zeros(len(row_to_token), h)
    # If exact, no row depends on the number of rows. GPUs without our kernels have few FP64 units.
    product = partial(block_scaled_matmul, exact=is_on_cpu)
    for expert, (begin, end) in enumerate(pairwise(expert_offsets.tolist())):
        if begin == end:
            continue
        weights = gate_up_proj[expert].unflatten(0, (2, i))
        scales = gate_up_scales[expert].unflatten(0, (2, -1))
        gate, up = (
            product(data[begin:end], scale_inv[begin:end], *half)
            for half in zip(weights, scales, strict=True)
        )
        if inputs.gate_up_proj_bias is not None:
            gate_bias, up_bias = inputs.gate_up_proj_bias[expert].float().unflatten(0, (2, i))
            gate, up = gate + gate_bias, up + up_bias
        if gate_up is not None:
            gate_up[begin:end, 0], gate_up[begin:end, 1] = gate, up
        activated = quantize_1x128(activate(gate, up, inputs.activation, exact=is_on_cpu))
        down_weights = down_proj[expert], down_scales[expert]
        result = product(*activated, *down_weights)
        if inputs.down_proj_bias is not None:
            result = result + inputs.down_proj_bias[expert].float()
        rows[begin:end] = result
    return combine_rows(rows, token_to_row, top_k_weights, inputs.addend)


@dataclass(frozen=True)
class _Prepared:
    """A prepared call for one layout of weights and tokens.

    num_parts: the number of parts in which tokens are computed; 0: no GEMM has anything to compute.
    up, up_scales: bytes from gate to up, and from gate's scales to up's.
    fits: whether TMA can address the weights; if not, every call copies them.
    launches: the prepared launches; None if the tokens are split or copied first.
    """

    num_parts: int
    up: int = 0
    up_scales: int = 0
    fits: bool = True
    launches: Launches | None = None


def launch_experts(
    inputs: ExpertsInputs,
    gate_up: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    combine: Combine | None = None,
    word: int = 0,
) -> torch.Tensor:
    """`experts` on the current stream, bf16 [T, H]; nothing waits for it.

    Weights that TMA cannot address (16 does not divide H, or I) are copied first, in every call; so
    are biases that are not contiguous.

    gate_up: memory for the second result of `experts_saving`, contiguous; None: it is not saved.
    y: contiguous memory for the result; None: it is allocated.
    combine: replaces `describe_combine`, and takes `y`. Neither tokens nor weights may need to be
        split or copied.
    word: a number for the kernel of `combine`, which may differ from call to call.
    """
    tensors, driver = inputs[:7], current_driver()
    addend, x_scale_inv, gate_up_bias, down_bias = inputs[11:]
    x, addresses = tensors[0], tuple([z.data_ptr() for z in tensors])
    x_address, _, _, gate, gate_scales, down, _ = addresses
    y_alignment = 0 if y is None else y.data_ptr() % 16
    added, addend_layout = (0, None) if addend is None else (addend.data_ptr(), layout_of(addend))
    scales, scales_layout = 0, None
    if x_scale_inv is not None:
        scales, scales_layout = x_scale_inv.data_ptr(), layout_of(x_scale_inv)
    biases: tuple[int, ...] = (0, 0)
    biases_layout = None
    if gate_up_bias is not None or down_bias is not None:
        both = [None if z is None else z.contiguous() for z in (gate_up_bias, down_bias)]
        inputs = ExpertsInputs(*inputs[:13], *both)
        biases = tuple([0 if z is None else z.data_ptr() for z in both])
        biases_layout = tuple([None if z is None else layout_of(z) for z in both])
    key = (
        _OP,
        tuple([layout_of(z) for z in tensors]),
        (addend_layout, scales_layout, biases_layout, combine),
        (x_address % 16, gate % 16, down % 16, y_alignment, added % 16),
        inputs[7:11],
        gate_up is not None,
        driver.max_sms,
    )
    prepared = driver.prepared().get(key)
    if prepared is None:
        _allocate(inputs)  # raises if the arguments are wrong
        prepared = driver.keep(key, _prepare(inputs, y_alignment, gate_up is not None, combine))
    if y is None:
        y = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    if prepared.launches is None:
        _launch_parts(prepared.num_parts, inputs, y, gate_up)
        return y
    if prepared.fits:
        up, up_scales = gate + prepared.up, gate_scales + prepared.up_scales
        weights: tuple[int, ...] = (gate, gate_scales, up, up_scales, *addresses[5:])
    else:
        copies = fitting_weights(split_weights(inputs[3:7]))
        weights = tuple([z.data_ptr() for z in copies])
    saved = 0 if gate_up is None else gate_up.data_ptr()
    others = y.data_ptr(), added, saved, scales, word
    prepared.launches(x.get_device(), (*addresses[:3], *weights, *others, *biases))
    return y


def _launch_parts(
    num_parts: int, inputs: ExpertsInputs, y: torch.Tensor, gate_up: torch.Tensor | None
) -> None:
    """Launch part by part, or at once with contiguous copies of hidden states and addend."""
    addend = inputs.addend
    has_biases = inputs.gate_up_proj_bias is not None or inputs.down_proj_bias is not None
    if num_parts == 0 and has_biases and len(y):
        y.copy_(_body(inputs, gate_up))  # H or I is 0, so that biases are all there is
    elif num_parts == 0:
        y.zero_()
        if addend is not None:
            y.add_(addend.detach())
    elif num_parts == 1:
        addend = None if addend is None else addend.contiguous()
        whole = inputs._replace(hidden_states=inputs.hidden_states.contiguous(), addend=addend)
        launch_experts(whole, gate_up, y)
    else:
        tokens = *inputs[:3], addend, inputs.hidden_states_scale_inv, y, gate_up
        for x, ids, scores, added, x_scales, some_y, saved in split(num_parts, len(y), *tokens):
            part = inputs._replace(
                hidden_states=x,
                top_k_index=ids,
                top_k_weights=scores,
                addend=added,
                hidden_states_scale_inv=x_scales,
            )
            launch_experts(part, saved, some_y)


def _prepare(
    inputs: ExpertsInputs, y_alignment: int, saves: bool, combine: Combine | None
) -> _Prepared:
    x, ids, scores, *_ = inputs
    activation, masked, expert_offset, num_global_experts, addend, x_scale_inv = inputs[7:13]
    (num_tokens, top_k), (num_experts, h, i) = ids.shape, inputs.down_proj.shape
    layer = num_tokens, top_k, num_experts, h, i
    sizes = Sizes(*layer, masked, num_global_experts)
    if 0 in layer:
        return _Prepared(0)
    num_parts = num_parts_of(sizes, saves=saves)
    is_copied = (x.stride(1) != 1 and h > 1) or (addend is not None and not addend.is_contiguous())
    if num_parts > 1 or is_copied:
        if combine is not None:
            raise ValueError(f"{_OP}: with a combine, all tokens must be computed in one part")
        return _Prepared(num_parts)
    halves = split_weights(inputs[3:7])
    fitting = fitting_weights(halves)
    device_index = x.get_device()
    r = Record(target_of(device_index), INPUTS)
    describe_experts(
        r,
        sizes,
        Tensor.of(x, "x"),
        Choices(Tensor.of(ids, "ids"), Tensor.of(scores, "scores")),
        weights_layout(fitting, inputs.gate_up_proj_bias, inputs.down_proj_bias),
        results_layout("y", (num_tokens, h), gcd(y_alignment, TMA_BYTES)),
        activation=activation,
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


experts = register_inputs(
    _OP, ExpertsInputs, "Tensor", reference=_body, fake=_allocate, kernels=launch_experts
)
"""`sum_j w_j down(f(gate(x)) * up(x))` over a token's k experts, in the order of its choices.

The output of each expert is rounded to BF16, and the sum is FP32: `ExpertsInputs` -> bf16 [T, H].
On a Hopper GPU, the result of a token does not depend on other tokens, bit for bit. Raises
TypeError, ValueError, naming the argument, the rule and the value."""


# ---- Saving for a backward ----

Saving = tuple[torch.Tensor, torch.Tensor]  # the result, gate_up


def _allocate_saving(inputs: ExpertsInputs) -> Saving:
    return _allocate(inputs), _empty_gate_up(inputs)


def _empty_gate_up(inputs: ExpertsInputs) -> torch.Tensor:
    (num_tokens, top_k), size = inputs.top_k_index.shape, inputs.down_proj.shape[2]
    return empty_gate_up(inputs.down_proj, num_tokens * top_k, size)


def _body_saving(inputs: ExpertsInputs) -> Saving:
    _allocate(inputs)
    gate_up = _empty_gate_up(inputs).zero_()
    return _body(inputs, gate_up), gate_up


def _launch_saving(inputs: ExpertsInputs) -> Saving:
    inputs = inputs._replace(masked=False)
    if (inputs.top_k_index.ndim, inputs.down_proj.ndim) != (2, 3):
        _allocate(inputs)  # this raises
    gate_up = _empty_gate_up(inputs)
    return launch_experts(inputs, gate_up), gate_up


experts_saving = register_inputs(
    "experts_saving",
    ExpertsInputs,
    "(Tensor, Tensor)",
    reference=_body_saving,
    fake=_allocate_saving,
    kernels=_launch_saving,
)
"""`experts`, bit for bit, and for `experts_backward` gate and up of each row before the activation,
rounded to BF16: [T k, 2, I]. Rows are sorted by expert; rows after the last expert's are
undefined."""


# ---- On one GPU of several ----


def runs_as_a_whole(inputs: ExpertsInputs, *, saves: bool) -> bool:
    """Whether a Hopper GPU computes all tokens in one part, as `launch_combining` needs.

    saves: for `experts_saving`.
    """
    (num_tokens, top_k), (e, h, i) = inputs.top_k_index.shape, inputs.down_proj.shape
    sizes = Sizes(num_tokens, top_k, e, h, i, inputs.masked and not saves)
    return num_parts_of(sizes, saves=saves) == 1


def launch_combining(
    inputs: ExpertsInputs, combine: Combine, word: int, y: torch.Tensor, *, saves: bool
) -> torch.Tensor | None:
    """`experts` on a Hopper GPU, where `combine` sums the rows of tokens and sends sums elsewhere.

    word: a number for the kernel of `combine`, which may differ from call to call.
    y: the output argument of `combine`. There is no addend.
    saves: whether to return gate and up as `experts_saving` does; else None.
    """
    gate_up = _empty_gate_up(inputs) if saves else None
    if saves:
        inputs = inputs._replace(masked=False)
    launch_experts(inputs, gate_up, y, combine, word)
    return gate_up


# ---- Autograd ----


# The inputs that have gradients, but the addend.
TRAINED = "hidden_states", "top_k_weights", "gate_up_proj_bias", "down_proj_bias"


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: str, saved_dtype: torch.dtype, keep_transposed: bool | None, *args: Any
    ) -> torch.Tensor:
        inputs = ExpertsInputs(*args)
        needs = dict(zip(ExpertsInputs._fields, ctx.needs_input_grad[3:], strict=True))
        ctx.saves = any(needs[name] for name in needs if name != "addend")
        if not ctx.saves:
            return cast(torch.Tensor, experts(*inputs))
        y, gate_up = experts_saving(*inputs)
        scale_inv = None
        if saved_dtype == E4M3:
            gate_up, scale_inv = quantize_op(gate_up.flatten(0, 1), False)
        bias = inputs.down_proj_bias
        ctx.save_for_backward(*inputs[1:3], gate_up, scale_inv, *inputs[3:7], bias)
        ctx.layer = layer
        ctx.dtypes = {name: x.dtype for name in TRAINED if (x := getattr(inputs, name)) is not None}
        rank = inputs.expert_offset, inputs.num_global_experts
        ctx.options = inputs.activation, keep_transposed, *rank
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs = dict(zip(ExpertsInputs._fields, ctx.needs_input_grad[3:], strict=True))
        gradients = _gradients(ctx, grad, needs) if ctx.saves else {}
        if needs["addend"]:
            gradients["addend"] = grad
        return None, None, None, *(gradients.get(name) for name in ExpertsInputs._fields)


def _gradients(
    ctx: Any, grad: torch.Tensor, needs: dict[str, bool]
) -> dict[str, torch.Tensor | None]:
    """The gradients that are needed, by the names of inputs; the addend's is the caller's.

    Raises NotImplementedError if a gradient of weights or their scales is needed.
    """
    saved = ctx.saved_tensors  # read once: checkpointing unpacks them only once
    ids, scores, gate_up, gate_up_scales, *weights, down_bias = saved
    gradients: dict[str, torch.Tensor | None] = {}
    if any(needs[name] for name in TRAINED):
        down_proj = weights[2]
        grad_biases = empty_bias_gradients(needs, down_proj.device, down_proj.shape)
        tokens = grad, ids, scores, gate_up, gate_up_scales
        biases = down_bias, *grad_biases.values()
        dx, grad_scores = experts_backward(*tokens, *weights, *biases, *ctx.options)
        results = {"hidden_states": dx, "top_k_weights": grad_scores, **grad_biases}
        for name, x in results.items():
            if needs[name] and x is not None:
                gradients[name] = x.to(ctx.dtypes[name])
    frozen = "gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"
    nothing = no_gradients(grad, ctx.layer, [needs[name] for name in frozen], weights)
    return gradients | dict(zip(frozen, nothing, strict=True))


def check_saved_dtype(layer: str, saved_dtype: torch.dtype) -> None:
    if saved_dtype not in (torch.bfloat16, E4M3):
        raise ValueError(
            f"{layer}: saved_dtype must be torch.bfloat16 or torch.float8_e4m3fn, got "
            f"{saved_dtype!r}"
        )


def routed_experts(
    layer: str,
    inputs: ExpertsInputs,
    saved_dtype: torch.dtype = torch.bfloat16,
    keep_transposed: bool | None = None,
) -> torch.Tensor:
    """`experts` -> bf16 [T, H], with gradients in hidden states, top_k_weights, biases and addend.

    layer: the name in the error that a wanted gradient of a weight raises.
    saved_dtype: of gate and up, saved for the backward: bf16, or e4m3 with 1x128 scales.
    keep_transposed: see `transposed`.
    """
    y: torch.Tensor
    scale_inv = inputs.hidden_states_scale_inv
    if scale_inv is not None and records(layer, inputs.hidden_states, scale_inv):
        raise NotImplementedError(
            f"{layer}: codes of hidden states and their scales have no gradient; detach them"
        )
    if records(layer, *inputs):  # else skip the autograd function, as slow as a launch
        check_saved_dtype(layer, saved_dtype)
        y = _Experts.apply(layer, saved_dtype, keep_transposed, *inputs)
    else:
        y = experts(*inputs)
    return y
