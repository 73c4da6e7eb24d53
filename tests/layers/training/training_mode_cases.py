"""Modules with master weights, and one step of theirs: what tests of how they are run share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moefp8 import FP8Linear, GroupedExperts, MoE
from tests.functional.cases import inputs, tokens_of

E, H, I, K = 5, 144, 72, 2
WGRADS = "128x1", "128x128", "bf16"
Options = dict[str, Any]
Found = dict[str, torch.Tensor]
MODULES: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **options: FP8Linear(H, H, **options),
    "experts": lambda **options: GroupedExperts(E, H, I, **options),
    "moe": lambda **options: MoE(H, I, E, K, shared_intermediate_size=40, **options),
}


def make(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name](trainable=True, dtype=dtype, **options)


def given(name: str, num_tokens: int = 9, device: str = "cpu") -> list[torch.Tensor]:
    """What a module takes; the first are hidden states that ask for a gradient."""
    x = tokens_of(num_tokens, H, device).requires_grad_()
    others = inputs(num_tokens, H, K, E, device=device)[1:] if name == "experts" else ()
    return [x, *others]


def found_by(
    module: nn.Module, arguments: list[torch.Tensor], run: Callable[..., Any] | None = None
) -> Found:
    """The output and all gradients of one forward and backward; none are left behind."""
    y = module(*arguments) if run is None else run(*arguments)
    y.float().square().mean().backward()
    found = {"y": y.detach(), "x": arguments[0].grad}
    found |= {name: x.grad for name, x in module.named_parameters()}
    arguments[0].grad = None
    module.zero_grad()
    return found


def assert_same_bits(ours: Found, theirs: Found) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, x in ours.items() if not torch.equal(x, theirs[name])] == []


def num_quantized(run: Callable[[], Any]) -> int:
    """How often codes of a weight are made by it."""
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        run()
    names = [x.name for x in profile.function_events]
    return names.count("moefp8::quantize_128x128_both_into")
