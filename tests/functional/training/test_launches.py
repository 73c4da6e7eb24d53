"""What trained linears and experts launch on a GPU, emulated, beside PyTorch's bodies."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts
from moefp8.functional import parts as parts_room
from moefp8.functional.training.experts_records import trained_backward_record
from moefp8.kernels import jit, program
from moefp8.kernels.common.activation import KINDS, Activation
from moefp8.kernels.gemm.sizes import Sizes
from moefp8.layers.moe import SharedExperts
from tests.fakes.emulator import FakeDriver

WGRADS = ["128x1", "128x128"]


def gradients_of(module: nn.Module, x: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of what goes in and of all weights."""
    module.zero_grad()
    x, *others = (y.clone().requires_grad_(y.is_floating_point()) for y in (x, *others))
    y = module(x, *others)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y.dtype))
    leaves = [z for z in (x, *others, *module.parameters()) if z.grad is not None]
    return [y.detach(), *(z.grad.clone() for z in leaves)]


def assert_alike(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a.double() - b.double()).norm() <= 0.02 * b.double().norm()


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(300, 144, 256), (130, 128, 136), (33, 77, 40)])
def test_a_linear(shape, dtype, wgrad):
    torch.manual_seed(0)
    num_rows, k, n = shape
    module = FP8Linear(k, n, dtype=dtype, trainable=True, wgrad=wgrad)
    x = torch.randn(num_rows, k).to(dtype)
    wanted = gradients_of(module, x)
    with jit.using(FakeDriver()) as gpu:
        found = gradients_of(module, x)
        gpu.check_workspaces()
    assert_alike(found, wanted)
    sources = [made.kernel.source.stem for made in gpu.launched]
    assert sources.count("columns") == 2
    assert sources.count("gemm") == 2
    assert sources.count("k_grouped") == 1


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(300, 144, 264), (33, 77, 40)])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_experts(kind, sizes, dtype, wgrad):
    """The forward is that of frozen ones, and has their bits; of x, codes are made once."""
    torch.manual_seed(0)
    num_tokens, h, i = sizes
    activation = Activation(kind, 1.5)
    module = SharedExperts(h, i, trainable=True, wgrad=wgrad, activation=activation)
    x = torch.randn(num_tokens, h).to(dtype)
    wanted = gradients_of(module, x)
    with jit.using(FakeDriver()) as gpu:
        found = gradients_of(module, x)
        sources = [made.kernel.source.stem for made in gpu.launched]
        frozen = moefp8.freeze(copy.deepcopy(module))
        gpu.launched.clear()
        assert torch.equal(frozen(x), found[0])
        served = [made.kernel.source.stem for made in gpu.launched]
        gpu.check_workspaces()
    assert_alike(found, wanted)
    assert served == ["quantize", "gemm", "gemm"]
    linear = ["columns", "gemm", "k_grouped"]
    down_steps, gate_and_up_steps = ["columns", *linear], ["columns", *linear, *linear]
    backward = ["activation_rows", *down_steps, "activation_backward", *gate_and_up_steps]
    assert [x for x in sources if x != "both"] == [*served, *backward]


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("sizes", [(4, 256, 144), (3, 136, 72)])
def test_experts(sizes, saved_dtype, wgrad):
    torch.manual_seed(0)
    module = GroupedExperts(*sizes, trainable=True, wgrad=wgrad, saved_dtype=saved_dtype)
    x = torch.randn(150, sizes[1]).bfloat16()
    ids = torch.rand(150, sizes[0]).topk(2).indices
    ids[::5, 1] = sizes[0]  # held elsewhere
    weights = torch.rand(150, 2)
    wanted = gradients_of(module, x, ids, weights)
    with jit.using(FakeDriver()) as gpu:
        found = gradients_of(module, x, ids, weights)
        gpu.check_workspaces()
    assert_alike(found, wanted)
    sources = [made.kernel.source.stem for made in gpu.launched]
    assert sources.count("k_grouped") == 2
    assert "activation_columns" in sources
    assert "plan" not in sources


def test_linears_of_one_layout_hold_their_inputs_each_in_its_way():
    modules = [FP8Linear(128, 136, trainable=True, wgrad=wgrad) for wgrad in reversed(WGRADS)]
    x = torch.randn(130, 128).bfloat16()
    with jit.using(FakeDriver()):
        found = [gradients_of(module, x) for module in modules]
    for module, gradients in zip(modules, found, strict=True):
        assert_alike(gradients, gradients_of(module, x))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_one_weight_of_experts_may_have_main_grad(name):
    """Its gradient is added there, and that of the other weight is written."""
    module = GroupedExperts(3, 136, 72, trainable=True)
    x, ids, weights = (
        torch.randn(20, 136).bfloat16(),
        torch.randint(0, 3, (20, 1)),
        torch.ones(20, 1),
    )
    weight, results = getattr(module, name), []
    for context in (nullcontext(), jit.using(FakeDriver())):
        weight.main_grad = torch.full(weight.shape, 4.0)
        with context:
            results.append([*gradients_of(module, x, ids, weights), weight.main_grad])
    assert_alike(*results)


@pytest.mark.parametrize("sizes", [(150, 2, 4, 256, 144), (4000, 2, 3, 136, 72)])
def test_tokens_are_computed_in_parts_whose_workspaces_are_within_the_bound(sizes, monkeypatch):
    num_tokens, top_k, num_experts, h, i = sizes
    module = GroupedExperts(num_experts, h, i, trainable=True)
    x = torch.randn(num_tokens, h).bfloat16()
    ids = torch.rand(num_tokens, num_experts).topk(top_k).indices

    def workspaces():
        with jit.using(FakeDriver()) as gpu:
            gradients_of(module, x, ids, torch.rand(num_tokens, top_k))
            return [place.nbytes for place in gpu.workspaces]

    whole = workspaces()
    one = program.place(trained_backward_record(Sizes(1, *sizes[1:], False))).num_bytes
    for share in (2, 0.95, 0.6):
        limit = int(share * max(whole))
        monkeypatch.setattr(parts_room, "MAX_WORKSPACE_BYTES", limit)
        found, bound = workspaces(), max(limit, one + limit // 2)
        assert max(found) <= bound
        num_parts = len(found) // len(whole)
        assert num_parts == 1 if bound >= max(whole) else num_parts > 1


def test_what_does_not_fit_a_linear_is_refused_before_a_launch():
    """Its bias, where a user put another one, and memory of another device."""
    x = torch.randn(150, 128).bfloat16()
    biases = {
        "bias must be": torch.ones(8, dtype=torch.bfloat16),
        "on one device": torch.ones(128, dtype=torch.bfloat16, device="meta"),
    }
    for told, bias in biases.items():
        module = FP8Linear(128, 128, trainable=True)
        module.bias = nn.Parameter(bias)
        with jit.using(FakeDriver()) as gpu:
            with pytest.raises(ValueError, match=told):
                module(x)
            assert "gemm" not in [made.kernel.source.stem for made in gpu.launched]
