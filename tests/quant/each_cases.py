"""Matrices that become some of a stack, and what has to come of them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from moefp8.quant.both import WeightCodes
from moefp8.quant.each import quantize_128x128_each_into
from tests.gpu import same_bits
from tests.quant.both_cases import expected_of, weights

UNTOUCHED = 0xEE
SHAPES = [(1, 1), (16, 48), (128, 128), (130, 16), (129, 131), (300, 136)]  # [N, K]


class Stack(NamedTuple):
    """data, scale_inv and transposed as the op takes them, of [stack / parts, parts, N, K]."""

    data: torch.Tensor
    scale_inv: torch.Tensor
    transposed: torch.Tensor | None


def untouched(stack: int, parts: int, n: int, k: int, device: str = "cpu") -> Stack:
    """A stack whose bytes are all UNTOUCHED, with the layout of `quantize_128x128_both`."""
    like = expected_of(torch.zeros(stack // parts, parts * n, k), parts)
    memory = [torch.full_like(x.view(torch.uint8), UNTOUCHED) for x in like]
    data, scale_inv, transposed = (
        x.view(y.dtype).to(device) for x, y in zip(memory, like, strict=True)
    )
    scales = scale_inv.view(stack, -1, scale_inv.shape[-1])
    return Stack(data.view(stack, n, k), scales, transposed)


def assert_right(
    n: int,
    k: int,
    *,
    places: list[int],
    stack: int = 6,
    parts: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    with_transposed: bool = True,
    shift: int = 0,
    device: str = "cpu",
    repeats: int = 1,
    stacked: Sequence[int] = (),
    launching: AbstractContextManager[object] | None = None,
) -> None:
    """Quantize one matrix for each place, and check the whole stack.

    stacked: how many matrices come together, in turn; () sends each alone.
    shift: elements by which each matrix begins behind an aligned address.
    launching: what the op runs in, if anything.
    """
    values = weights(len(places), n * k + shift, dtype=dtype, device=device)
    matrices = [x[shift:].view(n, k) for x in values]
    made = untouched(stack, parts, n, k, device)
    if not with_transposed:
        made = made._replace(transposed=None)
    sent = (
        [x.contiguous() for x in torch.stack(matrices).split([*stacked])] if stacked else matrices
    )
    with launching or nullcontext():
        for _ in range(repeats):
            quantize_128x128_each_into(*made, parts, sent, places)
    whole = torch.zeros(stack, n, k, dtype=dtype)
    for x, place in zip(matrices, places, strict=True):
        whole[place] = x.cpu()
    expected: WeightCodes = expected_of(whole.view(stack // parts, parts * n, k), parts)
    wanted = expected.data.view(torch.uint8).view(stack, n, k).clone()
    scales = expected.scale_inv.view(stack, -1, made.scale_inv.shape[-1]).clone()
    width = expected.transposed.shape[-1] // parts
    turned = expected.transposed.view(torch.uint8).unflatten(-1, (parts, width)).clone()
    for other in set(range(stack)) - set(places):
        wanted[other] = UNTOUCHED
        scales[other].view(torch.uint8).fill_(UNTOUCHED)
        turned[other // parts, :, other % parts] = UNTOUCHED
    assert same_bits(made.data.view(torch.uint8), wanted)
    assert same_bits(made.scale_inv.view(torch.uint8), scales.view(torch.uint8))
    if made.transposed is not None:
        assert same_bits(made.transposed.view(torch.uint8), turned.flatten(-2))
