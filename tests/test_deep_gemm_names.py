"""DeepGEMM's names for the GEMMs, and its helpers for scales."""

import pytest
import torch

from moefp8 import kernels
from tests.kernels.gemm.cases import NAN, expected_of, operands


def test_deep_gemm_names():
    a, a_scale_inv, b, b_scale_inv, d, _ = operands(130, 200, 300)
    expected = expected_of(a, a_scale_inv, b, b_scale_inv, d, None)
    kernels.gemm_fp8_fp8_bf16_nt((a, a_scale_inv), (b, b_scale_inv), d)
    assert torch.equal(d, expected)
    layout = torch.zeros(130, dtype=torch.int32)
    d.fill_(NAN)
    kernels.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(
        (a, a_scale_inv), (b[None], b_scale_inv[None]), d, layout
    )
    assert torch.equal(d, expected)
    d.fill_(NAN)
    kernels.m_grouped_gemm_fp8_fp8_bf16_nt_masked(
        (a[None], a_scale_inv[None]),
        (b[None], b_scale_inv[None]),
        d[None],
        torch.tensor([130], dtype=torch.int32),
        130,
    )
    assert torch.equal(d, expected)
    assert [kernels.get_tma_aligned_size(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert kernels.get_tma_aligned_size(17, 1) == 32
    with pytest.raises(ValueError, match="element_size must divide 16, got 3"):
        kernels.get_tma_aligned_size(5, 3)


@pytest.mark.parametrize("shape", [(5, 3), (1, 3), (4, 1), (2, 5, 3), (3, 1, 2)])
@pytest.mark.parametrize(
    "align", [kernels.get_mn_major_tma_aligned_tensor, kernels.get_col_major_tma_aligned_tensor]
)
def test_scales_are_brought_into_the_order_of_tma(shape, align):
    x = torch.randn(shape)
    aligned = align(x)
    assert torch.equal(aligned, x)
    assert aligned.stride() == kernels.empty_tma_aligned(shape, "cpu").stride()
    assert align(aligned) is aligned
    with pytest.raises(TypeError, match="sf must be float32, got float64"):
        align(x.double())
    with pytest.raises(ValueError, match="2 or 3 dimensions"):
        align(x.view(1, 1, *shape))
