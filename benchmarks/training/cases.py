"""Training steps, and what they are timed at: forward, dX and dW, with all quantization in them.

M rows, K in, N out, E experts, T tokens, k choices. All that make the step of a case have the same
inputs and master weights. Operands tell what those of `benchmarks.gradient_cases` tell.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from benchmarks import peers
from benchmarks.gradient_cases import MODELS, ExpertsCase, Results, error_of
from benchmarks.peers import BF16
from moefp8.kernels import BLOCK

LINEARS = peers.Case(8192, 4096, 7168), peers.Case(8192, 7168, 2048), peers.Case(16384, 2048, 2048)
# So many elements of a tensor, in rows all over it, are compared at most.
MOST_COMPARED = 1 << 22


@dataclass(frozen=True)
class Step:
    """A call of forward and backward, as a loop that trains makes it: gradients go to `.grad`.

    leaves: what has a gradient, hidden states first; nobody else's gradients lie there meanwhile.
    grad: that of the result.
    before: what is called first.
    within: in what the forward and the backward run.
    """

    forward: Callable[[], torch.Tensor]
    leaves: Sequence[torch.Tensor]
    grad: torch.Tensor
    before: Callable[[], object] | None = None
    within: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self) -> Results:
        """The result, and the gradients of all leaves."""
        self._forget()  # a step that failed may have left some
        if self.before is not None:
            self.before()
        with self.within():
            y = self.forward()
            y.backward(self.grad)
        missing = [i for i, leaf in enumerate(self.leaves) if leaf.grad is None]
        if missing:
            raise RuntimeError(f"there is no gradient of the leaves {missing}")
        found = Results((y.detach(), *(leaf.grad for leaf in self.leaves if leaf.grad is not None)))
        self._forget()
        return found

    def _forget(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def normal(*shape: int, device: str, over: int = 1) -> torch.Tensor:
    """bf16 normal numbers, over the root of `over`."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16) / over**0.5


def parameter(x: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(x.contiguous())


def sample(x: torch.Tensor) -> torch.Tensor:
    """fp32 of rows all over x, in FP32."""
    rows = x.detach().flatten(0, -2)
    every = max(1, x.numel() // MOST_COMPARED)
    every += every % 2 == 0  # of a number of rows that is a power of two, it meets all places
    return rows[::every].float()


def errors_against(
    exact: Results, results: dict[str, Results], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Of each named tensor. Where a peer has a weight of each expert, these are the last ones."""
    found: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        tensors = [*result]
        if len(tensors) > len(exact):
            last = len(exact) - 1
            tensors = [*tensors[:last], torch.stack(tensors[last:])]
        found[name] = {
            key: error_of(sample(x.reshape(y.shape)), sample(y))
            for key, x, y in zip(names, tensors, exact, strict=True)
        }
    return found


# ---- Linears and grouped linears ----


class GroupedCase(NamedTuple):
    """E weights [N, K], and about so many tokens for each."""

    num_experts: int
    tokens: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.num_experts} x {self.tokens} of {self.n}x{self.k}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of all weights."""
        return self.num_experts, self.n, self.k

    @property
    def counts(self) -> list[int]:
        """0.7 to 1.3 times `tokens` each, down to multiples of 128, which some peers need.

        They are drawn once and for all.
        """
        g = torch.Generator().manual_seed(0)
        shares = (0.7 + 0.6 * torch.rand(1, generator=g).item() for _ in range(self.num_experts))
        return [max(BLOCK, int(self.tokens * share) // BLOCK * BLOCK) for share in shares]

    @property
    def flops(self) -> int:
        """Of the forward."""
        return 2 * sum(self.counts) * self.n * self.k


GROUPED = (
    GroupedCase(32, 1024, 4096, 7168),
    GroupedCase(32, 1024, 7168, 2048),
    GroupedCase(128, 512, 1536, 2048),
)


@dataclass(frozen=True)
class LinearStep:
    """x bf16 [M, K], the gradient of the result bf16 [M, N], and a weight [N, K], or [E, N, K].

    weight_anew: an equal one; who quantizes it in every step keeps its codes apart.
    counts: rows of each expert; None: there is one weight.
    """

    case: peers.Case | GroupedCase
    x: torch.Tensor
    grad: torch.Tensor
    weight: nn.Parameter
    weight_anew: nn.Parameter
    counts: list[int] | None

    @classmethod
    def random(cls, case: peers.Case | GroupedCase, device: str = "cuda") -> "LinearStep":
        counts, rows = None, case[0]
        shape: tuple[int, ...] = case[1:3]
        if isinstance(case, GroupedCase):
            counts, rows, shape = case.counts, sum(case.counts), case.shape
        n, k = shape[-2:]
        weight = normal(*shape, device=device, over=k)
        return cls(
            case,
            normal(rows, k, device=device).requires_grad_(),
            normal(rows, n, device=device),
            parameter(weight),
            parameter(weight.clone()),
            counts,
        )

    @property
    def ends(self) -> torch.Tensor:
        """int32 [E]: where the rows of each expert end."""
        return self.offsets[1:]

    @property
    def offsets(self) -> torch.Tensor:
        """int32 [E + 1]."""
        counts = [len(self.x)] if self.counts is None else self.counts
        offsets = [*accumulate(counts, initial=0)]
        return torch.tensor(offsets, dtype=torch.int32, device=self.x.device)

    def step(self, forward: Callable[[], torch.Tensor]) -> Step:
        return Step(forward, (self.x, self.weight), self.grad)

    @property
    def work(self) -> dict[str, float]:
        return {"tflops": 3 * self.case.flops / 1e6}

    @property
    def num_bytes(self) -> int:
        tensors = self.x, self.grad, self.weight
        return sum(2 * x.numel() * x.element_size() for x in tensors)  # results are as large

    @property
    def num_tokens(self) -> int:
        return len(self.x)

    def errors(self, results: dict[str, Results]) -> dict[str, dict[str, float]]:
        """Against BF16."""
        return errors_against(results[BF16], results, ("error", "error_of_x", "error_of_weight"))


# ---- Expert layers ----

# Tokens of each model.
LAYERS = (
    ExpertsCase(MODELS["deepseek_v3"], 4096),
    ExpertsCase(MODELS["qwen3_30b_a3b"], 8192),
    ExpertsCase(MODELS["mixtral_8x7b"], 8192),
)


@dataclass(frozen=True)
class LayerStep:
    """x bf16 [T, H], the gradient of the result, the router's weight [E, H], and the experts'.

    gate_up: [E, 2I, H], gate first. down: [E, H, I]. anew: equal ones, as in `LinearStep`.
    """

    case: ExpertsCase
    x: torch.Tensor
    grad: torch.Tensor
    router: nn.Parameter
    gate_up: nn.Parameter
    down: nn.Parameter
    anew: tuple[nn.Parameter, nn.Parameter]

    @classmethod
    def random(cls, case: ExpertsCase, device: str = "cuda") -> "LayerStep":
        (_, e, _, h, i), num_tokens = case
        gate_up = normal(e, 2 * i, h, device=device, over=h)
        down = normal(e, h, i, device=device, over=i)
        return cls(
            case,
            normal(num_tokens, h, device=device).requires_grad_(),
            normal(num_tokens, h, device=device),
            parameter(normal(e, h, device=device, over=h)),
            parameter(gate_up),
            parameter(down),
            (parameter(gate_up.clone()), parameter(down.clone())),
        )

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.router, self.gate_up, self.down

    def logits(self) -> torch.Tensor:
        return nn.functional.linear(self.x, self.router)

    def route(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of all choices, fp32 [T, k], and their experts, by PyTorch's operations."""
        scores, index = self.logits().float().softmax(-1).topk(self.case.model.top_k, dim=-1)
        return scores, index

    def step(self, forward: Callable[[], torch.Tensor]) -> Step:
        return Step(forward, self.leaves, self.grad)

    @property
    def work(self) -> dict[str, float]:
        model, num_tokens = self.case
        return {"tflops": 3 * 2 * num_tokens * model.top_k * model.weights_of_expert / 1e6}

    @property
    def num_bytes(self) -> int:
        return sum(2 * x.numel() * x.element_size() for x in self.leaves)

    @property
    def num_tokens(self) -> int:
        return len(self.x)

    def errors(self, results: dict[str, Results]) -> dict[str, dict[str, float]]:
        """Against BF16.

        A router's weight gets sums of small differences, so its gradient is farther off than
        others; it is told as "of_router", and nobody is judged by it.
        """
        names = "error", "error_of_x", "of_router", "error_of_gate_up", "error_of_down"
        return errors_against(results[BF16], results, names)
