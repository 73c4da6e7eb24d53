"""Which modules can share their very parameters with an FP8 module, as its master weights."""

from torch import nn

from .selection import is_conv1d
from .stacks import stacks_of


def master_problem(module: nn.Module) -> str | None:
    """Why the parameters of a linear or an experts module cannot be master weights as they are."""
    if is_conv1d(module):
        return "holds its weight as [in, out], where a master weight is [out, in]"
    stacks = stacks_of(module)
    if stacks is not None and stacks.is_transposed:
        return "holds its weights as [E, in, out], where master weights are [E, out, in]"
    if stacks is not None and len(stacks.gate_up) > 1:
        return (
            "holds gate and up apart, where a master weight is one stack of both: a copy would be "
            "no parameter that an optimizer knows"
        )
    for name in ("weight",) if stacks is None else stacks.names:
        weight = module.get_parameter(name)
        if weight.shape[-1] > 1 and weight.stride(-1) != 1:
            return (
                f"must hold {name} with one column after the other in memory, got strides "
                f"{list(weight.stride())}"
            )
    return None
