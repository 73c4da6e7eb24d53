"""Grouped GEMMs against FP64, one group at a time: every row its own expert, padding never read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.kernels import (
    get_mk_alignment_for_contiguous_layout,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128
from moefp8.testing import assert_matches_reference
from tests import naive

COUNTS = st.lists(st.sampled_from((0, 0, 1, 2, 7, 130)), min_size=1, max_size=5)
NAN = float("nan")
ALIGNMENT = get_mk_alignment_for_contiguous_layout()


def poisoned(x: BlockScaled, is_padding: torch.Tensor) -> BlockScaled:
    """`x` with NaN codes and NaN scales in the rows of `is_padding`."""
    data = x.data.view(torch.uint8).masked_fill(is_padding[..., None], 0x7F)
    scale_inv = x.scale_inv.masked_fill(is_padding[..., None], NAN)
    return BlockScaled(data.view(torch.float8_e4m3fn), scale_inv)


def expected_rows(a: BlockScaled, b: BlockScaled, groups: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(groups.numel(), b.data.shape[1], dtype=torch.float64)
    for group in range(b.data.shape[0]):
        rows = groups == group
        operand = (a.data.view(torch.uint8)[rows].view(a.data.dtype), a.scale_inv[rows])
        result[rows] = naive.gemm(operand, (b.data[group], b.scale_inv[group]))
    return result


def assert_rows_of_groups(d: torch.Tensor, expected: torch.Tensor, groups: torch.Tensor) -> None:
    """Those are right; the others are what they were, NaN."""
    assert_matches_reference(d[groups >= 0], expected[groups >= 0])
    assert bool(d[groups < 0].isnan().all())


@given(counts=COUNTS, n=st.sampled_from((1, 130)), k=st.sampled_from((1, 128, 200)))
def test_contiguous_with_expert_offsets(counts, n, k):
    offsets = torch.tensor([2, *counts], dtype=torch.int32).cumsum(0).int()  # two rows before all
    m = int(offsets[-1]) + 3  # and three after
    groups = torch.full((m,), -1)
    for group, count in enumerate(counts):
        groups[offsets[group] : offsets[group] + count] = group
    a = poisoned(quantize_1x128(torch.randn(m, k)), groups < 0)
    b = quantize_128x128(torch.randn(len(counts), n, k))
    d = torch.full((m, n), NAN, dtype=torch.bfloat16)
    m_grouped_fp8_gemm_nt_contiguous(a, b, d, expert_offsets=offsets)
    assert_rows_of_groups(d, expected_rows(a, b, groups), groups)


@given(counts=COUNTS, n=st.sampled_from((1, 130)), k=st.sampled_from((1, 128, 200)))
def test_contiguous_with_grouped_layout(counts, n, k):
    parts = []
    for group, count in enumerate(counts):
        parts += [torch.full((count,), group), torch.full((-count % ALIGNMENT,), -1)]
    layout = torch.cat([*parts, torch.full((ALIGNMENT,), -1)]).int()
    a = poisoned(quantize_1x128(torch.randn(layout.numel(), k)), layout < 0)
    b = quantize_128x128(torch.randn(len(counts), n, k))
    d = torch.full((layout.numel(), n), NAN, dtype=torch.bfloat16)
    m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    assert_rows_of_groups(d, expected_rows(a, b, layout), layout)


@given(counts=COUNTS, spare=st.sampled_from((0, 1, 5)), k=st.sampled_from((1, 200)))
def test_masked_leaves_other_rows_untouched(counts, spare, k):
    max_m, n = max(counts) + spare, 40
    masked_m = torch.tensor(counts, dtype=torch.int32)
    real = torch.arange(max_m) < masked_m[:, None]
    a = poisoned(quantize_1x128(torch.randn(len(counts), max_m, k)), ~real)
    b = quantize_128x128(torch.randn(len(counts), n, k))
    d = torch.full((len(counts), max_m, n), 77.0, dtype=torch.bfloat16)
    m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, expected_m=3)
    assert bool((d[~real] == 77).all())
    for group, count in enumerate(counts):
        rows = (a.data[group, :count], a.scale_inv[group, :count])
        expected = naive.gemm(rows, (b.data[group], b.scale_inv[group]))
        assert_matches_reference(d[group, :count], expected)


def test_strided_weights():
    a, both = quantize_1x128(torch.randn(5, 140)), quantize_128x128(torch.randn(3, 256, 140))
    half = BlockScaled(both.data[:, 128:], both.scale_inv[:, 1:])
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    d = torch.full((5, 128), NAN, dtype=torch.bfloat16)
    m_grouped_fp8_gemm_nt_contiguous(a, half, d, expert_offsets=offsets)
    assert_matches_reference(d, expected_rows(a, half, torch.tensor([0, 0, 2, 2, 2])))


def contiguous(**changes):
    arguments = {
        "a": quantize_1x128(torch.ones(256, 130)),
        "b": quantize_128x128(torch.ones(2, 20, 130)),
        "d": torch.full((256, 20), 5.0, dtype=torch.bfloat16),
        "grouped_layout": torch.zeros(256, dtype=torch.int32),
    }
    arguments.update(changes)
    try:
        m_grouped_fp8_gemm_nt_contiguous(**arguments)
    finally:
        assert bool((arguments["d"] == 5).all())


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def layout_with(row: int | slice, group: int) -> torch.Tensor:
    layout = torch.zeros(256, dtype=torch.int32)
    layout[row] = group
    return layout


CONTIGUOUS = {
    "id too large": ({"grouped_layout": layout_with(200, 2)}, "below 2, got 2 at row 200"),
    "id too small": ({"grouped_layout": layout_with(3, -2)}, "below 2, got -2 at row 3"),
    "unaligned": (
        {"grouped_layout": layout_with(60, 1)},
        "multiples of 128 rows, got group 1 from row 60",
    ),
    "unaligned after padding": (
        {"grouped_layout": layout_with(slice(250), -1)},
        "multiples of 128 rows, got group 0 from row 250",
    ),
    "after a hole": (
        {"grouped_layout": layout_with(slice(10, 15), -1)},
        "multiples of 128 rows, got group 0 from row 15",
    ),
    "dtype": ({"grouped_layout": torch.zeros(256)}, "grouped_layout must be int32, got float32"),
    "length": (
        {"grouped_layout": int32(0, 1)},
        r"grouped_layout must be \[M\] = \[256\], got \[2\]",
    ),
    "neither": ({"grouped_layout": None}, "grouped_layout or expert_offsets, got neither"),
    "both": ({"expert_offsets": int32(0, 1, 2)}, "grouped_layout or expert_offsets, got both"),
    "falling": ({"grouped_layout": None, "expert_offsets": int32(0, 9, 2)}, r"got \[0, 9, 2\]"),
    "too far": ({"grouped_layout": None, "expert_offsets": int32(0, 9, 257)}, "at most M = 256"),
    "K": (
        {"b": quantize_128x128(torch.ones(2, 20, 129))},
        "K must be equal in a and b, got 130 and 129",
    ),
    "rank": ({"b": quantize_128x128(torch.ones(20, 130))}, "b must have 3 dimensions"),
}


@pytest.mark.parametrize("case", CONTIGUOUS)
def test_contiguous_names_bad_input_and_loses_nothing(case):
    changes, message = CONTIGUOUS[case]
    with pytest.raises((TypeError, ValueError), match=f"nt_contiguous: .*{message}"):
        contiguous(**changes)


@pytest.mark.parametrize(
    ("masked_m", "message"),
    [
        (int32(1, 4), r"masked_m must be in \[0, max_m\] = \[0, 3\], got 4 for group 1"),
        (int32(-1, 1), "got -1 for group 0"),
        (int32(1), r"masked_m must be \[G\] = \[2\], got \[1\]"),
        (torch.tensor([1, 1]), "masked_m must be int32, got int64"),
    ],
)
def test_masked_names_bad_input(masked_m, message):
    a, b = quantize_1x128(torch.ones(2, 3, 130)), quantize_128x128(torch.ones(2, 20, 130))
    d = torch.full((2, 3, 20), 5.0, dtype=torch.bfloat16)
    with pytest.raises((TypeError, ValueError), match=f"nt_masked: .*{message}"):
        m_grouped_fp8_gemm_nt_masked(a, b, d, masked_m, 1)
    with pytest.raises(ValueError, match="G must be equal in a and b, got 1 and 2"):
        m_grouped_fp8_gemm_nt_masked((a[0][:1], a[1][:1]), b, d[:1], masked_m, 1)
    assert bool((d == 5).all())


def test_ops_agree_with_their_fake_bodies():
    checks = ("test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    a, b = quantize_1x128(torch.randn(5, 140)), quantize_128x128(torch.randn(2, 20, 140))
    d = torch.zeros(5, 20, dtype=torch.bfloat16)
    op = torch.ops.moefp8.m_grouped_fp8_gemm_nt_contiguous
    torch.library.opcheck(op, (*a, *b, d, None, int32(0, 2, 5)), test_utils=checks)
    a, d = quantize_1x128(torch.randn(2, 3, 140)), torch.zeros(2, 3, 20, dtype=torch.bfloat16)
    op = torch.ops.moefp8.m_grouped_fp8_gemm_nt_masked
    torch.library.opcheck(op, (*a, *b, d, int32(0, 2), 1), test_utils=checks)
