"""Report what quantization cost: the error of each weight, and the size of the checkpoint."""

import math
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from einops import reduce

from ...kernels import e4m3_to_float
from ...kernels.common.blocks import E4M3_MAX
from ...layers import Conversion
from ...quant import BlockScaled
from ...quant.numerics import blocks_128x128


@dataclass(frozen=True)
class WeightReport:
    """The error of one weight w that became q.

    error: ||w - dequantize(q)|| / ||w||, Frobenius; 0 if w is zeros. max_error: the largest
    |w - dequantize(q)|, each in units of 448 * scale_inv of its block, which is the block's largest
    |w|, or 1e-4 if that is smaller. E4M3 rounds by at most 1 / 28 of it.
    """

    key: str
    shape: tuple[int, ...]
    error: float
    max_error: float

    @classmethod
    def from_dict(cls, value: Any) -> "WeightReport":
        """Read what JSON made of `asdict`, where a tuple is a list. Raises KeyError, TypeError."""
        errors = value["error"], value["max_error"]
        if not all(type(x) is float for x in errors):
            raise TypeError(f"errors must be floats, got {errors}")
        return cls(value["key"], tuple(value["shape"]), *errors)


@dataclass(frozen=True)
class QuantizeReport:
    """The result of one quantization. weights: those in FP8 now; kept: keys that stayed.

    conversion: modules that became FP8, and why others stay; basis: what decided. Bytes are of
    tensors. num_resumed: shards that an earlier run had finished.
    """

    weights: tuple[WeightReport, ...]
    kept: tuple[str, ...]
    conversion: Conversion
    basis: str
    source_bytes: int
    target_bytes: int
    num_shards: int
    num_resumed: int
    seconds: float

    def median_error(self) -> float:
        return median(weight.error for weight in self.weights)

    def worst(self, num: int = 10) -> list[WeightReport]:
        """Return the weights of the largest error, the worst first."""
        return sorted(self.weights, key=lambda weight: (-weight.error, weight.key))[:num]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it."""
        return {**asdict(self), "median_error": self.median_error()}

    def __str__(self) -> str:
        lines = [f"{'error':>8}  {'max':>8}  {'shape':>15}  weight"]
        for x in self.worst():
            shape = " x ".join(map(str, x.shape))
            lines.append(f"{x.error:8.5f}  {x.max_error:8.5f}  {shape:>15}  {x.key}")
        resumed = f" ({self.num_resumed} were there already)" if self.num_resumed else ""
        lines += [
            f"{self.median_error():8.5f}  is the median of {len(self.weights)} weights in FP8",
            f"{_size(self.source_bytes)} became {_size(self.target_bytes)} in {self.num_shards} "
            f"shards{resumed}, {self.seconds:.1f} s; {len(self.kept)} tensors stay as they were",
        ]
        return "\n".join(lines)


def _size(num_bytes: int) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.2f} {name}"


class ErrorSums:
    """The error of a weight, summed up part by part; each part has whole blocks."""

    def __init__(self) -> None:
        self._error_squared = self._norm_squared = self._max_error = 0.0

    def add(self, w: torch.Tensor, q: BlockScaled) -> None:
        """w: [rows, K] float, finite and not empty; q: what `quantize_128x128` made of it."""
        # An exact factor brings numbers near 1: squares of small weights would vanish in FP32.
        largest = max(abs(float(x)) for x in torch.aminmax(w))
        factor = math.ldexp(1.0, min(-math.frexp(largest)[1], 126)) if largest else 1.0
        scale = q.scale_inv * factor
        exact = blocks_128x128(w.float() * factor)
        difference = blocks_128x128(e4m3_to_float(q.data)).mul_(scale[:, None, :, None]).sub_(exact)
        self._error_squared += _sum_of_squares(difference) / factor**2
        self._norm_squared += _sum_of_squares(exact) / factor**2
        largest_errors = reduce(difference.abs_(), "nb r kb c -> nb kb", "max")
        self._max_error = max(self._max_error, float((largest_errors / scale).max()) / E4M3_MAX)

    def report(self, key: str, shape: tuple[int, ...]) -> WeightReport:
        error = math.sqrt(self._error_squared / self._norm_squared) if self._norm_squared else 0.0
        return WeightReport(key, shape, error, self._max_error)


def _sum_of_squares(x: torch.Tensor) -> float:
    """Sum up the squares of x, which must be contiguous."""
    return float(torch.dot(x.view(-1), x.view(-1)))
