"""Build the model that transformers would build for a checkpoint, without weights.

A key of the checkpoint is renamed to a name of the model. Some keys are converted besides: experts
that are stored one by one are stacked, and fused projections are cut.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from ...layers import GroupedExperts
from ...layers.conversion.stacks import STACKS, stacks_of
from ..errors import printable, quoted
from ..files.names import Rename, scale_of_weight, weight_of_scale
from .slots import Inventory
from .untrusted import Bounded, count_problem, offline, stacks_problem, without_fetched


@dataclass(frozen=True)
class Skeleton:
    """model: on the meta device; conversions: transformers' steps from keys to names."""

    model: nn.Module
    conversions: list[Any]

    @cached_property
    def modules(self) -> list[str]:
        """List the names of all modules of the model."""
        return [name for name, _ in self.model.named_modules() if name]

    @cached_property
    def inventory(self) -> Inventory:
        return Inventory(self.model)

    @cached_property
    def rename(self) -> Rename:
        """Map key -> name by renamings alone: a key that is converted keeps a name of its own."""
        return renaming(self.model, self.conversions, self.inventory)

    def conversion_of(self, key: str) -> tuple[str, Any, str] | None:
        """Return (first name that it becomes, step, its pattern) for a key that is converted."""
        renamed = self.rename(key)
        for step in self.conversions:
            if hasattr(step, "operations"):
                target, pattern = step.rename_source_key(renamed)
                if pattern is not None:
                    return self.rename(target), step, pattern
        return None

    def is_merged(self, key: str, name: str) -> bool:
        """Whether a loader stacks the expert's weight of this key into the weight of this name."""
        match = self.conversion_of(key)
        return match is not None and match[0] == name and "MergeModulelist" in names_of(match[1])

    def is_loaded_as(self, key: str, name: str) -> bool:
        """Whether a loader puts a weight of this key, and its scales, under this name."""
        scale = scale_of_weight(key)
        return self.rename(key) == name and self.rename(scale) == scale_of_weight(name)

    def spelled(self, names: Collection[str], keys: Iterable[str]) -> dict[str, str] | None:
        """Return name of a weight -> its key in the checkpoint of these keys.

        A key has the checkpoint's prefix if loaders then find weights and scales, else the model's
        spelling; None if loaders find neither, since some renamings miss scales.
        """
        prefixes = list(map(self._prefixes, keys))
        base = f"{self.model.base_model_prefix}."  # rename adds it to no key that is converted
        prefixes += [(prefix, base + theirs) for prefix, theirs in prefixes]
        for prefix, theirs in dict.fromkeys([*prefixes, ("", "")]):
            made = {x: prefix + x.removeprefix(theirs) for x in names if x.startswith(theirs)}
            if all(name in made and self.is_loaded_as(made[name], name) for name in names):
                return made
        return None

    def _prefixes(self, key: str) -> tuple[str, str]:
        """Return the prefixes of key in the checkpoint and in the model; the rest is the same."""
        name = self.rename(key)
        pairs = zip(reversed(key), reversed(name), strict=False)
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return key[: len(key) - num_same], name[: len(name) - num_same]


def skeleton_of(config: Mapping[str, Any], num_tensors: int = 0) -> Skeleton | str:
    """Build the skeleton of a config.json, or say why transformers cannot build it.

    num_tensors: of the checkpoint; a model too large for these is not built. Nothing is fetched to
    build one.
    """
    if find_spec("transformers") is None:
        return "transformers is not installed"
    model_type = config.get("model_type")
    # At the end of its import, another module takes its place: a thread that waited for the import
    # would get the first one.
    import_module("transformers")
    transformers: Any = sys.modules["transformers"]
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        return f"transformers knows no model_type {quoted(model_type)}"
    if problem := count_problem(config, num_tensors):
        return problem
    try:
        with offline(), Bounded(num_tensors), torch.device("meta"):
            made = transformers.CONFIG_MAPPING[model_type].from_dict(without_fetched(config))
            model: Any = _class_of(config, made)(made)
    except Exception as error:  # a config of others can make transformers raise anything
        reason = printable(str(error), 200)
        return f"transformers cannot build {model_type} ({type(error).__name__}: {reason})"
    if problem := stacks_problem(model, num_tensors):
        return problem
    from transformers.conversion_mapping import get_model_conversion_mapping

    return Skeleton(model.to(torch.bfloat16), list(get_model_conversion_mapping(model, None, None)))


def skeleton_around(model: Any) -> Skeleton | None:
    """Return the skeleton of a model that transformers made, and None for any other model."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")  # loaded for such a model
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # a transformers that is too old for moefp8.hf
        return None
    return Skeleton(model, list(get_model_conversion_mapping(model, None, None)))


def order_of(key: str) -> Any:
    """Return the sort key by which transformers orders a conversion's keys; numbers count by value.

    Raises ValueError for a "²", which transformers takes for a number that it cannot read.
    """
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(key)


def names_of(step: Any) -> set[str]:
    """Return the names that transformers gives the operations of a step."""
    return {type(operation).__name__ for operation in step.operations}


def _class_of(config: Mapping[str, Any], made: Any) -> Callable[[Any], nn.Module]:
    """Return the class that config names, or the family's causal language model, or its base."""
    import transformers

    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        named = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(made) in auto._model_mapping:
            from_config: Callable[[Any], nn.Module] = auto.from_config
            return from_config
    raise ValueError("no model of it")


def renaming(model: Any, conversions: list[Any], inventory: Inventory) -> Rename:
    """Return checkpoint key -> model name, as transformers renames; experts stay one by one."""
    from transformers.core_model_loading import WeightRenaming

    steps = [step for step in conversions if isinstance(step, WeightRenaming)]
    prefix = f"{model.base_model_prefix}."
    is_whole = hasattr(model, model.base_model_prefix)  # others hold a base model below prefix
    homes = {  # experts that hold stacks, or will when they are converted, as DBRX's do
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, GroupedExperts) or stacks_of(module) is not None
    }

    def is_there(weight: str) -> bool:
        home, _, leaf = weight.rpartition(".")
        return inventory.find(weight) is not None or (leaf in STACKS and home in homes)

    def rename(key: str) -> str:
        name = key
        for step in steps:
            name, _ = step.rename_source_key(name)
        weight = weight_of_scale(name) or name  # not all scales have a place yet
        if is_there(weight):
            return name
        if is_there(f"{prefix}{weight}"):
            return f"{prefix}{name}"
        return name if is_whole else name.removeprefix(prefix)

    return rename
