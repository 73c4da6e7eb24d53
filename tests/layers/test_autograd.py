"""What PyTorch promises of autograd holds for FP8 modules: errors, memory, hooks, compile."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moefp8 import FP8Linear, MoE
from moefp8.layers.moe import SharedExperts
from tests.functional.cases import inputs, tokens_of
from tests.gpu import on_cpu_and_gpu
from tests.layers.gradient_cases import (
    E,
    H,
    I,
    K,
    differentiated,
    experts_of,
    gradient_of,
    on,
)

E4M3 = torch.float8_e4m3fn
T = 5
MODULES = {
    "linear": lambda: (FP8Linear(H, H), ()),
    "shared": lambda: (SharedExperts(H, I), ()),
    "experts": lambda: (experts_of(), inputs(T, H, K, E)[1:]),
    "moe": lambda: (MoE(H, I, E, K, shared_intermediate_size=72), ()),
}


@pytest.fixture(params=MODULES)
def made(request) -> tuple[nn.Module, list[torch.Tensor]]:
    """A module of H to H, and what it takes; the first asks for a gradient."""
    module, others = MODULES[request.param]()
    return module, [tokens_of(T, H).requires_grad_(), *others]


class Saved(contextlib.ExitStack):
    """What autograd saves in this context."""

    def __enter__(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda x: tensors.append(x) or x, lambda x: x
        )
        self.enter_context(keep)
        return tensors


# ---- What is saved ----


def bytes_beside(weights: nn.Module, saved: list[torch.Tensor]) -> int:
    known = {x.data_ptr() for x in weights.parameters()}
    return sum(x.untyped_storage().nbytes() for x in saved if x.data_ptr() not in known)


@on_cpu_and_gpu
@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, E4M3])
def test_experts_save_gate_and_up(saved_dtype, device):
    """4 I or 2 I bytes of a choice, beside the choices and their weights."""
    layer, size = experts_of(device, i=256, saved_dtype=saved_dtype), 256
    x, ids, top_k_weights = inputs(64, H, K, E, device=device)
    with Saved() as saved:
        layer(x.requires_grad_(), ids, top_k_weights)
    scales = 2 * 4 * size // 128 if saved_dtype == E4M3 else 0
    of_choice = 2 * size * saved_dtype.itemsize + scales
    choices = bytes_beside(layer, [ids, top_k_weights])
    assert bytes_beside(layer, saved) == 64 * K * of_choice + choices
    assert not any(y.data_ptr() == x.data_ptr() for y in saved)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_for_an_addend_alone_nothing_is_saved(is_compiled):
    """As where adapters of shared experts train, and nothing before them."""
    layer, arguments = experts_of(), inputs(T, H, K, E)
    addend, grad = tokens_of(T, H).requires_grad_(), gradient_of(T, H)
    torch._dynamo.reset()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if is_compiled else layer
    with Saved() as saved:
        y = run(*arguments, addend=addend)
    assert not saved
    with torch.no_grad():
        assert torch.equal(y, layer(*arguments, addend=addend))
    y.backward(grad)
    assert torch.equal(addend.grad, grad)


def test_a_linear_saves_nothing_of_its_tokens():
    linear = FP8Linear(H, I)
    with Saved() as saved:
        linear(tokens_of(T, H).requires_grad_())
    assert bytes_beside(linear, saved) == 0


def test_shared_experts_save_gate_and_up():
    shared = SharedExperts(H, I)
    with Saved() as saved:
        shared(tokens_of(T, H).requires_grad_())
    assert bytes_beside(shared, saved) == T * 4 * I


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_nothing_is_saved_where_nothing_trains(made, mode):
    module, (x, *others) = made
    if mode is contextlib.nullcontext:
        module.requires_grad_(False)
        x = x.detach()
    with mode(), Saved() as saved:
        y = module(x, *others)
    assert not y.requires_grad
    assert not saved


# ---- Errors ----


def test_another_dtype_to_save_in_is_an_error():
    """Also where it was set later."""
    layer, (x, *choice) = experts_of(), inputs(T, H, K, E)
    layer.saved_dtype = torch.float8_e5m2
    with pytest.raises(ValueError, match=r"saved_dtype must be torch\.bfloat16 or .*float8_e5m2"):
        layer(x.requires_grad_(), *choice)
    with pytest.raises(ValueError, match=r"saved_dtype must be torch\.bfloat16 or .*float16"):
        experts_of(saved_dtype=torch.float16)


def test_a_second_backward_is_an_error(made):
    module, arguments = made
    y = module(*arguments).sum()
    first = torch.autograd.grad(y, arguments[0], retain_graph=True)
    second = torch.autograd.grad(y, arguments[0])
    assert torch.equal(*first, *second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_a_gradient_of_a_gradient_is_an_error(made):
    """Also where no more depends on it than a penalty."""
    module, (x, *others) = made
    y = module(x, *others)
    (of_x,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    for loss in (of_x.float().square().sum(), y.sum() + of_x.sum()):
        with pytest.raises(RuntimeError, match=r"cannot be differentiated again.*dequantize"):
            loss.backward(retain_graph=True)
    _, expected = differentiated(lambda x: module(x, *others), x, grad=2 * y.detach())
    assert torch.equal(of_x, expected)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated again.*dequantize"):
        torch.autograd.functional.hvp(lambda x: module(x, *others).float().square().sum(), x, x)


def test_a_weight_that_changed_since_is_an_error(made):
    module, arguments = made
    fp8 = [x for x in module.parameters() if x.dtype == E4M3]
    for changed in fp8:
        y = module(*arguments)
        with torch.no_grad():
            changed.view(torch.uint8).add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("changed", [0, 1])
def test_choices_that_changed_since_are_an_error(changed):
    x, *choice = inputs(T, H, K, E)
    y = experts_of()(x.requires_grad_(), *choice)
    choice[changed].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tokens_may_change(made):
    """They are not saved; but the router's are."""
    module, (x, *others) = made
    grad = gradient_of(T, H)
    _, expected = differentiated(lambda x: module(x, *others), x, grad=grad)
    tokens = x * 1
    y = module(tokens, *others)
    with torch.no_grad():
        tokens.zero_()
    if isinstance(module, MoE):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(grad)
    else:
        y.backward(grad)
        assert torch.equal(x.grad, expected)


def test_inference_tensors_are_an_error():
    x, ids, top_k_weights = inputs(T, H, K, E)
    with torch.inference_mode():
        inferred = top_k_weights.clone()
        made_there = FP8Linear(H, H)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        experts_of()(x.requires_grad_(), ids, inferred)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        made_there(x)


def test_frozen_weights_get_none(made):
    module, arguments = made
    module(*arguments).sum().backward()
    of_weights = {name: x.grad for name, x in module.named_parameters()}
    trained = {"gate.weight"} if isinstance(module, MoE) else set()
    assert {name for name, grad in of_weights.items() if grad is not None} == trained
    assert arguments[0].grad.any()


def test_a_router_alone_may_train():
    module, x = MoE(H, I, E, K), tokens_of(T, H)
    module(x).sum().backward()
    assert module.gate.weight.grad.any()


# ---- What others do with it ----


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_change_no_bit(made, use_reentrant):
    module, (x, *others) = made
    grad = gradient_of(T, H)
    expected = differentiated(module, x, *others, grad=grad)

    def again(*given):
        return checkpoint(module, *given, use_reentrant=use_reentrant)

    assert all(map(torch.equal, differentiated(again, x, *others, grad=grad), expected))


def test_hooks_see_and_change_gradients(made):
    module, (x, *others) = made
    grad = gradient_of(T, H)
    _, plain, *_ = differentiated(module, x, *others, grad=grad)
    _, of_double, *_ = differentiated(module, x, *others, grad=2 * grad)
    seen = []
    module.register_full_backward_hook(lambda _, of_x, of_y: seen.append((of_x[0], of_y[0])))
    _, hooked, *_ = differentiated(module, x, *others, grad=grad)
    ((of_x, of_y),) = seen
    assert torch.equal(of_y, grad)
    assert torch.equal(hooked, plain)
    assert torch.equal(of_x, plain)
    module.register_full_backward_pre_hook(lambda _, of_y: (2 * of_y[0],))
    _, changed, *_ = differentiated(module, x, *others, grad=grad)
    assert torch.equal(changed, of_double)


def test_gradients_add_up(made):
    module, (x, *others) = made
    first, second = gradient_of(T, H), gradient_of(T, H)
    parts = [differentiated(module, x, *others, grad=g)[1] for g in (first, second)]
    for grad in (first, second):
        module(x, *others).backward(grad)
    assert torch.equal(x.grad, sum(parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_them(dtype):
    layer, arguments, grad = experts_of(), inputs(T, H, K, E), gradient_of(T, H)
    expected = differentiated(layer, *arguments, grad=grad)
    with torch.autocast("cpu", dtype=dtype):
        assert all(map(torch.equal, differentiated(layer, *arguments, grad=grad), expected))


@on_cpu_and_gpu
@pytest.mark.parametrize("saved_dtype", [torch.bfloat16, E4M3])
def test_compiled_experts_have_the_same_bits(saved_dtype, device):
    layer = experts_of(device, saved_dtype=saved_dtype)
    assert_compiled_equals(layer, *inputs(T, H, K, E, device=device))


@on_cpu_and_gpu
@pytest.mark.parametrize("name", ["linear", "moe"])
def test_compiled_modules_have_the_same_bits(name, device):
    module, others = MODULES[name]()
    assert_compiled_equals(module.to(device), *on(device, tokens_of(T, H), *others))


@pytest.mark.parametrize("name", ["shared", "experts", "moe"])
def test_compiled_modules_take_a_limit_where_nothing_asks_for_a_gradient(name):
    """The trace may have a symbol for the number, which is no tensor."""
    module, others = MODULES[name]()
    for each in module.modules():
        if hasattr(each, "swiglu_limit"):
            each.swiglu_limit = 0.5
    for x in module.parameters():
        x.requires_grad_(False)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    x = tokens_of(T, H)
    assert torch.equal(compiled(x, *others), module(x, *others))


def assert_compiled_equals(module, x, *others) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    grad = gradient_of(T, H, x.device.type)
    expected = differentiated(module, x, *others, grad=grad)
    found = differentiated(compiled, x, *others, grad=grad)
    assert all(map(torch.equal, found, expected))
