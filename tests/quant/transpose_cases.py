"""Cases of transposed codes: random ones, what becomes of them, and where they may be written."""

import torch

from moefp8.quant.transpose import transpose_codes_into

SHAPES = [
    (1, 1), (1, 16), (16, 1), (128, 128), (127, 129), (130, 16), (2, 3, 5), (3, 128, 144),
    (2, 264, 400), (1, 6, 16), (2, 192, 80), (0, 16), (16, 0), (0, 0), (0, 4, 16), (2, 0, 16),
    (2, 12, 0),
]  # fmt: skip
# Name -> the bytes before a row of `out`, behind it, and the columns beyond N of each part.
LAYOUTS = {
    "exactly": (0, 0, 0),
    "aligned": (16, 32, 16),
    "whole blocks more": (0, 16, 256),
    "at odd places": (3, 2, 1),
}
UNTOUCHED = 0xEE


def codes(*shape: int, device: str = "cpu") -> torch.Tensor:
    """All but zero, which stands for nothing."""
    made = torch.randint(1, 256, shape, dtype=torch.uint8, device=device)
    return made.view(torch.float8_e4m3fn)


def expected_of(w: torch.Tensor, parts: int, width: int) -> torch.Tensor:
    """The bytes [..., K, parts * width], made by PyTorch, part by part."""
    *batch, n, k = w.shape
    rows, made = n // parts, w.new_zeros(*batch, k, parts * width, dtype=torch.uint8)
    for i in range(parts):
        of_part = w.view(torch.uint8)[..., i * rows : (i + 1) * rows, :]
        made[..., i * width : i * width + rows] = of_part.mT
    return made


def run_into(w: torch.Tensor, parts: int, layout: str) -> None:
    """Transpose into the middle of a tensor, and check the whole of it."""
    before, behind, more = LAYOUTS[layout]
    *batch, n, k = w.shape
    width = n // parts + more
    shape = (*batch, k, before + parts * width + behind)
    memory = torch.full(shape, UNTOUCHED, dtype=torch.uint8, device=w.device)
    columns = slice(before, before + parts * width)
    transpose_codes_into(w, parts, memory.view(w.dtype)[..., columns])
    expected = torch.full_like(memory, UNTOUCHED)
    expected[..., columns] = expected_of(w, parts, width)
    assert torch.equal(memory, expected)
