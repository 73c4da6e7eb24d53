"""Steps of linears and of frozen experts, and what they are timed at.

A step is forward and backward with the gradient of its result given; weights are frozen. All
operands tell `work`, what a call does by unit in 1e-6 of it, and `num_bytes`, which caches would
have to hold; `errors` compares what calls gave.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from benchmarks import moe_cases, peers
from benchmarks.moe_accuracy import COMPARED_TOKENS, reference
from benchmarks.moe_cases import Model, random_experts
from benchmarks.peers import Call
from moefp8 import FP8Linear, GroupedExperts
from moefp8.adapters import LoRA, add_lora
from moefp8.testing import relative_error

TOKENS = 16, 1024, 4096, 16384
MODELS = {
    "deepseek_v3": moe_cases.MODELS["deepseek_v3"]._replace(
        title="DeepSeek-V3 (32 local experts)", num_experts=32
    ),
    "qwen3_30b_a3b": moe_cases.MODELS["qwen3_30b_a3b"],
    "mixtral_8x7b": moe_cases.MODELS["mixtral_8x7b"],
}
RANK = 16
LINEARS = peers.Case(8192, 4096, 7168), peers.Case(8192, 7168, 2048)


class Results(tuple[torch.Tensor, ...]):
    """The tensors that a call gives, in one order."""

    def clone(self) -> "Results":
        return Results(x.detach().clone() for x in self)

    def equals(self, other: "Results") -> bool:
        return all(map(torch.equal, self, other))


def step_of(
    forward: Callable[..., torch.Tensor], inputs: Iterable[torch.Tensor], grad: torch.Tensor
) -> Call:
    """A call of forward and backward, which gives the gradients of all `inputs`."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    return lambda: Results(torch.autograd.grad(forward(*leaves), leaves, grad))


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of all rows as one vector."""
    return float(f"{relative_error(actual.float().flatten(), expected.float().flatten()):.4g}")


# ---- Experts ----


class ExpertsCase(NamedTuple):
    model: Model
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.model.title}, {self.num_tokens} tokens"


@lru_cache(maxsize=1)
def _experts_of(model: Model, device: str) -> GroupedExperts:
    return random_experts(model, device)


@dataclass(frozen=True)
class ExpertsStep:
    """Routed tokens, and the gradient of what the experts give: bf16 [T, H].

    Results are the gradients of hidden states and of `top_k_weights`.
    """

    case: moe_cases.Case
    grad: torch.Tensor

    @classmethod
    def random(cls, case: ExpertsCase, device: str = "cuda") -> "ExpertsStep":
        model, num_tokens = case
        tokens = moe_cases.Case.random(model, _experts_of(model, device), num_tokens)
        return cls(tokens, torch.randn_like(tokens.x))

    def call(self, experts: Callable[..., torch.Tensor]) -> Call:
        """experts: x, top_k_index, top_k_weights -> y."""
        x, index, weights = self.case.x, self.case.top_k_index, self.case.top_k_weights
        return step_of(lambda x, weights: experts(x, index, weights), (x, weights), self.grad)

    @property
    def work(self) -> dict[str, float]:
        return {"tflops": 2 * self.case.flops / 1e6}

    @property
    def num_bytes(self) -> int:
        return self.case.num_bytes("block_scaled")

    def errors(self, results: dict[str, Results]) -> dict[str, dict[str, float]]:
        """Of both gradients at up to 64 tokens, against autograd of FP32 with the same weights."""
        num_tokens = len(self.grad)
        at = torch.linspace(0, num_tokens - 1, min(num_tokens, COMPARED_TOKENS)).long()
        at = at.to(self.grad.device)
        some = self.case.only(at)

        def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return reference(replace(some, x=x, top_k_weights=weights))

        exact = step_of(layer, (some.x.float(), some.top_k_weights), self.grad[at].float())()
        names = "error", "error_of_weights"
        return {
            name: {key: error_of(x[at], y) for key, x, y in zip(names, result, exact, strict=True)}
            for name, result in results.items()
        }


@dataclass(frozen=True)
class AdaptedStep(ExpertsStep):
    """The same of experts with LoRA beside both weights.

    Results have the gradients of A and B, too. B is so small that the others are near those of
    experts without adapters, which errors are against.
    """

    adapted: GroupedExperts

    @classmethod
    def random(cls, case: ExpertsCase, device: str = "cuda") -> "AdaptedStep":
        step, (_, _, _, h, i) = ExpertsStep.random(case, device), case.model
        adapted = GroupedExperts(case.model.num_experts, h, i, device="meta")
        for name, weight in step.case.experts.named_parameters():
            setattr(adapted, name, weight)
        add_lora(adapted, RANK, RANK)
        with torch.no_grad():
            for lora in adapters_of(adapted):
                lora.B.normal_(std=1e-3)
        return cls(step.case, step.grad, adapted)

    def call(self, experts: Callable[..., torch.Tensor]) -> Call:
        x, index, weights = self.case.x, self.case.top_k_index, self.case.top_k_weights
        leaves = tuple(x.detach().requires_grad_() for x in (x, weights))
        trained = *leaves, *(x for lora in adapters_of(self.adapted) for x in (lora.A, lora.B))
        return lambda: Results(
            torch.autograd.grad(experts(leaves[0], index, leaves[1]), trained, self.grad)
        )

    def errors(self, results: dict[str, Results]) -> dict[str, dict[str, float]]:
        return super().errors({name: Results(result[:2]) for name, result in results.items()})


def adapters_of(experts: GroupedExperts) -> tuple[LoRA, LoRA]:
    """Those of gate_up_proj and of down_proj."""
    of_gate_up, of_down = (x for x in experts.children() if isinstance(x, LoRA))
    return of_gate_up, of_down


# ---- Linears ----


@dataclass(frozen=True)
class LinearStep:
    """x bf16 [M, K], the gradient of the result bf16 [M, N], and W. The result is that of x."""

    case: peers.Case
    x: torch.Tensor
    grad: torch.Tensor
    linear: FP8Linear

    @classmethod
    def random(cls, case: peers.Case, device: str = "cuda") -> "LinearStep":
        m, n, k = case
        x, grad = (torch.randn(m, size, device=device).bfloat16() for size in (k, n))
        return cls(case, x, grad, FP8Linear(k, n, bias=False, device=device))

    def call(self, linear: Callable[..., torch.Tensor]) -> Call:
        return step_of(linear, (self.x,), self.grad)

    @property
    def work(self) -> dict[str, float]:
        return {"tflops": 2 * self.case.flops / 1e6}

    @property
    def num_bytes(self) -> int:
        return self.case.num_bytes("block_scaled")

    def errors(self, results: dict[str, Results]) -> dict[str, dict[str, float]]:
        """Against BF16 with the same weight."""
        exact = self.grad @ self.linear.dequantize()
        return {name: {"error": error_of(dx, exact)} for name, (dx,) in results.items()}
