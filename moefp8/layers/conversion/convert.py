"""`convert`: swap the linears and experts of a model for FP8 ones, in place."""

import logging
import warnings
from typing import Any, NamedTuple

import torch
from torch import nn

from ...functional.training.wgrad import Wgrad
from ...system.progress import Progress
from ..experts import GroupedExperts
from ..linear import FP8Linear
from ..saving import adopt
from ..trainable import TrainableModule, has_finite_scales
from .choose import Chosen, FilterFn, Overrides, Patterns, choose, kind_of
from .conversion import Conversion
from .selection import is_conv1d, widths
from .stacking import Stacked
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

    Weights are quantized one module at a time, the largest first, and each original is freed, so
    the peak is the model and one module. A model on the meta device is swapped without weights, to
    be loaded into. `convert` swaps `nn.Linear`, transformers' `Conv1D`, DBRX's experts, and experts
    stacked as `gate_up_proj` [E, 2I, H], gate rows first, and `down_proj` [E, H, I], or as `w13`
    and `w2`. Experts are first run on random tokens: they must compute SwiGLU, or its clamped
    variant, and nothing else.

    Experts in an `nn.ModuleList` or `nn.ModuleDict`, which a block calls one by one, become one
    `GroupedExperts`, and the block a `ConvertedMoE` around its own router, if a trial shows the
    same outputs. Else their linears are swapped, and a warning says why, with the two lines that
    run them at once.

    By default these stay: output heads, routers, gates to one number, what the model keeps in FP32,
    and linears whose weights are read by others (`moefp8.layers.conversion.selection`). The result
    is logged ("moefp8", INFO); it is a warning if nothing is swapped, if other experts stay, or if
    most weights are parameters of modules that `convert` does not know.

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
            need a copy: those of Conv1D and of DBRX's experts. The model is unchanged. After an
            interrupt or an OutOfMemoryError, each module is whole, and the same call goes on.
    """
    chosen = choose(model, skip, only, filter_fn, overrides, trainable, wgrad)
    conversion = chosen.conversion
    _LOGGER.info("convert: %s", conversion)
    if (warning := _warning(chosen, trainable)) is not None:
        warnings.warn(f"convert: {warning}", stacklevel=3)
    converted, not_finite = _apply(model, chosen, progress)
    adopt(converted, conversion)
    if not_finite:
        more = f" and {len(not_finite) - 5} more" if len(not_finite) > 5 else ""
        warnings.warn(
            f"convert: weights of {', '.join(not_finite[:5])}{more} hold NaN or Inf, so whole "
            "blocks of 128x128 became NaN",
            stacklevel=3,
        )
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


class _Swap(NamedTuple):
    """A module to be swapped: its names, its replacement, and the bytes to quantize.

    fp8: the replacement, or the module in it that has codes. weights_key: equal for modules that
    share their weights, and will share the codes.
    """

    names: list[str]
    replacement: nn.Module
    fp8: TrainableModule
    num_bytes: int
    weights_key: tuple[Any, ...]


def _apply(model: nn.Module, chosen: Chosen, progress: bool | None) -> tuple[nn.Module, list[str]]:
    """Swap the modules. Returns what takes the model's place, and whose weights are not finite.

    All FP8 modules first take their places without codes. The largest is quantized first: if memory
    runs out, it does so before originals are freed. Each original is freed in turn, which
    empties `chosen.modules`. After an error, those that are left there are put back.
    """
    left = chosen.modules
    swaps = _prepare(chosen)
    total = sum(swap.num_bytes for swap in swaps)
    quantized: dict[tuple[Any, ...], TrainableModule] = {}
    not_finite: list[str] = []
    try:
        for swap in swaps:
            _put(model, swap.names, swap.replacement)
        with Progress("quantizing", total, "GiB", 2**30, progress if total else False) as bar:
            for names, _, made, num_bytes, weights in sorted(swaps, key=lambda x: -x.num_bytes):
                twin = quantized.setdefault(weights, made)
                if twin is made:
                    _quantize(made, left[names[0]], chosen.stacked.get(names[0]))
                for name in (*made.fp8_names, *made.fp32_names):
                    made._parameters[name] = twin._parameters[name]
                not_finite += [] if has_finite_scales(made) else names[:1]
                for name in names:
                    del left[name]
                bar.advance(num_bytes)
    except BaseException:
        _put_back(model, left)
        raise
    return next((swap.replacement for swap in swaps if "" in swap.names), model), not_finite


def _put(model: nn.Module, names: list[str], module: nn.Module) -> None:
    for name in filter(None, names):  # the model itself is in no other
        model.set_submodule(name, module)


def _put_back(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    stuck = {}
    for name, module in modules.items():
        try:
            _put(model, [name], module)
        except Exception as error:  # a parent may refuse for any reason; the others are put back
            stuck[name] = f"{type(error).__name__}: {error}"
    for name, why in stuck.items():
        warnings.warn(
            f"convert: {name} could not be put back, and has no weights if it is FP8 now; its "
            f"parent raised {why}",
            stacklevel=5,
        )


def _prepare(chosen: Chosen) -> list[_Swap]:
    """What to put in the place of each module, without codes; master weights are shared."""
    modules = chosen.modules
    names: dict[int, list[str]] = {}
    for name, module in modules.items():
        names.setdefault(id(module), []).append(name)
    swaps = []
    for aliases in names.values():
        module, options = modules[aliases[0]], chosen.settings[aliases[0]]
        stack = chosen.stacked.get(aliases[0])
        made: TrainableModule
        replacement: nn.Module
        if stack is None:
            replacement = made = _without_codes(module, options)
            weights = [module.get_parameter(name) for name in _weight_names(module)]
        else:
            made = GroupedExperts(*stack.experts.sizes, device="meta", **options)
            replacement, weights = stack.replacement(module, made), stack.weights(module)
        made.is_converted = True
        made.train(module.training)
        replacement.training = module.training
        to_quantize = [] if options["trainable"] else [x for x in weights if not x.is_meta]
        key = kind_of(module), options["trainable"], *map(id, weights)
        num_bytes = sum(x.nbytes for x in to_quantize)
        swaps.append(_Swap(aliases, replacement, made, num_bytes, key))
    return swaps


def _weight_names(module: nn.Module) -> tuple[str, ...]:
    stacks = stacks_of(module)
    return ("weight",) if stacks is None else stacks.names


def _without_codes(module: nn.Module, settings: dict[str, Any]) -> TrainableModule:
    """The FP8 module for `module`."""
    stacks, trainable = stacks_of(module), settings["trainable"]
    if stacks is not None:
        if trainable:
            (gate_up,) = stacks.gate_up  # `master_problem` refuses two
            biases: dict[str, Any] = stacks.biases
            return GroupedExperts.from_weights(gate_up, stacks.down, **settings, **biases)
        experts = GroupedExperts(*stacks.down.shape, device="meta", **settings)
        experts._share_biases(stacks.biases)
        experts.is_rearranged = stacks.is_rearranged
        return experts
    wgrad = settings["wgrad"]
    if trainable and isinstance(module, nn.Linear):
        return FP8Linear.from_linear(module, trainable=True, wgrad=wgrad)
    linear = FP8Linear(*widths(module), bias=False, device="meta", wgrad=wgrad)
    linear._share_bias(module._parameters.get("bias"))
    return linear


def _quantize(made: Any, module: nn.Module, stack: Stacked | None) -> None:
    """Make the codes of `made`, if it is to have any, of the weights of `module`."""
    if made.trainable:
        return
    if stack is not None:
        *gate_up, down = stack.experts.weights(module)
        made._quantize_from(gate_up, down)
        return
    stacks = stacks_of(module)
    if stacks is not None:
        made._quantize_from(stacks.gate_up, stacks.down)
    else:
        weight = module.get_parameter("weight").detach()
        made._quantize_from(weight.t() if is_conv1d(module) else weight)
