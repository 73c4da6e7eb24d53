"""Weights in 16 or 32 bits that come for FP8 parameters of an engine, as trainers send them."""

import inspect
from typing import Any
from weakref import ref

import torch

from ..kernels import E4M3
from ..kernels.common.blocks import num_blocks
from ..kernels.common.checks import FLOATS
from ..quant import quantize_128x128


def take_floats(layer: Any, name: str) -> None:
    """Let a parameter's loader quantize bf16, fp16 and fp32, too, by the rule of `convert`.

    A loader of vLLM or SGLang cuts what comes for this rank and copies it, codes and scales alike:
    so it is given both. What comes is a whole matrix [N, K], or a stack of them.

    name: of E4M3 weights; their scales are the parameter `<name>_scale_inv`.
    """
    parameter, owner = getattr(layer, name), ref(layer)
    load = parameter.weight_loader  # of the layer, which must not hold itself through it
    is_method = getattr(load, "__self__", None) is layer
    function = load.__func__ if is_method else load

    def weight_loader(param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        before = (owner(),) if is_method else ()
        if loaded_weight.dtype in FLOATS:
            loaded_weight, scale_inv = _quantized(loaded_weight, param.device)
            scales = getattr(owner(), f"{name}_scale_inv")
            named = {key: _name_of_scales(x) for key, x in kwargs.items()}
            function(*before, scales, scale_inv, *map(_name_of_scales, args), **named)
        return function(*before, param, loaded_weight, *args, **kwargs)

    weight_loader.__signature__ = inspect.signature(load)  # type: ignore[attr-defined]
    vars(weight_loader).update(vars(function))
    is_property = hasattr(parameter, "_weight_loader")
    setattr(parameter, "_weight_loader" if is_property else "weight_loader", weight_loader)


def _quantized(w: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of w [..., N, K]; where vLLM counts elements it is on the meta device."""
    if device.type != "meta":
        return quantize_128x128(w.to(device))
    *batch, n, k = w.shape
    scale_inv = torch.empty((*batch, num_blocks(n), num_blocks(k)), device=device)
    return torch.empty_like(w, dtype=E4M3, device=device), scale_inv


def _name_of_scales(argument: Any) -> Any:
    """The name of a weight becomes that of its scales; other arguments stay."""
    is_name = isinstance(argument, str) and argument.endswith("weight")
    return f"{argument}_scale_inv" if is_name else argument
