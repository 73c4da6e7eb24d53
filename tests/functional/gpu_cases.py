"""What the tests of the routed experts on a GPU share."""

import torch

from tests import gpu
from tests.functional import cases

E, K, H, I = 16, 4, 512, 384


def inputs(num_tokens, top_k=K, num_experts=E, hidden_size=H, kind="distinct"):
    return cases.inputs(num_tokens, hidden_size, top_k, num_experts, kind, "cuda")


def poison() -> None:
    """What is allocated next holds NaN in every float, and -1 as an int."""
    torch.cuda.empty_cache()
    gpu.poison("cuda", 1 << 29, *[1 << 19] * 32)
