"""`experts_implementation="moefp8"`: the experts that transformers keeps, run in FP8.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

from ..checkpoint.update import FOLLOWERS
from ..functional.autograd import frozen
from ..functional.grouped_linear import grouped_linear
from ..kernels import E4M3
from ..kernels.common.activation import Activation
from ..layers import GroupedExperts
from ..layers.conversion.stacks import activations_of
from ..layers.experts import BIASES, WEIGHTS
from ..quant import BlockScaled
from ..quant.each import quantize_128x128_each_into
from ..quant.weight_format import BLOCKS
from ..routing import build_plan, combine, dispatch

_CACHE = "_moefp8_experts"  # no submodule, so that no state dict holds it
_Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The forward of any experts module of transformers in FP8; arguments as in `GroupedExperts`.

    Weights that are not FP8 are quantized at the first call, and again when they have changed, into
    the same memory if that was in place; the module keeps its own beside them, which takes 1.5
    times the memory: `FP8Config` takes 0.5.
    Changes by `torch.optim`, fused or not, are noticed. Not noticed are changes through `.data`, by
    fused optimizers of others, of weights that were made in inference mode, and in place between
    calls of a compiled graph: then call `experts.__dict__.pop("_moefp8_experts")`.

    Gated experts with an activation of ours run as `GroupedExperts`, with biases or without. Others
    take two grouped GEMMs, and PyTorch does the rest: experts with another activation, no gate or a
    norm of their output. Weights of transformers' own FP8 modules are used as they are; it is a
    ValueError if their blocks are not 128x128, or if the scales of activations are static. A part
    that `moefp8.shard` left takes the ids of the whole model.

    Gradients flow to hidden states, weights of choices, biases and norms. The weights that were
    quantized have none: `backward()` raises NotImplementedError if one asks; they train in FP8
    after `moefp8.convert(model, trainable=True)`.
    """
    # Autograd sees what was quantized, so that none of it trains in vain.
    y = experts_of(module)(hidden_states, top_k_index, top_k_weights)
    return with_frozen_weights(module, y)


def experts_of(module: nn.Module) -> _Experts:
    """The module's experts in FP8, a `GroupedExperts` if it computes the same."""
    if "parametrizations" in module._modules:
        _refuse_parametrized(module)
    cached: _Cache | None = module.__dict__.get(_CACHE)
    # A compiled graph cannot look at versions; it guards what is kept.
    if cached is None or not (torch.compiler.is_compiling() or cached.is_of(module)):
        cached = module.__dict__[_CACHE] = _prepare(module, cached)
    if isinstance(cached.experts, GroupedExperts) and module.has_bias:
        _give_biases(module, cached.experts)
    return cached.experts


def weights_kept_beside(model: nn.Module) -> Iterator[torch.Tensor]:
    """The FP8 weights that `experts_forward` keeps, made again if a module's own have changed."""
    for module in model.modules():
        if _CACHE in module.__dict__:
            experts_of(module)
            for weight in module.__dict__[_CACHE].weights:
                yield from weight


FOLLOWERS.append(weights_kept_beside)


def with_frozen_weights(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """y, whose backward raises if a weight that was quantized for it asks for a gradient."""
    weights = [_weight(module, name) for name in _weight_names(module)]
    return frozen(type(module).__name__, y, weights)


fp8_experts_forward = experts_forward
ExpertsInterface.register("moefp8", experts_forward)
FP8ExpertsInterface.register("moefp8", fp8_experts_forward)


def _refuse_parametrized(module: nn.Module) -> NoReturn:
    """FP8 weights are made once, from the original weights: they would lack an adapter's part."""
    raise ValueError(
        f'experts_implementation="moefp8": {type(module).__name__} is parametrized (by '
        "torch.nn.utils.parametrize, or PEFT's target_parameters), which its FP8 weights would not "
        "follow; convert the model (moefp8.convert) and use moefp8.adapters.add_lora, or choose "
        "another experts_implementation"
    )


class _Cache:
    """FP8 experts, and the parameters that they were made from, with their state at that time.

    It holds the parameters themselves, so that no new one has the id of an old one. A copy of the
    module makes its own.
    """

    def __init__(self, module: nn.Module, experts: _Experts, *weights: BlockScaled) -> None:
        self.experts, self.weights = experts, weights
        self.note(module)
        _CACHES.add(self)

    def note(self, module: nn.Module) -> None:
        """Note that the weights are up to date with the module."""
        self.is_stale = False
        self.made_of = list(module.parameters(recurse=False))
        self.states = _states_of(module)

    def is_of(self, module: nn.Module) -> bool:
        return not self.is_stale and _states_of(module) == self.states

    def is_of_memory_of(self, module: nn.Module) -> bool:
        """Whether the parameters are at the same addresses, whatever values they have now."""
        here, before = _states_of(module), self.states
        return [x[:1] + x[2:] for x in here] == [x[:1] + x[2:] for x in before]

    def __reduce__(self) -> Any:
        return type(None), ()


_CACHES: WeakSet[_Cache] = WeakSet()


def _see_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Note which weights a fused optimizer changed, since it gives them no new `_version`."""
    fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
    changed = (x for params in fused for x in params if x.grad is not None)
    if stepped := {_identity(getattr(x, "_local_tensor", x)) for x in changed}:
        for cache in tuple(_CACHES):
            cache.is_stale |= any(_identity(x) in stepped for x in cache.made_of)


register_optimizer_step_post_hook(_see_step)


def _states_of(module: nn.Module) -> list[Any]:
    """States that change with parameters, unless made in inference mode or set through `.data`."""
    return [
        (_identity(x), None if x.is_inference() else x._version, x.data_ptr(), x.device, x.dtype)
        for x in module.parameters(recurse=False)
    ]


def _identity(x: torch.Tensor) -> int:
    """Identifies a parameter, or its storage if transformers passes a new view to each call.

    The view is a rank's part of a DTensor (expert parallelism); torch 2.13 marks it as a parameter.
    """
    return x.untyped_storage()._cdata if type(x) is torch.Tensor else id(x)


def _weight(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter, or the tensor that transformers puts in its place during a call."""
    parameter: Any = module._parameters[name]
    weight: torch.Tensor = parameter
    return weight


@torch.compiler.disable(reason="weights are quantized once, outside of graphs")
@torch.no_grad()
@torch.inference_mode(False)  # what is kept outlives the mode in which it was made
def _prepare(module: nn.Module, before: _Cache | None) -> _Cache:
    """before: the cache for older values; graphs may know its memory."""
    activations = activations_of(module) if module.has_gate else []
    is_gated = bool(activations) and not getattr(module, "has_post_expert_norm", False)
    if before is not None and before.is_of_memory_of(module):
        _weights(module, 1 + is_gated, before.weights)
        before.note(module)
        return before
    weights = _weights(module, 1 + is_gated)
    experts = _any_experts(module, *weights)
    if is_gated:
        experts = _gated_experts(module, *weights, activations[0])
    return _Cache(module, experts, *weights)


def _weight_names(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _weights(
    module: nn.Module, halves: int, memory: Sequence[BlockScaled] = ()
) -> tuple[BlockScaled, BlockScaled]:
    """The module's weights as [E, F, H] (F = 2I, gate first, or I without a gate) and [E, H, I].

    F is divided into so many `halves` before it is cut into blocks. memory: the result
    of an earlier call, to be filled again.
    """
    name, _ = names = _weight_names(module)
    first, second = (_weight(module, x).detach() for x in names)
    if first.dtype == E4M3:
        stored = _stored(module, name, first, halves), _stored(module, "down_proj", second, 1)
        for before, now in zip(memory, stored, strict=False):
            if before.scale_inv.data_ptr() != now.scale_inv.data_ptr():  # FP32 copies
                before.scale_inv.copy_(now.scale_inv)
        first_codes, second_codes = memory or stored
        return first_codes, second_codes
    if module.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    if module.has_gate and not module.is_concatenated:
        first = first.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    first_codes, second_codes = memory or (_empty(first, halves), _empty(second, 1))
    _quantize(first, halves, first_codes)
    _quantize(second, 1, second_codes)
    return first_codes, second_codes


def _empty(weights: torch.Tensor, halves: int) -> BlockScaled:
    num_experts, rows, columns = weights.shape
    grid = num_experts, *BLOCKS.grid(rows, columns, halves)
    return BlockScaled(
        weights.new_empty(weights.shape, dtype=E4M3), weights.new_empty(grid, dtype=torch.float32)
    )


def _quantize(weights: torch.Tensor, halves: int, q: BlockScaled) -> None:
    """Quantize one expert at a time, so that only one expert's values are copied."""
    stack = [x.view(halves * len(x), -1, x.shape[-1]) for x in q]
    for expert, weight in enumerate(weights):
        matrices = weight.contiguous().unflatten(0, (halves, -1))
        places = list(range(expert * halves, (expert + 1) * halves))
        quantize_128x128_each_into(*stack, None, halves, [matrices], places)


def _stored(module: nn.Module, name: str, data: torch.Tensor, halves: int) -> BlockScaled:
    where = f'experts_implementation="moefp8": {type(module).__name__}'
    block = getattr(module, "block_size", None)
    if block is None or tuple(block) != (128, 128):
        raise ValueError(f"{where}: block_size must be (128, 128), got {block}")
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        raise ValueError(f"{where}: activation_scheme must be 'dynamic', got 'static'")
    if halves == 1 and name == "gate_up_proj" and data.shape[1] // 2 % 128 > 64:
        raise ValueError(
            f"{where}: I of gated experts whose activation is not one of ours must not be "
            f"{data.shape[1] // 2}: nothing tells scales of gate and up, one after the other, from "
            "those of 2I rows, since there are as many"
        )
    scale_inv = _weight(module, f"{name}_scale_inv").detach().float()
    wanted = BLOCKS.grid(data.shape[1], data.shape[2], halves)
    if scale_inv.shape[1:] != wanted:
        raise ValueError(
            f"{where}: {name}_scale_inv must be [E, {wanted[0]}, {wanted[1]}] for {halves} parts "
            f"of {data.shape[1] // halves} rows, each cut into blocks of 128, got "
            f"{list(scale_inv.shape)}"
        )
    return BlockScaled(data, scale_inv)


def _rank_of(module: nn.Module) -> dict[str, Any]:
    """The attributes by which `shard` says which experts the module holds."""
    names = "expert_offset", "num_global_experts"
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


def _gated_experts(
    module: nn.Module, first: BlockScaled, second: BlockScaled, activation: Activation
) -> GroupedExperts:
    """`GroupedExperts` that hold these very tensors."""
    sizes = second.data.shape
    experts = GroupedExperts(*sizes, activation=activation, device="meta").eval()
    for name, tensor in zip(WEIGHTS, (*first, *second), strict=True):
        experts._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    vars(experts).update(_rank_of(module))
    return experts


def _give_biases(module: Any, experts: GroupedExperts) -> None:
    """Let experts add the module's biases, which have gradients, in each call.

    A bias of gate and up in turns is copied, so that gate comes first.
    """
    gate_up, down = (_weight(module, name) for name in BIASES)
    if not module.is_concatenated:
        gate_up = gate_up.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    held: dict[str, Any] = experts._parameters
    held.update(zip(BIASES, (gate_up, down), strict=True))


def _any_experts(module: Any, first: BlockScaled, second: BlockScaled) -> _Experts:
    """Two grouped GEMMs, and between them the module's own steps."""
    rank, name = _rank_of(module), type(module).__name__

    def experts(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        plan = build_plan(top_k_index, first.data.shape[0], **rank)
        expert = plan.row_to_expert.clamp(min=0)
        rows = grouped_linear(name, dispatch(hidden_states, plan), *first, plan.expert_offsets)
        if module.has_gate:
            if not module.is_concatenated:  # its bias and its gate take gate and up in turns
                rows = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
            rows = rows + module.gate_up_proj_bias[expert] if module.has_bias else rows
            rows = module._apply_gate(rows)
        else:
            rows = rows + module.up_proj_bias[expert] if module.has_bias else rows
            rows = module.act_fn(rows)
        rows = grouped_linear(name, rows, *second, plan.expert_offsets)
        rows = rows + module.down_proj_bias[expert] if module.has_bias else rows
        if getattr(module, "has_post_expert_norm", False):
            rows = module.post_expert_norm(rows)
        return combine(rows, plan, top_k_weights).to(hidden_states.dtype)

    return experts
