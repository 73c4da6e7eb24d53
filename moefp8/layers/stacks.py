"""Experts modules whose weights lie in stacks, and what they compute of them.

E experts, H hidden, I intermediate, T tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import nn

from ..kernels.experts import swiglu
from .experts import GroupedExperts

STACKS = ("gate_up_proj", "down_proj")

# What transformers says of an experts module, where it is as `GroupedExperts` is.
_FLAGS = {
    "is_transposed": False,
    "is_concatenated": True,
    "has_bias": False,
    "has_gate": True,
    "has_post_expert_norm": False,
}
_TOKEN_SIZES = (0.25, 1.0, 4.0, 8.0, 16.0, 32.0)  # from small to large, so that clamps show
_SMALL = 1 << 24  # elements of weights up to which each expert gets random ones of its own
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}


@dataclass(frozen=True)
class Stacks:
    """What an experts module holds, without a copy. names: of the parameters.

    gate_up: one stack [E, 2I, H], gate rows first, or gate and up [E, I, H]; down: [E, H, I].
    """

    gate_up: tuple[torch.Tensor, ...]
    down: torch.Tensor
    names: tuple[str, ...]

    def fused(self) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up_proj [E, 2I, H] and down_proj [E, H, I]; a copy where gate and up lie apart."""
        is_fused = len(self.gate_up) == 1
        return self.gate_up[0] if is_fused else torch.cat(self.gate_up, dim=1), self.down


def stacks_of(module: nn.Module) -> Stacks | None:
    """The stacks of an experts module of a known make, else None; their shapes are not checked."""
    if isinstance(module, GroupedExperts):
        return None
    weights: list[Any] = [getattr(module, name, None) for name in STACKS]
    if all(isinstance(w, torch.Tensor) and w.ndim == 3 for w in weights):
        return Stacks((weights[0],), weights[1], STACKS)
    return _dbrx_stacks(module)


def _dbrx_stacks(module: nn.Module) -> Stacks | None:
    """DBRX: gate, up and the transpose of down, each [E * I, H], in a child called mlp."""
    num_experts = getattr(module, "num_experts", None)
    home, names = getattr(module, "mlp", None), ("w1", "v1", "w2")
    weights: list[Any] = [getattr(home, name, None) for name in names]
    if type(num_experts) is not int or not all(
        isinstance(w, torch.Tensor) and w.ndim == 2 and w.shape == weights[0].shape for w in weights
    ):
        return None
    if num_experts < 1 or weights[0].shape[0] % num_experts:
        return None
    gate, up, down = (w.unflatten(0, (num_experts, -1)) for w in weights)
    return Stacks((gate, up), down.transpose(1, 2), tuple(f"mlp.{name}" for name in names))


def flags_problem(module: nn.Module) -> str | None:
    """What transformers says of `module` that `GroupedExperts` is not."""
    for attribute, wanted in _FLAGS.items():
        if getattr(module, attribute, wanted) != wanted:
            return f"must have {attribute} = {wanted}, got {not wanted}"
    return None


def shapes_problem(module: nn.Module, stacks: Stacks) -> str | None:
    extra = set(dict(module.named_parameters())) - set(stacks.names)
    if extra:
        return f"must have no parameters but {' and '.join(stacks.names)}, got {sorted(extra)}"
    gate_up, down = list(stacks.gate_up[0].shape), list(stacks.down.shape)
    gate_up[1] *= len(stacks.gate_up)
    if gate_up != [down[0], 2 * down[2], down[1]]:
        return (
            f"must hold gate_up_proj [E, 2I, H] and down_proj [E, H, I], got {gate_up} and {down}"
        )
    return None


class Probe:
    """Runs experts modules on random tokens, once for each make, beside what FP8 would replace."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[float | None, str | None]] = {}

    def __call__(self, module: nn.Module) -> tuple[float | None, str | None]:
        """(the SwiGLU limit of module, None), or (None, how it differs from SwiGLU experts)."""
        key = _make_of(module)
        if key is None or key not in self._seen:
            self._seen[key] = _probe(module)
        return self._seen[key]


def _make_of(module: nn.Module) -> Any:
    """Equal for modules that differ in their weights alone; None if that cannot be told."""
    if any(True for _ in module.buffers()):
        return None
    made = []
    for child in module.modules():
        plain = {
            name: value
            for name, value in vars(child).items()
            if isinstance(value, int | float | str | bool | None) and name != "training"
        }
        others = {
            name: getattr(value, "__qualname__", type(value).__qualname__)
            for name, value in vars(child).items()
            if callable(value)
        }
        made.append((type(child), *sorted(plain.items()), *sorted(others.items())))
    weights = ((n, w.shape, w.dtype, w.device) for n, w in module.named_parameters())
    return (*made, *weights)


@torch.no_grad()
def _probe(module: nn.Module) -> tuple[float | None, str | None]:
    random = torch.Generator().manual_seed(0)
    with _random_weights(module, random) as stacks:
        inputs = _tokens(stacks, random)
        try:
            came = _forward_of(module)(*inputs)
        except Exception as error:  # whatever a forward of others raises
            return None, (
                "must have forward(hidden_states [T, H], top_k_index and top_k_weights [T, k]), "
                f"but that raised {type(error).__name__}: {str(error)[:200]}"
            )
        if not isinstance(came, torch.Tensor) or came.numel() != inputs[0].numel():
            return None, f"must give one tensor [T, H], got {type(came).__name__}"
        return _compare(module, stacks, inputs, came.reshape(inputs[0].shape).float())


def _compare(
    module: nn.Module, stacks: Stacks, inputs: tuple[torch.Tensor, ...], came: torch.Tensor
) -> tuple[float | None, str | None]:
    """What `Probe` gives, from what the forward of module gave for inputs."""
    tolerance = _TOLERANCE[inputs[0].dtype]
    limits = (None, getattr(module, "swiglu_limit", None), getattr(module, "limit", None))
    for limit in limits:
        if limit is not None and not isinstance(limit, int | float):
            continue
        if _worst_row(came, _reference(partial(swiglu, limit=limit), stacks, *inputs)) < tolerance:
            return limit, None
    off = _worst_row(came, _reference(swiglu, stacks, *inputs))
    swapped = _worst_row(came, _reference(lambda gate, up: swiglu(up, gate), stacks, *inputs))
    told = "; its up rows come before its gate rows" if swapped < tolerance else ""
    return None, (
        "must compute silu(gate) * up or its clamped variant, gate rows first, weighted and "
        f"summed: on random tokens, rows of its forward are up to {100 * off:.0f} % off that{told}"
    )


def _worst_row(came: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((came - wanted).norm(dim=1) / wanted.norm(dim=1)).nan_to_num(torch.inf).max())


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Of a module of transformers, the loop over experts under what its config chooses."""
    forward = type(module).forward
    chosen_by_config = hasattr(getattr(module, "config", None), "_experts_implementation")
    forward = unwrap(forward) if chosen_by_config and hasattr(module, "_apply_gate") else forward
    return lambda *inputs: forward(module, *inputs)


@contextmanager
def _random_weights(module: nn.Module, random: torch.Generator) -> Iterator[Stacks]:
    """The module with random weights in place of its own; FP32 on the CPU if it is on meta."""
    homes = [
        (child._parameters, name, parameter)
        for child in module.modules()
        for name, parameter in child._parameters.items()
        if parameter is not None
    ]
    training = [(child, child.training) for child in module.modules()]
    try:
        for home, name, parameter in homes:
            home[name] = _random_like(parameter, random)  # type: ignore[assignment]
        for child, _ in training:
            child.training = False
        stacks = stacks_of(module)
        if stacks is None:
            raise TypeError(f"{type(module).__name__} holds no stacks of experts")
        yield stacks
    finally:
        for home, name, parameter in homes:
            home[name] = parameter
        for child, was in training:
            child.training = was


def _draw(
    draw: Callable[..., torch.Tensor], shape: Sequence[int], random: torch.Generator
) -> torch.Tensor:
    return draw(shape, generator=random, dtype=torch.float32, device="cpu")


def _random_like(parameter: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Of large weights their own, if they are of use, else one entry of random ones for all."""
    shape = list(parameter.shape)
    is_large = parameter.numel() > _SMALL
    if is_large and not parameter.is_meta and _is_of_use(parameter[: len(_TOKEN_SIZES) + 1]):
        return parameter
    values = _draw(torch.randn, [1, *shape[1:]] if is_large else shape, random)
    values /= math.sqrt(shape[-1])
    if not parameter.is_meta:
        values = values.to(parameter.device, parameter.dtype)
    return values.expand(shape)


def _is_of_use(weights: torch.Tensor) -> bool:
    """Whether products with them tell one forward from another."""
    return bool(weights.isfinite().all()) and float(weights.float().std()) > 1e-3


def _tokens(
    stacks: Stacks, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A few tokens of two experts each: x [T, H], index [T, k], weights [T, k]."""
    num_experts, hidden_size, _ = stacks.down.shape
    like, sizes = stacks.down, torch.tensor(_TOKEN_SIZES, device="cpu")[:, None]
    x = _draw(torch.randn, (len(sizes), hidden_size), random) * sizes
    first = torch.arange(len(sizes), device="cpu")
    index = torch.stack((first, first + 1), dim=1)[:, : min(2, num_experts)] % num_experts
    weights = _draw(torch.rand, index.shape, random) + 0.25
    return x.to(like.device, like.dtype), index.to(like.device), weights.to(like.device, like.dtype)


def _reference(
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    stacks: Stacks,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """fp32 [T, H], in plain loops."""
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, chosen in enumerate(index.tolist()):
        for choice, expert in enumerate(chosen):
            gate_up = [weight[expert].float() @ x[token].float() for weight in stacks.gate_up]
            gate, up = torch.cat(gate_up).chunk(2)
            y = stacks.down[expert].float() @ activation(gate, up).float()
            result[token] += weights[token, choice].float() * y
    return result


def swiglu_limits(module: nn.Module) -> list[float | None]:
    """The limits with which SwiGLU is what `module` makes of gate and up; none if it is not.

    Its `_apply_gate` or `act_fn` is asked, not its forward.
    """
    grid = torch.linspace(-30, 30, 61, dtype=torch.float32, device="cpu")  # whatever the defaults
    gate, up = torch.meshgrid(grid, grid, indexing="ij")
    came = _gated(module, gate, up)
    limits = (None, getattr(module, "swiglu_limit", None), getattr(module, "limit", None))
    return [
        limit
        for limit in limits
        if came is not None
        and torch.allclose(came.float(), swiglu(gate, up, limit), rtol=1e-4, atol=1e-4)
    ]


def _gated(module: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """What the module makes of gate and up: asked, not guessed from a class name."""
    apply_gate, act_fn = getattr(module, "_apply_gate", None), getattr(module, "act_fn", None)
    if callable(apply_gate):
        concatenated = getattr(module, "is_concatenated", True)
        pair = (gate, up) if concatenated else (torch.stack((gate, up), dim=-1).flatten(-2),)
        return apply_gate(torch.cat(pair, dim=-1))
    return act_fn(gate) * up if callable(act_fn) else None


def foreign_experts(name: str, module: nn.Module) -> Sequence[int]:
    """The shape of a stack of experts of another make that `module` itself holds, else ()."""
    is_expert = "expert" in f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    if not is_expert or isinstance(module, GroupedExperts):
        return ()
    shapes = (tuple(w.shape) for w in module._parameters.values() if w is not None and w.ndim == 3)
    return max(shapes, default=())
