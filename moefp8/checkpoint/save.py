"""Write a model as a checkpoint, with the keys and the config that it was loaded with."""

import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..layers.adapter import adapters_of
from ..layers.parts import parts_of
from .errors import CheckpointError, failing_as, raise_if_any
from .files.config import (
    FP8_QUANTIZATION,
    SEPARATE,
    is_leftover,
    quantization_of,
    without_mtp,
    without_quantization,
)
from .files.header import DTYPE_NAMES
from .files.names import SCALE_SUFFIX, scale_of_weight
from .files.target import in_shards, shard_name, target_of, write_index, write_json
from .files.workplace import workplace
from .model.record import Record, recall
from .model.skeleton import skeleton_around
from .model.slots import Inventory, ModelTensor, Role, Slot, not_dense

Leaves = tuple[str, ...]  # a loader's names for gate, up and down of one expert
_LEAVES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def save_checkpoint(
    model: nn.Module, path: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write model into the directory path, which must be empty if it exists.

    Experts are written one by one under DeepSeek's names, other tensors under the model's; in a
    model of transformers, under the names that its loader stacks, or as stacks if it knows no
    others. A loaded model gets the names and config.json of its checkpoint back. MTP layers, which
    no model holds, are not written, and config.json then says so. A tied tensor is written once.
    Master weights are written as plain weights in their dtype, and config.json states no FP8 if
    nothing else is in FP8; `freeze` the model first to write FP8. A model of more than
    max_shard_bytes is split into shards with an index. Adapters are left out with a warning, and
    have files of their own: `moefp8.adapters.save_lora`.

    The directory gets its name when it is complete; until then all is in `.NAME.partial` beside it.
    The next save to path removes what a killed process left there.

    Raises:
        CheckpointError: a tensor is on the meta device or one rank's part; the path cannot be
            written, exists, or is being written by another process or thread.
        ValueError: a size that cannot be meant.
    """
    if not max_shard_bytes > 0:  # this refuses NaN too
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    target = target_of(path)
    _check_whole(model)
    inventory, record = Inventory(model), recall(model)
    leaves = _expert_leaves(model, inventory, record)
    slots = list(_slots_to_save(inventory, record, leaves))
    tensors = _named_tensors(slots, record, leaves)
    config = _config(model, inventory, record, slots)
    if not any(is_leftover(config, key) for key in tensors):
        config = without_mtp(config)
    if adapters := adapters_of(model):
        warnings.warn(
            f"save_checkpoint: {len(adapters)} adapters are left out ({next(iter(adapters))}, "
            "...); moefp8.adapters.save_lora(model, directory) writes them",
            stacklevel=2,
        )
    job = {"written_by": "save_checkpoint"}
    with failing_as(target, "cannot be written"), workplace(target, job) as work:
        try:
            _write_all(work.content, tensors, config, max_shard_bytes)
            work.publish()
        finally:
            shutil.rmtree(work.path, ignore_errors=True)


def _check_whole(model: nn.Module) -> None:
    sharded = [name or "the model" for name, module in model.named_modules() if parts_of(module)]
    if sharded:
        raise CheckpointError(
            f"the model cannot be saved: {len(sharded)} modules hold one rank's part alone "
            f"({sharded[0]}, ...); a checkpoint is of a whole model: save it before shard or "
            "expert_parallel, or keep the state_dict() of every rank"
        )


def _expert_leaves(model: nn.Module, inventory: Inventory, record: Record) -> dict[str, Leaves]:
    """Return module -> leaves, () for stacks, for modules that transformers' loader names."""
    skeleton = None if record.config or record.names else skeleton_around(model)
    if skeleton is None:
        return {}
    names: dict[str, Leaves] = {}
    for module in dict.fromkeys(x.module for x in inventory.slots.values() if x.is_fused):
        stacks = [f"{module}.gate_up_proj", f"{module}.gate_up_proj", f"{module}.down_proj"]
        named = (
            leaves
            for leaves in _LEAVES
            if all(
                skeleton.is_merged(f"{module}.0.{leaf}.weight", stack)
                for leaf, stack in zip(leaves, stacks, strict=True)
            )
        )
        names[module] = next(named, ())
    return names


def _named_tensors(
    slots: Iterable[Slot], record: Record, leaves: dict[str, Leaves]
) -> dict[str, torch.Tensor]:
    """Return checkpoint key -> view of the model's tensor."""
    tensors: dict[str, torch.Tensor] = {}
    problems = []
    for slot in slots:
        key, tensor = _key(slot, record, leaves.get(slot.module, ())), slot.owner.tensor
        if tensor.is_meta:
            problems.append(f"{slot.name}: on the meta device; load or initialise the model first")
        elif is_traceable_wrapper_subclass(tensor):
            problems.append(
                f"{slot.name}: a {type(tensor).__name__} has no memory of its own; save before "
                "sharding or wrapping the model, or by torch.distributed.checkpoint"
            )
        elif key in tensors:
            problems.append(f"{slot.name}: its key {key} is that of another tensor already")
        elif tensor.layout is not torch.strided:
            problems.append(f"{slot.name}: {not_dense(tensor)}")
        elif tensor.dtype not in DTYPE_NAMES:
            problems.append(f"{slot.name}: safetensors has no dtype {tensor.dtype}")
        else:
            tensors[key] = tensor.detach()[slot.index]
    raise_if_any(problems, "the model cannot be saved")
    return tensors


def _slots_to_save(
    inventory: Inventory, record: Record, leaves: dict[str, Leaves]
) -> Iterator[Slot]:
    """Yield every part once, or a whole stack if loaders or the checkpoint know no parts of it."""
    whole: set[ModelTensor] = set()
    for slot in inventory.slots.values():
        was_whole = slot.name in record.names or slot.weight_name in record.names
        if slot.is_fused and (was_whole or leaves.get(slot.module) == ()):
            whole.add(slot.owner)
            yield slot
    for slot in inventory.parts.values():
        if slot.owner not in whole:
            yield slot


def _key(slot: Slot, record: Record, leaves: Leaves) -> str:
    """Return the recorded name of slot; a scale that has none follows its weight's."""
    name = slot.name if slot.is_fused else slot.parts[0]
    if leaves and not slot.is_fused:
        home, leaf, weight = name.rsplit(".", 2)
        name = f"{home}.{leaves[_LEAVES[0].index(leaf)]}.{weight}"
    weight = name.removesuffix(SCALE_SUFFIX)
    if slot.role is Role.SCALE and name not in record.names and weight in record.names:
        return scale_of_weight(record.names[weight])
    return record.names.get(name, name)


def _config(
    model: nn.Module, inventory: Inventory, record: Record, slots: Iterable[Slot]
) -> dict[str, Any]:
    config = dict(record.config)
    own: Any = getattr(model, "config", None)
    if not config and hasattr(own, "to_dict"):
        config = without_quantization(own.to_dict())  # a save writes plain fp8
    has_fp8 = any(slot.role is Role.WEIGHT for slot in inventory.parts.values())
    if not has_fp8:  # weights loaded in FP8 may be master weights now
        return without_quantization(config)
    quantization = quantization_of(config) or FP8_QUANTIZATION
    if any(inventory.is_ambiguous(slot) for slot in slots):
        quantization = {**quantization, **SEPARATE}
    return {**config, "quantization_config": quantization}


def _write_all(
    directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], max_bytes: int
) -> None:
    shards = list(in_shards(tensors, lambda key: tensors[key].nbytes, max_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = shard_name(number, len(shards))
        whole = {key: tensors[key].contiguous() for key in shard}
        save_file(whole, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    write_index(directory, weight_map, sum(tensor.nbytes for tensor in tensors.values()))
    write_json(directory / "config.json", config)
