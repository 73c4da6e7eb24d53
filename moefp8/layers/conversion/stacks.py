"""Experts modules that store their weights in stacks, and their attributes.

E experts, H hidden, I intermediate.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from ...functional.activation import activate
from ...functional.expert_biases import bias_shapes
from ...functional.kept import is_plain
from ...kernels.common.activation import KINDS, Activation
from ..experts import GroupedExperts

STACKS = ("gate_up_proj", "down_proj")
_STACK_NAMES = (STACKS, ("w13", "w2"))  # transformers' names, and vLLM's
STACK_NAMES = frozenset(name for names in _STACK_NAMES for name in names)

# The attributes of experts modules of transformers, with the values that suit `GroupedExperts`.
_FLAGS = {"has_gate": True, "has_post_expert_norm": False}


@dataclass(frozen=True)
class Stacks:
    """Views of the weights that an experts module stores in the parameters `names`.

    gate_up: one stack [E, 2I, H], gate rows first, or gate and up [E, I, H]; down: [E, H, I].
    gate_up_bias: as many [E, 2I] or [E, I], or none; down_bias: [E, H], or None.
    shapes_of: the shapes of the parameters for other H and I, by name.
    is_transposed: whether the parameters are [E, in, out].
    """

    gate_up: tuple[torch.Tensor, ...]
    down: torch.Tensor
    names: tuple[str, ...]
    shapes_of: Callable[[int, int], dict[str, tuple[int, ...]]]
    gate_up_bias: tuple[torch.Tensor, ...] = ()
    down_bias: torch.Tensor | None = None
    is_transposed: bool = False

    @property
    def is_rearranged(self) -> bool:
        """Whether parameters of these names have another order here than in `GroupedExperts`.

        They are transposed, or have rows of gate and of up in turns.
        """
        is_in_turns = len(self.gate_up) > 1 and self.names[:2] in _STACK_NAMES
        return self.is_transposed or is_in_turns

    @property
    def biases(self) -> dict[str, torch.Tensor]:
        """The biases as `GroupedExperts` names them: [E, 2I], gate first, and [E, H]."""
        made = {}
        if self.gate_up_bias:
            first, *more = self.gate_up_bias
            made["gate_up_proj_bias"] = torch.cat([first, *more], 1) if more else first
        if self.down_bias is not None:
            made["down_proj_bias"] = self.down_bias
        return made


def stacks_of(module: nn.Module) -> Stacks | None:
    """The stacks of an experts module of a known make, else None; their shapes are not checked."""
    if isinstance(module, GroupedExperts):
        return None
    for names in _STACK_NAMES:
        weights: list[Any] = [getattr(module, name, None) for name in names]
        if all(isinstance(w, torch.Tensor) and w.ndim == 3 for w in weights):
            return _stacks_of(module, names, *weights)
    return _dbrx_stacks(module)


def _stacks_of(
    module: nn.Module, names: tuple[str, ...], gate_up: torch.Tensor, down: torch.Tensor
) -> Stacks:
    """Stacks as the module's attributes say; those of transformers are [out, in] by default."""
    is_transposed = bool(getattr(module, "is_transposed", False))
    biases: dict[str, torch.Tensor] = {}
    for name in names:
        bias: Any = getattr(module, f"{name}_bias", None)
        if isinstance(bias, torch.Tensor) and bias.ndim == 2:
            biases[f"{name}_bias"] = bias
    if is_transposed:
        gate_up, down = gate_up.mT, down.mT
    num_experts = len(down)

    def shapes_of(h: int, i: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns) in zip(names, ((2 * i, h), (h, i)), strict=True):
            matrix = (columns, rows) if is_transposed else (rows, columns)
            shapes[name] = (num_experts, *matrix)
            if f"{name}_bias" in biases:
                shapes[f"{name}_bias"] = (num_experts, rows)
        return shapes

    def halves(x: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        if x is None:
            return ()
        if getattr(module, "is_concatenated", True):
            return (x,)
        return x[:, ::2], x[:, 1::2]  # rows of gate and of up in turns

    gate_up_name, down_name = (f"{name}_bias" for name in names)
    return Stacks(
        halves(gate_up),
        down,
        (*names, *biases),
        shapes_of,
        halves(biases.get(gate_up_name)),
        biases.get(down_name),
        is_transposed,
    )


def _dbrx_stacks(module: nn.Module) -> Stacks | None:
    """DBRX's stacks: gate, up and the transpose of down, each [E * I, H], in a child called mlp."""
    num_experts, home = getattr(module, "num_experts", None), getattr(module, "mlp", None)
    weights: list[Any] = [getattr(home, name, None) for name in ("w1", "v1", "w2")]
    if not all(isinstance(w, torch.Tensor) and w.ndim == 2 for w in weights):
        return None
    if type(num_experts) is not int or num_experts < 1 or len({w.shape for w in weights}) > 1:
        return None
    if weights[0].shape[0] % num_experts:
        return None
    gate, up, down = (w.unflatten(0, (num_experts, -1)) for w in weights)
    names = "mlp.w1", "mlp.v1", "mlp.w2"

    def shapes_of(h: int, i: int) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(names, (num_experts * i, h))

    return Stacks((gate, up), down.transpose(1, 2), names, shapes_of)


def form_problem(module: nn.Module, stacks: Stacks) -> str | None:
    """How a module's attributes, tensors or shapes differ from those of `GroupedExperts`."""
    for attribute, wanted in _FLAGS.items():
        if getattr(module, attribute, wanted) != wanted:
            return f"must have {attribute} = {wanted}, got {not wanted}"
    extra = set(module.state_dict()) - set(stacks.names)
    if extra:
        return (
            f"must have no parameters but {' and '.join(stacks.names)}, and no buffers that are "
            f"saved, got {sorted(extra)}"
        )
    gate_up, down = list(stacks.gate_up[0].shape), list(stacks.down.shape)
    gate_up[1] *= len(stacks.gate_up)
    names = stacks.names if stacks.names[:2] in _STACK_NAMES else STACKS
    if gate_up != [down[0], 2 * down[2], down[1]]:
        if getattr(module, "is_transposed", False):
            gate_up, down = ([e, columns, rows] for e, rows, columns in (gate_up, down))
            shapes = "[E, H, 2I]", "[E, I, H]"
        else:
            shapes = "[E, 2I, H]", "[E, H, I]"
        held = " and ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=False))
        return f"must hold {held}, got {gate_up} and {down}"
    bias_shape = bias_shapes(*stacks.down.shape)
    for name, bias in stacks.biases.items():
        if bias.shape != bias_shape[name]:
            return f"must hold {name} {list(bias_shape[name])}, got {list(bias.shape)}"
    if 0 in down:
        return f"must hold weights, got {names[0]} {gate_up} and {names[1]} {down}"
    return None


def tensor_problem(module: nn.Module, names: Sequence[str]) -> str | None:
    """Why the tensors of those names cannot be quantized, or be master weights."""
    devices = set()
    for name in names:
        home, _, leaf = name.rpartition(".")
        weight = module.get_submodule(home)._parameters.get(leaf)
        if weight is None:
            return f"must hold {name} as a parameter, got a buffer or another attribute"
        if not is_plain(weight):
            return f"must hold {name} as a plain tensor, got a {type(weight).__name__}"
        if weight.layout != torch.strided:
            layout = str(weight.layout).removeprefix("torch.")
            return f"must hold {name} as a dense tensor, got layout {layout}"
        devices.add(str(weight.device))
    if len(devices) > 1:
        return f"must hold {' and '.join(names)} on one device, got {', '.join(sorted(devices))}"
    return None


def stated_limits(module: nn.Module) -> list[float]:
    """The limits at which a module may clamp gate and up."""
    stated: list[Any] = [getattr(module, name, None) for name in ("swiglu_limit", "limit")]
    return [x for x in stated if type(x) in (int, float) and math.isfinite(x)]


def activations_of(module: nn.Module) -> list[Activation]:
    """The activations that equal the module's `_apply_gate`, or `act_fn(gate) * up`."""
    grid = torch.linspace(-30, 30, 61, dtype=torch.float32, device="cpu")  # whatever defaults are
    gate, up = torch.meshgrid(grid, grid, indexing="ij")
    apply_gate, act_fn = getattr(module, "_apply_gate", None), getattr(module, "act_fn", None)
    if callable(apply_gate):
        concatenated = getattr(module, "is_concatenated", True)
        pair = (gate, up) if concatenated else (torch.stack((gate, up), dim=-1).flatten(-2),)
        came = apply_gate(torch.cat(pair, dim=-1))
    elif callable(act_fn):
        came = act_fn(gate) * up
    else:
        return []
    alpha = getattr(module, "alpha", None)
    return [
        activation
        for kind, limit in product(KINDS, (None, *stated_limits(module)))
        for activation in [Activation(kind, limit, alpha if kind == "gpt_oss" else None)]
        if torch.allclose(came.float(), activate(gate, up, activation), rtol=1e-4, atol=1e-4)
    ]


def foreign_experts(name: str, module: nn.Module) -> Sequence[int]:
    """The shape of a stack that `module` holds if it is experts of another make, else ()."""
    is_expert = "expert" in f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    if not is_expert or isinstance(module, GroupedExperts):
        return ()
    shapes = (tuple(w.shape) for w in module._parameters.values() if w is not None and w.ndim == 3)
    return max(shapes, default=())
