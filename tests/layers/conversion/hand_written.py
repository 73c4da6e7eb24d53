"""Mixtures of experts as they are written by hand: a router, and a list of experts in a loop."""

import warnings

import torch
from torch import nn
from torch.nn import functional as F

from moefp8 import convert

H, I, E = 64, 40, 4


class FeedForward(nn.Module):
    def __init__(self, hidden_size=H, intermediate_size=I, bias=False):
        super().__init__()
        self.w1 = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.w2 = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.w3 = nn.Linear(hidden_size, intermediate_size, bias=bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Fused(nn.Module):
    """Gate and up in one linear."""

    is_gate_first = True

    def __init__(self):
        super().__init__()
        self.w13, self.w2 = nn.Linear(H, 2 * I, bias=False), nn.Linear(I, H, bias=False)

    def forward(self, x):
        first, second = self.w13(x).chunk(2, dim=-1)
        gate, up = (first, second) if self.is_gate_first else (second, first)
        return self.w2(F.silu(gate) * up)


class Sparse(nn.Module):
    """Softmax, then top-k, renormalized; a loop with torch.where and index_add."""

    def __init__(self, expert=FeedForward, num_experts=E, top_k=2, hidden_size=H):
        super().__init__()
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(num_experts))

    def choose(self, logits):
        weights = F.softmax(logits, dim=-1, dtype=torch.float)
        weights, ids = torch.topk(weights, self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), ids

    def loop(self, x, weights, ids):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, choice = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        return y

    def forward(self, x):
        batch, length, hidden_size = x.shape
        x = x.view(-1, hidden_size)
        weights, ids = self.choose(self.gate(x))
        return self.loop(x, weights.to(x.dtype), ids).view(batch, length, hidden_size)


class InDict(Sparse):
    """Its experts are in a dictionary."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({f"e{i}": x for i, x in enumerate(self.experts)})

    def loop(self, x, weights, ids):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts.values()):
            token, choice = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        return y


class WithLogits(Sparse):
    """It returns the router's logits as well, as Mixtral's first code did."""

    def forward(self, x):
        batch, length, hidden_size = x.shape
        x = x.view(-1, hidden_size)
        logits = self.gate(x)
        weights, ids = self.choose(logits)
        y = self.loop(x, weights.to(x.dtype), ids)
        return y.reshape(batch, length, hidden_size), logits


class Masked(nn.Module):
    """Top-k, then softmax; masks over [B, S], and names of its own."""

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gate = (nn.Linear(H, I, bias=False) for _ in range(2))
            self.down, self.dropout = nn.Linear(I, H, bias=False), nn.Dropout(0.0)

        def forward(self, x):
            return self.dropout(self.down(self.up(x) * F.silu(self.gate(x))))

    def __init__(self, num_experts=E, k=2):
        super().__init__()
        self.router, self.k = nn.Linear(H, num_experts), k
        self.ffns = nn.ModuleList(self.Expert() for _ in range(num_experts))

    def forward(self, x):
        scores, ids = self.router(x).topk(self.k, dim=-1)
        scores = scores.softmax(dim=-1)
        y = torch.zeros_like(x)
        for e, ffn in enumerate(self.ffns):
            chosen = ids == e
            mask = chosen.any(dim=-1)
            if mask.any():
                weight = (scores * chosen).sum(dim=-1)[mask]
                y[mask] += weight.unsqueeze(-1) * ffn(x[mask])
        return y


class PlainTokens(Sparse):
    """It takes tokens [T, H] alone, and leaves the weights as softmax gave them."""

    def forward(self, x):
        weights, ids = self.gate(x).softmax(dim=-1).topk(self.top_k)
        num_tokens, _ = x.shape
        return self.loop(x, weights, ids)[:num_tokens]


class Sigmoid(Sparse):
    def choose(self, logits):
        weights, ids = torch.topk(logits.float().sigmoid(), self.top_k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), ids


class EveryExpert(Sparse):
    """It runs all experts for all tokens, and weighs them."""

    def forward(self, x):
        weights, ids = self.choose(self.gate(x))
        dense = torch.zeros(*ids.shape[:-1], self.num_experts).to(weights)
        dense = dense.scatter(-1, ids, weights).to(x.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * dense.unsqueeze(-2)).sum(dim=-1)


class Model(nn.Module):
    def __init__(self, make=Sparse, num_layers=2):
        super().__init__()
        layers = (
            nn.ModuleDict({"proj": nn.Linear(H, H), "moe": make()}) for _ in range(num_layers)
        )
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            y = layer["moe"](layer["proj"](x))
            x = x + (y[0] if isinstance(y, tuple) else y)
        return x


class Scaled(FeedForward):
    scale = 1.1

    def forward(self, x):
        return super().forward(x) * self.scale


def with_forward(forward, base=Sparse, **attributes):
    run = base.forward
    return type("Own", (base,), {"forward": lambda self, x: forward(self, x, run), **attributes})


def of_experts(kind):
    return type("Own", (Sparse,), {"__init__": lambda self: Sparse.__init__(self, kind)})


def convert_with_warning(model, **arguments):
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        convert(model, **arguments)
    (warning,) = (str(x.message) for x in raised)
    return warning
