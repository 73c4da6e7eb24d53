"""Cases by room: functions that use public names and return all that a user could see.

A case is called with a device, in an empty current directory, after a fixed seed. It returns
tensors, modules, texts, paths and structures of these; `tests.public.outcome` takes them apart.
Keywords are written out in calls, where `tests.public.surface` reads them. A name that older
libraries lack is used by attribute (`moefp8.layers.Name`) in a case of its own, since an import of
it at the top would end all cases of the file there.
"""

import random
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

ROOMS = tuple(sorted(x.stem for x in Path(__file__).parent.glob("[!_]*.py")))
BF16 = torch.bfloat16


class Case(NamedTuple):
    """A function of a device, the device that it needs, if any, and whether it takes seconds."""

    name: str
    run: Callable[[str], Any]
    needs: str | None = None
    is_long: bool = False


_cases: dict[str, Case] = {}


def case(run: Callable[[str], Any]) -> Callable[[str], Any]:
    """Register a case under `room.function`."""
    return _register(run, None)


def gpu_case(run: Callable[[str], Any]) -> Callable[[str], Any]:
    """Register a case that a CPU cannot run."""
    return _register(run, "cuda")


def cpu_case(run: Callable[[str], Any]) -> Callable[[str], Any]:
    """Register a long case that needs more GPUs than there may be, or none."""
    return _register(run, "cpu", is_long=True)


def long_case(run: Callable[[str], Any]) -> Callable[[str], Any]:
    """Register a case that starts processes, for what other tests see as well."""
    return _register(run, None, is_long=True)


def _register(
    run: Callable[[str], Any], needs: str | None, is_long: bool = False
) -> Callable[[str], Any]:
    name = f"{run.__module__.rpartition('.')[2]}.{run.__name__}"
    _cases[name] = Case(name, run, needs, is_long)
    return run


def cases_in(room: str) -> list[Case]:
    """Import a room's file and return its cases in their order."""
    import_module(f"{__name__}.{room}")
    return [x for x in _cases.values() if x.name.startswith(f"{room}.")]


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def randn(*shape: int, device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*shape).to(device, dtype)


def nan(*shape: int, device: str) -> torch.Tensor:
    """Memory for an output: what a call does not write stays NaN."""
    return torch.full(shape, float("nan"), dtype=BF16, device=device)


def layout_of(counts: Sequence[int], alignment: int, device: str) -> torch.Tensor:
    """The group of each row, int32; -1 for rows that pad a group to the alignment."""
    groups = [g for g, x in enumerate(counts) for g in [g] * x + [-1] * (-x % alignment)]
    return torch.tensor(groups, dtype=torch.int32, device=device)


def warm_up(run: Callable[[], Any]) -> None:
    """Run it twice on another stream, as a capture of PyTorch's asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)


def choices(
    num_tokens: int, top_k: int, num_experts: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids in [0, E], of which E is held elsewhere, and weights in FP32."""
    ids = torch.rand(num_tokens, num_experts + 1).argsort(dim=1)[:, :top_k]
    return ids.to(device), torch.rand(num_tokens, top_k).to(device)


def step(module: nn.Module, x: torch.Tensor, *others: Any, **options: Any) -> dict[str, Any]:
    """Run forward and backward; return the output and all gradients."""
    inputs = [z.detach().requires_grad_(z.is_floating_point()) for z in (x, *others)]
    y = module(*inputs, **options)
    y.backward(torch.randn(y.shape).to(y))
    asked = {name: w.grad for name, w in module.named_parameters() if w.requires_grad}
    return {"y": y, "inputs": [z.grad for z in inputs], "weights": asked}


def attempt(run: Callable[[], Any]) -> Any:
    """Return what `run` returns, or what it raises, as text."""
    try:
        return run()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
