"""FP8 GEMMs, dense and grouped: ops, operands, and the interface of a GPU's kernels."""
