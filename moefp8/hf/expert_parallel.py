"""`ep_implementation="moefp8"`: tokens travel to the experts of transformers by our exchange.

T tokens of a rank, k choices each, E experts of the whole model, H hidden.
"""

from typing import Any

import torch
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from ..distributed.expert_parallel.experts import ParallelExperts
from ..distributed.expert_parallel.group import ExpertGroup
from ..distributed.expert_parallel.local import LocalExperts
from ..distributed.expert_parallel.shared_batch import SharedBatch
from ..layers import GroupedExperts
from .distributed import NAME
from .experts import experts_of, with_frozen_weights


class FP8ExpertParallel(EPImplementation):
    """`DistributedConfig(ep_size=..., ep_implementation="moefp8")`, for transformers from 5.23 on.

    A token travels once to each rank that holds one of its experts, and its experts there give
    their sum, as in `moefp8.distributed.ExpertParallel`. With `experts_implementation="moefp8"`
    SwiGLU experts compute in FP8 and tokens travel as FP8 codes, half of the bytes; other experts
    of ours, and any other `experts_implementation`, take tokens unquantized, at least one a
    call. Gradients flow to hidden states, scores, and the weights that the experts' forward trains.

    Where the ranks of a TP group share a batch, each takes its part of the tokens, and gets the
    results of all. Ids are in [0, E]; E is nobody's and counts with score 0.

    All ranks make the same calls in the same order, backwards included; a rank that ends, or does
    not come within `timeout`, is an error on all. A subclass may set another timeout.
    """

    timeout = None  # as `ExpertParallel`: 5 minutes

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        group, num_experts = ExpertGroup.of(ep_mesh, self.timeout), experts.num_experts
        batch = SharedBatch(tp_mesh.get_group()) if tp_mesh.size() > 1 else None
        self.parallel = ParallelExperts(group, group.size * num_experts, batch)
        self.module: Any = experts
        if isinstance(experts, GroupedExperts):  # of an FP8 checkpoint
            experts.parallel = self.parallel
        self.rank = group.rank * num_experts, num_experts
        self._run = torch.compiler.disable(self._call, reason="the ranks' hosts agree on each call")

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """This rank's tokens [T, H], ids and scores [T, k] -> [T, H] in the tokens' dtype."""
        y: torch.Tensor = self._run(hidden_states, top_k_index, top_k_weights)
        return y

    def _call(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = getattr(getattr(self.module, "config", None), "_experts_implementation", None)
        if chosen == NAME and hasattr(self.module, "has_gate"):  # only such classes ask the config
            y = self.parallel(self._fp8_experts(x.shape[-1]), x, ids, scores, None)
            return with_frozen_weights(self.module, y)

        def forward(x: torch.Tensor, ids: torch.Tensor, own_scores: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.experts_forward(x, ids.long(), own_scores.to(scores.dtype))
            return y

        weights = list(self.module.parameters())
        return self.parallel(
            LocalExperts(x.shape[-1], *self.rank, forward, weights), x, ids, scores, None
        )

    def _fp8_experts(self, hidden_size: int) -> GroupedExperts | LocalExperts:
        experts = experts_of(self.module)
        if not isinstance(experts, GroupedExperts):
            return LocalExperts(hidden_size, *self.rank, experts)
        experts.expert_offset, experts.num_global_experts = self.rank[0], self.parallel.num_experts
        return experts


EPImplementationInterface.register(NAME, FP8ExpertParallel)
