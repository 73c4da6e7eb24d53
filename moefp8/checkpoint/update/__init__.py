"""Write a trainer's tensors into a model that serves, in place."""

from .update import Update, updating
from .write import FOLLOWERS

__all__ = ["FOLLOWERS", "Update", "updating"]
