"""The kernel of the router's choice: its text, which the CPU runs too, and its launch."""

import ctypes
import math
from itertools import cycle, product

import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.jit.kernel import compile_kernels
from moefp8.kernels.program import Place
from moefp8.routing import sigmoid_group_topk, softmax_topk, top_k_launch
from moefp8.routing.logits_launch import Sums
from moefp8.routing.top_k import _sigmoid
from moefp8.routing.top_k_launch import TopKInputs, describe_top_k
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.gpu import ARCH
from tests.records import run
from tests.routing.top_k_cases import (
    DTYPES,
    OPS,
    assert_same_choice,
    bias_of,
    group_limits,
    logits_of,
    samples,
)
from tests.sampling import ALL_KERNELS

# What the dispatcher gives for tensors on the CPU, whatever GPU there is.
SOFTMAX, SIGMOID = (getattr(torch.ops.moefp8, op).default for op in OPS)


# ---- Its text ----


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("op", OPS)
def test_every_variant_compiles_and_spills_nothing(op):
    """All kinds with most experts; with fewer, one of each kind in turn."""
    kinds = [*((dtype, 0) for dtype in DTYPES), (torch.float32, 1), (torch.float32, 4)]
    fewer, most = range(32, 512, 32), 512
    pairs = product(fewer, kinds) if ALL_KERNELS else zip(fewer, cycle(kinds), strict=False)
    of_op = *pairs, *product([most], kinds)
    kernels = [top_k_launch.kernel_of(op, size, *kind) for size, kind in of_op]
    for kernel, cubin in zip(kernels, compile_kernels(kernels, ARCH), strict=True):
        assert cubin.problems() == [], kernel


SIGMOIDS = """
extern "C" void sigmoids(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = sigmoid(x[i]);
}
"""
SIZES = 1, 8, 33, 64, 160, 256, 512


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """`top_k.cu` as g++ understands it."""
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    variants = product(OPS, {-(-e // 32) * 32 for e in SIZES}, (0, 1, 4))
    kernels = [top_k_launch.kernel_of(op, e, torch.float32, parts) for op, e, parts in variants]
    more = {"sigmoids": SIGMOIDS}
    return cuda_on_cpu.build(kernels, tmp_path_factory.mktemp("top_k"), more=more)


def test_the_kernels_sigmoid_is_bit_equal(functions):
    x = samples()
    y = torch.empty_like(x)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, y))
    functions["sigmoids"](*pointers, ctypes.c_int64(x.numel()))
    assert torch.equal(y.nan_to_num(7.0), _sigmoid(x).nan_to_num(7.0))


@pytest.fixture
def runs_the_text(functions):
    """A GPU of four SMs that runs the kernels' text."""
    with jit.using(FakeDriver(4, library=cuda_on_cpu.OnCpu(functions))) as driver:
        yield driver


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
    num_tokens, num_experts, k = 13, 40, 6  # up to four of a CTA
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
    shape = num_tokens, num_experts
    given = Sums(Place("sums"), shape, num_parts, parts_of_group)
    of_bias = None if steered is None else Place("bias")
    places = of_bias, inputs.choice, Place("index"), Place("weights")
    run(
        lambda r: describe_top_k(r, op, given, *places),
        sums=sums,
        bias=steered,
        index=index,
        weights=weights,
    )
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
