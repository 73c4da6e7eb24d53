"""What `push.cu` and `give_back.cu` share, beside `ranks.cuh`: this rank, and the sizes of a call.

T tokens of a rank, M of any at most, k choices each, P ranks, E experts, H hidden.
"""

from typing import NamedTuple

from .peer_memory import GivenBack

WARP = 32
UNITS = {16: "uint4", 2: "uint16_t"}  # bytes that a thread moves at once -> their type


def unit_of(*multiples: int) -> int:
    """The bytes that a thread moves at once, for rows with these addresses, pitches and lengths."""
    return 16 if all(x % 16 == 0 for x in multiples) else 2


class Member(NamedTuple):
    """This rank, the number of ranks, and how long it waits for the others."""

    rank: int
    num_ranks: int
    deadline_ns: int


ALONE = Member(0, 1, 0)  # to list kernels, which depend on no member


class Sizes(NamedTuple):
    """A call's M, k, E, H."""

    max_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int

    def given_back(self, num_ranks: int) -> GivenBack:
        return GivenBack.of(num_ranks, self.max_tokens, self.hidden_size, self.top_k)
