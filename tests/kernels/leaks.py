"""Calls of every op, of ever-new shapes, strides and addresses; what is kept for them is counted.

T tokens, E experts, H hidden, I intermediate.
"""

import gc
import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from moefp8.functional import experts, experts_launch, feed_forward, linear
from moefp8.kernels import E4M3, num_blocks, round_up
from moefp8.kernels.gemm import dense as gemm
from moefp8.kernels.gemm import dense_launch as gemm_launch
from moefp8.kernels.gemm import grouped as grouped_gemm
from moefp8.kernels.gemm import grouped_launch
from moefp8.quant import quantize, quantize_launch
from moefp8.routing import plan_op as routing_plan
from moefp8.routing import top_k_launch
from moefp8.routing import top_k_op as top_k

# By which names the ops and their launchers are called; both take the same arguments.
OPS = SimpleNamespace(
    quantize=quantize.quantize_1x128,
    quantize_weights=quantize.quantize_128x128,
    gemm=gemm._fp8_gemm_nt,
    contiguous=grouped_gemm._contiguous_op,
    masked=grouped_gemm._masked_op,
    linear=linear.fp8_linear,
    feed_forward=feed_forward.feed_forward,
    experts=experts.experts,
    plan=routing_plan.build_plan,
    softmax=top_k.softmax_topk,
    sigmoid=top_k.sigmoid_group_topk,
)
LAUNCHERS = SimpleNamespace(
    quantize=quantize.launch_quantize_1x128,
    quantize_weights=quantize.launch_quantize_128x128,
    gemm=gemm.launch_gemm,
    contiguous=grouped_gemm._launch_contiguous,
    masked=grouped_gemm._launch_masked,
    linear=linear.launch_linear,
    feed_forward=feed_forward.launch_feed_forward,
    experts=experts._launch,
    plan=routing_plan.launch_build_plan,
    softmax=top_k.launch_softmax_topk,
    sigmoid=top_k.launch_sigmoid_group_topk,
)

_BYTES = 1 << 24
_SIZES = (256, 128), (264, 512), (200, 300)  # of weights; TMA cannot address the last ones
_NUM_EXPERTS = 4


class Mix:
    """`call` makes one of all calls. Tensors are views of one memory: new ones take no time.

    fresh: how many calls have sizes, strides and addresses that were hardly ever seen.
    """

    def __init__(self, ops: SimpleNamespace, device: str, fresh: float) -> None:
        self.ops, self.random, self.is_fresh, self.fresh = ops, random.Random(0), False, fresh
        # Of any numbers: the results of some calls are what others take, at the same time too.
        memory = torch.randint(0, 256, (_BYTES,), dtype=torch.uint8, device=device)
        dtypes = E4M3, torch.bfloat16, torch.float32, torch.int32, torch.int64
        self.memory = {dtype: memory.view(dtype) for dtype in dtypes}
        offsets = [2 * i for i in range(_NUM_EXPERTS + 1)]
        self.bounds = torch.tensor(offsets, dtype=torch.int32, device=device)
        self.calls: list[Callable[[], Any]] = [
            *[self.quantize, self.gemm] * 4,
            *[self.linear, self.top_k] * 3,
            *[self.contiguous, self.masked, self.feed_forward, self.experts, self.plan] * 2,
        ]

    def call(self) -> None:
        self.is_fresh = self.random.random() < self.fresh
        self.random.choice(self.calls)()

    def fill(self, kept: "list[Kept]", most: int) -> None:
        """Call until all that is kept was forgotten once: host memory grows until then."""
        self.is_fresh = True
        for _ in range(4 * most):
            for call in dict.fromkeys(self.calls):
                call()
            if all(x.num_forgotten for x in kept):
                return
        raise AssertionError(f"more than {most} are kept: {[len(x) for x in kept]}")

    def view(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Its rows may lie apart, anywhere at a multiple of 256 bytes."""
        *outer, rows, columns = shape
        unit = 16 // dtype.itemsize
        pitch, start = round_up(columns, unit), 0
        if self.is_fresh:
            pitch += self.random.randrange(24) * unit
            start = self.random.randrange(1 << 12) * 256 // dtype.itemsize
        strides = [rows * pitch] * len(outer) + [pitch, 1]
        return self.memory[dtype].as_strided(shape, strides, start)

    def scales(self, *shape: int) -> torch.Tensor:
        """Of activations: the rows innermost."""
        *outer, rows, blocks = shape
        return self.view(torch.float32, *outer, blocks, rows).mT

    def weight(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        *outer, n, k = shape
        return (
            self.view(E4M3, *shape),
            self.view(torch.float32, *outer, num_blocks(n), num_blocks(k)),
        )

    def number(self, least: int, end: int) -> int:
        """Below `end`: any in a fresh call, else one of five."""
        if self.is_fresh:
            return self.random.randrange(least, end)
        return least + (end - 1 - least) * self.random.randrange(5) // 4

    def num_tokens(self) -> int:
        return self.number(1, 100)

    def quantize(self) -> Any:
        shape = self.num_tokens(), self.number(1, 600)
        op = self.random.choice((self.ops.quantize, self.ops.quantize_weights))
        return op(self.view(torch.bfloat16, *shape), False)

    def gemm(self) -> None:
        m, (n, k) = self.num_tokens(), self.random.choice(_SIZES)
        a = self.view(E4M3, m, k), self.scales(m, num_blocks(k))
        self.ops.gemm(*a, *self.weight(n, k), self.view(torch.bfloat16, m, n), None)

    def contiguous(self) -> None:
        m, (n, k) = self.num_tokens(), self.random.choice(_SIZES)
        a = self.view(E4M3, m, k), self.scales(m, num_blocks(k))
        operands = (*a, *self.weight(_NUM_EXPERTS, n, k), self.view(torch.bfloat16, m, n))
        self.ops.contiguous(*operands, None, self.bounds)

    def masked(self) -> None:
        m, (n, k) = self.num_tokens() + 8, self.random.choice(_SIZES)
        a = self.view(E4M3, _NUM_EXPERTS, m, k), self.scales(_NUM_EXPERTS, m, num_blocks(k))
        d = self.view(torch.bfloat16, _NUM_EXPERTS, m, n)
        self.ops.masked(*a, *self.weight(_NUM_EXPERTS, n, k), d, self.bounds[1:], 4)

    def linear(self) -> torch.Tensor:
        n, k = self.random.choice(_SIZES)
        x = self.view(torch.bfloat16, self.num_tokens(), k)
        return self.ops.linear(x, *self.weight(n, k), None)

    def feed_forward(self) -> torch.Tensor:
        h, i = self.random.choice(_SIZES)
        gate, up, down = self.weight(i, h), self.weight(i, h), self.weight(h, i)
        x = self.view(torch.bfloat16, self.num_tokens(), h)
        return self.ops.feed_forward(x, *gate, *up, *down, None)

    def experts(self) -> torch.Tensor:
        h, i = self.random.choice(_SIZES)
        gate_up = self.view(E4M3, _NUM_EXPERTS, 2 * i, h)
        scales = self.view(torch.float32, _NUM_EXPERTS, 2 * num_blocks(i), num_blocks(h))
        down, num_tokens = self.weight(_NUM_EXPERTS, h, i), self.num_tokens()
        x = self.view(torch.bfloat16, num_tokens, h)
        ids = self.view(torch.int64, num_tokens, 2)
        weights = self.view(torch.float32, num_tokens, 2)
        masked = self.random.random() < 0.3
        return self.ops.experts(x, ids, weights, gate_up, scales, *down, None, masked)

    def plan(self) -> Any:
        ids = self.view(torch.int64, self.num_tokens(), self.number(1, 9))
        return self.ops.plan(ids, self.number(1, 300), 1, None)

    def top_k(self) -> Any:
        logits = self.view(torch.float32, self.num_tokens(), self.number(8, 300))
        if self.random.random() < 0.5:
            return self.ops.softmax(logits, self.number(1, 9), True)
        return self.ops.sigmoid(logits, None, 8, 1, 1, True, 2.5)


# ---- What is kept ----


class Kept(dict):
    """Counts how often it was forgotten."""

    num_forgotten = 0

    def clear(self) -> None:
        self.num_forgotten += 1
        super().clear()


def watch(monkeypatch, most: int) -> list[Kept]:
    """All that is kept for calls to come; `most` entries each."""
    for room, name in (
        *((gemm_launch.Launches, "max_kept"), (feed_forward, "_MAX_KEPT")),
        *((experts_launch, "_MAX_KEPT"), (quantize_launch, "_MAX_PREPARED")),
        (top_k_launch, "_MAX_PREPARED"),
    ):
        monkeypatch.setattr(room, name, most)
    found = []
    for room, name in (
        *((gemm_launch._launches, "plans"), (gemm_launch._launches, "prepared")),
        *((grouped_launch._launches, "plans"), (grouped_launch._launches, "prepared")),
        *((experts_launch, "_layers"), (experts_launch, "_prepared"), (feed_forward, "_launches")),
        *((quantize_launch._of_thread, "prepared"), (top_k_launch._of_thread, "prepared")),
    ):
        found.append(Kept())
        monkeypatch.setattr(room, name, found[-1])
    return found


def resident_bytes() -> int:
    """Of host memory, once nothing is left that only waits to be collected."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
