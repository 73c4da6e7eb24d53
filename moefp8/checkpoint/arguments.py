"""Check the argument that loading and quantizing share."""

import torch

from .errors import printable


def usable_device(device: torch.device | str | int | None, caller: str) -> torch.device:
    """Return the device, or the CPU for None. Raises ValueError if no tensor can be made there."""
    try:
        place = torch.device("cpu" if device is None else device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, ImportError) as error:  # each backend has its own
        there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        why = printable(str(error).partition("\n")[0], 200)
        raise ValueError(
            f"{caller}: device must be one that there is ({there}), got {str(device)!r}: {why}"
        ) from error
    if place.type == "meta":  # copying there does nothing, silently
        raise ValueError(f"{caller}: device must be a real one, got meta")
    return place
