"""Gradients of adapters, against plain PyTorch on the sums of weights."""

import pytest
import torch
from torch import nn

import moefp8
from moefp8.adapters import LoRA, add_lora
from moefp8.adapters.grouped import grouped_nt, grouped_outer
from tests.adapters.cases import E, H, I, K, Net, error, merged, tokens, trained
from tests.gpu import on_cpu_and_gpu, poison


def bf16(*shape, device="cpu"):
    return torch.randn(*shape, dtype=torch.bfloat16, device=device)


@on_cpu_and_gpu
@pytest.mark.parametrize(("n", "k"), [(8, 64), (64, 8), (5, 3), (24, 130)])
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0], [0, 9, 0], [40, 1, 200]])
def test_grouped_products(n, k, counts, device):
    """Rows of no expert are NaN, and so is memory; rows of an expert see none of it."""
    total, extra = sum(counts), 4
    offsets = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    rows, weight, grad = (
        bf16(*shape, device=device) for shape in ((total + extra, k), (3, n, k), (total + extra, n))
    )
    rows[total:] = grad[total:] = torch.nan
    poison(device, 2 * grad.numel(), 2 * rows.numel(), 2 * weight.numel())
    y = grouped_nt(rows, weight, offsets)
    of_rows, of_weight = grouped_nt(grad, weight.mT, offsets), grouped_outer(grad, rows, offsets)
    expert = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).to(device)
    x, g, w = rows[:total].double(), grad[:total].double(), weight.double()
    outer = torch.zeros_like(w).index_add_(0, expert, g[:, :, None] * x[:, None, :])
    exact = {
        "y": (y[:total], torch.einsum("rnk,rk->rn", w[expert], x)),
        "rows": (of_rows[:total], torch.einsum("rnk,rn->rk", w[expert], g)),
        "weight": (of_weight, outer),
    }
    for name, (ours, theirs) in exact.items():
        assert ours.shape == theirs.shape, name
        assert not theirs.numel() or not theirs.any() or error(ours, theirs) < 4e-3, name
    assert not of_weight[torch.tensor(counts) == 0].any()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("rows must be", lambda rows, weight, offsets: (rows[:, 1:], weight, offsets)),
        ("rows must be bfloat16", lambda rows, weight, offsets: (rows.float(), weight, offsets)),
        ("expert_offsets must", lambda rows, weight, offsets: (rows, weight, offsets[1:])),
        ("expert_offsets must be int32", lambda rows, w, offsets: (rows, w, offsets.long())),
    ],
)
def test_wrong_operands(name, make):
    inputs = bf16(4, 8), bf16(3, 16, 8), torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    with pytest.raises((TypeError, ValueError), match=name):
        grouped_nt(*make(*inputs))


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
