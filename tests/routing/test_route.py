"""The router: its logits and its choice are the same whatever the batch, and exact to FP32."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moefp8 import TopKRouter
from moefp8.kernels.jit import compile_kernels
from moefp8.kernels.program import Tensor
from moefp8.kernels.targets import target_of
from moefp8.routing import logits_launch, sigmoid_group_topk, softmax_topk
from moefp8.routing.logits_launch import TILES, choose_tile, describe_logits, kernel_of
from moefp8.routing.route import route, route_kernels
from tests.gpu import ARCH, no_synchronisation, on_gpu
from tests.records import TARGET, run

SIGMOID = (8, True, 8, 4, True, 2.5)  # k, by_sigmoid, num_groups, topk_groups, renormalize, factor
SOFTMAX = (4, False, 1, 1, True, 1.0)
OP = torch.ops.moefp8.route.default  # what the dispatcher gives, whatever GPU there is


def inputs_of(num_tokens: int, h: int, num_experts: int, dtype=torch.bfloat16, device="cpu"):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, h, generator=g).to(device, dtype)
    weight = (torch.randn(num_experts, h, generator=g) / h**0.5).to(device)
    return x, weight, (torch.randn(num_experts, generator=g) / 10).to(device)


def assert_equal(ours, expected) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a.cpu(), b.cpu())


# ---- Numerics ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_chooses_by_the_logits(dtype):
    x, weight, bias = inputs_of(9, 96, 64, dtype)
    logits = (x.double() @ weight.double().T).float()
    assert_equal(route(x, weight, None, *SOFTMAX), softmax_topk(logits, 4, True))
    k, _, *rest = SIGMOID
    assert_equal(route(x, weight, bias, *SIGMOID), sigmoid_group_topk(logits, bias, k, *rest))


@pytest.mark.parametrize("options", [SOFTMAX, SIGMOID, (3, False, 1, 1, False, 1.0)])
def test_gradients_flow_to_tokens_and_weight(options):
    x, weight, bias = inputs_of(7, 32, 64, torch.float32)
    found = []
    for formula in (False, True):
        leaves = [y.clone().requires_grad_() for y in (x, weight)]
        if formula:
            logits, (k, by_sigmoid, *rest) = torch.nn.functional.linear(*leaves), options
            chosen = (
                sigmoid_group_topk(logits, bias, k, *rest)
                if by_sigmoid
                else softmax_topk(logits, k, rest[2])
            )
        else:
            chosen = route(*leaves, bias if options[1] else None, *options)
        loss = (chosen.top_k_weights * torch.arange(1, 1 + chosen.top_k_weights.shape[1])).sum()
        found.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_the_op_keeps_the_rules_of_torch():
    for num_tokens in (6, 0):
        x, weight, bias = inputs_of(num_tokens, 16, 64)
        torch.library.opcheck(OP, (x, weight, bias, *SIGMOID))
        torch.library.opcheck(OP, (x, weight, None, *SOFTMAX))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(3, 15)}, r"x must be \[T, H\] for weight \[E, H\]"),
        ({"x": torch.ones(3, 16, dtype=torch.int32)}, "x must be"),
        ({"weight": torch.randn(64, 16).bfloat16()}, "weight must be"),
        ({"bias": torch.randn(63)}, r"bias must be \[E\]"),
        ({"k": 65}, r"top_k must be in \[1, E\] = \[1, 64\], got 65"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    x, weight, bias = inputs_of(3, 16, 64)
    given = {"x": x, "weight": weight, "bias": bias, "k": 8} | change
    with pytest.raises((TypeError, ValueError), match=message):
        route(*given.values(), *SIGMOID[1:])


# ---- The kernels ----


@pytest.mark.usefixtures("own_cache")
def test_every_tile_compiles_and_spills_nothing():
    kernels = list(map(logits_launch.kernel_of, TILES))
    for kernel, cubin in zip(kernels, compile_kernels(kernels, ARCH), strict=True):
        assert not cubin.problems(), (kernel, cubin.problems())


@pytest.mark.parametrize(("num_experts", "h"), [(256, 7168), (128, 2048), (8, 4096), (64, 2880)])
def test_tiles_fill_the_gpu_with_few_tokens_and_with_many(num_experts, h):
    one, eight, many = (choose_tile(m, num_experts, h, 132) for m in (1, 8, 16384))
    assert one == eight == (8, 64, 1)  # as many CTAs as can be, and no weight is read twice
    assert many.tokens >= 64
    if num_experts >= 128:
        assert many.chunks == 4
    listed = route_kernels(TARGET, 16384, "softmax_topk", num_experts, h)
    assert {kernel_of(one), kernel_of(many)} <= {*listed}


# ---- The launcher ----


@pytest.mark.parametrize("num_tokens", [1, 133, 600])
@pytest.mark.parametrize(("num_experts", "h"), [(64, 96), (64, 2880), (130, 2048)])
def test_launch_says_where_everything_lies(gpu, num_tokens, num_experts, h):
    x, weight, bias = inputs_of(num_tokens, h, num_experts)
    options = (3, True, 2, 1, False, 2.5)
    wide = torch.randn(num_tokens, h + 8).bfloat16()
    for given in (x, wide[:, 8:]):
        gpu.launched.clear()
        ours = route(given, weight, bias, *options)
        assert [y.kernel.source.stem for y in gpu.launched] == ["logits", "top_k"]
        expected = OP(given, weight, bias, *options)
        assert torch.equal(ours.top_k_index, expected[0])
        torch.testing.assert_close(ours.top_k_weights, expected[1])


@pytest.mark.parametrize(
    "given",
    [
        lambda x, weight: (x[:, 1:], weight[:, 1:]),
        lambda x, weight: (x[:, :33], weight[:, :33].contiguous()),
        lambda x, weight: (x[:1, :36], weight[:, :36].contiguous()),
        lambda x, weight: (x.T.contiguous().T, weight.T.contiguous().T),
        lambda x, weight: (x[:1].expand(5, -1), weight),
    ],
    ids=["unaligned", "odd", "one row", "transposed", "expanded"],
)
def test_what_tma_cannot_address_is_copied(gpu, given):
    x, weight, bias = inputs_of(5, 64, 16)
    x, weight = given(x, weight)
    bias = torch.stack([bias, bias + 1], dim=1)[:, 0]
    options = (3, True, 4, 2, True, 2.5)
    with float64_by_default():
        ours = route(x, weight, bias, *options)
    assert [y.kernel.source.stem for y in gpu.launched] == ["logits", "top_k"]
    expected = OP(x, weight, bias, *options)
    assert torch.equal(ours.top_k_index, expected[0])
    torch.testing.assert_close(ours.top_k_weights, expected[1])


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_run_in_pytorch(gpu, dtype):
    x, weight, _ = inputs_of(5, 64, 16, dtype)
    assert_equal(route(x, weight, None, *SOFTMAX), OP(x, weight, None, *SOFTMAX))
    assert "logits" not in [y.kernel.source.stem for y in gpu.launched]


def test_widths_that_differ_are_named(gpu):
    x, weight, _ = inputs_of(5, 64, 16)
    for other in (weight[:, :0], weight[:, :32]):
        with pytest.raises(ValueError, match=r"x must be \[T, H\] for weight \[E, H\]"):
            route(x, other, None, *SOFTMAX)
    ours = route(x[:, :0], weight[:, :0], None, *SOFTMAX)
    assert torch.equal(ours.top_k_index, torch.arange(4).expand(5, 4))


def test_very_many_tokens_are_split(gpu, monkeypatch):
    x, weight, bias = inputs_of(20, 512, 64)
    whole = route(x, weight, bias, *SIGMOID)
    assert len(gpu.launched) == 2
    monkeypatch.setattr(logits_launch, "MAX_SUMS_BYTES", 4 * 64 * 2 * 7)  # seven tokens
    assert_equal(route(x, weight, bias, *SIGMOID), whole)
    assert len(gpu.launched) == 2 + 2 * 3
    assert max(map(len, gpu.workspaces[1:])) <= logits_launch.MAX_SUMS_BYTES


def test_a_bias_is_no_part_of_what_was_prepared_without_one(gpu):
    x, weight, bias = inputs_of(9, 512, 64)
    for given in (None, 8 * bias, None):
        ours, expected = (f(x, weight, given, *SIGMOID) for f in (route, OP))
        assert torch.equal(ours[0], expected[0])
        torch.testing.assert_close(ours[1], expected[1])


def test_no_tokens_launch_nothing(gpu):
    router = TopKRouter(64, 16, 4)
    index, weights = router(torch.empty(0, 64).bfloat16())
    assert index.shape == weights.shape == (0, 4)
    assert not gpu.launched


# ---- On a GPU ----


def logits_on_gpu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [T, E], added up in the order in which the kernel of the choice does."""
    tile = choose_tile(len(x), *weight.shape, target_of(x.get_device()).num_sms)
    shape = tile.num_parts(x.shape[1]), len(x), len(weight)
    sums = x.new_full(shape, torch.nan, dtype=torch.float32)
    run(
        lambda r: describe_logits(r, Tensor.of(x, "x"), Tensor.of(weight, "weight")),
        x=x,
        weight=weight,
        sums=sums,
    )
    groups = [sum(parts[1:], parts[0]) for parts in sums.split(tile.parts_of_group)]
    return sum(groups[1:], groups[0])


@on_gpu
@pytest.mark.parametrize(
    ("num_experts", "h"), [(256, 7168), (128, 2048), (8, 4096), (130, 2880), (64, 104), (512, 2048)]
)
def test_logits_are_exact_to_fp32_and_the_same_in_every_batch(num_experts, h):
    most = 1100
    x, weight, _ = inputs_of(most, h, num_experts, device="cuda")
    x[::3] *= 30
    weight[::2] *= torch.logspace(-3, 3, h, device="cuda")  # its numbers differ in size
    all_logits = logits_on_gpu(x, weight)
    exact = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    assert bool(((all_logits - exact).abs() <= 1e-6 * sizes).all())
    order = torch.randperm(most, device="cuda")
    assert torch.equal(logits_on_gpu(x[order], weight), all_logits[order])
    for m in (1, 2, 8, 9, 17, 33, 65, 100, 129, 257, 500, 513, 777, 1024):
        first = (most - m) // 2
        some = logits_on_gpu(x[first : first + m], weight)
        assert torch.equal(some, all_logits[first : first + m]), m


@on_gpu
@pytest.mark.parametrize("options", [SOFTMAX, SIGMOID])
@pytest.mark.parametrize("num_tokens", [1, 3, 64, 300, 2000])
def test_choices_on_a_gpu_follow_from_the_logits(options, num_tokens):
    x, weight, bias = inputs_of(num_tokens, 7168, 256, device="cuda")
    k, by_sigmoid, *rest = options
    bias = bias if by_sigmoid else None
    with no_synchronisation():
        ours = route(x, weight, bias, *options)
    logits = logits_on_gpu(x, weight)
    expected = (
        sigmoid_group_topk(logits, bias, k, *rest) if by_sigmoid else softmax_topk(logits, k, True)
    )
    assert_equal(ours, expected)


@on_gpu
def test_a_graph_serves_every_input():
    router = TopKRouter(2048, 128, 8, device="cuda")
    for num_tokens in (1, 40, 1000):
        x = torch.randn(num_tokens, 2048, device="cuda").bfloat16()
        with torch.no_grad():
            router(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = router(x)
            for _ in range(3):
                x.normal_()
                graph.replay()
                assert_equal(captured, router(x))
