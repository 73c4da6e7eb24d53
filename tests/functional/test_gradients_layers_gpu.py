"""Gradients of layers on a GPU: linear, shared and grouped ones against the portable bodies; and
all of them in graphs, under torch.compile, and with no kernel of others.
"""

import pytest
import torch

from moefp8 import GroupedExperts, MoE
from moefp8.functional.experts import ExpertsInputs, routed_experts
from moefp8.functional.feed_forward import feed_forward, feed_forward_saving
from moefp8.functional.feed_forward_backward import feed_forward_backward
from moefp8.functional.grouped_linear import grouped_linear
from moefp8.functional.linear import fp8_linear_backward
from moefp8.kernels.common.activation import SWIGLU, Activation
from moefp8.kernels.common.blocks import MIN_GRADIENT_AMAX
from moefp8.quant import quantize_128x128
from moefp8.quant.numerics import quantize_1x128
from moefp8.testing import assert_matches_reference
from tests import naive
from tests.functional.cases import run_body, tokens_of, weights_of
from tests.functional.gpu_cases import E, H, I, inputs, poison
from tests.functional.layer_cases import KINDS, make_layer, pass_of
from tests.functional.test_feed_forward import SIZES, operands
from tests.gpu import NEEDS_GPU, no_synchronisation, slow
from tests.layers.cases import assert_close

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("error:.*portable PyTorch body"),
]
SHAPES = [  # M, N, K
    (1, 2112, 7168), (40, 2112, 512), (64, 128, 4096), (300, 1000, 2000), (4096, 512, 640),
    (7, 136, 264), (33, 100, 200), (130, 129, 257), (9, 1, 128), (9, 128, 1), (5, 3, 7),
]  # fmt: skip


def gradient_of(num_rows: int, size: int) -> torch.Tensor:
    """Its amax is small: that of activations would be 1e-4 at least."""
    return tokens_of(num_rows, size, "cuda") * 2.0**-24


# ---- Against FP64, of the same codes ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear_is_right(m, n, k, dtype):
    grad, weight = gradient_of(m, n).to(dtype), quantize_128x128(torch.randn(n, k, device="cuda"))
    codes = quantize_1x128(grad, min_amax=MIN_GRADIENT_AMAX)
    of_grad, of_weight = naive.values(*codes, 1), naive.values(*weight, 128)
    expected, size = of_grad @ of_weight, of_grad.abs() @ of_weight.abs()
    found = []
    for _ in range(3):
        poison()
        with no_synchronisation():
            found.append(fp8_linear_backward(grad, *weight, False))
    error = (found[0].double() - expected).abs()
    assert bool((error <= expected.abs() * 2**-8 + size * 2**-11).all())
    assert all(torch.equal(x, found[0]) for x in found)
    if k >= 64:
        assert_matches_reference(found[0], expected)
    strided = grad.T.contiguous().T
    assert torch.equal(fp8_linear_backward(strided, *weight, False), found[0])


@pytest.mark.parametrize("loads", [(4, 0, 9), (0, 0, 0), (130, 1, 2), (700, 300, 64)])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (400, 512), (136, 272), (100, 36), (129, 257)])
def test_grouped_linear_is_right(loads, n, k):
    weight = quantize_128x128(torch.randn(3, n, k, device="cuda"))
    offsets = torch.tensor([0, *loads]).cumsum(0).int().cuda()
    num_rows = sum(loads)
    x, grad = tokens_of(num_rows + 3, k, "cuda").requires_grad_(), gradient_of(num_rows + 3, n)
    with torch.no_grad():
        x[num_rows:] = torch.nan  # rows of no expert may hold anything
    grad[num_rows:] = torch.inf
    poison()
    y = grouped_linear("a layer", x, *weight, offsets, False)
    (dx,) = torch.autograd.grad(y, x, grad)
    codes = quantize_1x128(grad, min_amax=MIN_GRADIENT_AMAX)
    begin = 0
    for expert, load in enumerate(loads):
        rows = slice(begin, begin + load)
        of_grad = naive.values(codes[0][rows], codes[1][rows], 1)
        expected = of_grad @ naive.values(weight.data[expert], weight.scale_inv[expert], 128)
        assert_matches_reference(dx[rows], expected, 4e-3 if k >= 64 else 5e-2)
        begin += load
    assert not dx[num_rows:].any()
    assert not y[num_rows:].any()


@pytest.mark.parametrize("activation", [SWIGLU, Activation("geglu", 0.3)])
@pytest.mark.parametrize(
    ("t", "h", "i"), [*SIZES, (140, 256, 384), (700, 512, 640), (2049, 384, 1408), (5, 100, 36)]
)
def test_shared_experts_are_right(t, h, i, activation):
    made, grad = operands(t, h, i, "cuda"), gradient_of(t, h)
    y, gate_up = feed_forward_saving(*made, activation)
    assert torch.equal(y, feed_forward(*made, activation))
    tolerance = 4e-3 if i >= 64 else 5e-2
    assert_matches_reference(
        gate_up, run_body(feed_forward_saving, *made, activation)[1], tolerance
    )
    expected = run_body(feed_forward_backward, grad, gate_up, *made[1:], activation, False)
    found = []
    for _ in range(3):
        poison()
        with no_synchronisation():
            _, again = feed_forward_saving(*made, activation)
            found.append(feed_forward_backward(grad, again, *made[1:], activation, False))
        assert torch.equal(again, gate_up)
    assert_close(found[0], expected, i)
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_numbers_stay_with_their_row(kind, bad):
    layer, given = make_layer(kind, False), pass_of(kind)
    clean = given.gradient(layer)
    given.grad[3, 100] = bad
    found = given.gradient(layer)
    others = torch.arange(len(clean), device="cuda") != 3
    assert not found[3].isfinite().any()
    assert torch.equal(found[others], clean[others])


# ---- As layers ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_result_is_the_same_with_and_without_gradients(kind, dtype):
    layer, given = make_layer(kind, None), pass_of(kind)
    x = given.x.to(dtype).requires_grad_()
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    (dx,) = torch.autograd.grad(y, x, given.grad.to(y.dtype))
    assert dx.dtype == dtype
    assert bool(dx.any(1).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_saved_may_be_offloaded(kind, saved_dtype):
    """Then it comes back without gaps between rows, and with scales in another order."""
    layer, given = make_layer(kind, False, 260), pass_of(kind, 260)
    layer.saved_dtype = saved_dtype
    expected = given.gradient(layer)
    x = given.x.detach().requires_grad_()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = layer(x)
    assert torch.equal(torch.autograd.grad(y, x, given.grad)[0], expected)


def leaves_of(made: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    x, _, top_k_weights = made
    return [x.requires_grad_(), top_k_weights.requires_grad_()]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_tokens", [1, 32, 400, 2100])
def test_one_graph_of_forward_and_backward_serves_all_routings(num_tokens, saved_dtype, keeps):
    layer = GroupedExperts(E, H, I, saved_dtype=saved_dtype, keep_transposed=keeps, device="cuda")
    memory, grad = inputs(num_tokens), gradient_of(num_tokens, H)
    leaves, side = leaves_of(memory), torch.cuda.Stream()

    def step() -> tuple[torch.Tensor, ...]:
        y = layer(*memory)
        return y.detach(), *torch.autograd.grad(y, leaves, grad)

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for kind in ("one expert", "distinct", "out of range", "repeated", "nowhere"):
        with torch.no_grad():
            for old, new in zip(memory, inputs(num_tokens, kind=kind), strict=True):
                old.copy_(new)
            grad.copy_(gradient_of(num_tokens, H))
            for x in found:
                x.fill_(torch.nan)
        for _ in range(2):
            graph.replay()
        for ours, theirs in zip(found, step(), strict=True):
            assert torch.equal(ours, theirs), kind


@pytest.mark.parametrize("num_tokens", [8, 300])
def test_a_whole_layer_in_a_graph(num_tokens):
    """Shared experts of few tokens are computed beside the routed ones."""
    layer = MoE(256, 128, 8, 2, shared_intermediate_size=384, device="cuda")
    x = tokens_of(num_tokens, 256, "cuda").requires_grad_()
    grad, side = gradient_of(num_tokens, 256), torch.cuda.Stream()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = layer(x)
        return y.detach(), torch.autograd.grad(y, x, grad)[0]

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(tokens_of(num_tokens, 256, "cuda"))
        graph.replay()
        expected, of_x = step()
        assert torch.equal(y, expected)
        assert_matches_reference(dx, of_x, 1e-2)  # three gradients are added in another order


@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_backward_holds_no_kernels_of_others(saved_dtype):
    """Nor does it transpose what is kept."""
    weights = weights_of(E, H, I, "cuda")
    for num_tokens in (32, 2100):
        leaves = leaves_of(made := inputs(num_tokens))
        given = ExpertsInputs(*made, *weights, SWIGLU, False)
        grad = gradient_of(num_tokens, H)
        torch.autograd.grad(routed_experts("it", given, saved_dtype, True), leaves, grad)
        y = routed_experts("it", given, saved_dtype, True)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.autograd.grad(y, leaves, grad)
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if "kernel" in event.name.lower()]
        assert any("activation_backward" in name for name in kernels), kernels
        assert not [x for x in kernels if "at::native" in x or "transpose" in x], kernels


@pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
@pytest.mark.parametrize("size", [I, 100])
@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_experts_compile_whole(backend, size, saved_dtype):
    """Rows of what is saved lie as the launcher wants them, also where a graph carries them."""
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    layer = GroupedExperts(E, H, size, saved_dtype=saved_dtype, device="cuda")
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for num_tokens in (9, 1, 300):
        leaves, grad = leaves_of(made := inputs(num_tokens)), gradient_of(num_tokens, H)
        results = []
        for run in (layer, compiled):
            y = run(*made)
            results.append((y, *torch.autograd.grad(y, leaves, grad)))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_compile_whole(kind, backend):
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    layer, given = make_layer(kind, None), pass_of(kind)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert torch.equal(given.gradient(compiled), given.gradient(layer))
