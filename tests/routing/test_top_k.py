"""The router's choice: the same in plain Python, in PyTorch, in the kernel's text and on a GPU."""

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8 import TopKRouter
from moefp8.kernels import jit
from moefp8.kernels.jit import Source
from moefp8.kernels.jit.kernel import DEVICE_FOLDER, compile_kernels
from moefp8.routing import sigmoid_group_topk, softmax_topk, top_k_launch
from moefp8.routing.logits_launch import Sums
from moefp8.routing.top_k import _sigmoid
from moefp8.routing.top_k_launch import TopKInputs, TopKSources, prepare_top_k
from tests import naive
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.gpu import assert_arguments_fit, no_synchronisation, on_gpu

DTYPES = torch.bfloat16, torch.float16, torch.float32
OPS = "softmax_topk", "sigmoid_group_topk"
NAN, INF = math.nan, math.inf


def logits_of(num_tokens: int, num_experts: int, dtype=torch.float32) -> torch.Tensor:
    """Rows in turn: distinct numbers, ties, ties of both zeros, NaN, Inf, all of them."""
    logits = torch.randn(num_tokens, num_experts) * torch.randint(1, 9, (num_tokens, 1))
    logits[1::6] = logits[1::6].round()
    logits[2::6] = torch.where(logits[2::6] > 0, 0.0, -0.0)
    some = [NAN, -NAN], [INF, -INF, -104.0], [NAN, INF, -INF, 0.0, -0.0]
    for first, odd in enumerate(some, 3):
        rows = logits[first::6]
        chosen = torch.tensor(odd)[torch.randint(len(odd), rows.shape)]
        logits[first::6] = torch.where(torch.rand(rows.shape) < 0.3, chosen, rows)
    return logits.to(dtype)


def bias_of(num_experts: int) -> torch.Tensor:
    """A bias of few values, so that sums are often equal; closed groups score -Inf too."""
    bias = torch.randint(-2, 3, (num_experts,)) / 4
    return torch.where(torch.rand(num_experts) < 0.2, -INF, bias)


def group_limits(num_experts: int, k: int) -> list[tuple[int, int]]:
    """(num_groups, topk_groups) under which k experts can be chosen."""
    found = []
    for num_groups in (2, 8, num_experts // 2, num_experts):
        if num_groups >= 2 and num_experts % num_groups == 0:
            topk_groups = -(-k // (num_experts // num_groups))
            found += [(num_groups, x) for x in {topk_groups, num_groups // 2} if x >= topk_groups]
    return [(1, 1), *sorted(set(found))]


def assert_same_choice(ours, expected, ulps: int) -> None:
    for x, y in zip(ours, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert torch.equal(ours[0].cpu(), expected[0])
    torch.testing.assert_close(
        ours[1].cpu(), expected[1], rtol=ulps * 2**-23, atol=ulps * 2.0**-149, equal_nan=True
    )


# ---- In PyTorch ----

ODD = st.sampled_from((NAN, INF, -INF, 0.0, -0.0, 1.0, 1.5, 1e-40, 3e38))  # ties are common


@given(
    data=st.data(),
    value=st.sampled_from((ODD, st.floats(-20, 20, width=32))),
    dtype=st.sampled_from(DTYPES),
    renormalize=st.booleans(),
    factor=st.sampled_from((1.0, 2.5)),
)
def test_choices_equal_plain_python(data, value, dtype, renormalize, factor):
    num_groups, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    num_experts, topk_groups = num_groups * size, data.draw(st.integers(1, num_groups))
    k = data.draw(st.integers(1, topk_groups * size))
    drawn = st.lists(value, min_size=num_experts, max_size=num_experts)
    logits, bias = torch.tensor([data.draw(drawn)]).to(dtype), torch.tensor(data.draw(drawn))
    ours = softmax_topk(logits, k, renormalize)
    assert_close_choice(ours, *naive.softmax_topk(logits[0].tolist(), k, renormalize))
    ours = sigmoid_group_topk(logits, bias, k, num_groups, topk_groups, renormalize, factor)
    scores = logits[0].double().sigmoid().float()
    index = naive.group_choice((scores + bias).tolist(), k, num_groups, topk_groups)
    expected = scores[index] * factor  # the bias does not change them
    total = scores[index].sum() + 1e-20 if renormalize else 1.0
    assert_close_choice(ours, index, expected / total)


def assert_close_choice(ours, index, weights) -> None:
    """Compare the choice of a single token."""
    assert ours.top_k_index[0].tolist() == index
    expected = torch.as_tensor(weights, dtype=torch.float32)
    torch.testing.assert_close(
        ours.top_k_weights[0], expected, rtol=1e-5, atol=1e-7, equal_nan=True
    )


def test_sigmoid_group_topk_at_deepseek_size():
    logits, bias = torch.randn(50, 256), torch.randn(256) * 0.1
    for token in logits:
        ours = sigmoid_group_topk(token[None], bias, 8, 8, 4, True, 2.5)
        arguments = (token.tolist(), bias.tolist(), 8, 8, 4, True, 2.5)
        assert_close_choice(ours, *naive.sigmoid_group_topk(*arguments))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: softmax_topk(x, 9, True), r"softmax_topk: top_k .* \[1, E\] = \[1, 8\], got 9"),
        (lambda x: softmax_topk(x, 0, True), "got 0"),
        (lambda x: softmax_topk(x[0], 2, True), r"logits must be \[T, E\], got shape \[8\]"),
        (lambda x: sigmoid_group_topk(x, None, 2, 3), "num_groups must divide E = 8, got 3"),
        (lambda x: sigmoid_group_topk(x, None, 2, 4, 5), r"topk_groups must be in .*got 5"),
        (lambda x: sigmoid_group_topk(x, None, 3, 4, 1), "the 2 experts of 1 groups, got 3"),
        (lambda x: sigmoid_group_topk(x, x[0, :3], 2), r"bias must be \[E\] = \[8\], got \[3\]"),
    ],
)
def test_bad_choices_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4, 8))


def test_experts_of_closed_groups_follow_when_only_minus_infinity_is_left():
    bias = torch.tensor([0.0, 0.0, 5.0, -INF])
    index, _ = sigmoid_group_topk(torch.zeros(1, 4), bias, 2, 2, 1)
    assert index.tolist() == [[0, 1]]  # 5 - Inf is no strong group
    bias[2:] = torch.tensor([-INF, 5.0])
    index, _ = sigmoid_group_topk(torch.zeros(1, 4), -bias.abs(), 2, 2, 1)
    assert index.tolist() == [[0, 1]]
    index, _ = sigmoid_group_topk(torch.zeros(1, 4), torch.full((4,), -INF), 2, 2, 1)
    assert index.tolist() == [[0, 1]]


def samples() -> torch.Tensor:
    ends = torch.tensor([0.0, -0.0, INF, -INF, NAN, 128, -128, 1e-40, -1e-40, 3e38, -3e38])
    near_zero = torch.randn(100_000) * torch.exp2(torch.randint(-30, 3, (100_000,)))
    return torch.cat([torch.linspace(-106, 20, 1_000_000), near_zero, ends])


def test_sigmoid_is_rounded_correctly():
    x = samples()
    ours, e = _sigmoid(x), x.double().exp()
    exact = torch.where(x < 0, e / (1 + e), 1 / (1 + 1 / e))
    exponent = torch.frexp(exact).exponent.clamp(min=-125)
    errors = (ours.double() - exact).abs() / torch.exp2(exponent.double() - 24)
    assert errors[~x.isnan()].max() < 0.5001
    assert torch.equal(ours.isnan(), x.isnan())
    assert ours[(ours > 0) & (ours < 2**-126)].numel() > 10_000  # denormal ones are among them


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_are_those_of_the_formulas(renormalize):
    logits = torch.randn(5, 16, requires_grad=True)
    index, weights = softmax_topk(logits, 4, renormalize)
    expected = logits.softmax(dim=-1).gather(1, index)
    sigmoid_index, sigmoid_weights = sigmoid_group_topk(logits, None, 4, 4, 2, renormalize, 2.5)
    sigmoids = logits.sigmoid().gather(1, sigmoid_index)
    if renormalize:
        expected, sigmoids = (x / x.sum(dim=-1, keepdim=True) for x in (expected, sigmoids))
    for ours, formula in ((weights, expected), (sigmoid_weights, 2.5 * sigmoids)):
        grad = torch.randn_like(ours)
        pairs = (torch.autograd.grad(x, logits, grad)[0] for x in (ours, formula))
        torch.testing.assert_close(*pairs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_compiled_router_is_bit_equal(scoring):
    torch._dynamo.reset()
    rest = {"num_groups": 4, "topk_groups": 2, "correction_bias": True}
    router = TopKRouter(32, 16, 4, scoring=scoring, **(rest if scoring == "sigmoid" else {}))
    compiled, x = torch.compile(router, fullgraph=True), torch.randn(7, 32)
    ours, expected = compiled(x), router(x)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    (ours_grad,), (grad,) = (
        torch.autograd.grad(y.top_k_weights.square().sum(), router.weight) for y in (ours, expected)
    )
    torch.testing.assert_close(ours_grad, grad)


@pytest.mark.parametrize("op", OPS)
def test_ops_keep_the_rules_of_torch(op):
    arguments = (4, True) if op == "softmax_topk" else (None, 4, 4, 2, True, 2.5)
    function = getattr(torch.ops.moefp8, op).default
    for logits in (torch.randn(6, 16), torch.randn(16, 6).T.bfloat16(), torch.randn(0, 16)):
        torch.library.opcheck(function, (logits, *arguments))


# ---- The kernel's text ----


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_variant_compiles_and_spills_nothing(op, dtype):
    kernels = [
        top_k_launch.kernel_of(op, num_experts, dtype, parts)
        for num_experts in range(32, 513, 32)
        for parts in ((0, 1, 4) if dtype == torch.float32 else (0,))
    ]
    for kernel, cubin in zip(kernels, compile_kernels(kernels), strict=True):
        assert cubin.problems() == [], kernel


@pytest.mark.usefixtures("own_cache")
def test_arguments_lie_in_memory_as_the_kernel_reads_them(tmp_path):
    kernel = top_k_launch.kernel_of("softmax_topk", 8, torch.float32)
    assert_arguments_fit(top_k_launch._Arguments, kernel, tmp_path)


RUN = """
#include "warp.hpp"
#include "top_k.cu"

extern "C" void sigmoids(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = sigmoid(x[i]);
}
template <class Kernel>
void run(Kernel kernel, const Arguments& args, uint32_t grid, uint32_t block) {
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    for (uint32_t warp = 0; warp < block / kWarp; ++warp) run_warp(warp, [&] { kernel(args); });
}
"""
RUN_KERNEL = """
extern "C" bool {name}(const Arguments* x, unsigned grid, unsigned block, unsigned bytes) {{
  run({op}_kernel<Input::kFloat, {items}, {parts}>, *x, grid, {parts} ? kWarp : block);
  return bytes == 0;
}}
"""  # With sums, threads meet: here warps run one after the other, so a single one adds up all.
SIZES = 1, 8, 33, 64, 160, 256, 512
VARIANTS = [
    (op, items, parts)
    for op in OPS
    for items in {-(-e // 32) for e in SIZES}
    for parts in (0, 1, 4)
]


def name_of(op: str, items: int, parts: int) -> str:
    return f"{op}_{items}_{parts}"


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory) -> ctypes.CDLL:
    """`top_k.cu` as g++ understands it."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("cpu")
    code = RUN + "".join(
        RUN_KERNEL.format(name=name_of(*x), op=x[0], items=x[1], parts=x[2]) for x in VARIANTS
    )
    (folder / "run.cpp").write_text(code)
    folders = [Path(cuda_on_cpu.__file__).parent, top_k_launch._SOURCE.parent]
    includes = [f"-I{x}" for x in (*folders, DEVICE_FOLDER)]
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    command = ["g++", *flags, *includes, "run.cpp", "-o", "run.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "run.so"))


def test_the_kernels_sigmoid_is_bit_equal(on_cpu):
    x = samples()
    y = torch.empty_like(x)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, y))
    on_cpu.sigmoids(*pointers, ctypes.c_int64(x.numel()))
    assert torch.equal(y.nan_to_num(7.0), _sigmoid(x).nan_to_num(7.0))


@pytest.fixture
def runs_the_text(on_cpu):
    """A GPU of four SMs that runs the kernels' text."""
    functions = {}
    for op, items, parts in VARIANTS:
        function = on_cpu[name_of(op, items, parts)]
        function.restype = ctypes.c_bool
        functions[f"{op}_kernel<Input::kFloat, {items}, {parts}>"] = function
    with jit.using(FakeDriver(4, library=cuda_on_cpu.OnCpu(functions))) as driver:
        yield driver


# What the dispatcher gives for tensors on the CPU, whatever GPU there is.
SOFTMAX, SIGMOID = (getattr(torch.ops.moefp8, op).default for op in OPS)


@pytest.mark.parametrize("num_experts", SIZES)
def test_the_kernels_text_chooses_the_same(runs_the_text, num_experts):
    logits, bias = logits_of(13, num_experts), bias_of(num_experts)
    for k in {1, min(8, num_experts), min(40, num_experts), num_experts}:
        assert_same_choice(softmax_topk(logits, k, True), SOFTMAX(logits, k, True), 16)
        for groups in group_limits(num_experts, k):
            for steered in (bias, None):
                rest = (steered, k, *groups, steered is None, 2.5)
                assert_same_choice(sigmoid_group_topk(logits, *rest), SIGMOID(logits, *rest), 0)
    assert runs_the_text.launched


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("num_parts", "parts_of_group"), [(1, 1), (7, 1), (19, 1), (3, 4), (28, 4), (33, 4)]
)
def test_the_kernels_text_adds_up_sums_in_order(runs_the_text, op, num_parts, parts_of_group):
    """Those of a group first, each rounded to FP32: what logits.cu leaves."""
    num_tokens, num_experts, k = 4, 40, 6
    sums = torch.randn(num_parts, num_tokens, num_experts) * 2.0 ** torch.randint(
        -9, 9, (num_parts, 1, 1)
    )
    logits = torch.zeros(num_tokens, num_experts)
    for group in sums.split(parts_of_group):
        of_group = group[0]
        for part in group[1:]:
            of_group = of_group + part
        logits = logits + of_group
    bias = bias_of(num_experts)
    rest = (1, 1, True, 1.0) if op == "softmax_topk" else (8, 4, True, 2.5)
    steered = None if op == "softmax_topk" else bias
    inputs = TopKInputs(logits, steered, k, *rest)
    index = torch.full((num_tokens, k), -1)
    weights = torch.full((num_tokens, k), math.nan)
    sources = TopKSources(Source(0), Source(1), Source(2), Source(3))
    launch = prepare_top_k(op, inputs, sources, Sums(num_parts, parts_of_group))
    tensors = sums, steered, index, weights
    launch.on(-1, tuple(0 if x is None else x.data_ptr() for x in tensors))
    expected = SOFTMAX(logits, k, True) if op == "softmax_topk" else SIGMOID(*inputs)
    assert_same_choice((index, weights), expected, 16 if op == "softmax_topk" else 0)
    assert runs_the_text.launched[-1].programmatic


# ---- The launcher ----


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_tokens", [1, 133, 600])
def test_launch_says_where_everything_lies(gpu, num_tokens, dtype):
    for logits in (
        logits_of(num_tokens, 40, dtype),
        logits_of(num_tokens, 64, dtype)[:, 3:43],
        logits_of(40, num_tokens, dtype).T,
    ):
        assert_same_choice(softmax_topk(logits, 3, True), SOFTMAX(logits, 3, True), 0)
        rest = (bias_of(80)[::2], 3, 8, 2, False, 2.5)
        assert_same_choice(sigmoid_group_topk(logits, *rest), SIGMOID(logits, *rest), 0)
    assert [x.stream for x in gpu.launched] == [7] * 6


def test_a_launch_is_prepared_once_for_each_layout(gpu):
    for logits in torch.randn(3, 5, 16):
        assert_same_choice(softmax_topk(logits, 2, True), SOFTMAX(logits, 2, True), 0)
    assert len(gpu.prepared()) == 1
    softmax_topk(logits, 2, False)
    softmax_topk(logits, 3, True)
    softmax_topk(logits[:4], 2, True)
    softmax_topk(logits.half(), 2, True)
    assert len(gpu.prepared()) == 5
    for bias in (None, *torch.randn(2, 16)):
        rest = (bias, 2, 4, 2, True, 1.0)
        assert_same_choice(sigmoid_group_topk(logits, *rest), SIGMOID(logits, *rest), 0)
    assert len(gpu.prepared()) == 6


def test_nothing_is_launched_for_no_token(gpu):
    index, weights = softmax_topk(torch.zeros(0, 8), 3, True)
    assert (index.shape, weights.shape, gpu.launched) == ((0, 3), (0, 3), [])


@pytest.mark.parametrize(("num_experts", "launches"), [(512, 2), (513, 0)])
def test_more_experts_than_lanes_hold_run_in_pytorch(gpu, num_experts, launches):
    logits = logits_of(7, num_experts)
    assert_same_choice(softmax_topk(logits, 4, True), SOFTMAX(logits, 4, True), 0)
    rest = (None, 4, 1, 1, True, 1.0)
    assert_same_choice(sigmoid_group_topk(logits, *rest), SIGMOID(logits, *rest), 0)
    assert len(gpu.launched) == launches


# ---- On a GPU ----


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_experts", [1, 8, 33, 64, 128, 160, 256, 384, 512])
def test_choices_on_a_gpu_equal_the_cpu(num_experts, dtype):
    ks = [k for k in (1, 2, 6, 8, 10, 40, num_experts) if k <= num_experts]
    bias = bias_of(num_experts)
    gpu_bias = bias.cuda()
    for num_tokens in (1, 3, 257):
        wide = logits_of(num_tokens, num_experts + 3, dtype)
        for first in (0, 1):
            logits, gpu_logits = (x[:, first : first + num_experts] for x in (wide, wide.cuda()))
            for k in dict.fromkeys(ks):
                renormalize = k % 2 == 0
                with no_synchronisation():
                    ours = softmax_topk(gpu_logits, k, renormalize)
                assert_same_choice(ours, softmax_topk(logits, k, renormalize), 16)
                for groups in group_limits(num_experts, k):
                    rest = k, *groups, renormalize, 2.5
                    with no_synchronisation():
                        ours = sigmoid_group_topk(gpu_logits, gpu_bias, *rest)
                    assert_same_choice(ours, sigmoid_group_topk(logits, bias, *rest), 0)


@on_gpu
def test_sigmoid_on_a_gpu_is_bit_equal():
    x = samples()
    ours = sigmoid_group_topk(x[:, None].cuda(), None, 1, renormalize=False).top_k_weights
    assert torch.equal(ours[:, 0].cpu().nan_to_num(7.0), _sigmoid(x).nan_to_num(7.0))
    ours = _sigmoid(x.cuda())
    assert torch.equal(ours.cpu().nan_to_num(7.0), _sigmoid(x).nan_to_num(7.0))


@on_gpu
def test_many_tokens_on_a_gpu_equal_the_cpu():
    logits, bias = torch.randn(16384, 256), torch.randn(256) * 0.1
    gpu_logits, gpu_bias = logits.cuda(), bias.cuda()
    rest = 8, 8, 4, True, 2.5
    with no_synchronisation():
        ours = sigmoid_group_topk(gpu_logits, gpu_bias, *rest)
        softmaxes = softmax_topk(gpu_logits, 8, True)
    assert_same_choice(ours, sigmoid_group_topk(logits, bias, *rest), 0)
    assert_same_choice(softmaxes, softmax_topk(logits, 8, True), 16)


@on_gpu
@pytest.mark.filterwarnings("ignore:.*portable PyTorch body")
def test_many_experts_on_a_gpu_do_not_wait():
    logits = torch.randn(9, 600)
    gpu_logits = logits.cuda()
    with no_synchronisation():
        ours = softmax_topk(gpu_logits, 8, True), sigmoid_group_topk(gpu_logits, None, 8, 6, 2)
    assert_same_choice(ours[0], softmax_topk(logits, 8, True), 16)
    assert_same_choice(ours[1], sigmoid_group_topk(logits, None, 8, 6, 2), 0)


@on_gpu
def test_one_graph_serves_every_router_input():
    router = TopKRouter(64, 32, 4, scoring="sigmoid", correction_bias=True).cuda()
    x, logits = torch.randn(5, 64, device="cuda"), torch.randn(5, 32, device="cuda")

    def choose() -> list[torch.Tensor]:
        with torch.no_grad():
            router(x)
        choices = softmax_topk(logits, 4, True), sigmoid_group_topk(logits, logits[0], 4, 8, 4)
        return [tensor for choice in choices for tensor in choice]

    choose()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = choose()
    for _ in range(3):
        x.normal_()
        logits.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, choose(), strict=True))
