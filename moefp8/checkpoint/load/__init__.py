"""Fill a model from a checkpoint."""

from .load import LoadReport, load_checkpoint

__all__ = ["LoadReport", "load_checkpoint"]
