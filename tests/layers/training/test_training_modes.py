"""Modules with master weights give the same gradients, however they are run."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moefp8 import FP8Linear
from moefp8.functional.training.weights import requantize
from tests.layers.training.training_mode_cases import (
    MODULES,
    WGRADS,
    H,
    assert_same_bits,
    found_by,
    given,
    make,
    num_quantized,
)

DTYPES = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=MODULES)
def name(request) -> str:
    return request.param


# ---- Checkpointing ----


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_change_no_bit(name, use_reentrant):
    module, arguments = make(name), given(name)
    again = partial(checkpoint, module, use_reentrant=use_reentrant)
    assert_same_bits(found_by(module, arguments, again), found_by(module, arguments))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_codes_are_made_once_a_step_however_often_a_forward_runs(use_reentrant):
    linear = FP8Linear(H, H, trainable=True)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)

    def micro_batches(count: int) -> None:
        for _ in range(count):
            y = checkpoint(linear, given("linear")[0], use_reentrant=use_reentrant)
            y.float().square().mean().backward()

    assert num_quantized(lambda: micro_batches(2)) == 1
    assert num_quantized(lambda: micro_batches(1)) == 0
    optimizer.step()
    assert num_quantized(lambda: micro_batches(2)) == 1


# ---- Micro-batches ----


@pytest.mark.parametrize("wgrad", WGRADS)
def test_gradients_of_micro_batches_add_up(name, wgrad):
    module, batches = make(name, wgrad=wgrad), [given(name) for _ in range(3)]
    parts = [found_by(module, arguments) for arguments in batches]
    for arguments in batches:
        module(*arguments).float().square().mean().backward()
    for parameter_name, x in module.named_parameters():
        first, second, third = (part[parameter_name] for part in parts)
        assert torch.equal(x.grad, (first + second) + third), parameter_name


@pytest.mark.parametrize("name", ["linear", "experts"])
@pytest.mark.parametrize("wgrad", WGRADS)
def test_main_grad_sums_micro_batches_in_fp32(name, wgrad):
    """As the gradients of FP32 weights with the same values; the first batch overwrites."""
    module, batches = make(name, torch.bfloat16, wgrad=wgrad), [given(name) for _ in range(3)]
    precise = make(name, wgrad=wgrad)
    precise.load_state_dict(module.state_dict())
    masters = {x: y for x, y in module.named_parameters() if x != "bias"}
    for weight in masters.values():
        weight.main_grad = torch.full_like(weight, torch.nan, dtype=torch.float32)
        weight.overwrite_main_grad, weight.grad_added_to_main_grad = True, False
    for arguments in batches:
        module(*arguments).float().square().mean().backward()
        precise(*arguments).float().square().mean().backward()
        for weight in masters.values():
            assert weight.grad_added_to_main_grad
            weight.overwrite_main_grad = weight.grad_added_to_main_grad = False
    assert masters
    for parameter_name, weight in masters.items():
        expected = precise.get_parameter(parameter_name).grad
        error = (weight.main_grad - expected).norm() / expected.norm()
        assert error < 1e-6, parameter_name


# ---- Mixed precision ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_bit(name, dtype):
    module, arguments = make(name), given(name)
    expected = found_by(module, arguments)
    with torch.autocast("cpu", dtype=dtype):
        assert_same_bits(found_by(module, arguments), expected)


@pytest.mark.parametrize("autocasts", [False, True])
def test_autocast_between_layers_is_taken_as_it_comes(autocasts):
    """A plain linear gives BF16 under autocast, and takes its gradient in that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, H), FP8Linear(H, H, trainable=True, dtype=torch.float32))
    x = torch.randn(9, H)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
        y = model(x)
    assert y.dtype == (torch.bfloat16 if autocasts else torch.float32)
    y.float().square().mean().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.any() for x in model.parameters())


def test_a_scaled_loss_gives_scaled_gradients_to_the_bit(name):
    """Codes do not depend on a power of two, so nothing is lost or won by a `GradScaler`."""
    module, arguments = make(name), given(name)
    expected = found_by(module, arguments)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(module(*arguments).float().square().mean()).backward()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scaler.unscale_(optimizer)
    for parameter_name, x in module.named_parameters():
        assert torch.equal(x.grad, expected[parameter_name]), parameter_name
    before = [x.detach().clone() for x in module.parameters()]
    scaler.step(optimizer)
    assert all(not torch.equal(x, y) for x, y in zip(module.parameters(), before, strict=True))


def test_a_step_with_infinite_gradients_is_left_out():
    linear = FP8Linear(H, H, trainable=True, dtype=torch.float32)
    before = linear.weight.detach().clone()
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    scaler.scale(1e12 * linear(given("linear")[0]).float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(linear.weight, before)
    assert scaler.get_scale() == 2.0**119


# ---- torch.compile ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_linear_has_the_same_bits(dtype):
    assert_compiled_is_eager("linear", dtype)


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_experts_have_the_same_bits(wgrad, dynamic):
    assert_compiled_is_eager("experts", dynamic=dynamic, wgrad=wgrad)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_layer_has_the_same_bits(dynamic):
    assert_compiled_is_eager("moe", dynamic=dynamic)


def assert_compiled_is_eager(name: str, dtype=torch.float32, dynamic=None, **options) -> None:
    """Also after a step, which the compiled code cannot see."""
    torch._dynamo.reset()
    module, arguments = make(name, dtype, **options), given(name)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        expected = found_by(module, arguments)
        assert_same_bits(found_by(module, arguments, compiled), expected)
        module(*given(name)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- Weights that are written unseen ----


def test_a_write_through_data_is_told_by_requantize(name):
    module, arguments = make(name), given(name)
    found_by(module, arguments)
    for x in module.parameters():
        x.data.mul_(-2)
    requantize(module)
    twin = make(name)
    twin.load_state_dict(module.state_dict())
    assert_same_bits(found_by(module, arguments), found_by(twin, arguments))
