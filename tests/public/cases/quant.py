"""`moefp8.quant`: tensors to FP8 and back."""

from typing import Any

import torch

from moefp8.quant import BlockScaled, dequantize, quantize_1x128, quantize_128x128

from . import BF16, attempt, case, randn

DTYPES = BF16, torch.float16, torch.float32


def _uneven(*shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of many magnitudes, with zeros, whole blocks of tiny ones, NaN and Inf."""
    x = randn(*shape, device=device, dtype=torch.float32)
    x = x * torch.exp2(torch.randint(-12, 8, (shape[0], 1)).to(device))
    if x.numel() > 600:
        x[:-2, :128] *= 1e-8
        x[0, :128] = 0
        x[-1, 3], x[-2, 5] = float("nan"), float("inf")
    return x.to(dtype)


@case
def rows(device: str) -> Any:
    outcomes = {}
    for dtype in DTYPES:
        for shape in ((5, 300), (130, 128), (1, 7), (0, 128)):
            for ue8m0 in (False, True):
                q = quantize_1x128(x=_uneven(*shape, device=device, dtype=dtype), ue8m0=ue8m0)
                outcomes[dtype, shape, ue8m0] = q, q.scale_inv.stride()
    x = randn(2, 3, 200, device=device)
    return outcomes, quantize_1x128(x), quantize_1x128(x.transpose(0, 1))


@case
def blocks(device: str) -> Any:
    outcomes = {}
    for dtype in DTYPES:
        for shape in ((5, 300), (130, 128), (260, 200), (0, 128)):
            for ue8m0 in (False, True):
                w = _uneven(*shape, device=device, dtype=dtype)
                outcomes[dtype, shape, ue8m0] = quantize_128x128(w=w, ue8m0=ue8m0)
    return outcomes


@case
def back(device: str) -> Any:
    q = quantize_128x128(randn(200, 300, device=device))
    again = BlockScaled(data=q.data, scale_inv=q.scale_inv)
    rows = quantize_1x128(randn(7, 300, device=device))
    return [dequantize(q=again), dequantize(q, dtype=BF16), dequantize(rows), type(q).__name__]


@case
def errors(device: str) -> Any:
    q = quantize_128x128(randn(200, 300, device=device))
    return [
        attempt(lambda: quantize_1x128(q.data)),
        attempt(lambda: quantize_128x128(randn(4, device=device))),
        attempt(lambda: dequantize(BlockScaled(q.data, q.scale_inv[:1]))),
    ]
