"""Modules: `FP8Linear`, `GroupedExperts`, `TopKRouter`, `MoE`; `convert` and `dequantize`."""

from .conversion import (
    DEFAULT_SKIP,
    Conversion,
    PlainExperts,
    convert,
    dequantize,
    plan_conversion,
)
from .experts import GroupedExperts
from .linear import FP8Linear
from .moe import MoE
from .router import TopKRouter

__all__ = [
    "DEFAULT_SKIP",
    "Conversion",
    "FP8Linear",
    "GroupedExperts",
    "MoE",
    "PlainExperts",
    "TopKRouter",
    "convert",
    "dequantize",
    "plan_conversion",
]
