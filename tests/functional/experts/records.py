"""Records of expert layers of given sizes, on a machine without a GPU."""

import math

import torch

from moefp8.functional.expert_configs import Sizes
from moefp8.functional.expert_parts import Choices, ExpertWeights, TransposedWeights
from moefp8.functional.experts_backward_launch import describe_experts_backward
from moefp8.functional.experts_launch import describe_experts
from moefp8.kernels import E4M3
from moefp8.kernels.common.blocks import num_blocks, round_up
from moefp8.kernels.program import Codes, Place, Record, Tensor
from tests.records import TARGET

NAMES = "x", "ids", "scores", "gate", "up", "down", "gate_up", "y", "saved", "grad_weights"


def contiguous(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(shape, strides, dtype, Place(name))


def weights(name: str, *shape: int) -> Codes:
    experts, n, k = shape
    scales = contiguous(name, experts, num_blocks(n), num_blocks(k), dtype=torch.float32)
    return Codes(contiguous(name, *shape, dtype=E4M3), scales)


def choices(sizes: Sizes) -> Choices:
    shape = sizes.num_tokens, sizes.top_k
    ids = contiguous("ids", *shape, dtype=torch.int64)
    return Choices(ids, contiguous("scores", *shape, dtype=torch.float32))


def experts_record(sizes: Sizes) -> Record:
    """A forward, of contiguous BF16 tokens."""
    num_tokens, _, e, h, i, *_ = sizes
    r = Record(TARGET, NAMES)
    pitch = round_up(h, 16), round_up(i, 16)
    of_all = ExpertWeights(
        weights("gate", e, i, pitch[0]),
        weights("up", e, i, pitch[0]),
        weights("down", e, h, pitch[1]),
    )
    x, y = (contiguous(name, num_tokens, h) for name in ("x", "y"))
    describe_experts(r, sizes, x, choices(sizes), of_all, y)
    return r


def experts_backward_record(sizes: Sizes) -> Record:
    """A backward from what was saved in BF16."""
    num_tokens, top_k, e, h, i, *_ = sizes
    r = Record(TARGET, NAMES)
    of_all = TransposedWeights(
        weights("down", e, i, round_up(h, 16)), weights("gate_up", e, h, 2 * round_up(i, 128))
    )
    x, y = (contiguous(name, num_tokens, h) for name in ("x", "y"))
    describe_experts_backward(
        r,
        sizes,
        grad=x,
        grad_scales=None,
        choices=choices(sizes),
        saved=contiguous("saved", num_tokens * top_k, 2, round_up(i, 8)),
        saved_scales=None,
        weights=of_all,
        dx=y,
        limit=math.inf,
        expert_offset=0,
        combine=None,
    )
    return r
