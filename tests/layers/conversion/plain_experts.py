"""Experts in plain PyTorch, for `convert` to look at."""

import torch
from torch import nn
from torch.nn import functional as F


class PlainExperts(nn.Module):
    """Stacked experts with a SiLU, as a user may write them; `limit` clamps gate and up."""

    def __init__(self, num_experts=4, hidden_size=64, intermediate_size=40, limit=None):
        super().__init__()
        shape = num_experts, 2 * intermediate_size, hidden_size
        self.gate_up_proj = nn.Parameter(torch.randn(shape) * 0.1)
        shape = num_experts, hidden_size, intermediate_size
        self.down_proj = nn.Parameter(torch.randn(shape) * 0.1)
        self.act_fn, self.limit = nn.SiLU(), limit

    def activate(self, gate, up):
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.act_fn(gate) * up

    def expert(self, x, expert):
        gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(self.activate(gate, up), self.down_proj[expert])

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, choice = torch.where(top_k_index == expert)
            part = self.expert(hidden_states[token], expert)
            y.index_add_(0, token, top_k_weights[token, choice, None] * part)
        return y


class VllmLike(nn.Module):
    """Stacks under the names that vLLM has."""

    def __init__(self, num_experts=4, hidden_size=64, intermediate_size=40):
        super().__init__()
        shape = num_experts, 2 * intermediate_size, hidden_size
        self.w13 = nn.Parameter(torch.randn(shape) * 0.1)
        shape = num_experts, hidden_size, intermediate_size
        self.w2 = nn.Parameter(torch.randn(shape) * 0.1)

    def forward(self, x, index, weights):
        y = torch.zeros_like(x)
        for expert in index.unique().tolist():
            token, choice = torch.where(index == expert)
            gate, up = (x[token] @ self.w13[expert].T).chunk(2, dim=-1)
            inner = F.silu(gate) * up
            y.index_add_(0, token, weights[token, choice, None] * (inner @ self.w2[expert].T))
        return y


class DbrxLike(nn.Module):
    """Gate, up and down's transpose, each [E * I, H], in a child called mlp."""

    def __init__(self, num_experts=4, hidden_size=64, intermediate_size=40):
        super().__init__()
        self.num_experts, self.mlp = num_experts, nn.Module()
        for name in ("w1", "v1", "w2"):
            weight = torch.randn(num_experts * intermediate_size, hidden_size) * 0.1
            setattr(self.mlp, name, nn.Parameter(weight))

    def forward(self, x, index, weights):
        w1, v1, w2 = (
            w.view(self.num_experts, -1, x.shape[1])
            for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
        )
        y = torch.zeros_like(x)
        for expert in index.unique().tolist():
            token, choice = torch.where(index == expert)
            inner = F.silu(x[token] @ w1[expert].T) * (x[token] @ v1[expert].T)
            y.index_add_(0, token, weights[token, choice, None] * (inner @ w2[expert]))
        return y
