"""Run experts modules on random tokens, and compare with what `GroupedExperts` computes.

Attributes do not tell in which order rows lie, nor what a forward adds, scales or drops. E experts,
H hidden, T tokens, k choices.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import nn

from ...functional.swiglu import swiglu
from .stacks import Stacks, stated_limits
from .trial import attributes_of, is_small, random_weights, told

_TOKEN_SIZES = (0.25, 1.0, 4.0, 8.0, 16.0, 32.0)  # from small to large, so that clamps show
_SCORES = (0.3, 0.7, 1.0, 0.02, 2.5, -0.5)  # a forward that clamps or normalizes them is noticed
_NUM_OF_LARGE = 12  # how many experts are run if they are large
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.02, torch.float16: 5e-3}


class Routing(NamedTuple):
    """What experts modules take: x [T, H], ids chosen [T, k], scores [T, k]."""

    x: torch.Tensor
    chosen: torch.Tensor
    scores: torch.Tensor


# (the SwiGLU limit of an experts module, None), or (None, how it differs from SwiGLU experts)
Probed = tuple[float | None, str | None]


def probe(module: nn.Module, known: dict[Any, Probed]) -> Probed:
    """Run `module`, unless another of its make is among those known."""
    key = _make_of(module)
    if key is None or key not in known:
        known[key] = _probe(module)
    return known[key]


def _make_of(module: nn.Module) -> Any:
    """A key that is equal for modules that differ in their weights alone; None if unknown."""
    if any(True for _ in module.buffers()):
        return None
    made = (
        (type(child), *sorted((name, told(x)) for name, x in attributes_of(child).items()))
        for child in module.modules()
    )
    weights = ((n, w.shape, w.dtype, w.device) for n, w in module.named_parameters())
    return (*made, *weights)


@torch.no_grad()
def _probe(module: nn.Module) -> Probed:
    random = torch.Generator().manual_seed(0)
    with random_weights(module, random) as (stacks, changed):
        with torch.autocast(stacks.down.device.type, enabled=False):
            limit, problem = _compare(module, stacks, random)
        if problem is None and (name := changed()):
            problem = f"must have a forward that changes nothing in it, but that changes {name}"
    return limit, problem


def _compare(module: nn.Module, stacks: Stacks, random: torch.Generator) -> Probed:
    forward, limits = _forward_of(module), [*dict.fromkeys(stated_limits(module)), None]
    for routing in _routings(stacks, limits, random):
        try:
            came = forward(*routing)
        except Exception as error:  # a forward of others may raise anything
            return None, (
                "must have forward(hidden_states [T, H], top_k_index and top_k_weights [T, k]), "
                f"but that raised {type(error).__name__}: {str(error)[:200]}"
            )
        if not isinstance(came, torch.Tensor) or came.numel() != routing.x.numel():
            return None, f"must give one tensor [T, H], got {type(came).__name__}"
        came = came.reshape(routing.x.shape).float()
        fitting = [x for x in limits if _fits(came, stacks, routing, partial(swiglu, limit=x))]
        if not fitting:
            return None, _difference(came, stacks, routing)
        limits = fitting
    if _counts_what_is_elsewhere(forward, stacks, limits[0], random):
        return None, "must count the id E with weight 0, as an expert that is held elsewhere"
    return limits[0], None


Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _worst_row(
    came: torch.Tensor, stacks: Stacks, routing: Routing, activation: Activation
) -> float:
    """The largest relative error of a row."""
    wanted = _reference(activation, stacks, routing)
    return float(((came - wanted).norm(dim=1) / wanted.norm(dim=1)).nan_to_num(torch.inf).max())


def _fits(came: torch.Tensor, stacks: Stacks, routing: Routing, activation: Activation) -> bool:
    return _worst_row(came, stacks, routing, activation) < _TOLERANCE[routing.x.dtype]


def _difference(came: torch.Tensor, stacks: Stacks, routing: Routing) -> str:
    off = 100 * _worst_row(came, stacks, routing, swiglu)
    is_swapped = _fits(came, stacks, routing, lambda gate, up: swiglu(up, gate))
    order = "; its up rows come before its gate rows" if is_swapped else ""
    return (
        "must compute silu(gate) * up or its clamped variant, gate rows first, weighted and "
        f"summed, for any number of tokens and choices: on {len(came)} random tokens of "
        f"{routing.chosen.shape[1]} choices, rows of its forward are up to "
        f"{max(off, 1):.0f} % off{order}"
    )


def _counts_what_is_elsewhere(
    forward: Callable[..., Any], stacks: Stacks, limit: float | None, random: torch.Generator
) -> bool:
    """Whether the id E adds anything. Most modules do not take it."""
    if stacks.down.is_cuda:  # an id out of range would be the end of the process
        return False
    x, chosen, scores = _routing(stacks, 4, 1, range(1), _TOKEN_SIZES[:1], random)
    elsewhere = torch.full_like(chosen, len(stacks.down))
    routing = Routing(x, torch.cat((chosen, elsewhere), dim=1), scores.repeat(1, 2))
    try:
        came = forward(*routing).reshape(routing.x.shape).float()
    except Exception:  # it takes no such ids, so it will get none
        return False
    return not _fits(came, stacks, routing, partial(swiglu, limit=limit))


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The module's forward; in transformers, the loop that its config may replace."""
    forward = type(module).forward
    chosen_by_config = hasattr(getattr(module, "config", None), "_experts_implementation")
    forward = unwrap(forward) if chosen_by_config and hasattr(module, "_apply_gate") else forward
    return lambda *inputs: forward(module, *inputs)


# ---- What goes in ----


def _routings(
    stacks: Stacks, limits: Sequence[float | None], random: torch.Generator
) -> Iterator[Routing]:
    """Yield all experts in turn; all tokens to one, so that a capacity would show; 3 choices."""
    num_experts = len(stacks.down)
    num_run = num_experts if is_small(stacks.down) else min(num_experts, _NUM_OF_LARGE)
    experts = [number * (num_experts - 1) // max(num_run - 1, 1) for number in range(num_run)]
    sizes = [*_TOKEN_SIZES]
    if stacks.down.dtype != torch.float16:  # FP16 would overflow
        sizes += [4.0 * limit for limit in limits if limit is not None and limit > 8]
    num_tokens = max(len(sizes), math.ceil(num_run / 2))
    yield _routing(stacks, num_tokens, 2, experts, sizes, random)
    yield _routing(stacks, 64, 1, experts[-1:], sizes, random)
    yield _routing(stacks, 9, 3, experts, sizes, random)


def _routing(
    stacks: Stacks,
    num_tokens: int,
    top_k: int,
    experts: Sequence[int],
    sizes: Sequence[float],
    random: torch.Generator,
) -> Routing:
    """The experts in turn, top_k of them for a token, or all if there are fewer."""
    top_k = min(top_k, len(stacks.down))
    shape = num_tokens, stacks.down.shape[1]
    x = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")
    x *= _in_turn(sizes, (num_tokens, 1), torch.float32)
    chosen = _in_turn(experts, (num_tokens, top_k), torch.int64)
    scores = _in_turn(_SCORES, (num_tokens, top_k), torch.float32)
    device, dtype = stacks.down.device, stacks.down.dtype
    return Routing(x.to(device, dtype), chosen.to(device), scores.to(device, dtype))


def _in_turn(values: Sequence[float], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    each = torch.tensor(values, dtype=dtype, device="cpu")
    number = torch.arange(math.prod(shape), device="cpu").reshape(shape)
    return each[number % len(values)]


def _reference(activation: Activation, stacks: Stacks, routing: Routing) -> torch.Tensor:
    """The sum of the experts' outputs, fp32 [T, H]; the id E adds nothing."""
    x, chosen, scores = routing
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        if expert >= len(stacks.down):
            continue
        token, choice = torch.where(chosen == expert)
        rows = x[token].float()
        gate_up = torch.cat([rows @ weight[expert].float().t() for weight in stacks.gate_up], dim=1)
        y = activation(*gate_up.chunk(2, dim=1)).float() @ stacks.down[expert].float().t()
        result.index_add_(0, token, scores[token, choice, None].float() * y)
    return result
