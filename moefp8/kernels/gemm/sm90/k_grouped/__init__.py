"""The GEMM of gradients in weights: it sums over tokens, for each expert over its own."""
