"""What `convert`, `freeze` and `dequantize` take beside a model: less than a module in 16 bits."""

from functools import partial

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts
from moefp8.layers import PlainExperts
from tests.layers.memory import num_bytes, peak_beside

NUM_LAYERS = 3


def linear() -> nn.Module:
    module = nn.Linear(3072, 3072, bias=False, device="meta")
    module.weight = zeros(3072, 3072)
    return module


def conv1d() -> nn.Module:
    utils = pytest.importorskip("transformers.pytorch_utils")
    with torch.device("meta"):
        module = utils.Conv1D(3072, 3072)
    module.weight, module.bias = zeros(3072, 3072), zeros(3072)
    return module


def experts(num_experts: int, hidden_size: int, intermediate_size: int) -> nn.Module:
    module = PlainExperts(num_experts, hidden_size, intermediate_size, device="meta")
    module.gate_up_proj = weights(num_experts, 2 * intermediate_size, hidden_size)
    module.down_proj = weights(num_experts, hidden_size, intermediate_size)
    return module


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))


def weights(*shape: int) -> nn.Parameter:
    weight = torch.empty(shape, dtype=torch.bfloat16)
    return nn.Parameter(weight.uniform_(-0.05, 0.05))


MODULES = {
    "linear": linear,
    "Conv1D": conv1d,
    "two experts": partial(experts, 2, 2048, 1024),
    "many experts": partial(experts, 32, 512, 256),
}


def model_of(make) -> nn.Module:
    return nn.ModuleList(make() for _ in range(NUM_LAYERS))


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_convert_takes_less_than_a_module(make):
    def run(model):
        moefp8.convert(model)
        assert all(isinstance(x, FP8Linear | GroupedExperts) for x in model)

    assert peak_beside(partial(model_of, make), run) < num_bytes(make())


def filled(module: nn.Module) -> nn.Module:
    """It takes the memory of its parameters, and no more."""
    for x in module.to_empty(device="cpu").parameters():
        x.data.view(torch.uint8).zero_()
    return module


def fp8_linear(**options) -> nn.Module:
    with torch.device("meta"):
        module = FP8Linear(4096, 2048, bias=False, **options)
    return filled(module)


def fp8_experts(**options) -> nn.Module:
    with torch.device("meta"):
        module = GroupedExperts(16, 512, 1024, **options)
    return filled(module)


@pytest.mark.parametrize("make", [fp8_linear, fp8_experts])
def test_freeze_takes_less_than_a_module(make):
    trainable = partial(make, trainable=True)
    assert peak_beside(partial(model_of, trainable), moefp8.freeze) < num_bytes(trainable())


@pytest.mark.parametrize("make", [fp8_linear, fp8_experts])
def test_dequantize_takes_the_larger_model_and_less_than_a_module(make):
    size = num_bytes(make())  # about half of what it becomes
    grown = NUM_LAYERS * size
    assert peak_beside(partial(model_of, make), moefp8.dequantize) < grown + 2 * size
