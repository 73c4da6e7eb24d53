"""Tell by codes how gate and up of a stack were cut into blocks, where scales fit two cuts."""

import torch
from torch.nn.functional import pad

from ...kernels import BLOCK
from ..errors import failing_as
from .header import Entry
from .reading import read_into

_MAX_BYTES = 1 << 28  # of one expert's gate and up; DeepSeek-V3's have 28 MiB
_LARGEST = 0x7E  # 448; one more is NaN


def are_separate(weight: Entry, file: int) -> bool:
    """Whether codes show that gate and up [E, 2I, K] were cut each by itself, not as 2I rows.

    A quantizer makes the largest value of a block the largest code. So each block of the right cut
    has that code, or zeros alone, and some block of the wrong cut has neither. All experts are
    read, unless they are larger than any is.
    """
    num_experts, num_rows, num_columns = weight.shape
    if num_rows * num_columns > _MAX_BYTES:
        return False
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8, device="cpu")
    is_one = True
    for expert in range(num_experts):
        with failing_as(weight, "reading failed"):
            read_into(file, weight.begin + expert * codes.nbytes, codes)
        if not _fits(codes.view(2, num_rows // 2, num_columns)):
            return False
        is_one = is_one and _fits(codes[None])
    return not is_one


def _fits(parts: torch.Tensor) -> bool:
    """Whether each block of codes [parts, rows, K] holds the largest code, or zeros alone."""
    _, num_rows, num_columns = parts.shape
    whole = pad(parts & 0x7F, (0, -num_columns % BLOCK, 0, -num_rows % BLOCK))
    largest = whole.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)).amax((2, 4))
    return bool(((largest == _LARGEST) | (largest == 0)).all())
