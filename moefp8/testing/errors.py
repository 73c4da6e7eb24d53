"""How far a result is from its reference, by its worst row: means over all rows hide lost ones."""

from numbers import Real

import torch


def row_errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """`|actual - expected| / |expected|` of every row [...], as fp64 Euclidean norms.

    A row of `expected` that is zero wants zeros: its error is 0 or inf. A NaN or Inf on either
    side makes the error of its row inf. Dtypes may differ.

    Raises:
        TypeError: one of them is not a tensor of real numbers.
        ValueError: the shapes differ.
    """
    for name, x in (("actual", actual), ("expected", expected)):
        if not isinstance(x, torch.Tensor) or x.is_complex():
            kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(
                f"row_errors: {name} must be a tensor of real numbers, got {kind}; compare the "
                "tensors of an output one by one, complex ones by torch.view_as_real"
            )
    if actual.shape != expected.shape:
        raise ValueError(
            f"row_errors: actual and expected must have one shape, got {list(actual.shape)} and "
            f"{list(expected.shape)}"
        )
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = actual - expected
    errors = difference.norm(dim=-1) / expected.norm(dim=-1)
    errors = torch.where((difference == 0).all(dim=-1), 0.0, errors)
    return torch.where(errors.isfinite(), errors, torch.inf)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst of `row_errors`; 0.0 where there is no row.

    Rounding an exact result to BF16 gives at most 2**-8 = 3.9e-3, and about 1.7e-3 on rows of
    many elements.
    """
    errors = row_errors(actual, expected)
    return float(errors.max()) if errors.numel() else 0.0


def assert_matches_reference(
    actual: torch.Tensor, expected: torch.Tensor, max_relative_error: float = 4e-3
) -> None:
    """Raise AssertionError, naming the worst row, unless every row is within the tolerance.

    Args:
        actual: [..., N], what is tested.
        expected: [..., N], the reference.
        max_relative_error: per row. The default is BF16 rounding: *is the kernel right*, against
            a reference with the same FP8 operands. *Is FP8 good enough*, against BF16 operands,
            is another question: about 0.04 per GEMM, 0.06 for a layer of experts.

    Raises:
        TypeError: max_relative_error is no number, or as in `row_errors`.
        ValueError: max_relative_error is not in [0, 1), or as in `row_errors`.
    """
    if isinstance(max_relative_error, bool) or not isinstance(max_relative_error, Real):
        raise TypeError(
            "assert_matches_reference: max_relative_error must be a number, got "
            f"{max_relative_error!r}; call .item() on a tensor"
        )
    if not 0 <= max_relative_error < 1:  # nor is NaN
        raise ValueError(
            "assert_matches_reference: max_relative_error must be in [0, 1), got "
            f"{max_relative_error}; zeros have an error of 1, which a larger bound lets pass"
        )
    errors = row_errors(actual, expected)
    num_wrong = int((errors > max_relative_error).sum())
    if num_wrong:
        row = tuple((errors == errors.max()).nonzero()[0].tolist())
        raise AssertionError(
            f"{num_wrong} of {errors.numel()} rows are off by more than {max_relative_error:.1e}; "
            f"worst is row {row} with a relative error of {float(errors.max()):.3e}"
        )
