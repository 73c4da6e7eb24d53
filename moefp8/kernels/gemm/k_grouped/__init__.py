"""The GEMM of gradients in weights: it sums over tokens, for each expert over its own."""

from .k_grouped import KGroupedInputs, k_grouped_gemm

__all__ = ["KGroupedInputs", "k_grouped_gemm"]
