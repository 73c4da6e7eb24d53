"""Strict, streaming safetensors <-> modules: everything is checked before one byte is written.

`files` knows a checkpoint on disk and `model` the places that it fills. `load` matches the two and
moves the bytes; `update` writes a trainer's tensors while a model serves; `save` writes a model
back; `inspect` lists what a checkpoint holds without a model; `quantize` turns a 16-bit checkpoint
into one in FP8. The rooms import `files`, `model`, `errors` and `arguments`, and never each other.
"""

from .errors import CheckpointError
from .files.config import read_config
from .inspect import Inspection, fp8_layers, fp8_modules, inspect_checkpoint
from .load import LoadReport, load_checkpoint
from .quantize import QuantizeReport, WeightReport, quantize_checkpoint
from .save import save_checkpoint
from .update import updating

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
    "updating",
]
