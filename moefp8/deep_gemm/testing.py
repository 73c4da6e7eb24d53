"""DeepGEMM's measure of a difference."""

import torch

__all__ = ["calc_diff"]


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | float:
    """`|x - y|^2 / (|x|^2 + |y|^2)` of all elements, as a scalar in FP64; 0.0 if all are zero.

    `moefp8.testing.relative_error` looks at every row, which this mean over all rows hides.
    """
    x, y = x.double(), y.double()
    size = (x * x + y * y).sum()
    return 1 - 2 * (x * y).sum() / size if size != 0 else 0.0
