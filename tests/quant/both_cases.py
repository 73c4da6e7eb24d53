"""Cases of weights that are quantized both ways, and what has to come of them."""

from contextlib import AbstractContextManager, nullcontext

import torch

from moefp8.quant.both import WeightCodes, empty_both, quantize_128x128_both_into
from moefp8.quant.quantize import quantize_128x128
from moefp8.quant.transpose import transpose_codes
from tests.gpu import same_bits

DTYPES = torch.bfloat16, torch.float16, torch.float32
SHAPES = [
    (1, 1), (1, 16), (16, 1), (128, 128), (126, 129), (130, 16), (2, 2, 5), (3, 128, 144),
    (2, 264, 400), (1, 6, 16), (2, 192, 80), (2, 300, 136), (0, 16), (16, 0), (0, 0), (2, 0, 16),
    (2, 12, 0), (0, 4, 16),
]  # fmt: skip
UNTOUCHED = 0xEE


def weights(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    """Each row and each column has a size of its own; a block may hold NaN or an infinity."""
    w = torch.randn(shape)
    w *= torch.exp2(torch.randint(-9, 5, (*shape[:-1], 1)))
    w *= torch.exp2(torch.randint(-3, 3, (*shape[:-2], 1, shape[-1])))
    return w.to(dtype).to(device)


def expected_of(w: torch.Tensor, parts: int) -> WeightCodes:
    """Part by part, by the ops that quantize and transpose."""
    n = w.shape[-2] // parts
    of_parts = [
        quantize_128x128(w[..., i * n : (i + 1) * n, :].contiguous(), False) for i in range(parts)
    ]
    codes, scales = zip(*of_parts, strict=True)
    data = torch.cat([x.view(torch.uint8) for x in codes], dim=-2).view(codes[0].dtype)
    return WeightCodes(data, torch.cat(scales, dim=-2), transpose_codes(data, parts))


def assert_same(found: WeightCodes, expected: WeightCodes) -> None:
    """Bits and layout, and zeros between the rows of what is transposed."""
    for ours, theirs in zip(found, expected, strict=True):
        assert same_bits(ours, theirs)
        assert ours.stride() == theirs.stride()
    x = found.transposed
    if x.numel():
        between = x.view(torch.uint8).as_strided((*x.shape[:-1], x.stride(-2)), x.stride())
        assert not between[..., x.shape[-1] :].any()


def run_into(
    w: torch.Tensor,
    parts: int,
    before: int,
    behind: int,
    more: int,
    launching: AbstractContextManager[object] | None = None,
) -> None:
    """Transpose into the middle of a tensor, and check the whole of it.

    before, behind: bytes of a row around what is written; more: columns beyond n of each part.
    launching: what the op runs in, if anything.
    """
    *batch, n, k = w.shape
    n //= parts
    width = min(n + more, -(-n // 128) * 128)
    shape = (*batch, k, before + parts * width + behind)
    memory = torch.full(shape, UNTOUCHED, dtype=torch.uint8, device=w.device)
    columns = slice(before, before + parts * width)
    made, expected = empty_both(w, parts), expected_of(w, parts)
    target = memory.view(torch.float8_e4m3fn)[..., columns]
    with launching or nullcontext():
        quantize_128x128_both_into(w, parts, made.data, made.scale_inv, target)
    assert same_bits(made.data, expected.data)
    assert same_bits(made.scale_inv, expected.scale_inv)
    whole = torch.full_like(memory, UNTOUCHED)
    for i in range(parts):
        of_part = whole[..., before + i * width : before + (i + 1) * width]
        of_part.zero_()
        of_part[..., :n] = expected.data.view(torch.uint8)[..., i * n : (i + 1) * n, :].mT
    assert torch.equal(memory, whole)
