"""Strict, streaming safetensors <-> modules: everything is checked before one byte is written.

Reading order: `source` and `header` (what the files hold), `slots` and `names` (where it goes in
a model), `plan` (match the two), `read` (move the bytes); `load` and `save` call them.
"""

from .config import read_config
from .errors import CheckpointError
from .fp8 import fp8_modules
from .layers import fp8_layers
from .load import LoadReport, load_checkpoint
from .save import save_checkpoint

__all__ = [
    "CheckpointError",
    "LoadReport",
    "fp8_layers",
    "fp8_modules",
    "load_checkpoint",
    "read_config",
    "save_checkpoint",
]
