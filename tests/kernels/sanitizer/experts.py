"""Experts, feed-forward and SwiGLU, forward and backward."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from moefp8.functional.activation import empty_gate_up
from moefp8.functional.activation_rows import (
    activation_rows,
    activation_rows_backward,
    activation_rows_grad,
)
from moefp8.functional.experts import experts, experts_saving
from moefp8.functional.experts_backward import experts_backward
from moefp8.functional.feed_forward import feed_forward_saving
from moefp8.functional.feed_forward_backward import feed_forward_backward
from moefp8.kernels import num_blocks, set_num_sms
from moefp8.kernels.common.activation import KINDS, SWIGLU, Activation
from moefp8.quant.quantize import launch_quantize_1x128
from moefp8.routing import build_plan
from tests.functional.activation import cases as activation_cases
from tests.functional.cases import EXPERTS_FAMILIES
from tests.functional.experts import bias_cases
from tests.functional.training import activation_columns_cases
from tests.kernels.gemm.cases import choosing
from tests.kernels.sanitizer.judge import SILU, Launch, num_far, ones, tell

LIMITED = Activation(limit=100.0)


def launches() -> Iterator[Launch]:
    yield from families()
    yield from of_several_sizes()
    yield from with_biases()
    for num_tokens, h, i in ((3, 264, 400), (140, 100, 36), (300, 136, 144)):
        yield partial(run_feed_forward, num_tokens, h, i)
    for name, fp8, kind in product(activation_cases.CASES, (False, True), KINDS):
        yield partial(run_activation_backward, name, fp8, Activation(kind))
    flags = (False, True), (False, True)
    for name, fp8, blocks, kind in product(activation_columns_cases.CASES, *flags, KINDS):
        yield partial(run_activation_columns, name, fp8, blocks, Activation(kind))
    for num_rows, size in ((3, 8), (5, 100), (2, 2176), (1, 1)):
        yield partial(run_activation, num_rows, size)


def families() -> Iterator[Launch]:
    for name, (gate_up, down) in EXPERTS_FAMILIES.items():
        # On one SM one cluster takes all tiles; it asks for the next one on its way along K.
        long = (77, 1664, 144, 1) if gate_up else (77, 200, 1152, 1)
        shapes = [(5, 200, 144, None), (77, 264, 400, 1), long]
        if (gate_up or down).tail:
            shapes.append((230, 264, 400, None))  # 138 of each expert
        with choosing(down, gate_up):
            for *sizes, limit in shapes:
                told = f"experts, {name}, {sizes[0]} tokens"
                for masked in (False, True):
                    yield partial(run_experts, told, *sizes, masked=masked, limit=limit)
                if gate_up:
                    yield partial(run_experts_backward, told, *sizes, limit=limit)


def of_several_sizes() -> Iterator[Launch]:
    yield partial(run_experts, "experts, few choices", 3, 264, 400)
    yield partial(run_experts, "experts, counted", 2731, 136, 144)
    rank = {"first": 2, "num_global": 9}
    for num_tokens, masked in product((77, 2731), (False, True)):
        name = f"experts of a rank, {num_tokens} tokens"
        yield partial(run_experts, name, num_tokens, 136, 144, masked=masked, **rank)
    for num_tokens, h, i, limit in (
        (3, 264, 400, None),
        (2731, 100, 36, None),
        (300, 1664, 144, 1),
    ):
        name = f"experts, {num_tokens} tokens"
        yield partial(run_experts_backward, name, num_tokens, h, i, fp8=True, limit=limit)
    yield partial(run_experts_backward, "experts of a rank", 77, 136, 144, **rank)
    for num_tokens, h in ((3, 256), (77, 136), (2731, 144)):
        name = f"experts, {num_tokens} tokens as codes"
        for masked in (False, True):
            yield partial(run_experts, name, num_tokens, h, 144, masked=masked, codes=True, **rank)
        yield partial(run_experts_backward, name, num_tokens, h, 144, codes=True, **rank)


def with_biases() -> Iterator[Launch]:
    for gate_up, down in EXPERTS_FAMILIES.values():
        with choosing(down, gate_up):
            yield partial(run_biases, "frozen", (77, 2, 3, 264, 200), torch.bfloat16)
    # With "trained, bf16", PyTorch's own grouped GEMM would be judged, too.
    for form, dtype in product(("frozen", "trained"), (torch.bfloat16, torch.float32)):
        for sizes in ((3, 2, 3, 264, 400), (140, 2, 150, 100, 36), (300, 3, 2, 129, 144)):
            yield partial(run_biases, form, sizes, dtype)


def run_biases(form: str, sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    layer = bias_cases.layer_of(*sizes[2:], dtype=dtype, device="cuda", **bias_cases.FORMS[form])
    call = bias_cases.call_of(sizes, device="cuda")
    found = bias_cases.results_of(layer, call)
    bias_cases.assert_near(found, bias_cases.reference_of(layer, call), call, 0.12)
    tell(f"experts with biases, {form}, {sizes[0]} tokens", 0)


def run_experts(
    name: str,
    num_tokens: int,
    h: int,
    i: int,
    masked: bool = False,
    first: int = 0,
    num_global: int = 4,
    limit: int | None = None,
    codes: bool = False,
) -> None:
    """Gate and up are 1, so every choice that is held here gives its top_k_weight times silu(1).

    The addend is 1 where H is 264; else there is none. limit: how many SMs may be used.
    codes: whether tokens come as codes.
    """
    x, ids, is_here = tokens_of_ones(num_tokens, h, first, num_global)
    adds = h == 264
    options = LIMITED, masked, first, num_global, x if adds else None
    if codes:
        x, scale_inv = codes_of_ones(num_tokens, h)
        options = *options, scale_inv
    top_k_weights = torch.ones(num_tokens, 3, device="cuda")
    set_num_sms(limit)
    y = experts(x, ids, top_k_weights, *weights_of_ones(h, i), *options)
    set_num_sms(None)
    expected = SILU * is_here.sum(1, keepdim=True) + adds
    tell(f"{name}{', masked' if masked else ''}", num_far(y, expected))


def run_experts_backward(
    name: str,
    num_tokens: int,
    h: int,
    i: int,
    fp8: bool = False,
    first: int = 0,
    num_global: int = 4,
    limit: int | None = None,
    codes: bool = False,
) -> None:
    """The gradient of the result is 1 as well; so that of `a` is H / I, and weights are 1 / H."""
    x, ids, is_here = tokens_of_ones(num_tokens, h, first, num_global)
    weights, scales = weights_of_ones(h, i), None
    top_k_weights = torch.ones(num_tokens, 3, device="cuda")
    rank, scale_inv = (first, num_global), None
    if codes:
        x, scale_inv = codes_of_ones(num_tokens, h)
    set_num_sms(limit)
    options = LIMITED, False, *rank
    y, gate_up = experts_saving(x, ids, top_k_weights, *weights, *options, None, scale_inv)
    num_rows = int(is_here.sum())
    num_choices, row = is_here.sum(1, keepdim=True), gate_up[:num_rows].flatten(0, 1)
    wrong = num_far(y, SILU * num_choices) + num_far(row, torch.ones(()))
    if fp8:
        gate_up, scales = launch_quantize_1x128(gate_up.flatten(0, 1), False)
    args = gate_up, scales, *weights, None, None, None, *options, scale_inv
    found = experts_backward(x, ids, top_k_weights, *args)
    set_num_sms(None)
    slope = SILU + SILU * (1 - SILU)
    wrong += num_far(found[0], (slope + SILU) * num_choices)
    wrong += num_far(found[1] / h, SILU * is_here)
    tell(f"{name}, backward{', FP8' if fp8 else ''}", wrong)


def run_feed_forward(num_tokens: int, h: int, i: int) -> None:
    """As `run_experts_backward`, of an expert that all tokens take."""
    gate_up, gate_up_scales, down, down_scales = (x[0] for x in weights_of_ones(h, i))
    halves = gate_up.view(2, i, h), gate_up_scales.view(2, -1, gate_up_scales.shape[1])
    weights = *(x[half] for half in (0, 1) for x in halves), down, down_scales
    x = torch.ones(num_tokens, h, dtype=torch.bfloat16, device="cuda")
    y, saved = feed_forward_saving(x, *weights, LIMITED)
    dx = feed_forward_backward(x, saved, *weights, LIMITED, False)
    slope = SILU + SILU * (1 - SILU)
    wrong = num_far(y, torch.tensor(SILU)) + num_far(dx, torch.tensor(slope + SILU))
    tell(f"feed-forward, {num_tokens} tokens", wrong)


def run_activation(num_rows: int, size: int) -> None:
    """Rows end anywhere; gate and up are 1."""
    gate_up = empty_gate_up(torch.empty(0, device="cuda"), num_rows, size).fill_(1)
    wrong = num_far(activation_rows(gate_up, SWIGLU), torch.tensor(SILU))
    ids = torch.arange(num_rows, device="cuda")[:, None] % 4
    plan, weights = build_plan(ids, 4), torch.ones(num_rows, 1, device="cuda")
    grad = activation_rows(gate_up, SWIGLU)  # it lies as kernels want it
    found = activation_rows_backward(grad.fill_(1), gate_up, plan.token_to_row, weights, SWIGLU)
    slope = torch.tensor([SILU + SILU * (1 - SILU), SILU])[:, None]
    wrong += num_far(found[2], slope) + num_far(found[4] / size, torch.tensor(SILU))
    wrong += num_far(activation_rows_grad(grad, gate_up, SWIGLU), slope)
    tell(f"SwiGLU of {num_rows} rows of {size}", wrong)


def run_activation_backward(name: str, fp8: bool, activation: Activation) -> None:
    made = activation_cases.make(name, torch.float32, fp8, activation, "cuda")
    activation_cases.check(made, activation_cases.run(made))
    print(f"gradient of {activation.kind}, {name}{', FP8' if fp8 else ''}", flush=True)


def run_activation_columns(name: str, fp8: bool, blocks: bool, activation: Activation) -> None:
    case = activation_columns_cases.CASES[name]
    made = activation_columns_cases.make(
        case, torch.float32, fp8, activation, "cuda", blocks=blocks
    )
    activation_columns_cases.check(made, activation_columns_cases.run(made))
    told = f"{', FP8' if fp8 else ''}{', blocks' if blocks else ''}"
    print(f"gradient of {activation.kind} in columns, {name}{told}", flush=True)


def tokens_of_ones(
    num_tokens: int, h: int, first: int, num_global: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, three choices each, and which are held by the rank of four experts (on the CPU)."""
    x = torch.ones(num_tokens, h, dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(num_tokens * 3).view(num_tokens, 3) % (num_global + 1)
    return x, ids.cuda(), (ids >= first) & (ids < first + 4)


def codes_of_ones(num_tokens: int, h: int) -> tuple[torch.Tensor, torch.Tensor]:
    return ones(num_tokens, h), torch.ones(num_tokens, num_blocks(h), device="cuda")


def weights_of_ones(h: int, i: int) -> tuple[torch.Tensor, ...]:
    """Four experts, which give ones where gate and up, or activated values, are of ones."""
    blocks_h, blocks_i = num_blocks(h), num_blocks(i)
    gate_up_scales = torch.full((4, 2 * blocks_i, blocks_h), 1 / h, device="cuda")
    down_scales = torch.full((4, blocks_h, blocks_i), 1 / i, device="cuda")
    return ones(4, 2 * i, h), gate_up_scales, ones(4, h, i), down_scales
