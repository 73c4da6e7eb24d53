"""Gradients of adapters, against plain PyTorch on the sums of weights."""

import pytest
import torch
from torch import nn

import moefp8
from moefp8.adapters import LoRA, add_lora
from moefp8.functional.grouped_bf16 import add_low_rank, grouped_outer
from tests.adapters.cases import E, H, I, K, Net, error, merged, tokens, trained
from tests.gpu import on_cpu_and_gpu, poison


def bf16(*shape, device="cpu"):
    return torch.randn(*shape, dtype=torch.bfloat16, device=device)


@on_cpu_and_gpu
@pytest.mark.parametrize(("n", "k", "rank"), [(8, 64, 8), (64, 8, 3), (5, 3, 2), (24, 130, 16)])
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0], [0, 9, 0], [40, 1, 200]])
def test_grouped_products(n, k, rank, counts, device):
    """Rows of no expert are NaN, and so is memory; rows of an expert see none of it."""
    total, num_rows = sum(counts), sum(counts) + 4
    offsets = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    x, before, a, b = (
        bf16(*shape, device=device)
        for shape in ((num_rows, k), (num_rows, n), (3, rank, k), (3, n, rank))
    )
    x[total:] = before[total:] = torch.nan
    poison(device, 2 * before.numel(), 2 * x.numel(), 2 * a.numel(), 2 * num_rows * rank)
    y = before.clone()
    u, of_weight = add_low_rank(y, x, a, b, 0.5, offsets), grouped_outer(before, x, offsets)
    expert = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).to(device)
    rows, dy = x[:total].double(), before[:total].double()
    narrow = 0.5 * torch.einsum("rk,rlk->rl", rows, a.double()[expert])
    exact = {
        "u": (u[:total], narrow),
        "y": (y[:total], dy + torch.einsum("rl,rnl->rn", narrow, b.double()[expert])),
        "outer": (
            of_weight,
            torch.zeros(3, n, k, device=device, dtype=torch.float64).index_add_(
                0, expert, dy[:, :, None] * rows[:, None, :]
            ),
        ),
    }
    for name, (ours, theirs) in exact.items():
        assert ours.shape == theirs.shape, name
        assert not theirs.numel() or not theirs.any() or error(ours, theirs) < 4e-3, name
    assert not of_weight[torch.tensor(counts) == 0].any()
    parts = before.clone().view(num_rows, 1, n)
    add_low_rank(parts, x, a, b, 0.5, offsets)
    assert torch.equal(parts[:total, 0], y[:total])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a must be", {"x": bf16(4, 7)}),
        ("x must be bfloat16", {"x": torch.ones(4, 8)}),
        ("y must be", {"y": bf16(5, 16)}),
        ("b must be", {"b": bf16(3, 16, 3)}),
        ("expert_offsets must be", {"expert_offsets": torch.zeros(3, dtype=torch.int32)}),
        ("expert_offsets must be int32", {"expert_offsets": torch.zeros(4, dtype=torch.int64)}),
    ],
)
def test_wrong_operands(name, change):
    offsets = torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    inputs = {"y": bf16(4, 16), "x": bf16(4, 8), "a": bf16(3, 2, 8), "b": bf16(3, 16, 2)}
    inputs |= {"scaling": 1.0, "expert_offsets": offsets}
    with pytest.raises((TypeError, ValueError), match=f"add_low_rank: {name}"):
        add_low_rank(*(inputs | change).values())


def of_merged(model: nn.Module, plain: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of A and B that those of the sums of weights stand for."""
    found = {}
    for name, lora in model.named_modules():
        if isinstance(lora, LoRA):
            path, _, parameter = name.rpartition(".lora_")
            grad = lora.scaling * plain.get_submodule(path).get_parameter(parameter).grad
            found[f"{name}.A"] = lora.B.float().mT @ grad
            found[f"{name}.B"] = grad @ lora.A.float().mT
    return found


class Chosen(nn.Module):
    """A linear, and experts whose choices no rounding changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = moefp8.FP8Linear(H, H), moefp8.GroupedExperts(E, H, I)
        self.index, self.weights = torch.randint(0, E, (48, K)), torch.rand(48, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.first(x), self.index, self.weights)


@pytest.mark.parametrize(("rank", "dtype"), [(8, torch.bfloat16), (3, torch.float32)])
def test_gradients_are_those_of_merged_weights(rank, dtype):
    model, x, grad = Chosen(), tokens(48), bf16(48, H)
    add_lora(model, rank, 2 * rank, dtype=dtype)
    plain = merged(trained(model, 0.2))
    x_ours, x_theirs = x.clone().requires_grad_(), x.float().requires_grad_()
    model(x_ours).backward(grad)
    plain(x_theirs).backward(grad.float())
    exact = of_merged(model, plain)
    assert len(exact) == 6
    for name, theirs in exact.items():
        ours = model.get_parameter(name).grad
        assert ours.dtype == dtype
        assert error(ours, theirs) < 0.09, name
    assert error(x_ours.grad, x_theirs.grad) < 0.09


def test_the_gradient_of_a_linear_is_exact():
    """The adapter's own gradient needs no FP8 product."""
    linear, x, grad = moefp8.FP8Linear(H, 24), tokens(40), bf16(40, 24)
    add_lora(linear, 4, 8)
    lora = trained(linear).lora_weight
    linear(x).backward(grad)
    a, b, g = lora.A.double(), lora.B.double(), grad.double()
    assert error(lora.A.grad, 2 * (g @ b).t() @ x.double()) < 6e-3
    assert error(lora.B.grad, 2 * g.t() @ (x.double() @ a.t())) < 6e-3


def test_gradients_reach_the_choice_and_no_weight():
    experts = moefp8.GroupedExperts(E, H, I)
    add_lora(experts)
    weights = torch.rand(6, K, requires_grad=True)
    x = tokens(6).requires_grad_()
    experts(x, torch.randint(0, E, (6, K)), weights).float().sum().backward()
    assert weights.grad.abs().sum() > 0
    assert x.grad.abs().sum() > 0
    assert experts.gate_up_proj.grad is None


def test_choices_held_elsewhere_give_no_gradient():
    """Their rows are behind the last expert's."""
    experts = moefp8.GroupedExperts(E, H, I)
    add_lora(experts)
    trained(experts)
    index = torch.full((5, K), E)
    index[0, 0] = 1
    x = tokens(5).requires_grad_()
    experts(x, index, torch.rand(5, K)).float().square().sum().backward()
    assert not x.grad[1:].any()
    for lora in (experts.lora_gate_up_proj, experts.lora_down_proj):
        for grad in (lora.A.grad, lora.B.grad):
            assert not grad[[0, 2, 3]].any()
            assert grad[1].any()
            assert grad.isfinite().all()


def test_adapters_learn():
    model, x = Net(), tokens(8)
    target = bf16(8, 16)
    add_lora(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = (model(x) - target).float().square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_small_steps_are_not_lost_by_default():
    """AdamW goes lr at most; in BF16 most of such values would stay as they are."""
    linear, x = moefp8.FP8Linear(H, 24), tokens(40)
    add_lora(linear)
    lora = trained(linear).lora_weight
    before = [x.detach().clone() for x in lora.parameters()]
    optimizer = torch.optim.AdamW(lora.parameters(), lr=1e-5)
    linear(x).float().square().sum().backward()
    optimizer.step()
    for old, new in zip(before, lora.parameters(), strict=True):
        assert ((new != old) | (new.grad == 0)).float().mean() > 0.999


def test_a_second_derivative_through_adapters_of_experts_is_an_error():
    """Also where the incoming gradient asks for none: else a penalty would lack a part silently."""
    torch.manual_seed(0)
    experts = moefp8.GroupedExperts(3, 128, 64)
    add_lora(experts, 8)
    x = torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True)
    ids, weights = torch.randint(0, 3, (4, 2)), torch.rand(4, 2)
    y = experts(x, ids, weights).float().sum()
    (of_a,) = torch.autograd.grad(y, experts.lora_down_proj.A, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        of_a.float().square().sum().backward()
