"""Adapters on a GPU: as on the CPU, nothing waits for the device, and steps fit in a CUDA graph."""

import copy

import pytest
import torch
from torch import nn

from moefp8 import FP8Linear, GroupedExperts
from moefp8.adapters import LoRA, add_lora
from tests.adapters.cases import E, H, I, K, Net, error, trained
from tests.gpu import no_synchronisation, on_gpu


def step(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of all adapters."""
    model.zero_grad()
    y = model(*inputs)
    y.float().square().sum().backward()
    return [y.detach(), *(x.grad for x in model.parameters() if x.requires_grad)]


@on_gpu
@pytest.mark.parametrize(("h", "i"), [(H, I), (256, 512), (100, 36)])
@pytest.mark.parametrize("rank", [8, 3, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_as_on_the_cpu(h, i, rank, dtype):
    experts = GroupedExperts(E, h, i)
    add_lora(experts, rank, 2 * rank, dtype=dtype)
    trained(experts)
    x = torch.randn(200, h, dtype=torch.bfloat16)
    index = torch.randint(0, E + 1, (200, K))
    inputs = x, index, torch.rand(200, K)
    exact = step(experts, *inputs)
    found = step(copy.deepcopy(experts).cuda(), *(x.cuda() for x in inputs))
    for ours, theirs in zip(found, exact, strict=True):
        assert error(ours.cpu(), theirs) < 0.02


@on_gpu
def test_a_whole_layer_waits_for_nothing_and_replays():
    model = Net().cuda()
    add_lora(model)
    trained(model)
    x = torch.randn(64, H, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):  # kernels are compiled, gradients are allocated
            step(model, x)
    torch.cuda.synchronize()
    with no_synchronisation():
        step(model, x)
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(model, x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        replayed = [x.clone() for x in results]
        twin = copy.deepcopy(model)
        for ours, theirs in zip(replayed, step(twin, x.clone()), strict=True):
            assert error(ours, theirs) < 0.01


@on_gpu
def test_an_expert_without_tokens_has_zeros():
    """Also where the memory of its gradient held something else."""
    experts = GroupedExperts(64, H, I).cuda()
    add_lora(experts)
    trained(experts)
    x = torch.randn(3, H, dtype=torch.bfloat16, device="cuda")
    index = torch.tensor([[1, 2], [1, 64], [64, 64]], device="cuda")
    for _ in range(3):
        junk = [torch.full_like(x, torch.nan) for x in experts.parameters() if x.requires_grad]
        del junk
        step(experts, x, index, torch.rand(3, 2, device="cuda"))
    others = [e for e in range(64) if e not in (1, 2)]
    for lora in (x for x in experts.modules() if isinstance(x, LoRA)):
        for grad in (lora.A.grad, lora.B.grad):
            assert not grad[others].any()
            assert grad.isfinite().all()
            assert grad[1].any()


@on_gpu
def test_an_untrained_adapter_changes_no_bit_of_a_linear():
    linear = FP8Linear(512, 384).cuda()
    x = torch.randn(77, 512, dtype=torch.bfloat16, device="cuda")
    before = linear(x)
    add_lora(linear)
    assert torch.equal(linear(x), before)
