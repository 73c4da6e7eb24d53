"""Compile ahead of time: which kernels the layers of a model can need."""

from .layers import precompile

__all__ = ["precompile"]
