"""Quantization, and linears, which quantize."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from moefp8.functional.linear import fp8_linear, fp8_linear_backward
from moefp8.quant.both import quantize_128x128_both
from moefp8.quant.columns import first_block, quantize_1x128_and_128x1, quantize_128x1
from moefp8.quant.each import quantize_128x128_each_into
from moefp8.quant.quantize import launch_quantize_1x128, launch_quantize_128x128
from moefp8.quant.transpose import transpose_codes
from tests.kernels.sanitizer.judge import Launch, ones, tell

DTYPES = torch.bfloat16, torch.float16, torch.float32
WEIGHTS = (100, 144, 2), (264, 72, 1), (6, 16, 2), (331, 400, 1), (10, 9, 2)


def launches() -> Iterator[Launch]:
    for dtype in DTYPES:
        yield partial(run_quantize_and_linear, dtype)
    for n, k, parts in WEIGHTS[:4]:
        yield partial(run_transpose, n, k, parts)
    for dtype, (n, k, parts) in product(DTYPES, WEIGHTS):
        yield partial(run_both, dtype, n, k, parts)
        yield partial(run_each, dtype, n, k, parts)
    for dtype, k, blocks in product(DTYPES, (136, 9), (False, True)):
        yield partial(run_columns, dtype, k, blocks)


def run_quantize_and_linear(dtype: torch.dtype) -> None:
    x = torch.ones(9, 296, dtype=dtype, device="cuda")
    launch_quantize_1x128(x, False)
    launch_quantize_1x128(x[:, 1:], True)
    launch_quantize_128x128(x, False)
    weight = launch_quantize_128x128(torch.ones(136, 296, device="cuda"), False)
    fp8_linear(x, *weight, None)
    fp8_linear_backward(x[:, :136], *weight, False)
    print(f"quantize and linear, {dtype}", flush=True)


def run_transpose(n: int, k: int, parts: int) -> None:
    """All codes are 1.0, so that what lies behind a row or a part is seen at once."""
    found = transpose_codes(ones(2, n, k), parts).view(torch.uint8).cpu()
    width, rows = found.shape[-1] // parts, n // parts
    is_row = torch.arange(parts * width) % width < rows
    expected = torch.where(is_row, 0x38, 0).expand(2, k, -1)
    tell(f"transpose, {n}x{k} in {parts}", int((found != expected).sum()))


def run_both(dtype: torch.dtype, n: int, k: int, parts: int) -> None:
    """All weights are 448, of which scales are 1 and codes 0x7e."""
    w = torch.full((2, n, k), 448, dtype=dtype, device="cuda")
    found = quantize_128x128_both(w, parts)
    width, rows = found.transposed.shape[-1] // parts, n // parts
    is_row = torch.arange(parts * width) % width < rows
    expected = torch.where(is_row, 0x7E, 0).expand(2, k, -1)
    wrong = int((found.transposed.view(torch.uint8).cpu() != expected).sum())
    wrong += int((found.data.view(torch.uint8).cpu() != 0x7E).sum())
    wrong += int((found.scale_inv.cpu() != 1).sum())
    tell(f"both, {dtype}, {n}x{k} in {parts}", wrong)


def run_each(dtype: torch.dtype, n: int, k: int, parts: int) -> None:
    """All weights are 448, each matrix in memory of its own; one of the stack stays 1.0."""
    stack, places = 2 * parts, list(range(2 * parts - 1))[::-1]
    matrices = [torch.full((n, k), 448, dtype=dtype, device="cuda") for _ in places]
    data, turned = ones(stack, n, k), ones(2, k, parts * (-(-n // 128) * 128))
    scale_inv = torch.full((stack, -(-n // 128), -(-k // 128)), 1.0, device="cuda")
    quantize_128x128_each_into(data, scale_inv, turned, parts, matrices, places)
    codes = torch.full((stack, n, k), 0x7E, dtype=torch.uint8)
    codes[-1] = 0x38
    rows = torch.zeros(stack, k, turned.shape[-1] // parts, dtype=torch.uint8)
    rows[..., :n], rows[-1] = 0x7E, 0x38
    expected = rows.unflatten(0, (2, parts)).transpose(1, 2).flatten(-2)
    wrong = int((data.view(torch.uint8).cpu() != codes).sum())
    wrong += int((turned.view(torch.uint8).cpu() != expected).sum())
    wrong += int((scale_inv.cpu() != 1).sum())
    quantize_128x128_each_into(data, scale_inv, None, parts, matrices, places)
    tell(f"each, {dtype}, {n}x{k} in {parts}", wrong)


def run_columns(dtype: torch.dtype, k: int, blocks: bool) -> None:
    """All numbers are 448, of which scales are 1 and codes 0x7e; experts have 0, 131 and 9 rows."""
    offsets = torch.tensor([0, 0, 131, 140], dtype=torch.int32, device="cuda")
    x = torch.full((140, k), 448, dtype=dtype, device="cuda")
    tokens = torch.arange(139, -1, -1, dtype=torch.int32, device="cuda")
    row_data, row_scales, *found = quantize_1x128_and_128x1(x, offsets, False, 1e-4, blocks)
    wrong = int((row_data.view(torch.uint8).cpu() != 0x7E).sum())
    wrong += int((row_scales.cpu() != 1).sum())
    for data, scales in (found, quantize_128x1(x, offsets, tokens, False, 1e-4, blocks)):
        codes, scale_inv = data.view(torch.uint8).cpu(), scales.cpu()
        first = first_block(0, 1)
        counts = {first: 128, first + 1: 3, first_block(131, 2): 9}
        for block, count in counts.items():
            whole = torch.where(torch.arange(-(-count // 32) * 32) < count, 0x7E, 0)
            wrong += int((codes[block, :, : len(whole)] != whole).sum())
            wrong += int((scale_inv[block] != 1).sum())
    tell(f"columns, {dtype}, {k}, blocks {blocks}", wrong)
