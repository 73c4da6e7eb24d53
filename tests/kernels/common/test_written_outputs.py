"""Ops that write into `d`, as autograd sees them: the same on every device."""

import pytest
import torch

from moefp8.kernels import (
    fp8_gemm_nt,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128
from tests.gpu import NEEDS_GPU

M, N, K = 128, 256, 128


def dense(a, b, d):
    fp8_gemm_nt(a, b, d)


def contiguous(a, b, d):
    layout = torch.zeros(M, dtype=torch.int32, device=d.device)
    m_grouped_fp8_gemm_nt_contiguous(a, BlockScaled(b.data[None], b.scale_inv[None]), d, layout)


def by_offsets(a, b, d):
    offsets = torch.tensor([0, M], dtype=torch.int32, device=d.device)
    weights = BlockScaled(b.data[None], b.scale_inv[None])
    m_grouped_fp8_gemm_nt_contiguous(a, weights, d, expert_offsets=offsets)


def masked(a, b, d):
    rows = torch.full((1,), M, dtype=torch.int32, device=d.device)
    pairs = (BlockScaled(x.data[None], x.scale_inv[None]) for x in (a, b))
    m_grouped_fp8_gemm_nt_masked(*pairs, d[None], rows, M)


@pytest.fixture(params=[dense, contiguous, by_offsets, masked])
def gemm(request):
    return request.param


@pytest.fixture(params=["cpu", "launched", pytest.param("cuda", marks=NEEDS_GPU)])
def operands(request):
    """Of the CPU, once where its body runs and once where kernels are launched; or of a GPU."""
    device = "cuda" if request.param == "cuda" else "cpu"
    a, b = torch.randn(M, K, device=device), torch.randn(N, K, device=device)
    pairs = quantize_1x128(a), quantize_128x128(b)
    gpu = request.getfixturevalue("gpu") if request.param == "launched" else None
    yield pairs
    assert gpu is None or gpu.launched


def empty(operands, **options):
    return torch.zeros(M, N, dtype=torch.bfloat16, device=operands[0].data.device, **options)


def test_a_graph_that_saved_d_raises(gemm, operands):
    d, weight = empty(operands), empty(operands, requires_grad=True)
    loss = (d * weight).sum()
    gemm(*operands, d)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_d_that_requires_a_gradient_is_refused(gemm, operands, is_leaf):
    d = empty(operands, requires_grad=True)
    d = d if is_leaf else d * 1
    with pytest.raises(ValueError, match=r"d must not require a gradient.*detached"):
        gemm(*operands, d)
    assert not d.any()
    with torch.no_grad():
        gemm(*operands, d)
    assert d.any()
    gemm(*operands, d.detach())


@torch.inference_mode()
def test_inference_tensors_have_no_version(gemm, operands):
    d = empty(operands)
    gemm(*operands, d)
    assert d.any()
