"""The FP8 GEMM, dense and grouped: device code, configuration, heuristic, launch."""
