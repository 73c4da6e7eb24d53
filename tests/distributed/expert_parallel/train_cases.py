"""Models that train with experts on several ranks, and one process that takes all their batches.

Losses are means over ranks. Parameters that all ranks hold have gradients of a rank's own tokens,
and those of experts of the tokens of all ranks of the group, so each is divided by something else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import moefp8
from moefp8 import GroupedExperts
from moefp8.distributed import expert_parallel
from tests.distributed.trained_cases import STEPS, Trained, batch, sgd

RANKS_OF_EXPERTS = 2
Gradients = dict[str, torch.Tensor]


class Join(torch.autograd.Function):
    """x as it is; gradients that come from several are summed before they go on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y.float() - 1).square().mean()


class Together:
    """A model in one process. Experts take the tokens of all ranks of a group at once.

    They lie in parts, as on ranks, so that sums are rounded where those are.
    """

    def __init__(self) -> None:
        self.model = Trained()
        self.parts = [
            moefp8.shard(Trained(), {"moe.experts": "experts"}, rank, RANKS_OF_EXPERTS).moe.experts
            for rank in range(RANKS_OF_EXPERTS)
        ]
        modules = self.model.first, self.model.last, self.model.moe.gate
        others = [*modules, self.model.moe.shared_experts, *self.parts]
        self.optimizer = sgd(nn.ModuleList(others))

    def loss(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the losses of ranks of one group."""
        moe: Any = self.model.moe
        tokens = [self.model.first(x) for x in batches]
        shared = [moe.shared_experts(x) for x in tokens]
        choices = [torch.cat(x) for x in zip(*(moe.gate(x) for x in tokens), strict=True)]
        x = Join.apply(torch.cat(tokens))
        routed = sum(part(x, *choices).float() for part in self.parts).bfloat16()
        each = zip(routed.split([len(x) for x in tokens]), shared, strict=True)
        return sum(loss_of(self.model.last(y + z)) for y, z in each)

    def backward(self, num_ranks: int, step: int = 0) -> None:
        for begin in range(0, num_ranks, RANKS_OF_EXPERTS):
            ranks = range(begin, begin + RANKS_OF_EXPERTS)
            (self.loss([tokens_of(rank, step) for rank in ranks]) / num_ranks).backward()

    def steps(self, num_ranks: int) -> Gradients:
        for step in range(STEPS):
            self.optimizer.zero_grad()
            self.backward(num_ranks, step)
            self.optimizer.step()
        return self.tensors(lambda x: x.detach())

    def gradients(self, num_ranks: int) -> Gradients:
        self.backward(num_ranks)
        return self.tensors(lambda x: x.grad)

    def tensors(self, of: Callable[[Any], Any]) -> Gradients:
        """By name; those of experts whole."""
        found = {
            name: of(x)
            for name, x in self.model.named_parameters()
            if not name.startswith("moe.experts")
        }
        for name, _ in self.parts[0].named_parameters():
            of_parts = [of(part.get_parameter(name)) for part in self.parts]
            found[f"moe.experts.{name}"] = torch.cat(of_parts)
        return found


def tokens_of(rank: int, step: int) -> torch.Tensor:
    return batch(rank, step).bfloat16()


def is_of_experts(name: str) -> bool:
    return name.startswith("moe.experts")


# ---- What a rank runs ----


def plain(rank: int, mesh: Any) -> nn.Module:
    return expert_parallel(Trained(), mesh)


def average(model: nn.Module, num_ranks: int) -> None:
    """Without FSDP, gradients are averaged by hand."""
    experts = {x for y in model.modules() if isinstance(y, GroupedExperts) for x in y.parameters()}
    for x in model.parameters():
        if x.grad is not None and not isinstance(x, DTensor):
            if x not in experts:
                dist.all_reduce(x.grad)
            x.grad /= num_ranks


def with_fsdp(rank: int, mesh: Any, *, gathers_codes: bool) -> nn.Module:
    """Experts are sharded over the ranks that hold the same ones, all else over all ranks."""
    model: Any = expert_parallel(Trained(), mesh["experts"])
    if gathers_codes:
        moefp8.prepare_fsdp(model)
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    experts = fully_shard(model.moe.experts, mesh=mesh["data"])
    experts.set_gradient_divide_factor(dist.get_world_size())
    for part in (model.first, model.moe, model.last):
        fully_shard(part, mesh=everyone)
    return over_gloo(fully_shard(model, mesh=everyone))


def without_experts(rank: int, mesh: Any) -> nn.Module:
    """FSDP of all but experts, which lie on the ranks of the same mesh."""
    model = expert_parallel(Trained(), mesh)
    experts = {x for name, x in model.named_parameters() if is_of_experts(name)}
    return over_gloo(fully_shard(model, mesh=mesh, ignored_params=experts))


def over_gloo(model: nn.Module) -> nn.Module:
    """Let FSDP itself divide what it sums: gloo multiplies nothing, nor averages in torch 2.8."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def of_ranks(wrap: str, sizes: tuple[int, ...], steps: bool) -> Any:
    """Gradients of one step, or weights after all steps, of experts those of this rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    names = ("data", "experts")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = WRAPS[wrap](rank, mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS if steps else 1):
        optimizer.zero_grad()
        loss_of(model(tokens_of(rank, step))).backward()
        average(model, num_ranks)
        if steps:
            optimizer.step()
    found = {}
    for name, x in model.named_parameters():
        y = x.detach() if steps else x.grad
        found[name] = y.full_tensor() if isinstance(y, DTensor) else y.clone()
    return found


def clipped(max_norm: float) -> tuple[Gradients, torch.Tensor]:
    """Gradients of experts and of others are those of two meshes, so norms are taken of each."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("data", "experts"))
    model = with_fsdp(rank, mesh, gathers_codes=False)
    loss_of(model(tokens_of(rank, 0))).backward()
    named = dict(model.named_parameters())
    experts = [x for name, x in named.items() if is_of_experts(name)]
    others = [x for name, x in named.items() if not is_of_experts(name)]
    norms = [nn.utils.get_total_norm([x.grad for x in some]) for some in (experts, others)]
    of_experts, of_others = (norm.full_tensor() ** 2 for norm in norms)
    dist.all_reduce(of_experts, group=mesh["experts"].get_group())  # each rank has its own
    total = (of_experts + of_others).sqrt()
    for some in (experts, others):
        nn.utils.clip_grads_with_norm_(some, max_norm, total)
    return {name: x.grad.full_tensor() for name, x in named.items()}, total


WRAPS: dict[str, Callable[[int, Any], nn.Module]] = {
    "plain": plain,
    "fsdp": lambda rank, mesh: with_fsdp(rank, mesh, gathers_codes=False),
    "fsdp, codes": lambda rank, mesh: with_fsdp(rank, mesh, gathers_codes=True),
    "fsdp of others": without_experts,
}
