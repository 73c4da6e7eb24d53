"""`add_lora` and `remove_lora`: put adapters beside weights, and take them off."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ..layers.adapter import adapters_of
from ..layers.module import check_dtype
from ..layers.saving import release
from .config import Options
from .lora import LoRA
from .save import save_pretrained
from .targets import KINDS, Target, find_targets

_PLAIN = {made: kind for kind, made in KINDS.items()}


def add_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Iterable[str] | None = None,
    *,
    use_rslora: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Put LoRA beside linears and experts, in place; then they alone ask for gradients.

    A weight W then counts as `W + scaling * B @ A`; each expert has an A and a B of its own. B is
    zero at first. Linears then give what they gave, bit for bit; experts run step by step, with
    gate and up rounded to BF16 in between. Names of the model's own tensors stay, so that
    `load_checkpoint` works as before; `moefp8.save_checkpoint` writes them alone, and `save_lora`
    the adapters. So does `save_pretrained` of a model of transformers then, and its `Trainer`.

    Args:
        rank, alpha: `scaling` is alpha / rank, with use_rslora alpha / sqrt(rank). For experts on
            a GPU, ranks that 8 does not divide are padded with zeros in each call.
        targets: names of modules, or ends of them after a dot ("q_proj", "self_attn.q_proj"), or
            a string, which is a regular expression for whole names: as PEFT's `target_modules`.
            Experts have weights of their own: "experts" is both, "experts.gate_up_proj" is one.
            "all-linear", PEFT's word: experts, and each linear but a transformers model's head.
            None: each `FP8Linear` and `GroupedExperts`.
        dtype: of A and B. An optimizer rounds each step to it. FP32, which PEFT trains too, keeps
            small ones; in BF16, those below 1/512 of a value are lost, most of AdamW's at usual
            learning rates. Products are in the dtype of what the weight gives, BF16 as a rule. BF16
            needs half the memory, which counts beside hundreds of experts: take it to serve, or
            with an optimizer that has master weights, or rounds stochastically.

    Returns:
        The names of the weights that have an adapter.

    Raises:
        TypeError: arguments of another kind.
        ValueError: a target matches nothing or another kind of module, or a module that is on the
            meta device, wrapped, trainable, or cut by `shard` but for experts; the model has
            adapters. The model is unchanged.
    """
    _check(model, rank, alpha, dtype)
    matches = find_targets("add_lora", model, targets)
    options = Options(rank, alpha, use_rslora)
    put(model, dict.fromkeys(matches, options), dtype)
    return [target.name for target in matches]


def _check(model: nn.Module, rank: int, alpha: float, dtype: torch.dtype) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"add_lora: model must be an nn.Module, got {type(model).__name__}")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"add_lora: rank must be an integer of at least 1, got {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e6:
        raise ValueError(f"add_lora: alpha must be a number above 0, got {alpha!r}")
    check_dtype("add_lora", dtype)
    if adapters := adapters_of(model):
        raise ValueError(
            f"add_lora: the model must have no adapters yet, but has {len(adapters)} "
            f"({next(iter(adapters))}, ...); name all targets in one call, or take them off first: "
            "moefp8.adapters.remove_lora(model)"
        )


def put(model: Any, options: Mapping[Target, Options], dtype: torch.dtype) -> None:
    """Put an adapter beside each target, which must have none; freeze what else there is."""
    model.requires_grad_(False)
    for target, (rank, alpha, use_rslora) in options.items():
        module, device = target.module, getattr(target.module, target.parameter).device
        lora = LoRA(target.shape, rank, alpha, use_rslora=use_rslora, device=device, dtype=dtype)
        module.__class__ = KINDS.get(type(module), type(module))
        module.add_module(f"lora_{target.parameter}", lora.train(module.training))
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained = partial(save_pretrained, model)


def remove_lora(model: nn.Module) -> nn.Module:
    """Take all adapters off, in place; what was frozen stays frozen. Returns `model`.

    Raises ValueError if the class of a module has been changed since, as `fully_shard` does.
    """
    homes = [x for x in model.modules() if any(isinstance(y, LoRA) for y in x.children())]
    for module in homes:
        if type(module) not in _PLAIN:
            raise ValueError(
                f"remove_lora: {type(module).__name__} must be as add_lora made it; fully_shard "
                "and parametrizations change the class"
            )
    for module in homes:
        for name in [name for name, x in module.named_children() if isinstance(x, LoRA)]:
            delattr(module, name)
        module.__class__ = _PLAIN[type(module)]
    release(model)
    return model
