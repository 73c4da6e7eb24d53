"""Run experts modules on random tokens, and compare with what `GroupedExperts` computes.

Attributes do not say in which order rows are, nor what a forward adds, scales or drops. E experts,
H hidden, T tokens, k choices.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import nn

from ...functional.activation import activate
from ...kernels.common.activation import SWIGLU, Activation
from .source_code import Reach, in_reach
from .stacks import Stacks, activations_of, stated_limits
from .trial import attributes_of, fingerprint, random_weights

TOKEN_SIZES = (0.25, 1.0, 4.0, 8.0, 16.0, 32.0)  # from small to large, so that clamps show
_SCORES = (0.3, 0.7, 1.0, 0.02, 2.5, -0.5)  # a forward that clamps or normalizes them is noticed
_MAX_TOKENS = 1 << 16  # of one expert: limits above that are not looked for
NARROW = 32  # H and I, where they can be chosen: many tokens cost little then
# Every forward is tried with up to USUAL_TOKENS tokens of one expert: with fewer if they take more
# than USUAL_WORK products, or more elements at a time than _USUAL_ROOM and a quarter of the
# weights.
USUAL_TOKENS, USUAL_WORK, _USUAL_ROOM = 1 << 12, 1 << 34, 1 << 21
NAMED_WORK, _NAMED_ROOM = 1 << 36, 1 << 26  # bounds of what else is run at full width
FEW_TOKENS = 64  # a forward has to take so many for one expert
MAX_CHOICES = 64  # of a token
_MAX_KEY = 1 << 16  # elements of buffers that are compared with those of other layers
_CHUNK = 1 << 20  # elements of a weight of which an FP32 copy is made at a time
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.02, torch.float16: 5e-3}


class Routing(NamedTuple):
    """The inputs of experts modules: x [T, H], ids chosen [T, k], scores [T, k]."""

    x: torch.Tensor
    chosen: torch.Tensor
    scores: torch.Tensor

    def repeated(self, count: int) -> "Routing":
        return Routing(*(x.repeat(count, 1) for x in self))


# (the activation of an experts module, None), or (SWIGLU, how it differs from ours)
Probed = tuple[Activation, str | None]


def probe(module: nn.Module, known: dict[Any, Probed], trainable: bool = False) -> Probed:
    """Run `module`, unless another of its make is among those known.

    trainable: it has to compute the same in training mode.
    """
    reach = in_reach(module)
    make = make_of(module, reach)
    for training in (False, True) if trainable else (False,):
        key = make, training
        if make is None or key not in known:
            known[key] = _probe(module, training, reach.names)
        if known[key][1] is not None:
            break
    return known[key]


def make_of(module: nn.Module, reach: Reach) -> Any:
    """A key that is equal for modules that differ in their weights alone; None if unknown.

    An integer that no forward reads, such as the number of a layer, makes no difference either.
    """
    buffers = [*module.named_buffers()]
    if sum(x.numel() for _, x in buffers) > _MAX_KEY:
        return None
    attributes = [(type(child), attributes_of(child)) for child in module.modules()]
    integers = {name for _, held in attributes for name, x in held.items() if type(x) is int}
    skipped = reach.unread(integers)
    made = (
        (
            kind,
            *sorted(
                (n, fingerprint(x))
                for n, x in held.items()
                if type(x) is not int or n not in skipped
            ),
        )
        for kind, held in attributes
    )
    tensors = ((n, x.shape, x.dtype, x.device) for n, x in (*module.named_parameters(), *buffers))
    values = (None if x.is_meta else repr(x.tolist()) for _, x in buffers)
    return (*made, *tensors, *values)


@torch.no_grad()
def _probe(module: nn.Module, training: bool, names: Iterable[str]) -> Probed:
    """Run it at two widths if it takes any: numbers are tried where that costs little.

    names: those of its `Reach`.
    """
    random = torch.Generator().manual_seed(0)
    activations = _candidates(module)
    forward, has_run = _forward_of(module), False
    for widest in (NARROW, None):
        with random_weights(module, random, training, widest) as (stacks, changed):
            with torch.autocast(stacks.down.device.type, enabled=False):
                with suppress(Exception):  # what a first call keeps for later ones is no change
                    forward(*_routing(stacks, 1, 1, range(1), TOKEN_SIZES[:1], random))
                reach = in_reach(module, names)
                few = _few(stacks, activations, has_run, random)
                fitting, problem = _compare(forward, stacks, activations, few)
                if problem is not None and widest is not None and not changed(reach):
                    continue  # it may know H or I
                if problem is None:
                    many = _many(stacks, None if has_run else numbers_of(reach.values), random)
                    fitting, problem = _compare(forward, stacks, fitting, many)
                if problem is None and _counts_what_is_elsewhere(
                    forward, stacks, fitting[0], random
                ):
                    problem = (
                        "must count the id E with weight 0, as an expert that is held elsewhere"
                    )
            if problem is None and (name := changed(reach)):
                problem = f"must have a forward that changes nothing in it, but that changes {name}"
        if problem is not None:
            return SWIGLU, problem
        activations, has_run = fitting, True
    return activations[0], None


def _candidates(module: nn.Module) -> list[Activation]:
    """SwiGLU and what its `_apply_gate` or `act_fn` computes, with each limit that it states.

    Runs alone would not tell the two GELUs from each other.
    """
    limits: list[float | None] = [*dict.fromkeys(stated_limits(module)), None]
    try:
        others = activations_of(module)
    except Exception:  # functions of others may raise anything
        others = []
    kinds = dict.fromkeys([SWIGLU, *(x._replace(limit=None) for x in others)])
    return [kind._replace(limit=limit) for kind in kinds for limit in limits]


def _compare(
    forward: Callable[..., Any],
    stacks: Stacks,
    activations: list[Activation],
    routings: Iterable[tuple[Routing, int]],
) -> tuple[list[Activation], str | None]:
    """Which of the activations fit, and how the forward differs from our experts, or None."""
    for routing, count in routings:
        try:
            came = forward(*routing.repeated(count))
        except Exception as error:  # a forward of others may raise anything
            if count > FEW_TOKENS:
                continue  # a guard, which changes no result
            return [], (
                "must have forward(hidden_states [T, H], top_k_index and top_k_weights [T, k]), "
                f"but that raised {type(error).__name__}: {str(error)[:200]}"
            )
        if not isinstance(came, torch.Tensor) or came.numel() != count * routing.x.numel():
            return [], f"must give one tensor [T, H], got {type(came).__name__}"
        came = came.reshape(-1, routing.x.shape[1]).float()
        fitting = [
            x for x in activations if _fits(came, stacks, routing, partial(activate, activation=x))
        ]
        if not fitting:
            return [], _difference(came, stacks, routing)
        activations = fitting
    return activations, None


Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _worst_row(came: torch.Tensor, stacks: Stacks, routing: Routing, formula: Formula) -> float:
    """The largest relative error of a row."""
    wanted = _reference(formula, stacks, routing)
    return float(((came - wanted).norm(dim=1) / wanted.norm(dim=1)).nan_to_num(torch.inf).max())


def _fits(came: torch.Tensor, stacks: Stacks, routing: Routing, formula: Formula) -> bool:
    return _worst_row(came, stacks, routing, formula) < TOLERANCE[routing.x.dtype]


def _difference(came: torch.Tensor, stacks: Stacks, routing: Routing) -> str:
    off = 100 * _worst_row(came, stacks, routing, activate)
    is_swapped = _fits(came, stacks, routing, lambda gate, up: activate(up, gate))
    order = "; its up rows come before its gate rows" if is_swapped else ""
    return (
        "must compute silu(gate) * up or another activation of ours, gate rows first, weighted and "
        f"summed, for any number of tokens and choices: on {len(came)} random tokens of "
        f"{routing.chosen.shape[1]} choices, rows of its forward are up to "
        f"{max(off, 1):.0f} % off{order}"
    )


def _counts_what_is_elsewhere(
    forward: Callable[..., Any], stacks: Stacks, activation: Activation, random: torch.Generator
) -> bool:
    """Whether the id E adds anything. Most modules do not take it."""
    if stacks.down.is_cuda:  # an id out of range would be the end of the process
        return False
    x, chosen, scores = _routing(stacks, 4, 1, range(1), TOKEN_SIZES[:1], random)
    elsewhere = torch.full_like(chosen, len(stacks.down))
    routing = Routing(x, torch.cat((chosen, elsewhere), dim=1), scores.repeat(1, 2))
    try:
        came = forward(*routing).reshape(routing.x.shape).float()
    except Exception:  # it takes no such ids, so it will get none
        return False
    return not _fits(came, stacks, routing, partial(activate, activation=activation))


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """The module's forward; in transformers, the loop that its config may replace."""
    forward = type(module).forward
    chosen_by_config = hasattr(getattr(module, "config", None), "_experts_implementation")
    forward = unwrap(forward) if chosen_by_config and hasattr(module, "_apply_gate") else forward
    return lambda *inputs: forward(module, *inputs)


# ---- What goes in ----


def numbers_of(values: dict[str, Any]) -> list[int]:
    """The numbers among values: at those that a forward names it may begin to compute otherwise."""
    numbers: set[int] = set()
    for value in values.values():
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, int | float) and 1 <= x <= _MAX_TOKENS:
                numbers.add(math.ceil(x))
    return sorted(numbers)


def _few(
    stacks: Stacks, activations: Sequence[Activation], has_run: bool, random: torch.Generator
) -> Iterator[tuple[Routing, int]]:
    """Yield routings of all experts in turn, and how often to repeat their tokens.

    has_run: whether the module has run at another width, so that little is left to try.
    """
    num_experts = len(stacks.down)
    sizes = [*TOKEN_SIZES]
    if stacks.down.dtype != torch.float16:  # FP16 would overflow
        limits = {x.limit for x in activations if x.limit is not None}
        sizes += [4.0 * limit for limit in sorted(limits) if limit > 8]
    num_tokens = max(len(sizes), math.ceil(num_experts / 2))
    yield _routing(stacks, num_tokens, 2, range(num_experts), sizes, random), 1
    if not has_run:
        yield _routing(stacks, 9, 3, range(num_experts), sizes, random), 1


def _many(
    stacks: Stacks, numbers: Sequence[int] | None, random: torch.Generator
) -> Iterator[tuple[Routing, int]]:
    """Yield few and many choices, and few and many tokens of one expert: a capacity shows.

    numbers: those that the forward names; None: many tokens alone.
    """
    num_experts, hidden_size, intermediate_size = stacks.down.shape
    sizes, around = TOKEN_SIZES[1:2], {n + i for n in numbers or () for i in (0, 1)}
    for top_k in () if numbers is None else sorted({1, 2, 3, 4, *around}):
        if top_k <= min(num_experts, MAX_CHOICES):
            yield _routing(stacks, 1, top_k, range(num_experts), sizes, random), 1
    work, width = 3 * hidden_size * intermediate_size, 4 * (hidden_size + intermediate_size)
    room = max(_USUAL_ROOM, num_experts * work // 4)
    usual = max(FEW_TOKENS, min(USUAL_TOKENS, USUAL_WORK // work, room // width))
    last = [num_experts - 1]
    num_tokens = 0
    for count in sorted({*around, usual + 1}):
        num_tokens += count
        is_cheap = num_tokens * work <= NAMED_WORK and count * width <= _NAMED_ROOM
        if count <= usual + 1 or is_cheap:
            yield _routing(stacks, 1, 1, last, sizes, random), count


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


def _reference(formula: Formula, stacks: Stacks, routing: Routing) -> torch.Tensor:
    """The sum of the experts' outputs, fp32 [T, H]; the id E adds nothing."""
    x, chosen, scores = routing
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        if expert >= len(stacks.down):
            continue
        token, choice = torch.where(chosen == expert)
        rows = x[token].float()
        gate_up = torch.cat(
            [product_fp32(rows, weight[expert]) for weight in stacks.gate_up], dim=1
        )
        if (bias := stacks.biases.get("gate_up_proj_bias")) is not None:
            gate_up = gate_up + bias[expert].float()
        y = product_fp32(formula(*gate_up.chunk(2, dim=1)).float(), stacks.down[expert])
        if stacks.down_bias is not None:
            y = y + stacks.down_bias[expert].float()
        result.index_add_(0, token, scores[token, choice, None].float() * y)
    return result


def product_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in FP32."""
    chunks = weight.split(max(1, _CHUNK // weight.shape[1]))
    return torch.cat([x @ chunk.float().t() for chunk in chunks], dim=1)
