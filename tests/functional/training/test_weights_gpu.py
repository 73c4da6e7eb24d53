"""Codes of master weights on a GPU: captured steps, streams and memory."""

import gc

import pytest
import torch
from torch import nn

from moefp8.functional.training.weights import codes_of, codes_stay, requantize
from tests.functional.gpu_cases import poison
from tests.gpu import NEEDS_GPU, no_synchronisation, same_bits
from tests.quant.both_cases import expected_of

pytestmark = [*NEEDS_GPU, pytest.mark.filterwarnings("error:.*portable PyTorch body")]
DTYPES = torch.bfloat16, torch.float32


class Product(torch.autograd.Function):
    """x W^T of dequantized codes of W, and dX of those of W^T; W's gradient in its own dtype."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ dequantized(*codes_of(weight)[:2]).T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        codes = codes_of(weight)
        transposed = dequantized(codes.transposed, codes.scale_inv.mT)
        return dy @ transposed.T, (dy.T @ x).to(weight.dtype)


def dequantized(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    scales = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * scales[: codes.shape[0], : codes.shape[1]]


def make_weight(dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.randn(264, 144, device="cuda").to(dtype))


def assert_right(weight: torch.Tensor, parts: int = 1) -> None:
    expected = expected_of(weight.detach(), parts)
    for ours, theirs in zip(codes_of(weight, parts), expected, strict=True):
        assert same_bits(ours, theirs)


def assert_memory_is_right(weight: torch.Tensor, codes: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(codes, expected_of(weight.detach(), 1), strict=True):
        assert same_bits(ours, theirs)


@pytest.fixture(autouse=True, scope="module")
def cublas_is_ready():
    """PyTorch's products make a handle for each thread, which no capture allows."""
    weight = make_weight(torch.float32)
    Product.apply(torch.randn(40, 144, device="cuda", requires_grad=True), weight).sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_they_are_kept_without_a_wait(dtype, parts):
    weight = make_weight(dtype)
    first = codes_of(weight, parts)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with torch.no_grad(), no_synchronisation():
            weight.mul_(-3)
            assert codes_of(weight, parts).data is first.data
        assert_right(weight, parts)
    assert torch.cuda.memory_allocated() == before


def test_they_are_freed_with_the_weight():
    codes_of(make_weight())
    gc.collect()
    before = torch.cuda.memory_allocated()
    weight = make_weight()
    codes_of(weight)
    del weight
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("is_kept_before", [False, True])
def test_a_captured_step_is_the_eager_one(is_kept_before):
    """Forward, backward and the optimizer: each replay trains as an eager step does."""
    x = torch.randn(40, 144, device="cuda", requires_grad=True)
    captured = make_weight(torch.float32)
    eager = nn.Parameter(captured.detach().clone())

    def step(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        y = Product.apply(x, weight)
        y.square().mean().backward()
        optimizer.step()
        return y

    optimizers = [torch.optim.SGD([w], lr=30.0) for w in (captured, eager)]
    if is_kept_before:
        codes_of(captured)
    torch.cuda.synchronize()
    poison()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(captured, optimizers[0])
    for _ in range(4):
        graph.replay()
        expected = step(eager, optimizers[1])
        assert torch.equal(found, expected)
        assert torch.equal(captured, eager)
    assert_right(captured)  # eager again, after weights that no version counted
    graph.replay()
    step(eager, optimizers[1])
    assert torch.equal(captured, eager)
    assert_right(captured)


def test_captures_in_a_row_each_make_their_own():
    weight = make_weight()
    codes = codes_of(weight)
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            codes_of(weight), codes_of(weight)
    for graph in graphs:
        weight.data.mul_(-3)
        graph.replay()
        assert_memory_is_right(weight, codes)


def test_a_graph_that_makes_none_reads_what_requantize_made():
    weight = make_weight()
    x = torch.randn(40, 144, device="cuda")
    codes = codes_of(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with codes_stay(), torch.cuda.graph(graph):
        y = Product.apply(x, weight)
    for _ in range(3):
        weight.data.mul_(-3)
        graph.replay()
        old = y.clone()
        requantize(weight)
        assert_memory_is_right(weight, codes)
        graph.replay()
        assert torch.equal(y, Product.apply(x, weight))
        assert not torch.equal(y, old)


@pytest.mark.parametrize("is_captured", [False, True])
def test_another_stream_waits_until_they_are_made(is_captured):
    weight, side = make_weight(), torch.cuda.Stream()
    expected = expected_of(weight.detach(), 1)
    torch.cuda.synchronize()
    poison()

    def run() -> list[torch.Tensor]:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            codes_of(weight)
        copies = [x.view(torch.uint8).clone() for x in codes_of(weight)]
        here.wait_stream(side)
        return copies

    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        graph.replay()
    else:
        found = run()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs.view(torch.uint8))
