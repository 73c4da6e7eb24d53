"""Make PyTorch's data parallel wrappers leave out frozen FP8 parameters, which they cannot take.

`DistributedDataParallel` broadcasts all parameters, which gloo cannot do with FP8. FSDP flattens
parameters together, which must then have one dtype.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..layers.module import FixedDtypeModule
from ..layers.parts import parts_of_plain


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of `FP8Linear`, `GroupedExperts`, `TopKRouter` that ask for no gradient, by name.

    A tied parameter is there under each of its names. FSDP leaves them alone by
    `FullyShardedDataParallel(model, ignored_states=list(frozen.values()))` and
    `fully_shard(model, ignored_params=set(frozen.values()))`. FSDP does not broadcast what it
    ignores, so every rank must load the same.
    """
    return {
        f"{prefix}.{name}".lstrip("."): parameter
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, FixedDtypeModule)
        for name, parameter in module.named_parameters(recurse=False)
        if not parameter.requires_grad
    }


@torch.no_grad()
def prepare_ddp(model: nn.Module, process_group: Any = None) -> nn.Module:
    """Let `DistributedDataParallel(model, process_group=...)` take a model with frozen FP8 modules.

    Call it on all ranks of the group, on the model that is wrapped; it returns that. All ranks get
    the frozen parameters of the first, as bytes, and the wrapper then ignores them.

    Raises:
        ValueError: ranks differ in names, shapes, dtypes or in what `shard` left, or the model is
            on the meta device. All ranks raise it.
    """
    frozen = frozen_parameters(model)
    _check_alike(model, frozen, process_group)
    for parameter in dict.fromkeys(frozen.values()):
        data = parameter.detach().contiguous()
        if data.numel():
            dist.broadcast(data.view(torch.uint8), group=process_group, group_src=0)
        parameter.copy_(data)
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*known, *frozen])
    return model


def _check_alike(model: nn.Module, frozen: dict[str, nn.Parameter], process_group: Any) -> None:
    """All ranks compare what they hold, and come to the same verdict."""
    own = {name: f"{x.dtype} {list(x.shape)} on {x.device.type}" for name, x in frozen.items()}
    for prefix, module in model.named_modules():
        for leaf, parts in parts_of_plain(module).items():
            name = f"{prefix}.{leaf}".lstrip(".")
            own[name] = own.get(name, "a tensor") + "".join(
                f", [{part.begin}, {part.end}) of {part.total} along axis {axis}"
                for axis, part in parts.items()
            )
    everyone: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everyone, own, group=process_group)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                raise ValueError(
                    f"prepare_ddp: all ranks must hold the same, but {name} is {first.get(name)} "
                    f"on rank 0 of the group, and {theirs.get(name)} on rank {rank}; of models cut "
                    "by shard, pass the group of ranks with the same part"
                )
    if any(x.is_meta for x in frozen.values()):
        raise ValueError(
            "prepare_ddp: the model is on the meta device; load or initialise it first"
        )
