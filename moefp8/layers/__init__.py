"""Modules: `FP8Linear`, `GroupedExperts`, `TopKRouter`, `MoE`; `convert` and `dequantize`."""

from .batch_invariance import set_batch_invariant
from .conversion.conversion import Conversion
from .conversion.convert import convert, plan_conversion
from .conversion.dequantize import dequantize
from .conversion.plain import PlainExperts
from .conversion.selection import DEFAULT_SKIP
from .experts import GroupedExperts
from .linear import FP8Linear
from .moe import MoE
from .router import TopKRouter
from .trainable import freeze, unfreeze

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
    "freeze",
    "plan_conversion",
    "set_batch_invariant",
    "unfreeze",
]
