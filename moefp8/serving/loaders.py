"""Weights in 16 or 32 bits that come for FP8 parameters of an engine, as trainers send them."""

import inspect
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels import BLOCK
from ..kernels.common.checks import FLOATS
from ..quant import BlockScaled, quantize_128x128


def take_floats(layer: Any, name: str, problem: str | None = None) -> None:
    """Let a parameter's loader quantize bf16, fp16 and fp32, too, by the rule of `convert`.

    A loader of vLLM or SGLang cuts a tensor for this rank and copies it, codes and scales alike: so
    it gets both. The tensor is a whole matrix [N, K], or a stack of them.

    Args:
        name: of E4M3 weights; their scales are the parameter `<name>_scale_inv`. Where the engine
            has made that in E8M0, scales are powers of two.
        problem: why weights of this layer cannot be quantized; then the loader raises ValueError.
    """
    parameter, owner, scale_name = getattr(layer, name), ref(layer), f"{name}_scale_inv"
    ue8m0 = getattr(layer, scale_name).dtype == torch.float8_e8m0fnu
    load = parameter.weight_loader  # of the layer, which must not hold itself through it
    is_method = getattr(load, "__self__", None) is layer
    function = load.__func__ if is_method else load

    def weight_loader(param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        before = (owner(),) if is_method else ()
        if loaded_weight.dtype not in FLOATS:
            return function(*before, param, loaded_weight, *args, **kwargs)
        if problem is not None:
            raise ValueError(f"{problem}; send E4M3 codes and {scale_name}, or load a checkpoint")
        data, scale_inv = _quantized(loaded_weight, param.device, ue8m0)
        result = function(*before, param, data, *args, **kwargs)  # it raises if shapes do not fit
        scales = getattr(owner(), scale_name)
        named = {key: _name_of_scales(x) for key, x in kwargs.items()}
        rest = scale_inv, *map(_name_of_scales, args)
        if param.is_meta:  # a reload of vLLM counts what each parameter gets, and loads it later
            with _disable_current_modes():
                scales.weight_loader(scales, *rest, **named)
        else:
            function(*before, scales, *rest, **named)
        return result

    weight_loader.__signature__ = inspect.signature(load)  # type: ignore[attr-defined]
    vars(weight_loader).update(vars(function))
    is_property = hasattr(parameter, "_weight_loader")
    setattr(parameter, "_weight_loader" if is_property else "weight_loader", weight_loader)


def cut_problem(rows: Sequence[int], k: int, *, is_of_rank: bool) -> str | None:
    """Why weights cannot be quantized before they are cut, or None: blocks go across a cut.

    rows: of each piece that is stored here, in order. k: columns. is_of_rank: whether other
    ranks go on where these end.
    """
    *others, last = rows
    if not any(size % BLOCK for size in (*others, *((last, k) if is_of_rank else ()))):
        return None
    return f"blocks of 128x128 go across the cuts of a linear that has {rows} rows of {k} columns"


def _quantized(w: torch.Tensor, device: torch.device, ue8m0: bool) -> BlockScaled:
    """Quantize on the parameter's device; of one on the meta device, where there is a GPU."""
    if device.type == "meta":
        device = torch.device("cuda") if torch.cuda.is_available() else w.device
    return quantize_128x128(w.to(device), ue8m0=ue8m0)


def _name_of_scales(argument: Any) -> Any:
    """The name of a weight becomes that of its scales; other arguments stay."""
    is_name = isinstance(argument, str) and argument.endswith("weight")
    return f"{argument}_scale_inv" if is_name else argument
