"""Cases of column codes: rows by expert, what becomes of them, and what of it is defined."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from moefp8.quant.columns import quantize_1x128_and_128x1, quantize_128x1
from tests import naive
from tests.gpu import poison, same_bits

DTYPES = torch.bfloat16, torch.float16, torch.float32
# Tokens of each expert; None: all rows are of one, and there are no offsets.
COUNTS: dict[str, list[int] | None] = {
    "one of all": None,
    "one with offsets": [300],
    "none": [0, 0, 0],
    "around a block": [0, 1, 127, 128, 129, 0, 31, 32, 33],
    "odd": [5, 0, 260, 17],
    "more than threads": [*[0] * 150, 3, *[1] * 20, *[0] * 100, 130],
}
NUM_ROWS_OF_ONE = 300


class Block(NamedTuple):
    """A block of an expert: where it is, and which rows it has."""

    index: int
    first: int
    count: int


def offsets_of(counts: Sequence[int], before: int = 0) -> torch.Tensor:
    return torch.tensor([before + x for x in accumulate(counts, initial=0)], dtype=torch.int32)


def blocks_of(offsets: torch.Tensor | None, num_rows: int) -> Iterator[Block]:
    edges = [0, num_rows] if offsets is None else offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(edges)):
        for i, first in enumerate(range(begin, end, 128)):
            yield Block(begin // 128 + expert + i, first, min(end - first, 128))


def awkward(num_rows: int, k: int, dtype: torch.dtype, finite: bool = False) -> torch.Tensor:
    """Numbers of many sizes; some are zeros and, unless `finite`, no numbers or infinite."""
    x = torch.randn(num_rows, k) * torch.exp2(torch.randint(-12, 9, (num_rows, 1)))
    x = (x * torch.exp2(torch.randint(-4, 4, (k,)))).to(dtype)
    if x.numel():
        values = [] if finite else [torch.nan, -torch.nan, torch.inf, -torch.inf]
        values += [-0.0, torch.finfo(dtype).tiny]
        for i, value in enumerate(values):
            x[97 * i % num_rows, 5 * i % k] = value
        x[:, -1] = 0.0
        x[:, k // 2] = -0.0
    return x


def gathered(x: torch.Tensor, row_to_token: torch.Tensor) -> torch.Tensor:
    """The rows that are quantized, one by one."""
    zeros = torch.zeros_like(x[0]) if len(x) else x.new_zeros(x.shape[1])
    rows = [x[t] if 0 <= t < len(x) else zeros for t in row_to_token.tolist()]
    return torch.stack(rows) if rows else x[:0]


def assert_right(
    found: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    offsets: torch.Tensor | None,
    ue8m0: bool = False,
    min_amax: float = 1e-4,
    blocks: bool = False,
) -> None:
    """Codes and scales of the rows x against the slow reference."""
    data, scale_inv = (y.cpu() for y in found)
    num_experts = None if offsets is None else len(offsets) - 1
    expected_blocks = -(-len(x) // 128) if num_experts is None else len(x) // 128 + num_experts
    assert data.shape == (expected_blocks, x.shape[1], 128)
    num_scales = -(-x.shape[1] // 128) if blocks else x.shape[1]
    assert scale_inv.shape == (expected_blocks, num_scales)
    assert scale_inv.numel() == 0 or scale_inv.stride(0) == -(-num_scales // 4) * 4
    for index, first, count in blocks_of(offsets, len(x)):
        columns = x[first : first + count].T.contiguous()
        codes, scales = naive.quantize(columns, 128 if blocks else 1, ue8m0, min_amax)
        whole = torch.zeros(x.shape[1], -(-count // 32) * 32, dtype=torch.uint8)
        whole[:, :count] = codes
        assert torch.equal(data[index].view(torch.uint8)[:, : whole.shape[1]], whole)
        assert same_bits(scale_inv[index], scales[:, 0])


def assert_same(
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    offsets: torch.Tensor | None,
    num_rows: int,
) -> None:
    """What two bodies of an op give, where it is defined, bit by bit; and the layout."""
    assert [y.shape for y in ours] == [y.shape for y in theirs]
    assert [y.stride() for y in ours] == [y.stride() for y in theirs]
    *rows, data, scale_inv = (y.cpu() for y in ours)
    *expected_rows, expected_data, expected_scale_inv = (y.cpu() for y in theirs)
    some = slice(None) if offsets is None else slice(int(offsets[0]), int(offsets[-1]))
    assert all(same_bits(y[some], z[some]) for y, z in zip(rows, expected_rows, strict=True))
    for index, _, count in blocks_of(offsets, num_rows):
        codes = slice(0, -(-count // 32) * 32)
        assert same_bits(data[index][:, codes], expected_data[index][:, codes])
        assert same_bits(scale_inv[index], expected_scale_inv[index])


def poison_like(tensors: Sequence[torch.Tensor]) -> None:
    """Leave NaN in the memory that the GPU's allocator will hand out for such tensors."""
    poison("cuda", *(tensor.untyped_storage().nbytes() for tensor in tensors))


def check_both_ops(
    name: str,
    k: int,
    dtype: torch.dtype,
    device: str,
    ue8m0: bool = False,
    shift: int = 0,
    *,
    blocks: bool = False,
    finite: bool = False,
) -> None:
    """A case of `COUNTS` on a device and with PyTorch on the CPU.

    shift: rows before the first expert and behind the last one, and by how many elements rows are
        longer and begin later.
    finite: no element is NaN or infinite: with `blocks`, these spoil most of the blocks.
    """
    counts = COUNTS[name]
    num_rows = (NUM_ROWS_OF_ONE if counts is None else sum(counts)) + 2 * shift
    offsets = None if counts is None else offsets_of(counts, shift)
    x = awkward(num_rows, k + shift, dtype, finite)[:, shift:]
    options = ue8m0, 1e-4, blocks
    order = torch.randint(-2, num_rows + 2, (num_rows + 3,), dtype=torch.int32)
    on_device = x.to(device)
    if shift and device != "cpu":
        on_device = torch.empty(num_rows, k + shift, dtype=dtype, device=device)[:, shift:]
        on_device.copy_(x)
    there, tokens = (None if y is None else y.to(device) for y in (offsets, order))
    for row_to_token, given in ((None, None), (order, tokens)):
        rows = num_rows if row_to_token is None else len(row_to_token)
        expected = quantize_128x1.overload(x, offsets, row_to_token, *options)
        if device != "cpu":
            poison_like(expected)
        found = quantize_128x1(on_device, there, given, *options)
        assert_same(found, expected, offsets, rows)
    expected = quantize_1x128_and_128x1.overload(x, offsets, *options)
    if device != "cpu":
        poison_like(expected)
    found = quantize_1x128_and_128x1(on_device, there, *options)
    assert_same(found, expected, offsets, num_rows)
