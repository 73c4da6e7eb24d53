"""What FSDP2 (`fully_shard`) gathers of trained weights: FP8 codes, where shards hold whole blocks.

A rank's shard of a master weight stays BF16 or FP32, and so do its gradient and optimizer state.
Before each all-gather the shard is quantized, and codes and scales travel: 1 byte a weight.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..functional.training.experts import trained_experts
from ..functional.training.experts_backward import trained_dgrad, trained_experts_backward
from ..functional.training.feed_forward import trained_feed_forward
from ..functional.training.gathered import GatheredWeight, takes_gathered
from ..functional.training.grouped_linear import trained_grouped_linear
from ..functional.training.linear import trained_linear, trained_linear_backward
from ..kernels.common.blocks import BLOCK, ceil_div
from ..layers.trainable import TrainableModule
from ..quant import quantize_128x128

takes_gathered(trained_linear, "weight")
takes_gathered(trained_linear_backward, "weight")
takes_gathered(trained_grouped_linear, "weight")
takes_gathered(trained_feed_forward, "gate", "up", "down")
takes_gathered(trained_experts, "gate_up_proj", "down_proj")
takes_gathered(trained_experts_backward, "gate_up_proj", "down_proj")
takes_gathered(trained_dgrad, "weight")

_aten = torch.ops.aten
_KEEPING = {  # what FSDP, nn.Module and nn.Parameter make of a shard is one, too
    _aten.detach.default,
    _aten.alias.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.new_zeros.default,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}


class ShardedWeight(torch.Tensor):
    """A master weight, or a shard of it, of which FSDP2 gathers codes. It computes as `master`.

    Attributes:
        master: the values.
        parts: of the rows of the whole weight, as in `codes_of`.
    """

    master: torch.Tensor
    parts: int

    @staticmethod
    def __new__(cls, master: torch.Tensor, parts: int) -> "ShardedWeight":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            master.shape,
            strides=master.stride(),
            storage_offset=master.storage_offset(),
            dtype=master.dtype,
            device=master.device,
        )

    def __init__(self, master: torch.Tensor, parts: int) -> None:
        self.master, self.parts = master, parts

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        masters = tree_map_only(cls, lambda x: x.master, (args, kwargs or {}))
        result = func(*masters[0], **masters[1])
        if func not in _KEEPING:
            return result
        parts = args[0].parts
        return tree_map_only(torch.Tensor, lambda x: cls(x, parts), result)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["master"], self.parts

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], parts: Any, *_: Any
    ) -> "ShardedWeight":
        return cls(inner["master"], parts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold the values alone."""
        if isinstance(self, nn.Parameter):
            return nn.Parameter(self.master, self.requires_grad).__reduce_ex__(protocol)
        return self.master.__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.master!r}, parts={self.parts})"

    # ---- What FSDP2 calls around an all-gather ----

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """What this rank gives: codes and scales, or values that all ranks cannot quantize alone.

        The choice depends on what all ranks know.
        """
        shard = self.master
        if holds_whole_blocks(outer_size, shard.shape, mesh.size()):
            return _quantized(shard, self.parts), None
        if mp_policy.param_dtype is not None:
            shard = shard.to(mp_policy.param_dtype)
        if shard.shape[1:] == outer_size[1:]:  # along axis 0, the last ranks may hold less
            num_missing = ceil_div(outer_size[0], mesh.size()) - len(shard)
            if num_missing:
                shard = torch.cat([shard, shard.new_zeros(num_missing, *shard.shape[1:])])
        return (shard,), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole weight, in the memory of what was gathered; that stays the same later."""
        if out is not None:
            return None
        first, *scale_inv = gathered
        if not scale_inv:
            return first, ()
        return GatheredWeight(first, scale_inv[0], self.parts, param_dtype), ()


def holds_whole_blocks(whole: torch.Size, shard: torch.Size, num_ranks: int) -> bool:
    """Whether each of several ranks can quantize its shard as part of the whole."""
    is_even = num_ranks > 1 and whole[0] % num_ranks == 0
    is_along_rows = shard[1:] == whole[1:]
    rows = whole[0] // num_ranks
    return is_even and is_along_rows and (len(whole) == 3 or rows % BLOCK == 0)


def _quantized(shard: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    if shard.ndim == 2:
        q = quantize_128x128(shard)
        return q.data, q.scale_inv
    num_experts, n, k = shard.shape
    q = quantize_128x128(shard.reshape(num_experts * parts, n // parts, k))
    return q.data.view(shard.shape), q.scale_inv.view(num_experts, -1, q.scale_inv.shape[2])


@torch.no_grad()
def prepare_fsdp(model: nn.Module) -> nn.Module:
    """Let `fully_shard` gather trained weights of FP8 modules as codes: 1 byte for each weight.

    Call it before `fully_shard`, once, on a model with modules that are `trainable`; it returns
    that. Shards, gradients, optimizer states and what is saved stay as they are. The results are
    those of codes that each rank makes of whole weights in their own dtype, to the bit.

    Codes are gathered where a rank's shard holds whole blocks: of linears whose rows, divided by
    the number of ranks, are a multiple of 128, and of experts whose number the ranks divide. Other
    weights are gathered as they are, and so are those that a module holds as well which is none of
    ours, as an embedding that shares the weight of a head, and all under a `shard_placement_fn`
    that cuts another axis than the first. While codes are gathered, `weight` has no values: what is
    not a GEMM of moefp8 raises a TypeError when it reads them. `reshard_after_forward` must not be
    a number.

    Raises:
        ValueError: a weight is a DTensor, since `fully_shard` or a parallel plan came first.
    """
    from torch.distributed.tensor import DTensor  # it takes long to import

    weights = {
        (module, name): module.get_parameter(name)
        for module in model.modules()
        if isinstance(module, TrainableModule) and module.trainable
        for name in module.master_names
    }
    for (module, name), weight in weights.items():
        if isinstance(weight, DTensor):
            raise ValueError(
                f"prepare_fsdp: {name} of a {type(module).__name__} is a DTensor; call it before "
                "fully_shard, and before weights are distributed otherwise"
            )
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    others = _held_otherwise(model, weights)
    for (module, name), weight in weights.items():
        if isinstance(weight, ShardedWeight) or weight in others:
            continue
        if weight not in made:
            shard = ShardedWeight(weight.detach(), 2 if name == "gate_up_proj" else 1)
            made[weight] = nn.Parameter(shard, weight.requires_grad)
            for attribute, value in weight.__dict__.items():  # such as main_grad
                made[weight].__dict__.setdefault(attribute, value)
        setattr(module, name, made[weight])
    return model


def _held_otherwise(
    model: nn.Module, homes: Collection[tuple[nn.Module, str]]
) -> set[nn.Parameter]:
    """Parameters that have a home beside these, a module and a name each."""
    return {
        x
        for module in model.modules()
        for name, x in module.named_parameters(recurse=False, remove_duplicate=False)
        if (module, name) not in homes
    }
