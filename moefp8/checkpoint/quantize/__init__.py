"""Turn a 16-bit checkpoint into one with FP8 weights, from files to files."""

from .quantize import quantize_checkpoint
from .report import QuantizeReport, WeightReport

__all__ = ["QuantizeReport", "WeightReport", "quantize_checkpoint"]
