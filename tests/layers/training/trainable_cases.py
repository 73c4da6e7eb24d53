"""What the tests of modules whose weights train share."""

from typing import Any

import pytest
import torch

from moefp8 import FP8Linear, GroupedExperts

H = 32


def make(kind: str, **given: Any) -> Any:
    torch.manual_seed(0)
    options = {"trainable": True, "dtype": torch.bfloat16, **given}
    return FP8Linear(H, 24, **options) if kind == "linear" else GroupedExperts(3, H, 40, **options)


def arguments_of(kind: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, H, generator=generator).bfloat16()
    if kind == "linear":
        return (x,)
    return x, torch.randint(3, (20, 2), generator=generator), torch.rand(20, 2, generator=generator)


def output(module: Any, kind: str) -> torch.Tensor:
    with torch.no_grad():
        return module(*arguments_of(kind))


def fresh(module: Any, kind: str) -> torch.Tensor:
    """What a new module of the same weights gives, which has no codes yet."""
    twin = make(kind, dtype=module.get_parameter(module.master_names[0]).dtype)
    twin.load_state_dict({name: x.clone() for name, x in module.state_dict().items()})
    return output(twin, kind)


KINDS = pytest.mark.parametrize("kind", ["linear", "experts"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
