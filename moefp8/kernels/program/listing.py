"""Which kernels an op needs for any number of tokens: those of some of its records."""

from collections.abc import Callable, Iterator

from ..jit import Kernel
from .record import Record, Span


def kernels_of(describe: Callable[[Span], Record], most_tokens: int) -> Iterator[Kernel]:
    """The kernels of an op for 1 to `most_tokens` tokens; some may come several times.

    A choice of a description that depends on the number of tokens tells `Record.hold` up to which
    number it is the same. So an op is described for 1 token, and for each number where one of its
    choices may be another.

    describe: makes the record of as many tokens as a span begins with.
    """
    num_tokens = 1
    while num_tokens <= most_tokens:
        span = Span(num_tokens, most_tokens)
        yield from describe(span).kernels
        num_tokens = span.last + 1
