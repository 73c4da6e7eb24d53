"""What the tests of experts with biases share: layers, calls, and references in FP32."""

from typing import Any, NamedTuple

import torch

from moefp8 import Activation, GroupedExperts
from tests.routing.cases import ids_of

GPT_OSS = Activation("gpt_oss", 7.0)
SHAPES = {  # T, k, E, H, I
    "one token": (1, 2, 4, 128, 128),
    "few": (5, 2, 6, 256, 144),
    "some for each": (40, 3, 2, 160, 272),
    "many": (150, 2, 3, 272, 144),
    "odd": (9, 3, 2, 129, 257),
    "small": (6, 2, 3, 40, 20),
    "no intermediate": (4, 2, 3, 64, 0),
}
FORMS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "trained": {"trainable": True},
    "trained, blocks": {"trainable": True, "wgrad": "128x128"},
    "trained, bf16": {"trainable": True, "wgrad": "bf16"},
}


class Call(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    grad: torch.Tensor


def layer_of(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: Activation = GPT_OSS,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    **form: Any,
) -> GroupedExperts:
    """Biases about as large as what they are added to, which ask for gradients."""
    sizes = num_experts, hidden_size, intermediate_size
    layer = GroupedExperts(*sizes, activation=activation, bias=True, dtype=dtype, **form)
    for bias in layer.biases.values():
        torch.nn.init.normal_(bias.requires_grad_(), std=0.5)
    return layer.to(device)


def with_gaps(layer: GroupedExperts) -> GroupedExperts:
    """The layer itself; its bias of gate and up gets wide rows, that of down lies transposed."""
    gate_up, down = (x.detach() for x in layer.biases.values())
    wide = gate_up.new_full((len(gate_up), gate_up.shape[1] + 3), float("nan"))
    gaps = wide[:, 1:-2].copy_(gate_up), down.mT.contiguous().mT
    for name, x in zip(layer.biases, gaps, strict=True):
        layer.register_parameter(name, torch.nn.Parameter(x))
    return layer


def call_of(
    shape: tuple[int, int, int, int, int], kind: str = "distinct", device: str = "cpu"
) -> Call:
    num_tokens, top_k, num_experts, h, _ = shape
    x, grad = (torch.randn(num_tokens, h, device=device).bfloat16() for _ in range(2))
    scores = torch.rand(num_tokens, top_k, device=device) + 0.1
    return Call(x, ids_of(kind, num_tokens, top_k, num_experts).to(device), scores, grad)


def results_of(layer: torch.nn.Module, call: Call) -> dict[str, torch.Tensor]:
    """The result and all gradients but those of weights, by name."""
    x, scores = (z.detach().clone().requires_grad_() for z in (call.x, call.scores))
    named = layer.named_parameters()
    biases = {name: z for name, z in named if name.endswith("_bias") and z.requires_grad}
    y = layer(x, call.ids, scores)
    inputs = {"x": x, "scores": scores, **biases}
    gradients = torch.autograd.grad(y, list(inputs.values()), call.grad.to(y.dtype))
    return {"y": y.detach(), **dict(zip(inputs, gradients, strict=True))}


def reference_of(layer: GroupedExperts, call: Call) -> dict[str, torch.Tensor]:
    """The same by `PlainExperts` in FP32, on the CPU."""
    plain = layer.to_plain(torch.float32).cpu()
    return results_of(
        plain, Call(*(z.cpu().float() if z.is_floating_point() else z.cpu() for z in call))
    )


def assert_near(
    found: dict[str, torch.Tensor], right: dict[str, torch.Tensor], call: Call, tolerance: float
) -> None:
    """Each is right in the norm of all its entries.

    The gradient of a score is a product of two rows, in which much may cancel: there the norm of
    one of the rows counts. Without a bias it would be off by half of that.
    """
    assert found.keys() == right.keys()
    for name, expected in right.items():
        came, expected = found[name].double().cpu(), expected.double().cpu()
        error, size = (came - expected).norm(), expected.norm()
        if name == "scores":
            size = max(size, call.grad.double().cpu().norm() / 2)
        assert error <= tolerance * size, f"{name}: {float(error / size):.3g} of its norm"
