"""What all kernels share: op registry, argument checks, scale blocks, prepared launches."""
