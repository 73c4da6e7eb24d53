"""Which kernels an exchange of tokens can need, known before the first call.

T tokens of a rank, P ranks, H hidden.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from ...kernels.common.blocks import ceil_div
from ...kernels.jit import Kernel
from ...quant import quantize_launch
from ...routing import combine_launch
from .peers_launch import (
    COMBINE_AND_GIVE_BACK,
    give_back_kernel_of,
    push_codes_kernel_of,
    push_rows_kernel_of,
)

_BF16 = torch.bfloat16


class NeededByExchange(NamedTuple):
    """What `precompile` asks of experts that ranks share.

    num_ranks: P. num_sharing: among how many ranks a call's tokens are divided before.
    peers, collective: whether tokens may travel so.
    """

    num_ranks: int
    num_sharing: int
    peers: bool
    collective: bool

    def most_received(self, max_tokens: int) -> int:
        """Of calls with up to max_tokens tokens, how many the experts of a rank have at most."""
        return ceil_div(max_tokens, self.num_sharing) * self.num_ranks

    def kernels(
        self,
        hidden_size: int,
        dtypes: Iterable[torch.dtype],
        max_tokens: int,
        num_sms: int,
        *,
        are_codes: bool,
        backward: bool,
    ) -> Iterator[Kernel]:
        """dtypes: of the tokens, which may lie anywhere. are_codes: they travel as FP8 codes."""
        own, h = ceil_div(max_tokens, self.num_sharing), hidden_size
        travelling = {*dtypes, *([_BF16] if backward else [])}  # gradients are BF16
        if self.collective and are_codes:
            for dtype in travelling:
                yield from quantize_launch.needed_kernels(dtype, own, h, num_sms)
        if self.peers:
            for dtype in travelling:
                yield from _pushing(dtype, h, are_codes=are_codes)
            yield give_back_kernel_of(16 if h % 8 == 0 else 2)
            if are_codes and h % 8 == 0:
                yield COMBINE_AND_GIVE_BACK
        if self.collective and h % 8 == 0:
            at_once = combine_launch.at_once_of(self.num_ranks)
            yield combine_launch.kernel_of(torch.float32, True, at_once)


def _pushing(dtype: torch.dtype, h: int, *, are_codes: bool) -> Iterator[Kernel]:
    if are_codes:
        for vectorized in {h % 8 == 0, False}:
            yield push_codes_kernel_of(dtype, vectorized=vectorized)
    else:
        for unit in {16 if h * dtype.itemsize % 16 == 0 else 2, 2}:
            yield push_rows_kernel_of(unit)
