"""FP8 mixture-of-experts layers for PyTorch."""

from . import kernels, quant, routing
from .checkpoint import load_checkpoint, save_checkpoint
from .layers import FP8Linear, GroupedExperts, MoE, TopKRouter, convert

__version__ = "0.1.0"

__all__ = [
    "FP8Linear",
    "GroupedExperts",
    "MoE",
    "TopKRouter",
    "convert",
    "kernels",
    "load_checkpoint",
    "quant",
    "routing",
    "save_checkpoint",
]
