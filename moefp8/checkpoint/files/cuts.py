"""Infer from codes how gate and up of a stack were cut into blocks, if scales fit two cuts."""

import torch
from torch.nn.functional import pad

from ...kernels import BLOCK
from ..errors import failing_as
from .header import Entry
from .reading import read_into

_MAX_BYTES = 1 << 28  # of one expert's gate and up; DeepSeek-V3's have 28 MiB
_LARGEST = 0x7E  # 448; one more is NaN
_MIN_LACKING = 16  # docs/design/checkpoint.md says what this number rules out


def are_separate(weight: Entry, file: int) -> bool:
    """Whether codes show that gate and up [E, 2I, K] were cut each by itself, not as 2I rows.

    A quantizer makes the largest value of a block the largest code, in most formats. So each block
    of the right cut has that code, or zeros alone, and some blocks of the wrong cut have neither.
    Other quantizers leave out that code in places, most likely in the last blocks, which have fewer
    rows. So 16 blocks of the wrong cut must lack it, not counting the last ones. All experts are
    read, unless one has more than 256 MiB.
    """
    num_experts, num_rows, num_columns = weight.shape
    if num_rows < 2 * BLOCK or num_rows * num_columns > _MAX_BYTES:
        return False  # the only block of 128 rows holds all of gate, so it cannot lack the code
    codes = torch.empty(num_rows, num_columns, dtype=torch.uint8, device="cpu")
    num_lacking = 0
    for expert in range(num_experts):
        with failing_as(weight, "reading failed"):
            read_into(file, weight.begin + expert * codes.nbytes, codes)
        if _num_lacking(codes.view(2, num_rows // 2, num_columns)):
            return False
        if num_lacking < _MIN_LACKING:
            num_lacking += _num_lacking(codes[None, : num_rows // BLOCK * BLOCK])
    return num_lacking >= _MIN_LACKING


def _num_lacking(parts: torch.Tensor) -> int:
    """How many blocks of codes [parts, rows, K] hold neither the largest code nor zeros alone."""
    _, num_rows, num_columns = parts.shape
    whole = pad(parts & 0x7F, (0, -num_columns % BLOCK, 0, -num_rows % BLOCK))
    largest = whole.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)).amax((2, 4))
    return int(((largest != _LARGEST) & (largest != 0)).sum())
