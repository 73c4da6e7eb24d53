"""Ranks that have the same tokens: each computes its part of them, and gets the results of all.

T tokens of each rank, P ranks, H hidden.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .collective import gpu_group


class SharedBatch:
    """The ranks of a process group; rank r of P takes the tokens [r T // P, (r + 1) T // P).

    All ranks make the same calls, backwards included, and the gradients that they get are equal
    on all.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of [T, ...]. The gradient is that of all ranks' parts."""
        own: torch.Tensor = _Own.apply(self, x)
        return own

    def whole(self, y: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[T, H] of all ranks' parts. The gradient is this rank's part."""
        whole: torch.Tensor = _Whole.apply(self, y, num_tokens)
        return whole

    def part_of(self, x: torch.Tensor) -> torch.Tensor:
        begin, end = (rank * len(x) // self.size for rank in (self.rank, self.rank + 1))
        return x[begin:end]

    def gather(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[T, ...] of all ranks' parts, as bytes, since gloo does not know all dtypes."""
        bounds = [rank * num_tokens // self.size for rank in range(self.size + 1)]
        sizes = [end - begin for begin, end in pairwise(bounds)]
        data = x.detach().contiguous().view(torch.uint8)
        over_hosts = x.is_cuda and gpu_group(self.group) is None
        padded = data.new_zeros(max(sizes), *data.shape[1:], device="cpu" if over_hosts else None)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.to(x.device).view(x.dtype)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: SharedBatch, x: torch.Tensor) -> torch.Tensor:
        ctx.batch, ctx.num_tokens = batch, len(x)
        return batch.part_of(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.batch.gather(grad, ctx.num_tokens)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: SharedBatch, y: torch.Tensor, num_tokens: int) -> torch.Tensor:
        ctx.batch = batch
        return batch.gather(y, num_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.batch.part_of(grad), None
