"""FP8 mixture-of-experts layers for PyTorch.

Modules are here; `moefp8.checkpoint` loads and saves, `moefp8.adapters` trains beside them,
`moefp8.testing` compares with references,
`moefp8.quant`, `moefp8.routing` and `moefp8.kernels` are what the modules are made of,
`moefp8.deep_gemm` takes the calls of DeepGEMM.
"""

from . import adapters, checkpoint, deep_gemm, kernels, quant, routing, testing
from .checkpoint import load_checkpoint, save_checkpoint, updating
from .distributed import frozen_parameters, prepare_ddp, prepare_fsdp, shard
from .kernels.common.activation import Activation
from .layers import (
    FP8Linear,
    GroupedExperts,
    MoE,
    TopKRouter,
    convert,
    dequantize,
    freeze,
    set_batch_invariant,
    unfreeze,
)
from .precompile import precompile

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "FP8Linear",
    "GroupedExperts",
    "MoE",
    "TopKRouter",
    "adapters",
    "checkpoint",
    "convert",
    "deep_gemm",
    "dequantize",
    "freeze",
    "frozen_parameters",
    "kernels",
    "load_checkpoint",
    "precompile",
    "prepare_ddp",
    "prepare_fsdp",
    "quant",
    "routing",
    "save_checkpoint",
    "set_batch_invariant",
    "shard",
    "testing",
    "unfreeze",
    "updating",
]
