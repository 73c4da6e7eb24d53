"""What a checkpoint must give, since transformers draws at random what it does not find there."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..checkpoint.errors import raise_if_any
from ..layers.conversion.selection import asked


def check_filled(model: Any) -> None:
    """Raise CheckpointError if weights were drawn that only a checkpoint can give.

    A model of the class that config.json names, or without a head, needs all its weights. A model
    for another task, with a head of its own, needs layers, embeddings and all weights below the
    head; if config.json names no class, the output embedding too. Poolers, and what the model says
    may be missing, may be drawn.
    """
    named = getattr(model.config, "architectures", None) or ()
    is_named = type(model).__name__ in named
    base = _base_of(model)
    inner = {id(x) for x in base.state_dict(keep_vars=True).values()} if base else set()
    needed = {id(x) for x in _layers_and_embeddings(model, with_output=not named)} | inner
    allowed = [re.compile(x) for x in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    missing = [
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not (tensor.is_meta or getattr(tensor, "_is_hf_initialized", False))
        and (id(tensor) in needed or (is_named and isinstance(tensor, nn.Parameter)))
        and "pooler" not in name
        and not any(pattern.search(name) for pattern in allowed)
    ]
    problems = [f"{name}: not in the checkpoint" for name in missing]
    raise_if_any(problems, "moefp8.hf: the checkpoint does not fill the model")


def _base_of(model: Any) -> Any:
    """The model below the head, itself if it has no head, or None if a head is beside its parts.

    In the last two cases `base_model` is the model itself: the class is FooModel or FooForBar.
    """
    base = model.base_model
    return base if base is not model or type(model).__name__.endswith("Model") else None


def _layers_and_embeddings(model: Any, with_output: bool) -> Iterator[torch.Tensor]:
    """The tensors of elements of module lists, and of embeddings."""
    for method in ("get_input_embeddings", "get_output_embeddings")[: 1 + with_output]:
        embedding = asked(model, method)
        if isinstance(embedding, nn.Module):
            yield from embedding.parameters()
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module.state_dict(keep_vars=True).values()
