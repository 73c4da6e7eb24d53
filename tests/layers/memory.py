"""The memory that a call takes, as the CPU allocator counts it, whatever it keeps for later."""

from collections.abc import Callable
from itertools import accumulate

from torch import nn
from torch.profiler import ProfilerActivity, profile


def num_bytes(model: nn.Module) -> int:
    return sum(x.nbytes for x in model.parameters())


def peak_beside(make: Callable[[], nn.Module], run: Callable[[nn.Module], object]) -> int:
    """How many bytes `run(make())` holds at most, less what the model held before.

    `make` must take no more memory than the model has.
    """
    size = 0

    def both() -> None:
        nonlocal size
        model = make()
        size = num_bytes(model)
        run(model)

    held = peak(both)
    assert held >= size > 0, "the profiler saw the model itself"
    return held - size


def peak(run: Callable[[], object]) -> int:
    """How many bytes are held at most, of those that `run` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [x for x in profiled.profiler.kineto_results.events() if x.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events), default=0)
