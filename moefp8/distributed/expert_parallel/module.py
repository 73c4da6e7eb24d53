"""`ExpertParallel` and `expert_parallel`: experts that the ranks of a group share.

T tokens of a rank, k choices each, E experts of the whole model, H hidden.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ...layers.experts import PARALLELIZERS, GroupedExperts
from ..shard import shard
from .experts import ParallelExperts
from .group import ExpertGroup, TransportName
from .transport import Transport


class ExpertParallel(nn.Module):
    """`GroupedExperts` spread over all ranks of a group, each of which has its own tokens.

    Every rank calls it with its own tokens, as many as it has, none included, and the ids of the
    whole model; it gets its own tokens' outputs. All ranks make the same calls in the same order,
    backwards included. A token's output depends on no other token, on no timing and not on the
    token's rank: it is the FP32 sum, in the order of the ranks, of each rank's part: the sum of the
    token's experts there, rounded to BF16. If all are on one rank, the output has the same bits as
    in one process with all experts; else each part is rounded once more, by at most 2**-8.

    Args:
        experts: all E experts, of which this rank's part is kept, in place; or that part already,
            as `shard(model, {...: "experts"}, rank, num_ranks)` leaves it. On the meta device it
            may be filled afterwards: `load_checkpoint` reads this rank's experts and no others.
        mesh: a `DeviceMesh` of one dimension, or a process group. All ranks make the same layers in
            the same order.
        timeout: how long a rank waits for the others, for all layers of a group; None: 5 minutes.
        transport: "peers", kernels that write into the memory of other GPUs of the host;
            "collective", `all_to_all_single`; "auto" takes the first where it can, and says so if
            GPUs cannot; or your own, a class derived from `Transport`. One for all layers of a
            group. Results are the same. None: the group's, or "auto" of a new group.

    Attributes:
        experts: this rank's part, which sends tokens to the other ranks. It may be called itself.

    Raises ValueError if the experts are another rank's part, have adapters, or are fewer than
    ranks; RuntimeError if a rank makes no layer within the timeout.
    """

    def __init__(
        self,
        experts: GroupedExperts,
        mesh: Any,
        *,
        timeout: timedelta | None = None,
        transport: TransportName | type[Transport] | None = None,
    ) -> None:
        super().__init__()
        _check_experts(experts)
        _distribute(experts, mesh, timeout, transport)
        self.experts = experts

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `GroupedExperts.forward`, with this rank's tokens [T, H] and ids in [0, E].

        Raises:
            TypeError, ValueError: arguments are wrong. The other ranks raise a RuntimeError.
            ValueError: ranks are at different layers, or at forward and backward.
            RuntimeError: a rank has ended, or does not come within the timeout.
        """
        tokens = hidden_states, top_k_index, top_k_weights
        y: torch.Tensor = self.experts(*tokens, addend=addend)
        return y


def expert_parallel(
    model: nn.Module,
    mesh: Any,
    *,
    timeout: timedelta | None = None,
    transport: TransportName | type[Transport] | None = None,
) -> nn.Module:
    """Spread all `GroupedExperts` of a model over the ranks of `mesh`, in place; returns the model.

    Each becomes as in `ExpertParallel`, but names of modules and parameters stay. Call it after
    `convert`, on the meta device to load this rank's experts alone:

        with torch.device("meta"): model = Model(config)
        moefp8.convert(model)
        moefp8.distributed.expert_parallel(model, mesh)
        moefp8.load_checkpoint(model, path)

    Raises ValueError if there are no `GroupedExperts`; otherwise as `ExpertParallel`.
    """
    layers = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    if not layers:
        raise ValueError(
            "expert_parallel: the model has no GroupedExperts; call moefp8.convert(model) first"
        )
    for experts in layers:
        _check_experts(experts)
    for experts in layers:
        _distribute(experts, mesh, timeout, transport)
    return model


def _check_experts(experts: Any) -> None:
    if not isinstance(experts, GroupedExperts):
        raise TypeError(
            f"ExpertParallel: experts must be a GroupedExperts, got {type(experts).__name__}; "
            "moefp8.convert(model) makes them of experts modules"
        )
    if experts.parallel is not None:
        raise ValueError("ExpertParallel: these experts are those of a group already")


def _distribute(
    experts: GroupedExperts,
    mesh: Any,
    timeout: timedelta | None = None,
    transport: TransportName | type[Transport] | None = None,
) -> None:
    """Keep this rank's part, and let it exchange tokens with the others."""
    group = ExpertGroup.of(mesh, timeout, transport)
    total = experts.num_global_experts or experts.num_experts
    if total < group.size:  # all ranks raise it
        raise ValueError(
            f"ExpertParallel: each rank must hold an expert, got {total} experts for {group.size} "
            "ranks; use a smaller mesh"
        )
    if experts.num_global_experts is None and group.size > 1:
        shard(experts, {"": "experts"}, group.rank, group.size)
    begin, end = (rank * total // group.size for rank in (group.rank, group.rank + 1))
    held = experts.expert_offset, experts.expert_offset + experts.num_experts
    if held != (begin, end):
        raise ValueError(
            f"ExpertParallel: rank {group.rank} of {group.size} must hold experts [{begin}, {end}) "
            f"of {total}, got [{held[0]}, {held[1]}); shard by the rank in the mesh"
        )
    experts.parallel = ParallelExperts(group, total)


PARALLELIZERS.append(_distribute)
