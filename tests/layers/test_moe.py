"""How a MoE layer adds its shared experts: in combine or behind the experts, with the same bits."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from moefp8 import GroupedExperts, MoE
from moefp8.testing import assert_matches_reference
from tests.fakes.emulator import emulated
from tests.functional.cases import Calls
from tests.gpu import on_gpu

E, H, I, K = 6, 144, 200, 2


@pytest.fixture
def experts_calls() -> Iterator[list]:
    """The arguments of each call of the op."""
    with Calls("experts") as calls:
        yield calls.came


def layer(gate: bool = False) -> MoE:
    torch.manual_seed(0)
    return MoE(H, I, E, K, shared_intermediate_size=136, shared_expert_gate=gate)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, H).bfloat16()


def in_two_steps(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, H)
    return (moe.experts(rows, *moe.gate(rows)) + moe._shared(rows)).view(x.shape)


# ---- In combine ----


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 40), ()])
@pytest.mark.parametrize("gate", [False, True])
@torch.no_grad()
def test_experts_add_the_shared_ones_to_the_bit(experts_calls, gate, shape):
    moe, x = layer(gate), tokens(*shape)
    expected = in_two_steps(moe, x)
    assert experts_calls.pop()["addend"] is None
    y = moe(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert torch.equal(y, expected)
    (call,) = experts_calls
    assert torch.equal(call["addend"], moe._shared(x.view(-1, H)))


@torch.no_grad()
def test_a_layer_launches_no_addition():
    moe, x = layer(), tokens(30)
    with emulated() as gpu:
        y = moe(x)
        names = [made.kernel.name.split("_")[0] for made in gpu.launched]
        assert names[-4:] == ["dispatch", "gemm", "gemm", "combine"]
        assert gpu.launched[-1].arguments.addend
        assert torch.equal(y, in_two_steps(moe, x))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_layers_do_so_too(dynamic):
    torch._dynamo.reset()
    moe, graphs = layer(), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(moe, backend=keep, fullgraph=True, dynamic=dynamic)
    with torch.inference_mode():
        for num_tokens in (9, 30):
            x = tokens(num_tokens)
            assert torch.equal(compiled(x), in_two_steps(moe, x))
    calls = [str(node.target) for node in graphs[0].graph.nodes if "call" in node.op]
    assert "moefp8.experts.default" in calls
    assert not any("add" in call for call in calls)


# ---- Behind the experts ----


class Doubling(GroupedExperts):
    """Another forward, which knows no addend."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 2 * super().forward(hidden_states, top_k_index, top_k_weights)


def hooked(moe: MoE) -> None:
    moe.experts.register_forward_hook(lambda module, args, y: 2 * y)


def patched(moe: MoE) -> None:
    forward = moe.experts.forward
    moe.experts.forward = lambda *args: 2 * forward(*args)


def another_class(moe: MoE) -> None:
    moe.experts.__class__ = Doubling


def plain(moe: MoE) -> None:
    moe.experts = moe.experts.to_plain()


@pytest.mark.parametrize("change", [hooked, patched, another_class, plain])
@torch.no_grad()
def test_experts_that_are_others_add_nothing(experts_calls, change):
    moe, x = layer(), tokens(9)
    change(moe)
    expected = in_two_steps(moe, x)
    assert torch.equal(moe(x), expected)
    assert all(call["addend"] is None for call in experts_calls)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@torch.no_grad()
def test_hidden_states_of_other_dtypes_are_added_in_theirs(experts_calls, dtype):
    moe, x = layer(), tokens(9).to(dtype)
    expected = in_two_steps(moe, x)
    y = moe(x)
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    assert [call["addend"] for call in experts_calls] == [None, None]


def test_shared_experts_that_train_keep_their_gradients(experts_calls):
    """Also beside frozen experts, and where the experts add them."""
    moe, x = layer().requires_grad_(False), tokens(9)
    moe.shared_experts = nn.Linear(H, H, bias=False).bfloat16()
    with torch.no_grad():
        expected = moe(x)
    y = moe(x)
    assert torch.equal(y, expected)
    assert [call["addend"] is not None for call in experts_calls] == [True, True]
    y.float().sum().backward()
    expected = x.float().sum(0).expand(H, H)
    torch.testing.assert_close(
        moe.shared_experts.weight.grad.float(), expected, rtol=2e-2, atol=0.1
    )


def gradients(moe: MoE, x: torch.Tensor, forward) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    trained = [x, moe.gate.weight, *moe.shared_expert_gate.parameters()]
    return [*torch.autograd.grad(forward(x).square().sum(), trained)]


def test_an_addend_has_the_gradient_of_an_addition():
    moe, x = layer(gate=True), tokens(9)
    of_x, *others = gradients(moe, x, moe)
    expected_of_x, *expected = gradients(moe, x, lambda x: in_two_steps(moe, x))
    assert all(map(torch.equal, others, expected))
    assert_matches_reference(of_x, expected_of_x, 1e-2)  # four parts, in another order


# ---- On a GPU ----


@on_gpu
@pytest.mark.parametrize("num_tokens", [1, 128, 200, 3000])
@pytest.mark.parametrize("gate", [False, True])
@torch.inference_mode()
def test_graphs_give_the_bits_of_eager_calls(num_tokens, gate):
    """Up to 128 tokens a graph computes both side by side, and adds behind them."""
    moe, x = layer(gate).cuda(), tokens(num_tokens).cuda()
    moe(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe(x)
    for _ in range(3):
        x.copy_(tokens(num_tokens))
        graph.replay()
        eager = moe(x)
        assert torch.equal(y, eager)
        assert torch.equal(in_two_steps(moe, x), eager)


@on_gpu
@torch.inference_mode()
def test_only_kernels_of_ours_run():
    """Weights are such as TMA can address, so that nothing is copied."""
    moe = MoE(H, 128, E, K, shared_intermediate_size=128, device="cuda")
    x = tokens(200).cuda()
    moe(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        moe(x)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "kernel" in event.name.lower()]
    assert any("combine" in name for name in kernels), kernels
    assert not [name for name in kernels if "at::native" in name], kernels


def test_an_unknown_keyword_is_told_of_moe():
    with pytest.raises(TypeError, match=r"^MoE: keywords must be its own .*, got activate$"):
        MoE(128, 128, 4, 2, activate="gelu")
