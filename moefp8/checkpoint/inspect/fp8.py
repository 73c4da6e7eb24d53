"""Tell which modules a checkpoint stores in FP8, by its scales, never by lists in its config."""

import os
from collections.abc import Iterable

from torch import nn

from ...layers.conversion.stacks import stacks_of
from ...layers.experts import GroupedExperts
from ..errors import CheckpointError
from ..files.config import is_leftover
from ..files.names import Rename, renamed, split_expert, weight_of_scale
from ..files.source import Source, kept_entries, open_source
from ..model.slots import Inventory


def fp8_modules(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    ignore: Iterable[str] = (),
    rename: Rename | None = None,
) -> list[str]:
    """List the modules whose weights have a scale, for `convert(model, only=...)`.

    With model, the names are the model's own where families spell them differently (a
    checkpoint's `block_sparse_moe.experts` may be a model's `mlp.experts`); without, the
    checkpoint's. path, ignore, rename: as in load_checkpoint. Raises CheckpointError.
    """
    return fp8_modules_of(open_source(path), model, ignore, rename)


def fp8_modules_of(
    source: Source,
    model: nn.Module | None,
    ignore: Iterable[str] = (),
    rename: Rename | None = None,
) -> list[str]:
    """List the modules as `fp8_modules` does, of a checkpoint that is open."""
    weights = scaled_weights(source, ignore, rename)
    if model is None:
        experts = ((name, split_expert(name)) for name in weights.values())
        return list(dict.fromkeys(x[0] if x else name.rpartition(".")[0] for name, x in experts))
    inventory = Inventory(model)
    modules: dict[str, None] = {}
    for key, name in weights.items():
        slot = inventory.find(name)
        module = _experts_to_be(model, name) if slot is None else slot.module
        if module is None:
            raise CheckpointError(f"{source.entries[key]}: FP8, but the model has no such weight")
        modules[module] = None
    return list(modules)


def _experts_to_be(model: nn.Module, weight: str) -> str | None:
    """Return the experts whose weights `convert` will give this name; they have others now."""
    name, _, leaf = weight.rpartition(".")
    module = dict(model.named_modules()).get(name)
    if module is None or leaf not in GroupedExperts.fp8_names:
        return None
    return name if stacks_of(module) is not None else None


def scaled_weights(
    source: Source, ignore: Iterable[str] = (), rename: Rename | None = None
) -> dict[str, str]:
    """Return checkpoint key -> model name for every weight beside which there is a scale."""
    names = {
        renamed(key, rename): key
        for key in kept_entries(source, ignore)
        if not is_leftover(source.config, key)
    }
    weights = (weight_of_scale(name) for name in names)
    return {names[weight]: weight for weight in weights if weight in names}
