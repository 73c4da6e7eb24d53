"""`convert`: swap the linears and experts of a model for FP8 ones, in place."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from ..kernels.checks import FLOATS, check_tensor
from ..kernels.experts import swiglu
from .experts import GroupedExperts
from .linear import FP8Linear
from .parts import parts_of

# Small, and what they decide is not forgiving: output heads, routers, gates to one number, what
# weighs tokens in sparse and linear attention, projections of multi-token prediction. Published FP8
# checkpoints keep them too.
DEFAULT_SKIP = (
    *("lm_head", "gate", "router", "shared_expert_gate"),
    *("indexer.weights_proj", "in_proj_ba", "in_proj_b", "in_proj_a", "eh_proj", "shared_head"),
)

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
    only: str | Iterable[str] | None = None,
) -> nn.Module:
    """Swap every `nn.Linear` and every experts module for `FP8Linear` and `GroupedExperts`.

    Weights are quantized one module at a time, so the peak is the model and one module. A model
    on the meta device is swapped without weights, to be loaded into. Experts modules are those
    with stacked `gate_up_proj` [E, 2I, H], gate rows first, and `down_proj` [E, H, I], as
    transformers 5 has them, with SwiGLU or its clamped variant.

    Left alone are subclasses of `nn.Linear`, and linears of `nn.TransformerEncoderLayer`: code
    that holds those reads their weights instead of calling them.

    Args:
        model: changed in place.
        skip: names to leave as they are, with all below them: a dotted name or part of one
            ("lm_head", "mlp.gate"), or a pattern ("*.layers.0.*"). It takes the place of the
            default, `moefp8.layers.DEFAULT_SKIP`: output heads, routers, gates and their like.
        only: exact dotted names to swap, and no others; then `skip` is not looked at.

    Returns:
        `model`; or its replacement, if `model` itself is to be swapped.

    Raises:
        TypeError: a weight that is no bf16, fp16 or fp32.
        ValueError: an experts module of another make, a part that `shard` left, a name in `only`
            that is neither a linear nor experts, a name in `skip` that is nowhere in the model. In
            all cases the model is unchanged.
    """
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    only = (only,) if isinstance(only, str) else only
    chosen = _skipping(model, skip) if only is None else _named(model, tuple(only))
    limits = {name: _check(name, module) for name, module in chosen.items()}
    swapped: dict[int, nn.Module] = {}  # a module under two names stays one module
    for name, module in chosen.items():
        if id(module) not in swapped:
            swapped[id(module)] = _swap(module, limits[name])
        if not name:
            return swapped[id(module)]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, swapped[id(module)])
    return model


def _skipping(model: nn.Module, skip: tuple[str, ...]) -> dict[str, nn.Module]:
    """All that can be swapped, but for what `skip` names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for part in skip:
        if part not in DEFAULT_SKIP and not any(matches(name, part) for name in modules):
            raise ValueError(f"convert: every name in skip must be in the model, got {part!r}")
    return {
        name: module
        for name, module in modules.items()
        if _can_swap(module)
        and not any(matches(name, part) for part in skip)
        and not isinstance(modules[name.rpartition(".")[0]], nn.TransformerEncoderLayer)
    }


def _named(model: nn.Module, only: tuple[str, ...]) -> dict[str, nn.Module]:
    """What `only` names, but for what is FP8 already."""
    modules = dict(model.named_modules(remove_duplicate=False))
    done = {n for n, m in modules.items() if isinstance(m, FP8Linear | GroupedExperts)}
    wrong = [n for n in only if n not in done and (n not in modules or not _can_swap(modules[n]))]
    if wrong:
        raise ValueError(
            "convert: every name in only must be an nn.Linear or an experts module of the model, "
            f"got {', '.join(wrong[:5])}"
        )
    return {name: modules[name] for name in only if name not in done}


def matches(name: str, part: str) -> bool:
    """Whether part is a dotted piece of name, or a pattern (fnmatch) of all of it."""
    return f".{part}." in f".{name}." or fnmatchcase(name, part)


def _can_swap(module: nn.Module) -> bool:
    return type(module) is nn.Linear or bool(_expert_weights(module))


def _swap(module: nn.Module, swiglu_limit: float | None) -> nn.Module:
    if isinstance(module, nn.Linear):
        return FP8Linear.from_linear(module)
    experts = GroupedExperts.from_weights(*_expert_weights(module), swiglu_limit=swiglu_limit)
    return experts.train(module.training)


def _expert_weights(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """(gate_up_proj, down_proj) if `module` stacks experts in BF16 or such, else ()."""
    weights = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    if isinstance(module, GroupedExperts):
        return ()
    stacked = tuple(w for w in weights if isinstance(w, torch.Tensor) and w.ndim == 3)
    return stacked if len(stacked) == 2 else ()


def _check(name: str, module: nn.Module) -> float | None:
    """Raise unless `module` can be swapped; return the SwiGLU limit if it is experts."""
    if parts_of(module):
        raise ValueError(f"convert: {name} is one rank's part of a layer; convert before shard")
    if module._forward_hooks or module._forward_pre_hooks:
        raise _refusal(name, module, "must have no forward hooks, which would be lost")
    for parameter_name, parameter in module.named_parameters():
        check_tensor("convert", f"{name}.{parameter_name}".lstrip("."), parameter, FLOATS)
    return None if isinstance(module, nn.Linear) else _check_experts(name, module)


def _refusal(name: str, module: nn.Module, what: str) -> ValueError:
    return ValueError(
        f"convert: {name} ({type(module).__name__}) {what}; to leave it as it is, pass "
        f"skip=(*moefp8.layers.DEFAULT_SKIP, {name!r})"
    )


def _check_experts(name: str, module: nn.Module) -> float | None:
    """The SwiGLU limit of an experts module; ValueError if it computes anything else."""
    refuse = partial(_refusal, name, module)
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
    limits = swiglu_limits(module)
    if not limits:
        raise refuse(
            "must compute silu(gate) * up or its clamped variant (its act_fn or _apply_gate is "
            "asked for it)"
        )
    return limits[0]


def swiglu_limits(module: nn.Module) -> list[float | None]:
    """The limits with which SwiGLU is what `module` makes of gate and up; none if it is not."""
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
