"""Any function of tokens as the experts of a rank.

R tokens received, k choices each, E experts of this rank, H hidden.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..shard import own_choices


@dataclass(frozen=True)
class LocalExperts:
    """What `ParallelExperts` takes in place of a `GroupedExperts`.

    hidden_size: H. expert_offset, num_experts: the whole model's id of its first expert, and E.
    function: tokens [R, H], ids [R, k] in [0, E] and scores [R, k] -> [R, H] in the dtype of the
        tokens: what a token's experts here give together. Id E, with score 0, is held elsewhere.
        R is at least 1, so that what asks for a gradient is always part of the result.
    weights: what may ask for a gradient besides tokens and scores.
    """

    hidden_size: int
    expert_offset: int
    num_experts: int
    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    weights: Iterable[torch.Tensor] = ()

    trainable = False
    runs_in_steps = True  # tokens travel as they are

    def parameters(self) -> Iterable[torch.Tensor]:
        return self.weights

    def compute(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The function, with the ids of the whole model and any number of tokens."""
        ids, scores = own_choices(self, top_k_index, top_k_weights)
        x = hidden_states
        if len(x) == 0:
            x, scores = (torch.cat([z, z.new_zeros(1, z.shape[1])]) for z in (x, scores))
            return self.function(x, ids.new_zeros(1, ids.shape[1]), scores)[:0]
        is_nobody = (ids == self.num_experts).all(1, keepdim=True)  # whatever the rows hold
        y = self.function(x.masked_fill(is_nobody, 0), ids, scores)
        return y.masked_fill(is_nobody, 0)
