"""What layers, checkpoints and savers know of adapters (`moefp8.adapters`): that they are there."""

from torch import nn


class Adapter(nn.Module):
    """Parameters beside a module's weight. They are no part of the model's checkpoint."""


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """The adapters of a model by their dotted names."""
    return {name: x for name, x in model.named_modules() if isinstance(x, Adapter)}


def check_no_adapters(op: str, model: nn.Module, why: str) -> None:
    """Raise ValueError, which says why and what to do, if the model has adapters."""
    if names := [*adapters_of(model)]:
        raise ValueError(
            f"{op}: the model must have no adapters, {why}, but has {len(names)} "
            f"({names[0]}, ...); keep them with moefp8.adapters.save_lora, and take them "
            "off with moefp8.adapters.remove_lora(model)"
        )
