"""Check whether a tensor fits a place of a model, by dtype, shape and name, or say why not."""

from typing import Protocol

import torch

from ...kernels import num_blocks
from ..files.header import DTYPE_NAMES, FP8, SCALE_DTYPES
from ..files.names import canonical, split_expert
from .slots import Inventory, Role, Slot

FLOATS = ("F64", "F32", "BF16", "F16")
_WAY_OUT = "convert(model, only=fp8_modules(path, model=model)) before loading"


class Entry(Protocol):
    """A tensor's name, dtype and shape, in a file or not; its str says where it is."""

    @property
    def key(self) -> str: ...

    @property
    def dtype(self) -> str:
        """Its name in a safetensors header."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def misfit(entry: Entry, slot: Slot, inventory: Inventory) -> str | None:
    """Say why entry cannot fill slot, or None if it can."""
    return dtype_problem(entry, slot) or shape_problem(entry, slot, inventory)


def shape_problem(entry: Entry, slot: Slot, inventory: Inventory) -> str | None:
    """Say why the shape of entry does not fit slot."""
    rule = f"shape must be {list(slot.shape)}, got {list(entry.shape)}"
    is_cut = slot.role is Role.SCALE and slot.weight_name.endswith("gate_up_proj")
    num_rows = inventory.slots[slot.weight_name].shape[1] if is_cut else 0
    if entry.shape != slot.shape and is_cut and entry.shape[1:2] == (num_blocks(num_rows),):
        return (
            f"{rule}; these cut all {num_rows} rows into blocks, one of which holds rows of "
            "gate and of up, but each must be cut by itself: requantize them"
        )
    if entry.shape != slot.shape:
        return rule
    return None


def dtype_problem(entry: Entry, slot: Slot) -> str | None:
    """Say why a checkpoint's tensor of this dtype cannot fill slot."""
    dtype = slot.owner.tensor.dtype
    wanted = DTYPE_NAMES.get(dtype, str(dtype))
    if slot.role is Role.WEIGHT and entry.dtype != FP8:
        return (
            f"dtype must be {FP8} for the FP8 module {slot.module}, got {entry.dtype}; {_WAY_OUT}, "
            "or load the unconverted model, then convert it"
        )
    if slot.role is Role.SCALE and dtype != torch.float32:
        return f"the model's scale must be float32, got {dtype}"
    if slot.role is Role.SCALE and entry.dtype not in SCALE_DTYPES:
        return f"dtype of a scale must be one of {', '.join(SCALE_DTYPES)}, got {entry.dtype}"
    are_floats = entry.dtype in FLOATS and wanted in FLOATS
    if slot.role is Role.MASTER:
        is_float = entry.dtype in FLOATS or entry.dtype == FP8
        return None if is_float else f"dtype must be {wanted} or {FP8}, got {entry.dtype}"
    if slot.role is not Role.PLAIN or entry.dtype == wanted or are_floats:
        return None
    if entry.dtype == FP8:
        return f"an FP8 weight, but {slot.module or 'the model'} takes {wanted}; {_WAY_OUT}"
    return f"dtype must be {wanted}, got {entry.dtype}"


def widens(entry: Entry, slot: Slot) -> bool:
    """Whether slot is a 16-bit correction bias stored in FP32: rounding would make values equal."""
    is_bias = slot.name.rpartition(".")[2] == "e_score_correction_bias"
    return is_bias and entry.dtype == "F32" and slot.owner.tensor.itemsize == 2


def expert_problem(key: str, inventory: Inventory) -> str | None:
    """Say so if the number of the expert in key is too large for the model."""
    expert = split_expert(canonical(key))
    num_experts = inventory.experts.get(expert[0]) if expert else None
    if expert and num_experts is not None and expert[1] >= num_experts:
        return f"expert {expert[1]}, but {expert[0]} has {num_experts} experts"
    return None
