"""Ops that write into `d`, as autograd sees them: the same on every device."""

import pytest
import torch

from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.operands import Operands
from tests.gpu import NEEDS_GPU
from tests.kernels.gemm.grouped_cases import operands, routing_of, run_op


@pytest.fixture(params=["cpu", "launched", pytest.param("cuda", marks=NEEDS_GPU)])
def place(request):
    """A CPU, where the op's body runs or where kernels are launched; or a GPU."""
    gpu = request.getfixturevalue("gpu") if request.param == "launched" else None
    yield "cuda" if request.param == "cuda" else "cpu"
    assert gpu is None or gpu.launched


@pytest.fixture(params=(None, *GroupLayout))
def gemm(request, place):
    """A function of d, and a d of zeros."""
    routing = routing_of(request.param, (128,), 0)
    made, bounds = (x.to(place) for x in operands(routing, 256, 128)), routing.bounds_on(place)
    *others, d = made
    return lambda d: run_op(routing, Operands(*others, d), bounds), d.zero_()


def test_a_graph_that_saved_d_raises(gemm):
    run, d = gemm
    loss = (d * torch.zeros_like(d, requires_grad=True)).sum()
    run(d)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_d_that_requires_a_gradient_is_refused(gemm, is_leaf):
    run, d = gemm
    d = d.requires_grad_() if is_leaf else d.requires_grad_() * 1
    with pytest.raises(ValueError, match=r"d must not require a gradient.*detached"):
        run(d)
    assert not d.any()
    with torch.no_grad():
        run(d)
    assert d.any()
    run(d.detach())


@torch.inference_mode()
def test_inference_tensors_have_no_version(gemm):
    run, d = gemm
    d = torch.zeros_like(d)
    run(d)
    assert d.any()
