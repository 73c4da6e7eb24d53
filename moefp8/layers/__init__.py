"""Modules: `FP8Linear`, `GroupedExperts`, `TopKRouter`, `MoE`, `convert` and `shard`."""

from .convert import DEFAULT_SKIP, convert
from .experts import GroupedExperts
from .linear import FP8Linear
from .moe import MoE
from .router import TopKRouter
from .shard import shard

__all__ = ["DEFAULT_SKIP", "FP8Linear", "GroupedExperts", "MoE", "TopKRouter", "convert", "shard"]
