"""Calls of every op, of ever-new shapes, strides and addresses; what is kept for them is counted.

T tokens, E experts, H hidden, I intermediate.
"""

import gc
import os
import random
from collections.abc import Callable
from typing import Any

import torch

from moefp8.functional.experts import experts
from moefp8.functional.feed_forward import feed_forward
from moefp8.functional.linear import fp8_linear
from moefp8.kernels import (
    E4M3,
    fp8_gemm_nt,
    jit,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    num_blocks,
    round_up,
)
from moefp8.kernels.common.activation import SWIGLU
from moefp8.kernels.gemm.k_grouped import k_grouped_gemm
from moefp8.quant import quantize_1x128, quantize_128x128
from moefp8.routing import build_plan, sigmoid_group_topk, softmax_topk

_BYTES = 1 << 24
_SIZES = (256, 128), (264, 512), (200, 300)  # sizes of weights; TMA cannot address the last ones
_NUM_EXPERTS = 4


class Mix:
    """`call` makes one of all calls. Tensors are views of one memory: new ones take no time.

    fresh: how many calls have sizes, strides and addresses that were hardly ever seen.
    num_forgotten: how often this thread's prepared launches were.
    """

    def __init__(self, device: str, fresh: float) -> None:
        self.random, self.is_fresh, self.fresh = random.Random(0), False, fresh
        self.num_kept = self.num_forgotten = 0
        # It holds any numbers: what some calls write, others read, at the same time too.
        memory = torch.randint(0, 256, (_BYTES,), dtype=torch.uint8, device=device)
        dtypes = E4M3, torch.bfloat16, torch.float32, torch.int32, torch.int64
        self.memory = {dtype: memory.view(dtype) for dtype in dtypes}
        offsets = [2 * i for i in range(_NUM_EXPERTS + 1)]
        self.bounds = torch.tensor(offsets, dtype=torch.int32, device=device)
        self.calls: list[Callable[[], Any]] = [
            *[self.quantize, self.gemm] * 4,
            *[self.linear, self.top_k] * 3,
            *[self.contiguous, self.masked, self.feed_forward, self.experts, self.plan] * 2,
            self.weight_gradient,
        ]

    def call(self) -> None:
        self.is_fresh = self.random.random() < self.fresh
        self.random.choice(self.calls)()
        before, self.num_kept = self.num_kept, len(jit.current_driver().prepared())
        self.num_forgotten += self.num_kept < before

    def fill(self) -> None:
        """Call until all that is kept was forgotten once: host memory grows until then."""
        fresh, self.fresh = self.fresh, 1.0
        for _ in range(100 * jit.current_driver().max_prepared):
            self.call()
            if self.num_forgotten:
                self.fresh = fresh
                return
        raise AssertionError(f"{self.num_kept} are kept")

    def view(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A tensor whose rows may lie apart, anywhere at a multiple of 256 bytes."""
        *outer, rows, columns = shape
        unit = 16 // dtype.itemsize
        pitch, start = round_up(columns, unit), 0
        if self.is_fresh:
            pitch += self.random.randrange(24) * unit
            start = self.random.randrange(1 << 12) * 256 // dtype.itemsize
        strides = [rows * pitch] * len(outer) + [pitch, 1]
        return self.memory[dtype].as_strided(shape, strides, start)

    def scales(self, *shape: int) -> torch.Tensor:
        """Scales of activations, with the rows innermost."""
        *outer, rows, blocks = shape
        return self.view(torch.float32, *outer, blocks, rows).mT

    def weight(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        *outer, n, k = shape
        scales = self.view(torch.float32, *outer, num_blocks(n), num_blocks(k))
        return self.view(E4M3, *shape), scales

    def number(self, least: int, end: int) -> int:
        """A number below `end`: any in a fresh call, else one of five."""
        if self.is_fresh:
            return self.random.randrange(least, end)
        return least + (end - 1 - least) * self.random.randrange(5) // 4

    def num_tokens(self) -> int:
        return self.number(1, 100)

    def quantize(self) -> Any:
        shape = self.num_tokens(), self.number(1, 600)
        op = self.random.choice((quantize_1x128, quantize_128x128))
        return op(self.view(torch.bfloat16, *shape))

    def gemm(self) -> None:
        m, (n, k) = self.num_tokens(), self.random.choice(_SIZES)
        a = self.view(E4M3, m, k), self.scales(m, num_blocks(k))
        fp8_gemm_nt(a, self.weight(n, k), self.view(torch.bfloat16, m, n))

    def contiguous(self) -> None:
        m, (n, k) = self.num_tokens(), self.random.choice(_SIZES)
        a = self.view(E4M3, m, k), self.scales(m, num_blocks(k))
        b, d = self.weight(_NUM_EXPERTS, n, k), self.view(torch.bfloat16, m, n)
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=self.bounds)

    def masked(self) -> None:
        m, (n, k) = self.num_tokens() + 8, self.random.choice(_SIZES)
        a = self.view(E4M3, _NUM_EXPERTS, m, k), self.scales(_NUM_EXPERTS, m, num_blocks(k))
        b, d = self.weight(_NUM_EXPERTS, n, k), self.view(torch.bfloat16, _NUM_EXPERTS, m, n)
        m_grouped_fp8_gemm_nt_masked(a, b, d, self.bounds[1:], 4)

    def weight_gradient(self) -> None:
        num_blocks, sides = self.number(_NUM_EXPERTS, 9), []
        m, n = self.random.choice(_SIZES)
        for features in (m, n):
            sides.append(self.view(E4M3, num_blocks, features, 128))
            sides.append(self.view(torch.float32, num_blocks, features))
        d = self.view(torch.float32, _NUM_EXPERTS, m, n)
        k_grouped_gemm(*sides, d, self.bounds, 0, self.random.random() < 0.5)

    def linear(self) -> torch.Tensor:
        n, k = self.random.choice(_SIZES)
        x = self.view(torch.bfloat16, self.num_tokens(), k)
        return fp8_linear(x, *self.weight(n, k), None)

    def feed_forward(self) -> torch.Tensor:
        h, i = self.random.choice(_SIZES)
        gate, up, down = self.weight(i, h), self.weight(i, h), self.weight(h, i)
        x = self.view(torch.bfloat16, self.num_tokens(), h)
        return feed_forward(x, *gate, *up, *down, SWIGLU)

    def experts(self) -> torch.Tensor:
        h, i = self.random.choice(_SIZES)
        gate_up = self.view(E4M3, _NUM_EXPERTS, 2 * i, h)
        scales = self.view(torch.float32, _NUM_EXPERTS, 2 * num_blocks(i), num_blocks(h))
        down, num_tokens = self.weight(_NUM_EXPERTS, h, i), self.num_tokens()
        x = self.view(torch.bfloat16, num_tokens, h)
        ids = self.view(torch.int64, num_tokens, 2)
        weights = self.view(torch.float32, num_tokens, 2)
        masked = self.random.random() < 0.3
        return experts(x, ids, weights, gate_up, scales, *down, SWIGLU, masked)

    def plan(self) -> Any:
        ids = self.view(torch.int64, self.num_tokens(), self.number(1, 9))
        return build_plan(ids, self.number(1, 300))

    def top_k(self) -> Any:
        logits = self.view(torch.float32, self.num_tokens(), self.number(8, 300))
        if self.random.random() < 0.5:
            return softmax_topk(logits, self.number(1, 9), True)
        return sigmoid_group_topk(logits, None, 8, 1, 1, True, 2.5)


def resident_bytes() -> int:
    """How much host memory is used, once nothing is left that only waits to be collected."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
