"""Strict, streaming safetensors <-> modules: everything is checked before one byte is written.

Reading order: `source` and `header` (what the files hold), `slots` and `names` (where it goes in
a model), `plan` (match the two), `read` (move the bytes), `values` (look at them); `load` and
`save` call them. `inspect` needs no model: `contents` pairs weights and scales, `checks` and
`numbers` find `anomalies`, `family` tells whose it is. From files to files: `choose`, by `skeleton`
and `fillings` (which `moves` become FP8), `shard_file` and `stream` (write it), `report`,
`workplace` (outlive a kill); `quantize` calls them.
"""

from .config import read_config
from .errors import CheckpointError
from .fp8 import fp8_modules
from .inspect import Inspection, inspect_checkpoint
from .layers import fp8_layers
from .load import LoadReport, load_checkpoint
from .quantize import quantize_checkpoint
from .report import QuantizeReport, WeightReport
from .save import save_checkpoint

__all__ = [
    "CheckpointError",
    "Inspection",
    "LoadReport",
    "QuantizeReport",
    "WeightReport",
    "fp8_layers",
    "fp8_modules",
    "inspect_checkpoint",
    "load_checkpoint",
    "quantize_checkpoint",
    "read_config",
    "save_checkpoint",
]
