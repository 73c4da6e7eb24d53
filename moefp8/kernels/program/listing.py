"""Which kernels an op needs for any number of tokens: some of its records have all of them."""

from collections.abc import Callable, Iterator
from functools import partial

from ..common.blocks import TMA_BYTES
from ..jit import Kernel
from .record import Record, Span


def kernels_of(describe: Callable[[Span], Record], most_tokens: int) -> Iterator[Kernel]:
    """The kernels of an op for 1 to `most_tokens` tokens; some may come several times.

    If a choice of a description depends on the number of tokens, `Record.hold` says up to which
    number it stays the same. So an op is described for 1 token, then for each number where one of
    its choices may change.

    describe: makes the record for the first number of tokens of a span.
    """
    num_tokens = 1
    while num_tokens <= most_tokens:
        span = Span(num_tokens, most_tokens)
        yield from describe(span).kernels
        num_tokens = span.last + 1


def kernels_at_any_address(
    describe: Callable[..., Record], most_tokens: int, element_size: int
) -> Iterator[Kernel]:
    """`kernels_of` with aligned inputs, and with inputs at any multiple of an element.

    describe: makes the record for a span, and `alignment` in bytes.
    """
    for alignment in (TMA_BYTES, element_size):
        yield from kernels_of(partial(describe, alignment=alignment), most_tokens)
