"""Steps of training in CUDA graphs: each replay trains as an eager step does."""

import copy

import pytest
import torch
from torch import nn

from moefp8 import MoE
from moefp8.functional.training.weights import codes_stay, requantize
from tests.functional.cases import tokens_of
from tests.gpu import NEEDS_GPU, no_synchronisation, slow
from tests.layers.training.training_mode_cases import (
    WGRADS,
    Found,
    assert_same_bits,
    found_by,
    given,
    make,
)

pytestmark = [*NEEDS_GPU, pytest.mark.filterwarnings("error:.*portable PyTorch body")]
T, H = 300, 256


def layer_of(wgrad: str = "128x1", dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Its router is trained, too: what is chosen changes from step to step."""
    torch.manual_seed(0)
    options = {"trainable": True, "wgrad": wgrad, "dtype": dtype, "device": "cuda"}
    return MoE(H, 128, 8, 2, shared_intermediate_size=128, **options)


def on_a_side_stream(run) -> None:
    """As PyTorch asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)


def weights_of(module: nn.Module) -> Found:
    return {name: x.detach() for name, x in module.named_parameters()}


def gradients_of(module: nn.Module) -> Found:
    return {name: x.grad for name, x in module.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("wgrad", WGRADS)
def test_a_whole_step_in_a_graph(wgrad, fused, dtype):
    """Forward, backward and AdamW, with other tokens in each replay."""
    captured = layer_of(wgrad, dtype)
    eager = copy.deepcopy(captured)
    options = {"lr": 1e-2, "capturable": True, "fused": fused, "foreach": not fused}
    x = tokens_of(T, H, "cuda")

    def step(layer: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = (layer(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizers = [torch.optim.AdamW(layer.parameters(), **options) for layer in (captured, eager)]
    on_a_side_stream(lambda: step(captured, optimizers[0]))
    step(eager, optimizers[1])
    assert_same_bits(weights_of(captured), weights_of(eager))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(captured, optimizers[0])
    for _ in range(4):
        x.copy_(tokens_of(T, H, "cuda"))
        graph.replay()
        assert torch.equal(found, step(eager, optimizers[1]))
        assert_same_bits(weights_of(captured), weights_of(eager))
    with torch.no_grad():  # codes of the last weights, which no version counted
        assert torch.equal(captured(x), eager(x))
        assert torch.equal(captured.eval()(x), eager.eval()(x))


def test_a_graph_of_a_micro_batch_reads_codes_as_they_lie():
    """Two micro-batches for each step of an optimizer, which stays outside of the graph."""
    captured = layer_of(dtype=torch.float32)
    eager = copy.deepcopy(captured)
    optimizers = [torch.optim.SGD(layer.parameters(), 1e-1) for layer in (captured, eager)]
    x = tokens_of(T, H, "cuda")

    def micro_batch(layer: nn.Module) -> torch.Tensor:
        loss = (layer(x).float() - 1).square().mean()
        loss.backward()
        return loss.detach()

    on_a_side_stream(lambda: micro_batch(captured))
    for weight in captured.parameters():
        weight.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with codes_stay(), torch.cuda.graph(graph):
        found = micro_batch(captured)
    for _ in range(3):
        for _ in range(2):
            x.copy_(tokens_of(T, H, "cuda"))
            graph.replay()
            assert torch.equal(found, micro_batch(eager))
        assert_same_bits(gradients_of(captured), gradients_of(eager))
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].zero_grad(set_to_none=False)  # the graph adds to this memory
        optimizers[1].zero_grad()
        requantize(captured)
        assert_same_bits(weights_of(captured), weights_of(eager))


@pytest.mark.parametrize("name", ["linear", "experts", "moe"])
def test_a_step_waits_for_nothing(name):
    module, arguments = make(name).cuda(), given(name, device="cuda")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    found_by(module, arguments)
    with no_synchronisation():
        module(*arguments).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found_by(module, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
@pytest.mark.parametrize("name", ["linear", "experts", "moe"])
def test_compiled_modules_give_the_same(name, backend):
    """Inductor may leave out a rounding between two ops; our own ops are what they are."""
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    module, arguments = make(name).cuda(), given(name, device="cuda")
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    expected, found = found_by(module, arguments), found_by(module, arguments, compiled)
    if backend == "aot_eager":
        assert_same_bits(found, expected)
    for key, x in expected.items():
        assert (found[key].float() - x.float()).norm() <= 0.02 * x.float().norm(), key
