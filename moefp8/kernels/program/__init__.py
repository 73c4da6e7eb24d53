"""An op is described once, as a record of steps on tensors without memory; all readers share it.

A description runs on any machine, from layouts alone. `place` finds memory for the buffers between
steps, `prepare` makes launches, `kernels_of` lists kernels. This room knows no kernel by name.
"""

from .listing import kernels_at_any_address, kernels_of
from .place import check_early, place
from .prepare import prepare_launch, prepare_launches
from .record import (
    Arguments,
    Codes,
    Place,
    Record,
    Span,
    Step,
    Target,
    Tensor,
    TensorMap,
    Word,
    layouts,
)

__all__ = [
    "Arguments",
    "Codes",
    "Place",
    "Record",
    "Span",
    "Step",
    "Target",
    "Tensor",
    "TensorMap",
    "Word",
    "check_early",
    "kernels_at_any_address",
    "kernels_of",
    "layouts",
    "place",
    "prepare_launch",
    "prepare_launches",
]
