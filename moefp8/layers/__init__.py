"""Modules: `FP8Linear`, `GroupedExperts`, `TopKRouter`, `MoE`; `convert`, `dequantize`, `shard`."""

from .conversion import Conversion
from .convert import convert, plan_conversion
from .dequantize import dequantize
from .distributed import frozen_parameters, prepare_ddp
from .experts import GroupedExperts
from .linear import FP8Linear
from .moe import MoE
from .plain import PlainExperts
from .router import TopKRouter
from .selection import DEFAULT_SKIP
from .shard import shard

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
    "frozen_parameters",
    "plan_conversion",
    "prepare_ddp",
    "shard",
]
