"""GEMMs on a CPU against FP64, one group at a time; and what the grouped ones refuse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefp8.kernels import m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked
from moefp8.quant import quantize_1x128, quantize_128x128
from moefp8.testing import sizes
from tests.kernels.gemm.cases import BIASES, placements
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    all_routings,
    bias_of,
    expected_of,
    only_groups_are_written,
    operands,
    run_op,
)


@settings(max_examples=200)
@given(
    routing=all_routings(),
    n=sizes(140, 1),
    k=sizes(300),
    placement=placements(),
    bias=st.sampled_from(BIASES),
    expected_m=st.integers(-3, 500),
)
def test_every_gemm_is_right(routing, n, k, placement, bias, expected_m):
    """A dense one, too, which is that of a single group."""
    made, bias = placement.of(operands(routing, n, k)), None if routing.layout else bias_of(bias, n)
    with only_groups_are_written(routing, made.d.fill_(UNTOUCHED)):
        run_op(routing, made, routing.bounds_on(), expected_m, bias)
        assert torch.equal(made.d, expected_of(routing, made, bias))


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


@pytest.mark.parametrize("zero_padding", [False, True])
@pytest.mark.parametrize("case", CONTIGUOUS)
def test_contiguous_names_bad_input_and_loses_nothing(case, zero_padding):
    changes, message = CONTIGUOUS[case]
    with pytest.raises((TypeError, ValueError), match=f"nt_contiguous: .*{message}"):
        contiguous(**changes, zero_padding=zero_padding)


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
    with pytest.raises(ValueError, match="d must not be expanded"):
        m_grouped_fp8_gemm_nt_masked(a, b, d[:1].expand_as(d), masked_m, 1)
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
