"""`dequantize`: the way back from `convert`, in place."""

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from ..adapter import check_no_adapters
from ..experts import GroupedExperts
from ..linear import FP8Linear
from ..module import check_dtype, is_wrapped
from ..saving import release
from ..trainable import check_own_weights


@torch.no_grad()
def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Swap every `FP8Linear` for an `nn.Linear`, and `GroupedExperts` for `PlainExperts`.

    Master weights stay the very parameters that they are, so that an optimizer goes on: this
    undoes `convert` with trainable=True. All other parameters are new, and so are master weights if
    another `dtype` is asked for.

    Weights are `data * scale_inv` in FP32, rounded to `dtype`; they and the biases, which are cast,
    ask for gradients. Modules are swapped one at a time and their FP8 weights freed, so the
    peak is the larger model and one module. What was tied stays tied, what `shard` cut stays one
    rank's part, and a model on the meta device stays there.

    `convert` then makes the same codes again from weights that it had quantized itself, with scales
    that `dtype` has rounded (BF16: off by 2**-8 at most; FP32: by a bit). It makes others
    where the codes do not reach 448 in each block, as with scales that are powers of two.

    Args:
        model: changed in place. A model of transformers also loses its `quantization_config`; if
            `model` is a part of one, the whole loses it when saved, if nothing is FP8 then.
        dtype: bf16, fp16 or fp32; None: each master weight's, and bf16 for codes. A linear
            then takes inputs of this dtype and no other.

    Returns:
        `model`, or its replacement if `model` itself is to be swapped.

    Raises:
        TypeError: `model` is not a module, or `dtype` is another.
        ValueError: hooks on an FP8 module, which would be lost, a parametrized weight, adapters
            of `moefp8.adapters`, or experts of which other ranks hold some (`expert_parallel`); the
            model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"dequantize: model must be an nn.Module, got {type(model).__name__}; of a pair of "
            "data and scales, use moefp8.quant.dequantize"
        )
    if dtype is not None:
        check_dtype("dequantize", dtype)
    check_no_adapters("dequantize", model, "which PEFT can merge in BF16")
    names = _names_of_fp8(model)
    if not names:
        warnings.warn("dequantize: the model has no FP8 modules; nothing was changed", stacklevel=3)
        return model
    ties = _ties(model, names)
    for aliases in names:
        twin = _swap(model.get_submodule(aliases[0]), dtype, ties)
        for name in aliases:
            if not name:
                return twin
            model.set_submodule(name, twin)
    _forget_quantization(model)
    return model


def _names_of_fp8(model: nn.Module) -> list[list[str]]:
    """All names of each FP8 module, and no references to it, so that each can be freed in turn."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, FP8Linear | GroupedExperts):
            continue
        if is_wrapped(module):
            raise ValueError(
                f"dequantize: {name or 'the model'} ({type(module).__name__}) must have no hooks "
                "and no forward of its own (as accelerate's), which would be lost; remove them "
                "first, and add them again"
            )
        check_own_weights("dequantize", module, name or "the model")
        if isinstance(module, GroupedExperts):
            module.check_alone("dequantize", name or "the model")
        names.setdefault(id(module), []).append(name)
    return list(names.values())


Tie = tuple[nn.Parameter, nn.Parameter | None]  # a parameter and its scales


def _tie(module: Any, name: str) -> Tie:
    return module._parameters[name], module._parameters.get(f"{name}_scale_inv")


def _ties(model: nn.Module, names: list[list[str]]) -> dict[Tie, nn.Parameter | None]:
    """What several FP8 modules share -> what takes its place, which is None as yet."""
    counts = Counter(
        _tie(module, name)
        for module in (model.get_submodule(aliases[0]) for aliases in names)
        for name, _ in module.named_parameters(recurse=False)
    )
    return dict.fromkeys(tie for tie, count in counts.items() if count > 1)


def _swap(
    module: Any, dtype: torch.dtype | None, ties: dict[Tie, nn.Parameter | None]
) -> nn.Module:
    if module.trainable:
        dtypes = [getattr(module, name).dtype for name in module.master_names]
        if all(dtype in (None, x) for x in dtypes):
            return module.sharing_plain()
    dtype = dtype or torch.bfloat16
    twin = module.to_linear(dtype) if isinstance(module, FP8Linear) else module.to_plain(dtype)
    for name, made in list(twin.named_parameters(recurse=False)):
        tie = _tie(module, name)
        if tie in ties:
            known = ties[tie]
            twin._parameters[name] = ties[tie] = made if known is None else known
    return twin


def _forget_quantization(model: nn.Module) -> None:
    """Let no model of transformers save a `quantization_config` beside plain weights.

    Only models that are saved lose it: layers hold the config of the whole, which may be FP8 still.
    """
    for module in model.modules():
        release(module)
        if (quantizer := module.__dict__.get("hf_quantizer")) is not None:
            quantizer.remove_quantization_config(module)
        config: Any = module.__dict__.get("config")
        is_saved = callable(getattr(module, "save_pretrained", None))
        if is_saved and getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
