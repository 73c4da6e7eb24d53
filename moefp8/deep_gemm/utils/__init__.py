"""DeepGEMM's helpers: how scales lie in memory, and how tensors become FP8."""

from . import layout, math
from .layout import *
from .math import *

__all__ = [*layout.__all__, *math.__all__, "layout", "math"]
