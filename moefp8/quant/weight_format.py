"""Weight formats: how many E4M3 weights share an FP32 scale.

A format says what scales a matrix [N, K] has, and how they are made. The GEMMs take a scale for
each tile of 128x128 weights, at any strides. So a format with one scale for whole rows or columns
of tiles, or for all, needs no kernel of its own: `tile_scales` repeats its scales.
"""

from collections.abc import Callable, Sequence
from math import lcm
from typing import NamedTuple

import torch

from ..kernels.common.blocks import BLOCK, ceil_div, num_blocks
from ..kernels.common.checks import check_tensor
from .quantize import Quantized, quantize_128x128


class WeightFormat(NamedTuple):
    """Weights with one scale for each block.

    rows, columns: of a block; None: all of a matrix's. Ranks that cut such an axis keep all scales.
    quantize: [..., N, K] bf16, fp16 or fp32 -> e4m3 [..., N, K] and fp32 scales [..., *grid].
    """

    name: str
    rows: int | None
    columns: int | None
    quantize: Callable[[torch.Tensor], Quantized]

    def grid(self, n: int, k: int, parts: int = 1) -> tuple[int, int]:
        """How many rows and columns of scales a matrix [N, K] has.

        parts: gate and up are two, of N / 2 rows each, that share no scale.
        """
        return parts * _count(n // parts, self.rows), _count(k, self.columns)

    @property
    def alignment(self) -> int:
        """Ranks' tensors begin at multiples of this, so that blocks begin where they did."""
        return lcm(*[x for x in (self.rows, self.columns) if x is not None])

    def rule(self, n: str, k: str, parts: int = 1) -> str:
        """`grid` for a message, e.g. "2 ceil(I/128), ceil(H/128)" for n = "I"."""
        times = "" if parts == 1 else f"{parts} "
        rows = f"{parts}" if self.rows is None else f"{times}ceil({n}/{self.rows})"
        return f"{rows}, " + ("1" if self.columns is None else f"ceil({k}/{self.columns})")


def _count(size: int, block: int | None) -> int:
    return 1 if block is None else ceil_div(size, block)


def _quantize_blocks(w: torch.Tensor) -> Quantized:
    q: Quantized = quantize_128x128(w, False)
    return q


BLOCKS = WeightFormat("128x128", BLOCK, BLOCK, _quantize_blocks)
FORMATS = (BLOCKS,)


def format_of(
    shape: Sequence[int], scale_shape: Sequence[int], parts: int = 1
) -> WeightFormat | None:
    """The format in which weights [..., N, K] have scales of this shape; None if none has."""
    *batch, n, k = shape
    for x in FORMATS:
        if [*batch, *x.grid(n, k, parts)] == list(scale_shape):
            return x
    return None


def check_weight_scales(
    op: str, name: str, scale_inv: torch.Tensor, weight: torch.Tensor, axes: str, parts: int = 1
) -> None:
    """Check that scale_inv is fp32, and has the shape of some format for the weight.

    axes: the names of the weight's axes for the message, e.g. "E N K"; N are the rows of one part.
    """
    check_tensor(op, name, scale_inv, (torch.float32,), weight.ndim)
    if format_of(weight.shape, scale_inv.shape, parts) is None:
        (*names, n, k), (*batch, rows, columns) = axes.split(), weight.shape
        rules = [", ".join([*names, x.rule(n, k, parts)]) for x in FORMATS]
        grids = [[*batch, *x.grid(rows, columns, parts)] for x in FORMATS]
        allowed = " or ".join(f"[{a}] = {b}" for a, b in zip(rules, grids, strict=True))
        raise ValueError(f"{op}: {name} must be {allowed}, got {list(scale_inv.shape)}")


def tile_scales(weight: torch.Tensor, scale_inv: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """fp32 [..., parts * ceil(N / parts / 128), ceil(K/128)]: the scale of each 128x128 tile.

    weight, scale_inv: [..., N, K] and its scales in any format. The result is a view, unless a
    scale of several parts counts for more than a tile.

    Raises ValueError for scales of another shape.
    """
    *batch, n, k = weight.shape
    tiles = parts * num_blocks(n // parts), num_blocks(k)
    if scale_inv.shape == (*batch, *tiles):
        return scale_inv
    check_weight_scales(
        "weights", "scale_inv", scale_inv, weight, "E N K"[-2 * weight.ndim + 1 :], parts
    )
    part_scales = scale_inv.unflatten(-2, (parts, -1))
    return part_scales.expand(*batch, parts, tiles[0] // parts, tiles[1]).flatten(-3, -2)
