"""From a model with `nn.Linear` and expert modules to one with ours, in place, and back."""

from .conversion import Conversion
from .convert import convert, plan_conversion
from .dequantize import dequantize
from .plain import PlainExperts
from .selection import DEFAULT_SKIP

__all__ = [
    "DEFAULT_SKIP",
    "Conversion",
    "PlainExperts",
    "convert",
    "dequantize",
    "plan_conversion",
]
