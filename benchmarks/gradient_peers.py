"""Whose gradients are timed beside each other. T tokens, k choices each, E experts, S = T k rows.

Experts of peers are PyTorch's operations as in transformers 5.24: `grouped_mm` of rows that are
sorted by expert. `DEQUANTIZING` is its path for FP8 weights, in our words, since its kernels are
downloads: FP8 forward, here by our GEMM, and a backward that makes BF16 of the weights, 1 GiB at a
time. `BF16` has BF16 weights. Neither masks rows, nor are scores FP32 between them.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gradient_cases import AdaptedStep, ExpertsStep, LinearStep, adapters_of
from benchmarks.gradient_gemms import FORWARD, Codes, GemmPair
from benchmarks.gradient_swiglu import SwigluOfExperts
from benchmarks.moe_peers import Experts
from benchmarks.peers import BF16, OURS, Call, Peer
from moefp8 import FP8Linear, GroupedExperts
from moefp8.adapters import LoRA
from moefp8.kernels import BLOCK, E4M3, m_grouped_fp8_gemm_nt_contiguous
from moefp8.quant import quantize_1x128

DEQUANTIZING, COPY = "hf_dequantizing", "copy"
FROZEN, ANEW, SAVED_FP8, LEAST = "moefp8_frozen", "moefp8_anew", "moefp8_e4m3", "moefp8_least"
BYTES_AT_ONCE = 1 << 30  # of BF16 weights that a backward makes, as transformers does
# Bytes that each holds for a weight, scales left out: codes, and with W^T kept twice as many.
WEIGHT_BYTES = {OURS: 2, FROZEN: 2, ANEW: 1, SAVED_FP8: 2, LEAST: 1, DEQUANTIZING: 1, BF16: 2}

GroupedMatmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # rows, ends -> rows


# ---- Experts ----


def _ours(keeps: bool, saved_dtype: torch.dtype) -> Callable[[ExpertsStep], Call]:
    def prepare(step: ExpertsStep) -> Call:
        experts = copy.copy(step.case.experts)  # with the same weights
        experts.keep_transposed, experts.saved_dtype = keeps, saved_dtype
        return step.call(experts)

    return prepare


def sorted_by_expert(index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices [T * k] in the order of their experts, and int32 [E], where those of each end."""
    expert_of_row, order = index.flatten().sort()
    experts = torch.arange(num_experts, device=index.device)
    return order, torch.searchsorted(expert_of_row, experts, right=True, out_int32=True)


def sorted_experts(num_experts: int, gate_up: GroupedMatmul, down: GroupedMatmul) -> Experts:
    """Experts of rows that are sorted by expert; `ends` [E] says where those of each end."""

    def run(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        num_tokens, top_k = index.shape
        order, ends = sorted_by_expert(index, num_experts)
        gate, up = gate_up(x[order // top_k], ends).chunk(2, dim=-1)
        rows = down(F.silu(gate) * up, ends)
        rows = rows * weights.flatten()[order].to(rows.dtype)[:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        return rows[back].view(num_tokens, top_k, -1).sum(dim=1)

    return run


def bf16_experts(experts: GroupedExperts) -> Experts:
    gate_up, down = experts.dequantize()

    def times(weight: torch.Tensor) -> GroupedMatmul:
        return lambda rows, ends: F.grouped_mm(rows, weight.mT, offs=ends)

    return sorted_experts(experts.num_experts, times(gate_up), times(down))


def dequantizing_experts(experts: GroupedExperts) -> Experts:
    def times(*weight: torch.Tensor) -> GroupedMatmul:
        return lambda rows, ends: _Dequantizing.apply(rows, *weight, ends)

    gate_up = experts.gate_up_proj, experts.gate_up_proj_scale_inv
    down = experts.down_proj, experts.down_proj_scale_inv
    return sorted_experts(experts.num_experts, times(*gate_up), times(*down))


class _Dequantizing(torch.autograd.Function):
    """rows bf16 [S, K] by W e4m3 [E, N, K]; `ends` int32 [E]. N and K are multiples of 128."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        scale_inv: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale_inv, ends)
        result, offsets = rows.new_empty(len(rows), weight.shape[1]), F.pad(ends, (1, 0))
        multiply = m_grouped_fp8_gemm_nt_contiguous
        multiply(quantize_1x128(rows), (weight, scale_inv), result, expert_offsets=offsets)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, scale_inv, ends = ctx.saved_tensors
        at_once = experts_at_once(weight)
        if at_once >= len(weight):
            of_rows = F.grouped_mm(grad, dequantized(weight, scale_inv), offs=ends)
            return of_rows, None, None, None
        of_rows = grad.new_zeros(len(grad), weight.shape[2])
        last_rows = ends.tolist()  # here the host waits
        for first in range(0, len(weight), at_once):
            some = slice(first, first + at_once)
            begin, end = last_rows[first - 1] if first else 0, last_rows[some][-1]
            if begin < end:
                values = dequantized(weight[some], scale_inv[some])
                product = F.grouped_mm(grad[begin:end], values, offs=ends[some] - begin)
                of_rows[begin:end] = product
                del values  # before the next ones are made
        return of_rows, None, None, None


def experts_at_once(weight: torch.Tensor) -> int:
    """How many experts of e4m3 [E, N, K] a backward makes BF16 of at a time."""
    return max(1, BYTES_AT_ONCE // (2 * weight[0].numel()))


def makes_host_wait(name: str, step: ExpertsStep) -> bool:
    """Whether the host has to know how many rows experts have: no CUDA graph can be made of it."""
    weights = step.case.experts.gate_up_proj, step.case.experts.down_proj
    return name == DEQUANTIZING and any(experts_at_once(x) < len(x) for x in weights)


def dequantized(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """bf16 [E, N, K] in BF16 arithmetic: scales are repeated for rows, and broadcast along K."""
    scales = scale_inv.bfloat16().repeat_interleave(BLOCK, dim=-2)
    values = codes.bfloat16()
    values.unflatten(-1, (-1, BLOCK)).mul_(scales[..., None])
    return values


EXPERTS = {
    OURS: Peer("moefp8", "block_scaled", _ours(True, torch.bfloat16)),
    ANEW: Peer("moefp8, W^T made anew", "block_scaled", _ours(False, torch.bfloat16)),
    SAVED_FP8: Peer("moefp8, saved in E4M3", "block_scaled", _ours(True, E4M3)),
    LEAST: Peer("moefp8, both", "block_scaled", _ours(False, E4M3)),
    DEQUANTIZING: Peer(
        "transformers, dequantizing",
        "block_scaled",
        lambda step: step.call(dequantizing_experts(step.case.experts)),
    ),
    BF16: Peer(
        "BF16, grouped_mm",
        "bf16",
        lambda step: step.call(bf16_experts(step.case.experts)),
    ),
}


def bf16_adapted_experts(step: AdaptedStep) -> Experts:
    """Adapters are grouped products beside those of the weights, as in moefp8."""

    def times(weight: torch.Tensor, lora: LoRA) -> GroupedMatmul:
        def run(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            y = F.grouped_mm(rows, weight.mT, offs=ends)
            u = lora.scaling * F.grouped_mm(rows, lora.A.to(rows.dtype).mT, offs=ends)
            return y + F.grouped_mm(u, lora.B.to(rows.dtype).mT, offs=ends)

        return run

    both = zip(step.case.experts.dequantize(), adapters_of(step.adapted), strict=True)
    gate_up, down = (times(weight, lora) for weight, lora in both)
    return sorted_experts(step.adapted.num_experts, gate_up, down)


def _without_adapters(step: AdaptedStep) -> Call:
    return _ours(True, torch.bfloat16)(ExpertsStep(step.case, step.grad))


ADAPTED = {
    OURS: Peer("moefp8", "block_scaled", lambda step: step.call(step.adapted)),
    FROZEN: Peer("moefp8 without adapters", "block_scaled", _without_adapters),
    BF16: Peer("BF16, grouped_mm", "bf16", lambda step: step.call(bf16_adapted_experts(step))),
}


# ---- Linears, GEMMs, transpositions ----


def _linear(keeps: bool) -> Callable[[LinearStep], Call]:
    def prepare(step: LinearStep) -> Call:
        linear: FP8Linear = copy.copy(step.linear)
        linear.keep_transposed = keeps
        return step.call(linear)

    return prepare


def _bf16_linear(step: LinearStep) -> Call:
    weight = step.linear.dequantize()
    return step.call(lambda x: F.linear(x, weight))


def _gemm(name: str) -> Callable[[GemmPair], Call]:
    return lambda pair: pair.call(name)


def _transpose(codes: Codes) -> Call:
    return codes.transpose


def _copy(codes: Codes) -> Call:
    return codes.copy


def _swiglu(operands: SwigluOfExperts) -> Call:
    return operands.differentiate


def _copy_of_swiglu(operands: SwigluOfExperts) -> Call:
    return operands.copy


LINEARS = {
    OURS: Peer("moefp8", "block_scaled", _linear(keeps=True)),
    ANEW: Peer("moefp8, W^T made anew", "block_scaled", _linear(keeps=False)),
    BF16: Peer("torch BF16", "bf16", _bf16_linear),
}
GEMMS = {
    OURS: Peer("dX", "block_scaled", _gemm(OURS)),
    FORWARD: Peer("forward", "block_scaled", _gemm(FORWARD)),
}
TRANSPOSITIONS = {
    OURS: Peer("moefp8", "codes", _transpose),
    COPY: Peer("a copy", "codes", _copy),
}
SWIGLUS = {
    OURS: Peer("moefp8", "codes", _swiglu),
    COPY: Peer("a copy", "codes", _copy_of_swiglu),
}
