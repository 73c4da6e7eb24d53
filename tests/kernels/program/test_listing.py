"""Kernels of an op for all numbers of tokens are those of some of its records."""

from hypothesis import given
from hypothesis import strategies as st

from moefp8.kernels.gemm.segments import kernel_of
from moefp8.kernels.program import Place, Record, Span, kernels_of
from tests.records import TARGET


@given(
    most=st.integers(1, 300),
    bounds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 400)), max_size=4),
)
def test_every_number_of_tokens_has_the_kernels_that_are_listed_for_it(most, bounds):
    """Choices by so many rows of each token: above a bound, another kernel is chosen."""
    described = []

    def choices(num_tokens: int) -> list[bool]:
        return [num_tokens * rows > bound for rows, bound in bounds]

    def describe(span: Span) -> Record:
        described.append(span.first)
        r = Record(TARGET, ("x", "y"), span=span)
        for i, (rows, bound) in enumerate(bounds):
            size = span.first * rows
            is_above = size > bound
            r.hold(size, lambda most, b=bound, above=is_above: most if above else b)
            arguments = {"group_of_row": Place("x"), "list": Place("y")}
            kernel = kernel_of(2 * i + is_above)
            r.step(kernel, 1, 32, arguments, programmatic=False)
        return r

    listed = set(kernels_of(describe, most))
    wanted = {
        kernel_of(2 * i + is_above)
        for num_tokens in range(1, most + 1)
        for i, is_above in enumerate(choices(num_tokens))
    }
    assert listed == wanted
    changes = {n for n in range(2, most + 1) if choices(n) != choices(n - 1)}
    assert set(described) == {1} | changes


def test_what_is_launched_tells_nothing_of_other_numbers():
    def never(most: int) -> int:
        raise AssertionError

    Record(TARGET, ()).hold(5, never)
