"""Modules: `FP8Linear`, `GroupedExperts`, `TopKRouter`, `MoE`, `convert` and `shard`."""

from .conversion import Conversion
from .convert import convert, plan_conversion
from .experts import GroupedExperts
from .linear import FP8Linear
from .moe import MoE
from .router import TopKRouter
from .selection import DEFAULT_SKIP
from .shard import shard

__all__ = [
    "DEFAULT_SKIP",
    "Conversion",
    "FP8Linear",
    "GroupedExperts",
    "MoE",
    "TopKRouter",
    "convert",
    "plan_conversion",
    "shard",
]
