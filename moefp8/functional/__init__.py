"""What layers compute, as functions of tensors: a linear, a SwiGLU feed-forward, routed experts."""
