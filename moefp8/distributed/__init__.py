"""A rank's part of a model, and what PyTorch's data parallel wrappers are told of FP8 modules."""

from .data_parallel import frozen_parameters, prepare_ddp
from .fully_sharded import prepare_fsdp
from .shard import shard

__all__ = ["frozen_parameters", "prepare_ddp", "prepare_fsdp", "shard"]
