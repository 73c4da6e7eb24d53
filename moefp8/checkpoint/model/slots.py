"""The places of a model that a checkpoint can fill.

A ModelTensor is one tensor, under all its names. A slot is a tensor, or the rows of one expert
in a stacked [E, rows, columns] one. Parts are the smallest slots: all of them must be filled.
A master weight also has slots for scales, which the model does not hold: they are filled if the
checkpoint has the weight in FP8, which is dequantized with them.
Slots are of the whole model; in a sharded one, each slot lists its pieces on this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...kernels import BLOCK, E4M3, num_blocks
from ...layers.adapter import Adapter
from ...layers.parts import Index, Parts, is_stacked, overlaps, paddings, parts_of, whole_shape
from ...layers.trainable import TrainableModule
from ..files.config import has_ambiguous_blocks
from ..files.names import SCALE_SUFFIX, canonical, join, scale_of_weight
from .memory import memory_problems


class Role(Enum):
    WEIGHT = "FP8 weight that has a scale"
    SCALE = "scale of an FP8 weight"
    MASTER = "master weight, which may be stored in FP8"
    PLAIN = "anything else"


@dataclass(eq=False)
class ModelTensor:
    """A parameter or persistent buffer, in several places if it is tied. shard: its part here.

    scale: for a master weight, the tensor that takes its scales, which has no places. halves: 2 if
    gate and up are stored one after the other.
    """

    tensor: torch.Tensor
    shard: Parts = field(default_factory=dict)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    scale: "ModelTensor | None" = None
    halves: int = 1

    def replace(self, data: torch.Tensor) -> None:
        """Put data in every place of the tensor, as a parameter or buffer like it."""
        new = data
        if isinstance(self.tensor, nn.Parameter):
            new = nn.Parameter(data, requires_grad=self.tensor.requires_grad)
            new.__dict__.update(self.tensor.__dict__)
        for module, name in self.places:
            setattr(module, name, new)
        self.tensor = new

    @cached_property
    def scale_indices(self) -> list[torch.Tensor]:
        """For each axis of a whole master weight, the scale's index for each entry on that axis."""
        *batch, rows, columns = whole_shape(self.tensor.shape, self.shard)
        half = torch.arange(rows // self.halves, device="cpu") // BLOCK
        num_rows = num_blocks(rows // self.halves)
        in_rows = torch.cat([half + i * num_rows for i in range(self.halves)])
        in_columns = torch.arange(columns, device="cpu") // BLOCK
        return [*(torch.arange(n, device="cpu") for n in batch), in_rows, in_columns]

    def clear_padding(self) -> None:
        """Write zeros where entries of other ranks would be."""
        for index in paddings(self.shard):
            self.tensor.detach()[index].zero_()


@dataclass(frozen=True, eq=False)
class Slot:
    """A place in the whole model. name: its key; shape: the stored tensor's.

    module: the name of its module; index: its place in the whole tensor, () for all of it.
    """

    name: str
    module: str
    owner: ModelTensor
    parts: tuple[str, ...]
    role: Role
    shape: tuple[int, ...]
    index: Index = ()

    @property
    def weight_name(self) -> str:
        """The name of the weight that a scale scales; else its own."""
        return self.name.removesuffix(SCALE_SUFFIX) if self.role is Role.SCALE else self.name

    @property
    def is_fused(self) -> bool:
        """Whether this is all experts of a stacked tensor at once."""
        return not self.index and self.parts != (self.owner.names[0],)

    @cached_property
    def pieces(self) -> tuple[tuple[Index, Index], ...]:
        """Pairs (index in the stored tensor, index in this rank's); none if others hold all."""
        if not self.owner.shard:
            return (((), self.index),)
        return tuple(overlaps(self.owner.tensor.shape, self.owner.shard, self.index))


class Inventory:
    """All slots of a model, but for its adapters, which have files of their own.

    slots: all by name, fused and per-expert; parts: those to fill; scales: slots for scales of
    master weights, and scale_parts the parts of them; experts: canonical name of a module -> E;
    foreign: canonical names of tensors of other ranks; problems: what prevents filling.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[int, ModelTensor] = {}
        self.slots: dict[str, Slot] = {}
        self.parts: dict[str, Slot] = {}
        self.scales: dict[str, Slot] = {}
        self.scale_parts: dict[str, Slot] = {}
        self.experts: dict[str, int] = {}
        self.foreign: set[str] = set()
        self.problems: list[str] = []
        named = model.named_modules(remove_duplicate=False)
        modules = [(name, x) for name, x in named if not isinstance(x, Adapter)]
        for prefix, module in modules:
            self._collect(prefix, module)
        for prefix, module in modules:
            for name, tensor in persistent_tensors(module).items():
                owner = self.tensors[id(tensor)]
                self._add_slots(prefix, module, name, owner)
                if owner.scale is not None:
                    self._add_slots(prefix, module, scale_of_weight(name), owner.scale)
        self.problems += memory_problems((x.names[0], x.tensor) for x in self.tensors.values())

    def find(self, name: str) -> Slot | None:
        """Return the slot of this name, or the only one of the same canonical name."""
        exact = self.slots.get(name) or self.scales.get(name)
        return exact or self._aliases.get(canonical(name))

    def is_ambiguous(self, slot: Slot) -> bool:
        """Whether the scales of a whole FP8 gate_up_proj [E, 2I, H] fit two cuts into blocks.

        Gate and up, cut into blocks one after the other, then have as many scales as all 2I rows.
        """
        is_fp8 = slot.role in (Role.WEIGHT, Role.SCALE) and slot.is_fused
        if not (is_fp8 and slot.weight_name.endswith("gate_up_proj")):
            return False
        return has_ambiguous_blocks(self.slots[slot.weight_name].shape[1] // 2)

    @cached_property
    def _aliases(self) -> dict[str, Slot | None]:
        aliases: dict[str, Slot | None] = {}
        for name, slot in (*self.slots.items(), *self.scales.items()):
            key = canonical(name)
            aliases[key] = None if key in aliases else slot
        return aliases

    def _collect(self, prefix: str, module: nn.Module) -> None:
        persistent, parts = persistent_tensors(module), parts_of(module)
        self.foreign |= {canonical(join(prefix, name)) for name in parts.keys() - persistent}
        for name, tensor in persistent.items():
            new = ModelTensor(tensor, parts.get(name, {}))
            known = self.tensors.setdefault(id(tensor), new)
            known.places.append((module, name))
            known.names.append(join(prefix, name))
            if _role(module, name) is Role.MASTER:
                _add_scale(known, module, name, join(prefix, scale_of_weight(name)))
            if is_traceable_wrapper_subclass(tensor):
                self.problems.append(
                    f"{join(prefix, name)}: a {type(tensor).__name__} cannot be filled; load "
                    "before sharding or wrapping the model"
                )
            elif tensor.layout is not torch.strided:
                self.problems.append(f"{join(prefix, name)}: {not_dense(tensor)}")
        for name, tensor in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and name not in persistent:
                self.problems.append(
                    f"{join(prefix, name)}: on the meta device, and no checkpoint stores it; "
                    f"build {prefix or 'the model'} again outside torch.device('meta')"
                )

    def _add_slots(self, prefix: str, module: nn.Module, name: str, owner: ModelTensor) -> None:
        role, whole = _role(module, name), join(prefix, name)
        shape = whole_shape(owner.tensor.shape, owner.shard)
        pieces = list(_expert_pieces(name, shape)) if is_stacked(module) else []
        home = owner.names[0].removesuffix(name).removesuffix(".")
        parts = tuple(join(home, piece) for piece, _, _ in pieces) or (owner.names[0],)
        is_held = bool(owner.places)
        slots, to_fill = (self.slots, self.parts) if is_held else (self.scales, self.scale_parts)
        slots[whole] = slot = Slot(whole, prefix, owner, parts, role, shape)
        if not pieces:
            to_fill.setdefault(parts[0], slot)
            return
        self.experts[canonical(f"{prefix}.").removesuffix(".")] = shape[0]
        for part, (piece, index, piece_shape) in zip(parts, pieces, strict=True):
            slot = Slot(join(prefix, piece), prefix, owner, (part,), role, piece_shape, index)
            slots[slot.name] = slot
            to_fill.setdefault(part, slot)


def not_dense(tensor: torch.Tensor) -> str:
    """Say what is wrong with a tensor of another layout than torch.strided."""
    return f"its layout is {tensor.layout}, which no checkpoint has; make it dense by .to_dense()"


def persistent_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    own: dict[str, torch.Tensor | None] = {**module._parameters, **module._buffers}
    skipped = module._non_persistent_buffers_set
    return {name: x for name, x in own.items() if x is not None and name not in skipped}


def _add_scale(owner: ModelTensor, module: nn.Module, name: str, scale_name: str) -> None:
    """Give a master weight a tensor for scales, on the meta device until they are read.

    The tensor has the scales of the whole weight, also for one rank's part.
    """
    if owner.scale is None and isinstance(module, TrainableModule):
        owner.halves = halves = 2 if name in module.halved_names else 1
        *batch, rows, columns = whole_shape(owner.tensor.shape, owner.shard)
        shape = [*batch, halves * num_blocks(rows // halves), num_blocks(columns)]
        owner.scale = ModelTensor(torch.empty(shape, dtype=torch.float32, device="meta"))
    if owner.scale is not None:
        owner.scale.names.append(scale_name)


def _role(module: nn.Module, name: str) -> Role:
    weight = name.removesuffix(SCALE_SUFFIX)
    if isinstance(module, TrainableModule) and module.trainable and weight in module.master_names:
        return Role.MASTER if name == weight else Role.SCALE
    data, scale = (module._parameters.get(x) for x in (weight, scale_of_weight(weight)))
    if data is None or scale is None or data.dtype != E4M3:
        return Role.PLAIN
    return Role.WEIGHT if name == weight else Role.SCALE


def _expert_pieces(
    name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, Index, tuple[int, ...]]]:
    """Yield (per-expert name, index, shape) for each piece of a stacked tensor, and no other."""
    stem = name.removesuffix(SCALE_SUFFIX)
    if stem not in ("gate_up_proj", "down_proj") or len(shape) != 3:
        return
    leaf = f"weight{name.removeprefix(stem)}"
    num_experts, num_rows, num_columns = shape
    pieces: list[tuple[str, Index, int]] = [("down_proj", (), num_rows)]
    if stem == "gate_up_proj":
        half = num_rows // 2
        gate, up = slice(half), slice(half, num_rows)
        pieces = [("gate_proj", (gate,), half), ("up_proj", (up,), half)]
    for expert in range(num_experts):
        for piece, rows, size in pieces:
            yield f"{expert}.{piece}.{leaf}", (expert, *rows), (size, num_columns)
