"""How large an expert layer is, and which configurations its two GEMMs get by the heuristic.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ..common.blocks import ceil_div
from . import heuristic
from .config import GemmConfig


class Sizes(NamedTuple):
    """Of a layer, and of a part of its tokens."""

    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    masked: bool  # every expert has as many rows as there are tokens

    @property
    def matrix(self) -> tuple[int, int]:
        """(matrices, rows of each)"""
        if self.masked:
            return self.num_experts, self.num_tokens
        return 1, self.num_tokens * self.top_k


def mean_load(sizes: Sizes) -> tuple[int, int]:
    """(experts that have a token, at most; tokens of each of them, about)"""
    num_choices = sizes.num_tokens * sizes.top_k
    active = min(sizes.num_experts, num_choices)
    return active, ceil_div(num_choices, active)


def deciding_numbers(sizes: Sizes) -> Iterator[int]:
    """From each of these numbers of tokens up to the next, `choose_configs` chooses the same.

    All that such a layer can have are begun by one of them, which may be above its number.
    """
    num_experts, h, i = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    for load in heuristic.deciding_loads(num_experts, h, i):
        yield (load - 1) * num_experts // sizes.top_k + 1  # the first with that load or more


def choose_configs(sizes: Sizes, num_sms: int) -> tuple[GemmConfig, GemmConfig]:
    """For gate and up, and for down: by the mean load of an expert that has a token."""
    groups, load = mean_load(sizes)
    return heuristic.choose_experts_configs(
        load, groups, sizes.hidden_size, sizes.intermediate_size, num_sms
    )
