"""The bias of each group of a contiguous GEMM: in PyTorch, launched, and on a GPU."""

import pytest
import torch

from moefp8.kernels import m_grouped_fp8_gemm_nt_contiguous
from moefp8.quant import quantize_1x128, quantize_128x128
from tests.fakes.emulator import emulated
from tests.gpu import on_gpu

COUNTS = {"few": (1, 0, 3), "some": (70, 5, 0, 130), "many": (300, 900, 0, 64, 65)}
DTYPES = torch.bfloat16, torch.float16, torch.float32
PLACES = {  # the same bias elsewhere in memory
    "contiguous": lambda bias: bias,
    "wide rows": lambda bias: torch.cat([bias, bias + 1], 1)[:, : bias.shape[1]],
    "transposed": lambda bias: bias.mT.contiguous().mT,
}


def added(
    counts,
    n: int,
    k: int,
    dtype: torch.dtype,
    by_rows: bool,
    device: str,
    place: str = "contiguous",
) -> None:
    """Check that d is that without a bias, plus the bias of each row's group.

    Operands are small whole numbers, so that a lost or wrong bias is off by 1 or more.
    """
    num_groups, sizes = len(counts), [-(-x // 128) * 128 if by_rows else x for x in counts]
    m = sum(sizes)
    x, w = (torch.randint(-2, 3, s).float().to(device) for s in ((m, k), (num_groups, n, k)))
    a, b = quantize_1x128(x), quantize_128x128(w)
    bias = PLACES[place](torch.randint(-4, 5, (num_groups, n), device=device).to(dtype))
    group = torch.repeat_interleave(torch.arange(num_groups), torch.tensor(sizes)).int()
    rows = torch.cat([torch.arange(s) < c for s, c in zip(sizes, counts, strict=True)])
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    groups = {"expert_offsets": offsets.to(device)}
    if by_rows:
        groups = {"grouped_layout": group.masked_fill(~rows, -1).to(device)}
    d = torch.full((m, n), 77.0, dtype=torch.bfloat16, device=device)
    m_grouped_fp8_gemm_nt_contiguous(a, b, d, bias=bias, **groups)
    group, rows = group.to(device).long(), rows.to(device)
    expected = torch.einsum("mk,mnk->mn", x, w[group]) if m * n * k < 1 << 26 else None
    if expected is None:
        expected = torch.stack([x[i] @ w[g].T for i, g in enumerate(group.tolist())])
    expected = (expected + bias[group].float()).bfloat16()
    torch.testing.assert_close(d[rows], expected[rows], rtol=2**-7, atol=0.05)
    assert bool((d[~rows] == 77).all())


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("k", [130, 0])
def test_a_bias_is_added_to_the_rows_of_its_group(by_rows, k):
    added(COUNTS["some"], 72, k, torch.float32, by_rows, "cpu")


@pytest.mark.parametrize(("counts", "dtype"), zip(COUNTS, DTYPES, strict=True))
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("k", [130, 0])
def test_launches_add_it(counts, dtype, by_rows, k):
    with emulated():
        added(COUNTS[counts], 72, k, dtype, by_rows, "cpu")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("k", [130, 0])
def test_launches_add_it_wherever_it_lies(place, by_rows, k):
    with emulated():
        added(COUNTS["some"], 72, k, torch.bfloat16, by_rows, "cpu", place)


@on_gpu
@pytest.mark.parametrize("place", PLACES)
def test_a_gpu_adds_it_wherever_it_lies(place):
    for dtype in DTYPES:
        added(COUNTS["some"], 200, 264, dtype, False, "cuda", place)


@on_gpu
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize(("n", "k"), [(200, 264), (264, 1000), (72, 0)])
def test_a_gpu_adds_it(counts, dtype, by_rows, n, k):
    added(COUNTS[counts], n, k, dtype, by_rows, "cuda")


def test_a_wrong_bias_is_refused():
    a, b = quantize_1x128(torch.ones(3, 130)), quantize_128x128(torch.ones(2, 20, 130))
    d, offsets = torch.empty(3, 20).bfloat16(), torch.tensor([0, 1, 3]).int()
    with pytest.raises(ValueError, match=r"bias must be \[G, N\] = \[2, 20\], got \[2, 21\]"):
        m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=offsets, bias=torch.zeros(2, 21))
