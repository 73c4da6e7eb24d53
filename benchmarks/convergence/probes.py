"""FP8 beside BF16 at the same weights and on the same batch: gradients, and codes that underflow.

A code underflows if it is 0 where the value is not: the value is below half of the least subnormal
of its block. Counted are the operands of the three GEMMs of each linear and of both linears of
experts, taken from a BF16 model with the same weights: x and dY in blocks of 1x128 ("x", "dy"; for
the forward and for dX), in blocks of 128 tokens of one feature ("x columns", "dy columns"; for dW),
and the weight in 128x128 ("w").
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.convergence.example import train
from moefp8.kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX
from moefp8.quant.quantize import quantize_1x128, quantize_128x128

Shares = dict[str, float]


def gradients(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of each parameter, as a step of training has it; none is left in the model."""
    model.zero_grad()
    loss, balance = train.losses(model, ids)
    (loss + train.BALANCE * balance).backward()
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def cosines(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Shares:
    """The cosine of each gradient with the expected one of the same name.

    Raises ValueError if the names differ.
    """
    if found.keys() != expected.keys():
        raise ValueError(
            f"gradients: both models must have the same parameters, got "
            f"{sorted(found.keys() ^ expected.keys())} in one of them alone"
        )
    return {
        name: round(_cosine(found[name].double(), expected[name].double()), 6) for name in found
    }


def _cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x * y).sum() / (x.norm() * y.norm()).clamp(min=1e-300))


def underflow(codes: torch.Tensor, values: torch.Tensor) -> float:
    """The share of codes that are 0 among those of values that are not."""
    is_value = values != 0
    return float((is_value & (codes.float() == 0)).sum() / is_value.sum().clamp(min=1))


def _shares(x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor) -> Shares:
    """x [rows, K], dy [rows, N], weight [..., N, K]."""
    found = {}
    for name, values, least in (("x", x, MIN_AMAX), ("dy", dy, MIN_GRADIENT_AMAX)):
        for blocks, each in ((name, values), (f"{name} columns", values.t())):
            each = each.bfloat16().contiguous()
            found[blocks] = underflow(quantize_1x128(each, False, least)[0], each)
    found["w"] = underflow(quantize_128x128(weight.contiguous(), False)[0], weight)
    return {name: float(f"{share:.4g}") for name, share in found.items()}


class _Operands:
    """What a linear was given, and what came back for its output."""

    def __init__(self) -> None:
        self.x: torch.Tensor | None = None
        self.dy: torch.Tensor | None = None

    def keep_x(self, x: torch.Tensor) -> None:
        self.x = x.detach().flatten(0, -2)

    def keep_dy(self, y: torch.Tensor) -> None:
        def keep(grad: torch.Tensor) -> None:
            self.dy = grad.detach().flatten(0, -2)

        y.register_hook(keep)


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, tuple[torch.Tensor, _Operands]]]:
    """Name of a weight -> (the weight, its operands), which forward and backward fill."""
    found: dict[str, tuple[torch.Tensor, _Operands]] = {}
    undo: list[Callable[[], Any]] = []

    def watch_linear(name: str, linear: nn.Linear) -> None:
        operands = _Operands()
        found[f"{name}.weight"] = linear.weight, operands

        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
            operands.keep_x(inputs[0])
            operands.keep_dy(y)

        undo.append(linear.register_forward_hook(hook).remove)

    def watch_experts(name: str, experts: nn.Module) -> None:
        first, second = _Operands(), _Operands()
        found[f"{name}.gate_up_proj"] = experts.gate_up_proj, first
        found[f"{name}.down_proj"] = experts.down_proj, second
        apply_gate = experts._apply_gate

        def watched(gate_up: torch.Tensor) -> torch.Tensor:
            first.keep_dy(gate_up)
            activated = apply_gate(gate_up)
            second.keep_x(activated)
            return activated

        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
            first.keep_x(inputs[0])
            second.keep_dy(y)  # weights of choices scale rows, and so change no code of theirs

        experts._apply_gate = watched
        undo.append(lambda: delattr(experts, "_apply_gate"))
        undo.append(experts.register_forward_hook(hook).remove)

    for name, module in model.named_modules():
        if isinstance(module, train.Experts):
            watch_experts(name, module)
        elif isinstance(module, nn.Linear) and name != "lm_head":
            watch_linear(name, module)
    try:
        yield found
    finally:
        for each in undo:
            each()


def probe(fp8: nn.Module, plain: nn.Module, ids: torch.Tensor) -> dict[str, dict[str, Any]]:
    """{"cosine": parameter -> cosine of both gradients, "underflow": weight -> shares}.

    plain: the model without FP8; it gets the weights of `fp8`, which stays as it is.
    """
    plain.load_state_dict(fp8.state_dict())
    with _watched(plain) as watched:
        expected = gradients(plain, ids)
    return {
        "cosine": cosines(gradients(fp8, ids), expected),
        "underflow": {
            name: _shares(operands.x, operands.dy, weight.detach())
            for name, (weight, operands) in watched.items()
            if operands.x is not None and operands.dy is not None
        },
    }
