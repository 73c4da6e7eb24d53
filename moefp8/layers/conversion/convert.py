"""`convert`: swap the linears and experts of a model for FP8 ones, in place."""

import logging
import warnings
from typing import Any

import torch
from torch import nn

from ...functional.training.linear import Wgrad
from ...system.progress import Progress
from ..experts import GroupedExperts
from ..linear import FP8Linear
from ..module import FixedDtypeModule
from ..saving import adopt
from ..trainable import has_finite_scales
from .choose import Chosen, FilterFn, Overrides, Patterns, choose, kind_of
from .conversion import Conversion
from .selection import is_conv1d
from .stacks import stacks_of

_LOGGER = logging.getLogger("moefp8")


@torch.no_grad()
def convert(
    model: nn.Module,
    skip: Patterns | None = (),
    only: Patterns | None = None,
    *,
    filter_fn: FilterFn | None = None,
    overrides: Overrides | None = None,
    trainable: bool = False,
    wgrad: Wgrad = "128x1",
    return_conversion: bool = False,
    progress: bool | None = None,
) -> Any:
    """Swap linears and experts modules for `FP8Linear` and `GroupedExperts`.

    Weights are quantized one module at a time, so the peak is the model and one module. A model
    on the meta device is swapped without weights, to be loaded into. `convert` swaps `nn.Linear`,
    transformers' `Conv1D`, DBRX's experts, and experts stacked as `gate_up_proj` [E, 2I, H], gate
    rows first, and `down_proj` [E, H, I]. Experts are first run on a few random tokens: they must
    compute SwiGLU, or its clamped variant, and nothing else.

    By default these stay: output heads, routers, gates to one number, what the model keeps in FP32,
    and linears whose weights are read by others (`moefp8.layers.conversion.selection`). The result
    is logged ("moefp8", INFO); it is a warning if nothing is swapped, or if other experts stay.

    Args:
        model: changed in place.
        skip: further names that stay, with all below them: a dotted name or part of one
            ("lm_head", "mlp.gate"), or a pattern ("*.layers.0.*").
        only: the only names, parts or patterns to swap. The full name of a linear or experts module
            is that module alone, whatever the defaults say of it.
        filter_fn: `filter_fn(module, name)` decides about each linear and experts module in place
            of the defaults, as in torchao.
        overrides: pattern -> False (stays), True (becomes FP8, whatever the defaults say), or
            settings: trainable and wgrad of all modules, layout and swiglu_limit of the
            `GroupedExperts`, such as {"layout": "masked"}; the first match counts.
        trainable: weights stay the very parameters that they are, as master weights, tied ones
            tied: an optimizer made before goes on, and what asked for a gradient still does. Codes
            are made of them for each value that they have. `freeze` makes codes alone of them.
        wgrad: how gradients in master weights are computed, see `FP8Linear`.
        return_conversion: also give the `Conversion`; `plan_conversion` gives it beforehand.
        progress: show a bar on stderr; None shows it on a terminal.

    Returns:
        `model`, or its replacement if `model` itself is to be swapped; with `return_conversion`
        (that module, `Conversion`).

    Raises:
        TypeError: a weight that is not bf16, fp16 or fp32; arguments of another kind.
        ValueError: an experts module of another make, a part that `shard` left, hooks and patches
            that would be lost, a pattern that matches nothing; with trainable, weights that would
            need a copy: those of Conv1D and of DBRX's experts. The model is unchanged.
    """
    chosen = choose(model, skip, only, filter_fn, overrides, trainable, wgrad)
    conversion = chosen.conversion
    _LOGGER.info("convert: %s", conversion)
    if (warning := _warning(chosen, trainable)) is not None:
        warnings.warn(f"convert: {warning}", stacklevel=3)
    converted = _apply(model, chosen, progress)
    adopt(converted, conversion)
    return (converted, conversion) if return_conversion else converted


def plan_conversion(
    model: nn.Module,
    skip: Patterns | None = (),
    only: Patterns | None = None,
    *,
    filter_fn: FilterFn | None = None,
    overrides: Overrides | None = None,
    trainable: bool = False,
    wgrad: Wgrad = "128x1",
) -> Conversion:
    """What `convert` would do with these arguments; `model` is not changed."""
    return choose(model, skip, only, filter_fn, overrides, trainable, wgrad).conversion


def _warning(chosen: Chosen, trainable: bool) -> str | None:
    if not chosen.nothing_left:
        return chosen.conversion.warning()
    if not chosen.other_form:
        if not (trainable and chosen.other_wgrad):
            return None
        return (
            f"{chosen.other_wgrad} modules are trainable already and keep their wgrad; "
            "moefp8.unfreeze(model, wgrad=...) changes it"
        )
    stay, function = ("frozen", "unfreeze") if trainable else ("trainable", "freeze")
    return (
        f"{chosen.other_form} modules are FP8 already and stay {stay}; moefp8.{function}(model) "
        "changes them"
    )


def _apply(model: nn.Module, chosen: Chosen, progress: bool | None) -> nn.Module:
    """Swap; a module under two names stays one module, and shared weights become shared codes."""
    swapped: dict[int, FixedDtypeModule] = {}
    twins: dict[tuple[Any, ...], FixedDtypeModule] = {}
    not_finite: list[str] = []
    quantized = {
        id(module): module
        for name, module in chosen.modules.items()
        if not chosen.settings[name]["trainable"]
    }
    total = sum(map(_num_bytes, quantized.values()))
    with Progress("quantizing", total, "GiB", 2**30, progress if total else False) as bar:
        for name, module in chosen.modules.items():
            if id(module) not in swapped:
                made = _swap(module, chosen.settings[name], twins)
                swapped[id(module)] = made
                not_finite += [] if has_finite_scales(made) else [name]
                bar.advance(_num_bytes(module) if id(module) in quantized else 0)
            if name:
                model.set_submodule(name, swapped[id(module)])
            else:
                model = swapped[id(module)]
    if not_finite:
        more = f" and {len(not_finite) - 5} more" if len(not_finite) > 5 else ""
        warnings.warn(
            f"convert: weights of {', '.join(not_finite[:5])}{more} hold NaN or Inf, so whole "
            "blocks of 128x128 became NaN",
            stacklevel=4,
        )
    return model


def _num_bytes(module: nn.Module) -> int:
    """The size of what is to be quantized, which is nothing on the meta device."""
    return sum(x.nbytes for x in module.parameters(recurse=False) if not x.is_meta)


def _swap(
    module: nn.Module, settings: dict[str, Any], twins: dict[tuple[Any, ...], FixedDtypeModule]
) -> FixedDtypeModule:
    """The FP8 module for `module`. twins: (kind, weights) -> what was made of them first."""
    stacks, trainable = stacks_of(module), settings["trainable"]
    made: FixedDtypeModule
    if stacks is not None:
        made, names = GroupedExperts.from_weights(*stacks.fused(), **settings), stacks.names
    elif isinstance(module, nn.Linear) and trainable:
        wgrad = settings["wgrad"]
        made, names = FP8Linear.from_linear(module, trainable=True, wgrad=wgrad), ("weight",)
    else:
        weight, names = module.get_parameter("weight"), ("weight",)
        rows = weight.t().contiguous() if is_conv1d(module) else weight
        made = FP8Linear._from_weight(rows, module._parameters.get("bias"))
        made.wgrad = settings["wgrad"]
    weights = (id(module.get_parameter(name)) for name in names)
    first = twins.setdefault((kind_of(module), trainable, *weights), made)
    for name in (*made.fp8_names, *made.fp32_names):
        made._parameters[name] = first._parameters[name]
    made.is_converted = True
    return made.train(module.training)
