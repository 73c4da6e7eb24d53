"""The MoE that the tests of the layers share."""

import torch

from moefp8 import MoE
from moefp8.testing import assert_matches_reference, row_errors

E, H, I, K = 6, 256, 200, 2


def make_moe() -> MoE:
    torch.manual_seed(0)
    return MoE(
        H,
        I,
        E,
        K,
        shared_intermediate_size=130,
        shared_expert_gate=True,
        scoring="sigmoid",
        num_groups=3,
        topk_groups=2,
        correction_bias=True,
    )


def hidden(num_tokens: int = 9, size: int = H) -> torch.Tensor:
    return torch.randn(num_tokens, size, dtype=torch.bfloat16)


def assert_matches_up_to_codes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Between the GEMMs one activation in a million may round to the neighbouring E4M3 code."""
    assert_matches_reference(actual, expected, 5e-2)
    errors = row_errors(actual, expected)
    assert int((errors > 6e-3).sum()) <= 1 + 0.05 * errors.numel()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, size: int) -> None:
    """Sums of the tensor cores have some 14 bits, and a few activations in a thousand round to the
    neighbouring E4M3 code, an eighth away at most; of `size` in a row one alone may count, and of a
    few rows one row alone.
    """
    assert_matches_reference(actual, expected, 5e-2 if size >= 64 else 0.12)
    if actual.numel() and len(actual) >= 16:
        assert float(row_errors(actual, expected).mean()) < (1.2e-2 if size >= 64 else 4e-2)
