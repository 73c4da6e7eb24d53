"""Modules: `FP8Linear`, `GroupedExperts`, `TopKRouter`, `MoE`; `convert`, `dequantize`, `shard`."""

from .convert import DEFAULT_SKIP, convert
from .dequantize import dequantize
from .distributed import frozen_parameters, prepare_ddp
from .experts import GroupedExperts
from .linear import FP8Linear
from .moe import MoE
from .plain import PlainExperts
from .router import TopKRouter
from .shard import shard

__all__ = [
    "DEFAULT_SKIP",
    "FP8Linear",
    "GroupedExperts",
    "MoE",
    "PlainExperts",
    "TopKRouter",
    "convert",
    "dequantize",
    "frozen_parameters",
    "prepare_ddp",
    "shard",
]
