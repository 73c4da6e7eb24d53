"""Routed experts as their launcher runs them on the CPU, where `Emulator` stands for libcuda."""

import torch

from moefp8.functional import experts as op_room
from tests.functional.cases import run


def launch(x, ids, top_k_weights, weights, limit=None, masked=False) -> torch.Tensor:
    """As the op does on a Hopper GPU, into memory of which nothing around is written."""
    return op_room.experts(x, ids, top_k_weights, *weights, limit, masked)


def body(x, ids, top_k_weights, weights, limit=None, masked=False) -> torch.Tensor:
    """Ids out of range count as E."""
    e = weights.down_proj.shape[0]
    return run(x, ids.masked_fill((ids < 0) | (ids > e), e), top_k_weights, weights, limit, masked)


def names_of(launched) -> list[str]:
    return [made.kernel.name.split("_")[0] for made in launched]
