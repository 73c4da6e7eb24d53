"""`precompile`: how many kernels layers need; it runs without a GPU."""

from typing import Any

import torch
from torch import nn

import moefp8

from . import BF16, attempt, case


def _counted(done: Any) -> int:
    return done.num_kernels


@case
def layers(device: str) -> Any:
    moe = moefp8.MoE(256, 128, 4, 2, device="meta")
    experts = moefp8.GroupedExperts(4, 256, 128, device="meta")
    return [
        _counted(moefp8.precompile(moe, max_tokens=1)),
        _counted(
            moefp8.precompile(
                model=experts,
                max_tokens=1,
                dtype=BF16,
                top_k=2,
                backward=False,
                num_sms=132,
                num_threads=1,
                progress=False,
            )
        ),
    ]


@case
def backward(device: str) -> Any:
    linear = moefp8.FP8Linear(256, 128, device="meta")
    return _counted(moefp8.precompile(linear, 1, dtype=torch.float32, backward=True))


@case
def new_weights(device: str) -> Any:
    linear = moefp8.FP8Linear(256, 128, device="meta")
    return _counted(moefp8.precompile(linear, 1, updating=BF16))


@case
def errors(device: str) -> Any:
    experts = moefp8.GroupedExperts(4, 256, 128, device="meta")
    return [
        attempt(lambda: moefp8.precompile(experts, 4)),
        attempt(lambda: moefp8.precompile(experts, 0, top_k=2)),
        attempt(lambda: moefp8.precompile(experts, 4, top_k=2, dtype=torch.float64)),
        attempt(lambda: moefp8.precompile(experts, 4, top_k=2, num_threads=0)),
        attempt(lambda: moefp8.precompile(nn.Linear(8, 8), 4)),
    ]
