"""The GEMM of a gradient in weights: it sums over tokens, for each expert over its own.

M and N features, E experts, B blocks of 128 tokens. Both operands have a scale for 128 tokens of a
feature ("1D1D"), in the layouts of `quant.columns`.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from ..common.blocks import BLOCK, E4M3, TMA_BYTES, ceil_div, e4m3_to_float
from ..common.checks import check_same_device, check_shape, check_tensor
from ..common.prepared import layout_of, prepared
from ..common.tma_operands import fits, fitting
from ..jit import Launch
from ..program import Codes, Place, Record, Tensor, prepare_launch
from ..registry import Written, register_inputs
from ..targets import target_of
from .operands import check_sizes
from .sms import busy_sms

_OP = "k_grouped_gemm"


class KGroupedInputs(NamedTuple):
    """The arguments of `k_grouped_gemm`.

    a: e4m3 [B, M, 128], b: e4m3 [B, N, 128]: the codes of 128 tokens of a feature are neighbours;
        other strides may be any.
    a_scale_inv: fp32 [B, M]. b_scale_inv: fp32 [B, N], or [B, ceil(N/128)]: one for each block of
        128 tokens and 128 features.
    d: [E, M, N] bf16 or fp32, or [M, N] without expert_offsets; rows are contiguous.
    expert_offsets: int32 [E + 1]: expert e has the tokens from expert_offsets[e] to the next one,
        in blocks from expert_offsets[e] / 128 + e on. None: one expert has num_tokens in all
        blocks. Values are checked on the CPU only: on a GPU that would cost a synchronisation.
    num_tokens: at most 128 B; ignored with expert_offsets.
    accumulates: whether the product is added to what d holds, which is fp32 then.
    """

    a: torch.Tensor
    a_scale_inv: torch.Tensor
    b: torch.Tensor
    b_scale_inv: torch.Tensor
    d: Written
    expert_offsets: torch.Tensor | None
    num_tokens: int
    accumulates: bool = False


def has_blocks_b(b: torch.Tensor, b_scale_inv: torch.Tensor) -> bool:
    """Whether b has a scale for each 128 features; with one feature, both kinds are the same."""
    return b_scale_inv.shape[-1] == ceil_div(b.shape[1], BLOCK) != b.shape[1]


def check_k_grouped(inputs: KGroupedInputs) -> None:
    """Check all but the values of expert_offsets. Also the fake body."""
    a, a_scale_inv, b, b_scale_inv, d, expert_offsets, num_tokens, accumulates = inputs
    tensors = {"a": a, "a_scale_inv": a_scale_inv, "b": b, "b_scale_inv": b_scale_inv, "d": d}
    check_same_device(_OP, **tensors, expert_offsets=expert_offsets)
    for name, x in (("a", a), ("b", b)):
        check_tensor(_OP, name, x, (E4M3,), 3)
        if x.shape[2] != BLOCK or (x.numel() and x.stride(2) != 1):
            raise ValueError(
                f"{_OP}: {name} must be [B, features, 128] with 128 codes side by side, got shape "
                f"{list(x.shape)} with strides {list(x.stride())}"
            )
    (num_blocks, m, _), n = a.shape, b.shape[1]
    check_shape(_OP, "b", b, [num_blocks, n, BLOCK], "[B, N, 128] for a [B, M, 128]")
    num_b_scales = ceil_div(n, BLOCK) if has_blocks_b(b, b_scale_inv) else n
    for name, x, size in (
        ("a_scale_inv", a_scale_inv, m),
        ("b_scale_inv", b_scale_inv, num_b_scales),
    ):
        check_tensor(_OP, name, x, (torch.float32,), 2)
        check_shape(_OP, name, x, [num_blocks, size], "[B, features]")
    check_tensor(_OP, "d", d, (torch.float32,) if accumulates else (torch.bfloat16, torch.float32))
    if expert_offsets is None:
        check_shape(_OP, "d", d, [m, n], "[M, N]")
        if num_tokens < 0:
            raise ValueError(f"{_OP}: num_tokens must be at least 0, got {num_tokens}")
        if num_blocks != ceil_div(num_tokens, BLOCK):
            raise ValueError(
                f"{_OP}: a must have ceil(num_tokens / 128) blocks for num_tokens = {num_tokens}, "
                f"got {num_blocks}"
            )
    else:
        check_tensor(_OP, "expert_offsets", expert_offsets, (torch.int32,), 1)
        check_shape(_OP, "d", d, [len(expert_offsets) - 1, m, n], "[E, M, N]")
    if d.numel() and d.shape[-1] > 1 and d.stride(-1) != 1:
        raise ValueError(f"{_OP}: rows of d must be contiguous, got strides {list(d.stride())}")


def _check_offsets(offsets: list[int], num_blocks: int) -> None:
    ends = [
        begin // BLOCK + expert + ceil_div(end - begin, BLOCK)
        for expert, (begin, end) in enumerate(pairwise(offsets))
        if end > begin
    ]
    if offsets != sorted(offsets) or offsets[0] < 0 or max(ends, default=0) > num_blocks:
        raise ValueError(
            f"{_OP}: expert_offsets must rise from 0 or more, and lead to tokens in the "
            f"{num_blocks} blocks of a, got {offsets}"
        )


def _body(inputs: KGroupedInputs) -> None:
    check_k_grouped(inputs)
    a, a_scale_inv, b, b_scale_inv, d, expert_offsets, num_tokens, accumulates = inputs
    offsets = [0, num_tokens]
    if expert_offsets is not None:
        offsets = expert_offsets.tolist()
        _check_offsets(offsets, len(a))
    if has_blocks_b(b, b_scale_inv):
        b_scale_inv = b_scale_inv.repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    for expert, expert_d in enumerate(d[None] if expert_offsets is None else d):
        begin, end = offsets[expert : expert + 2]
        first = begin // BLOCK + expert
        result = torch.zeros(expert_d.shape, dtype=torch.float32, device=d.device)
        for i in range(ceil_div(end - begin, BLOCK)):
            block, count = first + i, min(end - begin - i * BLOCK, BLOCK)
            products = e4m3_to_float(a[block, :, :count].contiguous()) @ (
                e4m3_to_float(b[block, :, :count].contiguous()).T
            )
            result.addcmul_(products, a_scale_inv[block, :, None] * b_scale_inv[block])
        expert_d.copy_(expert_d + result if accumulates else result)


_INPUTS = "a", "a_scales", "b", "b_scales", "d"


def launch_k_grouped(inputs: KGroupedInputs) -> None:
    """`k_grouped_gemm` by a kernel of ours: one on the current stream; nothing waits for it.

    Operands that TMA cannot address are copied first.
    """
    operands, d = inputs[:4], inputs.d
    if not all(x.ndim > 1 and fits(x) for x in operands):
        check_k_grouped(inputs)
        a, a_scale_inv, b, b_scale_inv = map(fitting, operands)
        inputs = KGroupedInputs(a, a_scale_inv, b, b_scale_inv, *inputs[4:])
    tensors, num_tokens = [*inputs[:5]], inputs.num_tokens
    if inputs.expert_offsets is not None:
        tensors.append(inputs.expert_offsets.contiguous())
        num_tokens = 0
    accumulates, sms = inputs.accumulates, busy_sms(d.get_device())
    alignment = d.data_ptr() % TMA_BYTES  # of the others it does not matter, or is known
    key = (_OP, *map(layout_of, tensors), num_tokens, accumulates, alignment, sms)

    def prepare() -> Launch | None:
        check_k_grouped(inputs)
        check_sizes(_OP, d.shape[-2], d.shape[-1], BLOCK * len(inputs.a))
        return _prepare(inputs) if d.numel() and inputs.a.numel() else None

    launch = prepared(key, prepare)
    if launch is not None:
        launch.on(d.get_device(), tuple([x.data_ptr() for x in tensors]))
    elif not accumulates:
        d.zero_()


def _prepare(inputs: KGroupedInputs) -> Launch:
    is_grouped, device_index = inputs.expert_offsets is not None, inputs.d.get_device()
    d = inputs.d if is_grouped else inputs.d[None]
    others = ("expert_offsets",) if is_grouped else ()
    r = Record(target_of(device_index), (*_INPUTS, *others))
    r.target.gemms.k_grouped(
        r,
        Codes.of(inputs.a, inputs.a_scale_inv, "a"),
        Codes.of(inputs.b, inputs.b_scale_inv, "b"),
        Tensor.of(d, "d"),
        BLOCK * len(inputs.a) if is_grouped else inputs.num_tokens,
        accumulates=inputs.accumulates,
        expert_offsets=Place("expert_offsets") if is_grouped else None,
    )
    return prepare_launch(r, device_index)


k_grouped_gemm = register_inputs(
    _OP, KGroupedInputs, "()", reference=_body, fake=check_k_grouped, kernels=launch_k_grouped
)
"""Write `d[e] = sum over tokens t of e of dequantize(a)[:, t] dequantize(b)[:, t]^T`, or add it.

Each 128 tokens are summed by tensor cores, then promoted to FP32 with the product of both scales.
An expert without tokens gets zeros. The sum has one order: the same operands give the same bits."""
