"""Modules and routing on a GPU equal those of the CPU, and routing never waits for the device."""

from dataclasses import fields

import pytest
import torch

from moefp8 import FP8Linear, GroupedExperts, MoE, load_checkpoint, save_checkpoint
from moefp8.kernels.registry import register
from moefp8.quant import quantize_1x128
from moefp8.routing import build_plan, combine, dispatch, sigmoid_group_topk, softmax_topk
from moefp8.testing import assert_matches_reference
from tests.gpu import NEEDS_GPU, no_synchronisation

pytestmark = [*NEEDS_GPU, pytest.mark.filterwarnings("error:.*portable PyTorch body")]


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_routing_never_waits_and_equals_the_cpu(layout):
    logits, x = torch.randn(50, 16), torch.randn(50, 32).bfloat16()
    gpu_logits, gpu_x = logits.cuda(), x.cuda()
    bias = torch.zeros(16, device="cuda")
    with no_synchronisation():
        softmax_topk(gpu_logits, 4, True)
        choice = sigmoid_group_topk(gpu_logits, bias, 4, 4, 2, True, 2.5)
        plan = build_plan(choice.top_k_index, 16, layout)
        y = combine(dispatch(gpu_x, plan), plan, choice.top_k_weights)
        quantized = dispatch(quantize_1x128(gpu_x).data, plan)
    assert quantized.dtype == torch.float8_e4m3fn
    on_cpu = sigmoid_group_topk(logits, bias.cpu(), 4, 4, 2, True, 2.5)
    assert torch.equal(choice.top_k_index.cpu(), on_cpu.top_k_index)
    expected = build_plan(on_cpu.top_k_index, 16, layout)
    for field in fields(expected):
        ours, theirs = getattr(plan, field.name), getattr(expected, field.name)
        assert ours == theirs if field.name == "max_m" else torch.equal(ours.cpu(), theirs)
    rows = dispatch(x, expected)
    assert_matches_reference(y.cpu(), combine(rows, expected, on_cpu.top_k_weights))


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_one_graph_serves_every_routing(layout):
    x, weights = torch.randn(40, 64, device="cuda").bfloat16(), torch.rand(40, 2, device="cuda")
    index = torch.zeros(40, 2, dtype=torch.int64, device="cuda")

    def move() -> torch.Tensor:
        plan = build_plan(index, 8, layout)
        return combine(dispatch(x, plan), plan, weights)

    move()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = move()
    for _ in range(3):
        index.copy_(torch.randint(0, 9, (40, 2)))
        graph.replay()
        factor = (weights * (index < 8)).sum(1, keepdim=True)
        assert_matches_reference(y, x * factor, 8e-3)


def test_modules_equal_the_cpu():
    moe = MoE(256, 200, 8, 2, shared_intermediate_size=130, shared_expert_gate=True)
    x = torch.randn(30, 256).bfloat16()
    expected = moe(x)
    on_gpu = moe.cuda()
    assert all(p.is_cuda for p in on_gpu.parameters())
    assert_matches_reference(on_gpu(x.cuda()).detach().cpu(), expected.detach(), 8e-2)
    linear = FP8Linear(300, 200)
    z = torch.randn(4, 300)
    expected = linear(z)
    assert_matches_reference(linear.to("cuda")(z.cuda()).cpu(), expected, 8e-3)


def test_checkpoints_load_onto_the_gpu(tmp_path):
    moe = MoE(256, 200, 8, 2, shared_intermediate_size=130)
    save_checkpoint(moe, tmp_path / "moe")
    with torch.device("meta"):
        on_gpu = MoE(256, 200, 8, 2, shared_intermediate_size=130)
    load_checkpoint(on_gpu, tmp_path / "moe", device="cuda")
    in_place = MoE(256, 200, 8, 2, shared_intermediate_size=130).cuda()
    load_checkpoint(in_place, tmp_path / "moe")
    expected = moe.state_dict()
    for model in (on_gpu, in_place):
        for name, tensor in model.state_dict().items():
            assert tensor.is_cuda
            assert torch.equal(tensor.cpu().view(torch.uint8), expected[name].view(torch.uint8))


def test_mixed_devices_are_named():
    experts = GroupedExperts(4, 64, 64).cuda()
    index, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"hidden_states on cpu, .*gate_up_proj on cuda:0"):
        experts(torch.randn(3, 64), index, weights)


def test_portable_bodies_are_announced(monkeypatch, new_driver):
    """Each op announces its own once: this op is the test's."""
    op = register(
        "announced_in_a_test(Tensor x) -> Tensor",
        reference=lambda x: x + 1,
        fake=torch.empty_like,
        kernels=lambda x: x + 2,
    )
    x = torch.ones(3, device="cuda")
    assert torch.equal(op(x), x + 2)
    monkeypatch.setattr(new_driver, "arch", lambda index: "sm_80")
    with monkeypatch.context() as patch:
        patch.setenv("MOEFP8_STRICT", "1")
        with pytest.raises(RuntimeError, match="MOEFP8_STRICT=1 forbids that"):
            op(x)
    told = "announced_in_a_test runs its portable PyTorch body on NVIDIA"
    with pytest.warns(UserWarning, match=told):
        assert torch.equal(op(x), x + 1)
    assert torch.equal(op(x), x + 1)
