"""`convert`: swap the linears and experts of a model for FP8 ones, in place."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

import torch
from torch import nn

from .experts import GroupedExperts, swiglu
from .linear import FP8Linear

# Small, and what they decide is not forgiving: output heads, routers, gates to one number.
DEFAULT_SKIP = ("lm_head", "gate", "router", "shared_expert_gate")

# What transformers says of an experts module, where it is as `GroupedExperts` is.
_EXPERTS_FLAGS = {
    "is_transposed": False,
    "is_concatenated": True,
    "has_bias": False,
    "has_gate": True,
    "has_post_expert_norm": False,
}


@torch.no_grad()
def convert(
    model: nn.Module,
    skip: str | Iterable[str] = DEFAULT_SKIP,
    only: Collection[str] | None = None,
) -> nn.Module:
    """Swap every `nn.Linear` and every experts module for `FP8Linear` and `GroupedExperts`.

    Weights are quantized one module at a time, so the peak is the model and one module. A model
    on the meta device is swapped without weights, to be loaded into. Experts modules are those
    with stacked `gate_up_proj` [E, 2I, H], gate rows first, and `down_proj` [E, H, I], as
    transformers 5 has them, with SwiGLU or its clamped variant.

    Args:
        model: changed in place. Subclasses of `nn.Linear` are left alone.
        skip: names to leave as they are, with all below them: a dotted name or part of one
            ("lm_head", "mlp.gate"), or a pattern ("*.layers.0.*").
        only: exact dotted names to swap, and no others; then `skip` is not looked at.

    Returns:
        `model`; or its replacement, if `model` itself is to be swapped.

    Raises:
        ValueError: an experts module of another make, or a name in `only` that is none of both.
            The model is then unchanged.
    """
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    chosen: dict[str, nn.Module] = {}
    limits: dict[str, float | None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name not in only if only is not None else _is_skipped(name, skip):
            continue
        if type(module) is nn.Linear:
            chosen[name] = module
        elif _expert_weights(module):
            chosen[name] = module
            limits[name] = _check_experts(name, module)
    if only is not None and (unknown := sorted(set(only) - set(chosen))):
        raise ValueError(
            f"convert: every name in only must be an nn.Linear or an experts module of the model, "
            f"got {', '.join(unknown[:5])}"
        )
    swapped: dict[int, nn.Module] = {}  # a module under two names stays one module
    for name, module in chosen.items():
        if id(module) not in swapped:
            swapped[id(module)] = _swap(module, limits.get(name))
        if not name:
            return swapped[id(module)]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, swapped[id(module)])
    return model


def _swap(module: nn.Module, swiglu_limit: float | None) -> nn.Module:
    if isinstance(module, nn.Linear):
        return FP8Linear.from_linear(module)
    experts = GroupedExperts.from_weights(*_expert_weights(module), swiglu_limit=swiglu_limit)
    return experts.train(module.training)


def _is_skipped(name: str, skip: tuple[str, ...]) -> bool:
    return any(f".{part}." in f".{name}." or fnmatchcase(name, part) for part in skip)


def _expert_weights(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """(gate_up_proj, down_proj) if `module` stacks experts in BF16 or such, else ()."""
    weights = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    if isinstance(module, GroupedExperts):
        return ()
    stacked = tuple(w for w in weights if isinstance(w, torch.Tensor) and w.ndim == 3)
    return stacked if len(stacked) == 2 else ()


def _check_experts(name: str, module: nn.Module) -> float | None:
    """The SwiGLU limit of an experts module; ValueError if it computes anything else."""

    def refuse(what: str) -> ValueError:
        return ValueError(f"convert: {name} ({type(module).__name__}) {what}; add it to skip")

    for attribute, wanted in _EXPERTS_FLAGS.items():
        if getattr(module, attribute, wanted) != wanted:
            raise refuse(f"must have {attribute} = {wanted}, got {not wanted}")
    extra = set(dict(module.named_parameters())) - {"gate_up_proj", "down_proj"}
    if extra:
        raise refuse(f"must have no parameters but gate_up_proj and down_proj, got {sorted(extra)}")
    gate_up, down = (list(weight.shape) for weight in _expert_weights(module))
    if gate_up != [down[0], 2 * down[2], down[1]]:
        raise refuse(
            f"must hold gate_up_proj [E, 2I, H] and down_proj [E, H, I], got {gate_up} and {down}"
        )
    gate, up = torch.meshgrid(
        torch.linspace(-30, 30, 61), torch.linspace(-30, 30, 61), indexing="ij"
    )
    came = _gated(module, gate, up)
    if came is None:
        raise refuse("has neither act_fn nor _apply_gate, so its activation is unknown")
    for limit in (None, getattr(module, "swiglu_limit", None), getattr(module, "limit", None)):
        if torch.allclose(came.float(), swiglu(gate, up, limit), rtol=1e-4, atol=1e-4):
            return limit
    raise refuse("must compute silu(gate) * up or its clamped variant, but its gate does not")


def _gated(module: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """What the module makes of gate and up: asked, not guessed from a class name."""
    apply_gate, act_fn = getattr(module, "_apply_gate", None), getattr(module, "act_fn", None)
    if callable(apply_gate):
        return apply_gate(torch.cat((gate, up), dim=-1))
    return act_fn(gate) * up if callable(act_fn) else None
