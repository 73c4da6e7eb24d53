"""What a checkpoint holds and what is wrong with it, told without a model."""

from .anomalies import Anomaly
from .contents import Kind
from .fp8 import fp8_modules
from .inspect import Amount, Inspection, inspect_checkpoint
from .layers import Layers, fp8_layers

__all__ = [
    "Amount",
    "Anomaly",
    "Inspection",
    "Kind",
    "Layers",
    "fp8_layers",
    "fp8_modules",
    "inspect_checkpoint",
]
