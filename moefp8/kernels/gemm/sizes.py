"""The sizes of a layer of routed experts, by which its GEMMs are chosen.

T tokens, k choices each, E experts.
"""

from typing import NamedTuple

from ..common.blocks import ceil_div


class Sizes(NamedTuple):
    """The sizes of a layer, and the number of tokens in one part of a call."""

    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    masked: bool  # every expert has T rows of memory
    num_global_experts: int | None = None  # of the whole model; None: E

    @property
    def num_to_choose_from(self) -> int:
        return self.num_global_experts or self.num_experts


def matrix_of(sizes: Sizes) -> tuple[int, int]:
    """(matrices, rows of each)"""
    if sizes.masked:
        return sizes.num_experts, sizes.num_tokens
    return 1, sizes.num_tokens * sizes.top_k


def mean_load(sizes: Sizes) -> tuple[int, int]:
    """(the most local experts that can have a token, the mean number of tokens of such an expert)

    A rank of expert parallelism gets all choices, but most choose experts of other ranks.
    """
    num_choices = sizes.num_tokens * sizes.top_k
    active = min(sizes.num_experts, num_choices)
    return active, ceil_div(num_choices, min(sizes.num_to_choose_from, num_choices))
