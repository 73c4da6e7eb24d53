"""Inspect without a model: what a checkpoint holds, and what is wrong with it."""

from .fp8 import fp8_layers, fp8_modules
from .inspect import Inspection, inspect_checkpoint

__all__ = ["Inspection", "fp8_layers", "fp8_modules", "inspect_checkpoint"]
