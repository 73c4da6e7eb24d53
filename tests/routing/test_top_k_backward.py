"""The gradient of the router's choice: formulas, and the kernel, whose text the CPU runs too."""

from itertools import cycle, product

import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.jit import compile_kernels
from moefp8.kernels.program import Place
from moefp8.routing import sigmoid_group_topk, softmax_topk, top_k_backward_launch
from moefp8.routing.logits_launch import Sums
from moefp8.routing.top_k import top_k_backward
from moefp8.routing.top_k_backward_launch import (
    TopKBackwardInputs,
    describe_top_k_backward,
)
from tests.fakes import cuda_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.gpu import ARCH, no_synchronisation, on_gpu
from tests.records import run
from tests.routing.top_k_cases import DTYPES, INF, NAN, Forgets
from tests.sampling import ALL_KERNELS

OP = torch.ops.moefp8.top_k_backward.default  # what the dispatcher gives, whatever GPU there is
FORMULAS = list(product((False, True), (False, True)))  # by_sigmoid, renormalize
EPSILONS = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def inputs_of(num_tokens: int, num_experts: int, k: int, *formula, dtype=torch.float32):
    """Random ones, without the scaling factor where there is none."""
    logits = (4 * torch.randn(num_tokens, num_experts)).to(dtype)
    index = logits.float().topk(k).indices
    grad = torch.randn(num_tokens, k)
    return TopKBackwardInputs(grad, logits, index, *formula, 2.5 if formula[0] else 1.0)


def exact(inputs: TopKBackwardInputs) -> torch.Tensor:
    """What autograd finds in FP64."""
    grad, logits, index, by_sigmoid, renormalize, scaling_factor = inputs
    logits = logits.double().detach().requires_grad_()
    scores = logits.sigmoid() if by_sigmoid else logits.softmax(-1)
    weights = scores.gather(1, index)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    (found,) = torch.autograd.grad(scaling_factor * weights, logits, grad.double())
    return found


def assert_right(ours: torch.Tensor, inputs: TopKBackwardInputs) -> None:
    """Terms cancel each other, so an error is a share of all gradients of a token."""
    assert (ours.shape, ours.dtype) == (inputs.logits.shape, inputs.logits.dtype)
    assert ours.is_contiguous()
    size = inputs.scaling_factor * inputs.grad.norm(dim=1, keepdim=True).double()
    errors = (ours.cpu().double() - exact(inputs)).abs() / size
    assert errors.numel() == 0 or errors.max() <= 4 * EPSILONS[inputs.logits.dtype]


# ---- Numerics ----


@pytest.mark.parametrize(("by_sigmoid", "renormalize"), FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_gradient_of_the_weights(by_sigmoid, renormalize, dtype):
    for num_experts, k in ((1, 1), (8, 2), (40, 8), (64, 64)):
        inputs = inputs_of(9, num_experts, k, by_sigmoid, renormalize, dtype=dtype)
        assert_right(OP(*inputs), inputs)


@pytest.mark.parametrize("formula", FORMULAS)
def test_what_is_wrong_is_seen_to_be(formula):
    inputs = inputs_of(9, 40, 8, *formula)
    right = OP(*inputs)
    lost = right.clone()
    lost[3, inputs.top_k_index[3, 2]] = 0
    for wrong in (1.01 * right, torch.zeros_like(right), lost, right.fill_(NAN)):
        with pytest.raises(AssertionError):
            assert_right(wrong, inputs)


@pytest.mark.parametrize(("by_sigmoid", "renormalize"), FORMULAS)
def test_gradients_have_gradients(by_sigmoid, renormalize):
    """Those of both the incoming gradient and the logits, by PyTorch's operations."""
    inputs = inputs_of(3, 12, 4, by_sigmoid, renormalize)
    found = []
    for is_ours in (True, False):
        logits, grad = (x.clone().requires_grad_() for x in (inputs.logits, inputs.grad))
        if is_ours:
            rest = (None, 4, 1, 1, renormalize, 2.5) if by_sigmoid else (4, renormalize)
            chosen = (sigmoid_group_topk if by_sigmoid else softmax_topk)(logits, *rest)
            index, weights = chosen
            assert torch.equal(index, inputs.top_k_index)
        else:
            scores = logits.sigmoid() if by_sigmoid else logits.softmax(-1)
            weights = scores.gather(1, inputs.top_k_index)
            weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
            weights = weights * inputs.scaling_factor
        (first,) = torch.autograd.grad(weights, logits, grad, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (logits, grad)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_weights_that_nobody_asks_about_have_no_gradient():
    for choose in (lambda x: softmax_topk(x, 2, True), lambda x: sigmoid_group_topk(x, None, 2)):
        logits = torch.randn(3, 8, requires_grad=True)
        Forgets.apply(choose(logits).top_k_weights).sum().backward()
        assert logits.grad is None


def test_the_op_keeps_the_rules_of_torch():
    for num_tokens in (6, 0):
        for formula in FORMULAS:
            torch.library.opcheck(OP, inputs_of(num_tokens, 16, 4, *formula))
    inputs = inputs_of(6, 16, 4, False, True)
    torch.library.opcheck(OP, inputs._replace(logits=inputs.logits.T.contiguous().T))


# ---- The kernel's text ----


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("by_sigmoid", [False, True])
def test_every_variant_compiles_and_spills_nothing(by_sigmoid):
    """All kinds with most experts; with fewer, one of each kind in turn."""
    kinds = [*((dtype, 0) for dtype in DTYPES), (torch.float32, 1), (torch.float32, 4)]
    fewer, most = range(32, 512, 32), 512
    pairs = product(fewer, kinds) if ALL_KERNELS else zip(fewer, cycle(kinds), strict=False)
    kernels = [
        top_k_backward_launch.kernel_of(size, *kind, by_sigmoid=by_sigmoid)
        for size, kind in (*pairs, *product([most], kinds))
    ]
    for kernel, cubin in zip(kernels, compile_kernels(kernels, ARCH), strict=True):
        assert cubin.problems() == [], kernel


SIZES = 1, 8, 33, 160, 512
KINDS = [*((dtype, 0) for dtype in DTYPES), (torch.float32, 1), (torch.float32, 4)]


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    if not cuda_on_cpu.is_possible():
        pytest.skip("needs g++")
    kernels = [
        top_k_backward_launch.kernel_of(e, *kind, by_sigmoid=by_sigmoid)
        for e, kind, by_sigmoid in product(SIZES, KINDS, (False, True))
    ]
    return cuda_on_cpu.build(kernels, tmp_path_factory.mktemp("top_k_backward"))


@pytest.fixture
def runs_the_text(functions):
    """A GPU of four SMs that runs the kernel's text, as g++ understands it."""
    with jit.using(FakeDriver(4, library=cuda_on_cpu.OnCpu(functions))) as driver:
        yield driver


@pytest.mark.parametrize(("by_sigmoid", "renormalize"), FORMULAS)
@pytest.mark.parametrize("num_experts", SIZES)
def test_the_kernels_text_is_right(runs_the_text, num_experts, by_sigmoid, renormalize):
    for k in {1, min(8, num_experts), min(40, num_experts), num_experts}:
        for dtype in DTYPES:
            inputs = inputs_of(13, num_experts, k, by_sigmoid, renormalize, dtype=dtype)
            assert_right(top_k_backward(*inputs), inputs)
    assert runs_the_text.launched


def test_the_kernels_text_divides_small_sums_as_the_forward_does(runs_the_text):
    """Sigmoids of -60 are far below the epsilon that is added to their sum."""
    logits, index = torch.full((3, 8), -60.0), torch.tensor([[0, 5]] * 3)
    inputs = TopKBackwardInputs(torch.tensor([[1.0, -1.0]] * 3), logits, index, True, True, 1.0)
    ours = top_k_backward(*inputs)
    assert 0 < ours.abs().max() < 1e-6
    torch.testing.assert_close(ours, exact(inputs).float(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_the_kernels_text_tells_what_is_not_finite(runs_the_text, odd, formula):
    inputs = inputs_of(3, 33, 8, *formula)
    inputs.logits[0, inputs.top_k_index[0, 0]] = odd
    inputs.logits[1, inputs.top_k_index[1, :].sort().values[0] ^ 1] = odd  # of one not chosen, too
    ours, expected = top_k_backward(*inputs), OP(*inputs)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(("num_parts", "parts_of_group"), [(1, 1), (19, 1), (3, 4), (33, 4)])
def test_the_kernels_text_adds_up_sums(runs_the_text, formula, num_parts, parts_of_group):
    """And leaves two numbers in BF16, the first of them twice. A CTA has up to four tokens."""
    sums = torch.randn(num_parts, 13, 33)
    logits = sums.double().sum(0)
    index, grad = logits.topk(6).indices, torch.randn(13, 6)
    inputs = TopKBackwardInputs(grad, logits.float(), index, *formula, 2.5 if formula[0] else 1.0)
    of_logits = torch.full((13, 3, 33), NAN, dtype=torch.bfloat16)
    given = Sums(Place("sums"), (13, 33), num_parts, parts_of_group)
    places = map(Place, ("grad", "index", "of_logits"))
    options = {
        "by_sigmoid": inputs.by_sigmoid,
        "renormalize": inputs.renormalize,
        "scaling_factor": inputs.scaling_factor,
    }
    run(
        lambda r: describe_top_k_backward(r, given, *places, 6, **options),
        sums=sums,
        grad=grad,
        index=index,
        of_logits=of_logits,
    )
    high, low, again = of_logits.unbind(1)
    assert torch.equal(high, again)
    assert (low.float().abs() <= 2**-8 * high.float().abs()).all()
    size = inputs.scaling_factor * grad.norm(dim=1, keepdim=True)
    errors = (high.double() + low.double() - exact(inputs)).abs() / size
    assert errors.max() < 2.0**-16
    assert runs_the_text.launched[-1].programmatic


# ---- The launcher ----


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_tokens", [1, 133, 600])
def test_launch_says_where_everything_lies(gpu, num_tokens, dtype):
    for formula in FORMULAS:
        for layout in (
            lambda x: x,
            lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
            lambda x: x.T.contiguous().T,
        ):
            inputs = inputs_of(num_tokens, 40, 3, *formula, dtype=dtype)
            inputs = inputs._replace(
                logits=layout(inputs.logits),
                top_k_index=layout(inputs.top_k_index),
                grad=layout(inputs.grad),
            )
            ours = top_k_backward(*inputs)
            assert ours.is_contiguous()
            assert torch.equal(ours, OP(*inputs).contiguous())
    assert [x.kernel.source.stem for x in gpu.launched] == ["top_k_backward"] * 12


def test_a_launch_is_prepared_once_for_each_layout(gpu):
    inputs = inputs_of(5, 16, 2, False, True)
    for _ in range(3):
        top_k_backward(*inputs)
    assert len(gpu.prepared()) == 1
    top_k_backward(*inputs._replace(renormalize=False))
    top_k_backward(*inputs._replace(by_sigmoid=True))
    top_k_backward(*inputs_of(5, 16, 3, False, True))
    assert len(gpu.prepared()) == 4


def test_no_tokens_launch_nothing_and_many_experts_run_in_pytorch(gpu):
    for size in ((0, 8, 3), (7, 513, 4)):
        inputs = inputs_of(*size, False, True)
        assert torch.equal(top_k_backward(*inputs), OP(*inputs))
    assert not gpu.launched


# ---- On a GPU ----


def on_cuda(inputs: TopKBackwardInputs) -> TopKBackwardInputs:
    return TopKBackwardInputs(*(x.cuda() for x in inputs[:3]), *inputs[3:])


@on_gpu
@pytest.mark.parametrize(("by_sigmoid", "renormalize"), FORMULAS)
@pytest.mark.parametrize("num_experts", [1, 8, 33, 128, 160, 512])
def test_it_is_right_on_a_gpu(num_experts, by_sigmoid, renormalize):
    for num_tokens, dtype in product((1, 300, 2000), DTYPES):
        for k in {1, min(8, num_experts), num_experts}:
            inputs = inputs_of(num_tokens, num_experts, k, by_sigmoid, renormalize, dtype=dtype)
            given = on_cuda(inputs)
            with no_synchronisation():
                ours = top_k_backward(*given)
            assert_right(ours, inputs)


@on_gpu
def test_a_graph_serves_every_gradient():
    inputs = on_cuda(inputs_of(700, 128, 8, False, True))
    top_k_backward(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = top_k_backward(*inputs)
    for _ in range(3):
        inputs.grad.normal_()
        graph.replay()
        assert torch.equal(captured, top_k_backward(*inputs))
