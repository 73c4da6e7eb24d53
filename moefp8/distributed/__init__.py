"""A rank's part of a model, and FP8 modules in PyTorch's data parallel wrappers.

`ExpertParallel` lets the ranks of a group share experts; a `Transport` takes tokens to them.
"""

from .data_parallel import frozen_parameters, prepare_ddp
from .expert_parallel import ExpertParallel, Transport, expert_parallel
from .fully_sharded import prepare_fsdp
from .shard import shard

__all__ = [
    "ExpertParallel",
    "Transport",
    "expert_parallel",
    "frozen_parameters",
    "prepare_ddp",
    "prepare_fsdp",
    "shard",
]
