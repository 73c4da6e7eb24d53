"""Strict, streaming safetensors <-> modules: everything is checked before one byte is written.

Reading order: `source` and `header` (what the files hold), `slots` and `names` (where it goes in
a model), `plan` (match the two), `read` (move the bytes); `load` and `save` call them. From
files to files: `moves` and `choose` (what becomes FP8), `shard` and `stream` (write it), `report`,
`workplace` (outlive a kill); `quantize` calls them.
"""

from .config import read_config
from .errors import CheckpointError
from .fp8 import fp8_modules
from .layers import fp8_layers
from .load import LoadReport, load_checkpoint
from .quantize import quantize_checkpoint
from .report import QuantizeReport, WeightReport
from .save import save_checkpoint

__all__ = [
    "CheckpointError",
    "LoadReport",
    "QuantizeReport",
    "WeightReport",
    "fp8_layers",
    "fp8_modules",
    "load_checkpoint",
    "quantize_checkpoint",
    "read_config",
    "save_checkpoint",
]
