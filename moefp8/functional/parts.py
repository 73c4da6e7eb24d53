"""Split the tokens of experts into parts. T tokens, k choices each, R rows.

The workspace of a call grows with T. If it would exceed a bound, tokens are computed part by part.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from ..kernels.common.blocks import BLOCK, ceil_div
from ..kernels.gemm.sizes import Sizes, matrix_of
from ..kernels.program import Record, place

MAX_WORKSPACE_BYTES = 4 << 30
_BYTES_OF_COLUMN = 16  # the most that a row takes for each of H and I, in any record


def parts_of(sizes: Sizes, *describe: Callable[[Sizes], Record]) -> int:
    """The number of parts such that no record of a part takes more memory than a bound; 0 if there
    is nothing to compute.

    A backward needs the rows of its forward, and so the same parts: both pass the same `describe`.
    The bound is MAX_WORKSPACE_BYTES, or half of it more than one token takes if that is larger. One
    token is never split.

    describe: functions that make a record for given sizes.
    """
    num_tokens = sizes.num_tokens
    if 0 in sizes[:5]:
        return 0
    if _most_bytes(sizes) <= MAX_WORKSPACE_BYTES:
        return 1
    matrices, rows = matrix_of(sizes)
    one = max(_bytes_of(x, sizes._replace(num_tokens=1)) for x in describe)
    bound = max(MAX_WORKSPACE_BYTES, one + MAX_WORKSPACE_BYTES // 2)
    parts = ceil_div(2 * matrices * rows * sizes.hidden_size, bound)  # for results alone
    while parts < num_tokens:
        part = sizes._replace(num_tokens=ceil_div(num_tokens, parts))
        num_bytes = max(_bytes_of(x, part) for x in describe)
        if num_bytes <= bound:
            return parts
        parts = max(parts + 1, parts * num_bytes // bound)
    return num_tokens


def _most_bytes(sizes: Sizes) -> int:
    """An upper bound of the bytes of any record, with which most calls are known to be small."""
    matrices, rows = matrix_of(sizes)
    columns = sizes.hidden_size + sizes.intermediate_size + BLOCK
    return _BYTES_OF_COLUMN * (matrices * rows + BLOCK * sizes.num_experts) * columns


@lru_cache(4096)
def _bytes_of(describe: Callable[[Sizes], Record], sizes: Sizes) -> int:
    return place(describe(sizes)).num_bytes


def split(
    num_parts: int, num_tokens: int, *tensors: torch.Tensor | None
) -> Iterator[tuple[Any, ...]]:
    """The tensors of each part; None stays None.

    The first dimension of a tensor is a multiple of `num_tokens`: the rows of each token, in order.
    """
    size = ceil_div(num_tokens, num_parts)
    for begin in range(0, num_tokens, size):
        count = min(size, num_tokens - begin)
        yield tuple(
            None if x is None else x.narrow(0, begin * each, count * each)
            for x, each in ((x, 0 if x is None else len(x) // num_tokens) for x in tensors)
        )
