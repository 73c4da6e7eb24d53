"""Strict, streaming safetensors <-> modules: everything is checked before one byte is written."""

from .config import read_config
from .errors import CheckpointError
from .fp8 import fp8_modules
from .load import LoadReport, load_checkpoint
from .save import save_checkpoint

__all__ = [
    "CheckpointError",
    "LoadReport",
    "fp8_modules",
    "load_checkpoint",
    "read_config",
    "save_checkpoint",
]
