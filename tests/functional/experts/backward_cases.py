"""What the tests of the gradients of experts share: forward and backward, launched and in PyTorch.

The module imports no more than `sanitizer` may need.
"""

from typing import NamedTuple

import torch

from moefp8.functional.activation import activate, empty_gate_up
from moefp8.functional.experts import experts_saving
from moefp8.functional.experts_backward import experts_backward
from moefp8.kernels.common.activation import SWIGLU, Activation
from moefp8.quant.quantize import quantize_1x128
from moefp8.routing.plan import build_maps
from moefp8.testing import assert_matches_reference
from tests.functional import cases
from tests.functional.cases import Weights, ids_here, run_body, tokens_of
from tests.routing.cases import plan_of


class Case(NamedTuple):
    """What a layer is called with, and the gradient of what it gives.

    rank: as in `cases.run`.
    """

    x: torch.Tensor
    ids: torch.Tensor
    top_k_weights: torch.Tensor
    grad: torch.Tensor
    weights: Weights
    activation: Activation = SWIGLU
    rank: tuple[int, int | None] = (0, None)

    @property
    def num_experts(self) -> int:
        return len(self.weights.down_proj)

    @property
    def here(self) -> torch.Tensor:
        """Ids as the body takes them: experts are counted here."""
        return ids_here(self.ids, self.num_experts, self.rank[0])


class Gradients(NamedTuple):
    hidden_states: torch.Tensor
    top_k_weights: torch.Tensor


def case(
    num_tokens: int,
    h: int,
    top_k: int,
    weights: Weights,
    kind: str = "distinct",
    activation: Activation = SWIGLU,
    rank: tuple[int, int | None] = (0, None),
) -> Case:
    """On the device of the weights. Gradients are small: amax 1e-4 would count as large."""
    device = str(weights.down_proj.device)
    num_experts = rank[1] or len(weights.down_proj)
    inputs = cases.inputs(num_tokens, h, top_k, num_experts, kind, device)
    return Case(*inputs, tokens_of(num_tokens, h, device) * 2.0**-24, weights, activation, rank)


def saving(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and gate and up, launched."""
    x, ids, top_k_weights, _, weights, activation, rank = case
    return experts_saving(x, ids, top_k_weights, *weights, activation, False, *rank, None)


def saving_body(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the op's body in PyTorch; see `rows_of_body`."""
    x, _, top_k_weights, _, weights, activation, _ = case
    arguments = x, case.here, top_k_weights, *weights, activation, False, 0, None, None
    return run_body(experts_saving, *arguments)


def backward(
    case: Case, gate_up: torch.Tensor, fp8: bool = False, keeps: bool | None = None
) -> Gradients:
    """Launched. fp8: gate and up are quantized before."""
    scales = None
    if fp8:
        gate_up, scales = quantize_1x128(gate_up.flatten(0, 1), False)
    return backward_of_codes(case, gate_up, scales, keeps)


def backward_of_codes(
    case: Case, gate_up: torch.Tensor, scales: torch.Tensor | None, keeps: bool | None = None
) -> Gradients:
    """The same of gate and up as they were saved; scales: None for bf16."""
    _, ids, top_k_weights, grad, weights, activation, rank = case
    saved, options = (gate_up, scales), (None, None, None, activation, keeps, *rank)
    return Gradients(*experts_backward(grad, ids, top_k_weights, *saved, *weights, *options))


def backward_body(case: Case, gate_up: torch.Tensor, fp8: bool = False) -> Gradients:
    """The same by the op's body in PyTorch, of gate and up in its rows."""
    scales = None
    if fp8:
        gate_up, scales = run_body(quantize_1x128, gate_up.flatten(0, 1), False)
    saved, options = (gate_up, scales), (None, None, None, case.activation, None, 0, None)
    arguments = case.grad, case.here, case.top_k_weights, *saved, *case.weights, *options
    return Gradients(*run_body(experts_backward, *arguments))


def contiguous_when_saved() -> torch.autograd.graph.saved_tensors_hooks:
    """Saved tensors come back contiguous, as from hooks that offload them."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format)
    )


def rows_of_body(case: Case, gate_up: torch.Tensor) -> torch.Tensor:
    """Gate and up of a kernel's rows where the body has them.

    Choices of one expert by one token share a row of the body, and none of a kernel.
    """
    ours = plan_of(case.here, case.num_experts, None).token_to_row.to(gate_up.device)
    *_, theirs = build_maps(case.here, case.num_experts, 1, None)
    rows = empty_gate_up(gate_up, len(gate_up), gate_up.shape[2]).zero_()
    rows[theirs[ours >= 0].long()] = gate_up[ours[ours >= 0].long()]
    return rows


def assert_saved(case: Case, rows: torch.Tensor, tolerance: float = 4e-3) -> None:
    """What a kernel has left of gate and up is that of the body, rounded to BF16.

    rows: as `rows_of_body` gives them.
    """
    assert_matches_reference(rows, saving_body(case)[1], tolerance)


def assert_weights_close(case: Case, rows: torch.Tensor, found: Gradients, right: Gradients):
    """The gradient of a weight is a sum in which much may cancel: the size of its terms counts.

    `weights_of` makes a gradient about as large behind the down projection as before it.
    """
    activated = activate(*rows.unbind(1), case.activation).norm(dim=-1)
    *_, token_to_row = build_maps(case.here, case.num_experts, 1, None)
    sizes = case.grad.float().norm(dim=-1, keepdim=True) * activated[token_to_row.clamp(min=0)]
    error = (found.top_k_weights - right.top_k_weights).abs()
    most = sizes * 2.0**-5 / max(rows.shape[2], 1) ** 0.5
    assert bool((error <= most).all()), f"off by {float((error / most).max()):.1f} times too much"
    assert bool((found.top_k_weights[token_to_row < 0] == 0).all())
