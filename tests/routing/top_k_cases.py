"""What the tests of the router's choice share: logits and biases of every kind."""

import math

import torch

DTYPES = torch.bfloat16, torch.float16, torch.float32
OPS = "softmax_topk", "sigmoid_group_topk"
NAN, INF = math.nan, math.inf


def logits_of(num_tokens: int, num_experts: int, dtype=torch.float32) -> torch.Tensor:
    """Rows in turn: distinct numbers, ties, ties of both zeros, NaN, Inf, all of them."""
    logits = torch.randn(num_tokens, num_experts) * torch.randint(1, 9, (num_tokens, 1))
    logits[1::6] = logits[1::6].round()
    logits[2::6] = torch.where(logits[2::6] > 0, 0.0, -0.0)
    some = [NAN, -NAN], [INF, -INF, -104.0], [NAN, INF, -INF, 0.0, -0.0]
    for first, odd in enumerate(some, 3):
        rows = logits[first::6]
        chosen = torch.tensor(odd)[torch.randint(len(odd), rows.shape)]
        logits[first::6] = torch.where(torch.rand(rows.shape) < 0.3, chosen, rows)
    return logits.to(dtype)


def bias_of(num_experts: int) -> torch.Tensor:
    """A bias of few values, so that sums are often equal; closed groups score -Inf too."""
    bias = torch.randint(-2, 3, (num_experts,)) / 4
    return torch.where(torch.rand(num_experts) < 0.2, -INF, bias)


def group_limits(num_experts: int, k: int) -> list[tuple[int, int]]:
    """(num_groups, topk_groups) under which k experts can be chosen."""
    found = []
    for num_groups in (2, 8, num_experts // 2, num_experts):
        if num_groups >= 2 and num_experts % num_groups == 0:
            topk_groups = -(-k // (num_experts // num_groups))
            found += [(num_groups, x) for x in {topk_groups, num_groups // 2} if x >= topk_groups]
    return [(1, 1), *sorted(set(found))]


def assert_same_choice(ours, expected, ulps: int) -> None:
    for x, y in zip(ours, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert torch.equal(ours[0].cpu(), expected[0])
    torch.testing.assert_close(
        ours[1].cpu(), expected[1], rtol=ulps * 2**-23, atol=ulps * 2.0**-149, equal_nan=True
    )


def samples() -> torch.Tensor:
    ends = torch.tensor([0.0, -0.0, INF, -INF, NAN, 128, -128, 1e-40, -1e-40, 3e38, -3e38])
    near_zero = torch.randn(100_000) * torch.exp2(torch.randint(-30, 3, (100_000,)))
    return torch.cat([torch.linspace(-106, 20, 1_000_000), near_zero, ends])


class Forgets(torch.autograd.Function):
    """A copy of x, through which no gradient flows back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None
