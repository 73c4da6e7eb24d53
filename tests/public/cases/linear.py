"""`FP8Linear`: frozen and trained, any dtype and shape, and back to `nn.Linear`."""

import copy
import pickle
from typing import Any

import torch
from torch import nn

from moefp8 import FP8Linear

from . import BF16, attempt, case, gpu_case, randn, step


def _linear(device: str, dtype: torch.dtype = BF16) -> nn.Linear:
    return nn.Linear(200, 136).to(device, dtype)


@case
def forward(device: str) -> Any:
    """Any leading shape, none included, in each dtype, with and without a bias."""
    outputs = {}
    for bias in (True, False):
        linear = FP8Linear(in_features=328, out_features=200, bias=bias, device=device, dtype=BF16)
        for dtype in (BF16, torch.float16, torch.float32):
            for shape in ((5,), (3, 7), (0,), ()):
                x = randn(*shape, 328, device=device, dtype=dtype)
                outputs[f"{bias} {dtype} {shape}"] = linear(x)
    return linear, outputs


@case
def one_dtype_for_the_bias(device: str) -> Any:
    linears = [FP8Linear(64, 48, True, device, dtype) for dtype in (torch.float16, torch.float32)]
    return [(linear, linear(x=randn(4, 64, device=device))) for linear in linears]


@case
def many_rows(device: str) -> Any:
    """Above 512 rows, no sum of a row is divided."""
    return FP8Linear(512, 384, device=device)(randn(600, 512, device=device))


@case
def rows_that_depend_on_no_others(device: str) -> Any:
    outputs = {}
    for trainable in (False, True):
        linear = FP8Linear(1100, 136, device=device, trainable=trainable, batch_invariant=True)
        outputs[trainable] = [linear(randn(m, 1100, device=device)) for m in (1, 5, 40)]
        outputs[f"{trainable} gradients"] = step(linear, randn(3, 1100, device=device))
    return outputs


@gpu_case
def real_sizes(device: str) -> Any:
    linear = FP8Linear(4096, 1536, bias=False, device=device)
    trained = FP8Linear(4096, 1536, device=device, trainable=True)
    outputs = [linear(randn(m, 4096, device=device)) for m in (1, 16, 128, 700, 2048)]
    steps = [step(x, randn(1024, 4096, device=device)) for x in (linear, trained)]
    return outputs, steps


@case
def frozen_gradients(device: str) -> Any:
    outcomes = {}
    for kept in (True, False, None):
        linear = FP8Linear(256, 144, device=device, keep_transposed=kept)
        linear.bias.requires_grad_()
        x = randn(3, 6, 256, device=device)
        outcomes[kept] = [step(linear, x), step(linear, x), linear.keep_transposed]
    return outcomes


@case
def trained_gradients(device: str) -> Any:
    outcomes = {}
    for wgrad in ("128x1", "128x128", "bf16"):
        for dtype in (BF16, torch.float32):
            linear = FP8Linear(200, 144, device=device, trainable=True, wgrad=wgrad, dtype=dtype)
            outcomes[wgrad, dtype] = step(linear, randn(150, 200, device=device)), linear
    return outcomes


@case
def from_linear(device: str) -> Any:
    frozen = FP8Linear.from_linear(linear=_linear(device))
    trained = FP8Linear.from_linear(_linear(device), trainable=True, wgrad="128x128")
    x = randn(9, 200, device=device)
    return frozen, trained, frozen(x), step(trained, x)


@case
def to_linear(device: str) -> Any:
    linear = FP8Linear.from_linear(_linear(device))
    weights = [linear.dequantize(), linear.dequantize(dtype=torch.float32)]
    return weights, linear.to_linear(), linear.to_linear(dtype=torch.float32)


@case
def freeze_and_unfreeze(device: str) -> Any:
    linear = FP8Linear(200, 136, device=device)
    x = randn(9, 200, device=device)
    trained = linear.unfreeze(dtype=torch.float32, wgrad="128x128")
    outcomes = [step(trained, x), copy.deepcopy(trained)]
    again = trained.freeze().unfreeze()
    return outcomes, step(again, x), again.freeze(), again is linear


@case
def casts_copies_and_pickles(device: str) -> Any:
    linear = FP8Linear(200, 136, device=device)
    made = [copy.deepcopy(linear).half(), pickle.loads(pickle.dumps(linear))]
    other = FP8Linear(200, 136, device="meta").to_empty(device=device)
    other.load_state_dict(linear.state_dict())
    x = randn(4, 200, device=device)
    return made, [z(x) for z in (*made, other)], FP8Linear(8, 4, device="meta")


@case
def nan_stays_in_its_row(device: str) -> Any:
    x = randn(6, 300, device=device)
    x[1, 7], x[4, 200] = float("nan"), float("inf")
    return FP8Linear(300, 130, device=device)(x)


@case
def autocast_and_compile(device: str) -> Any:
    linear = FP8Linear(128, 256, device=device)
    x = randn(4, 128, device=device, dtype=torch.float32)
    with torch.autocast(device, dtype=BF16):
        y = linear(x)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    return y, step(compiled, randn(4, 128, device=device))


@case
def errors(device: str) -> Any:
    linear, x = FP8Linear(64, 48, device=device), randn(4, 64, device=device)
    linear.weight.requires_grad_(False)
    state = nn.Linear(64, 48).state_dict()
    return [
        attempt(lambda: linear(x[:, :60])),
        attempt(lambda: linear(x.double())),
        attempt(lambda: linear.load_state_dict(state)),
        attempt(lambda: nn.functional.linear(x, linear.weight)),
        attempt(lambda: FP8Linear(64, 48, wgrad="128x2")),
        attempt(lambda: FP8Linear.from_linear(nn.Embedding(3, 4))),
    ]
