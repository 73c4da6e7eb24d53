"""The places of a model by name, kept with the model as long as its layout stays.

Places hold no tensor and no module of the model, so those that it replaces are freed.
"""

from difflib import get_close_matches
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...kernels import E4M3
from ...kernels.common.checks import FLOATS
from ...layers.module import FixedDtypeModule
from ...layers.parts import parts_of
from ...layers.trainable import TrainableModule
from ..files.config import is_leftover
from ..files.header import DTYPE_NAMES, FP8, TORCH_DTYPES
from ..files.names import Rename, canonical, folded, scale_of_weight
from ..model.fit import dtype_problem, expert_problem, shape_problem, widens
from ..model.record import recall
from ..model.skeleton import renaming, skeleton_around
from ..model.slots import Inventory, ModelTensor, Role, Slot, persistent_tensors
from .bucket import Buckets
from .place import Arrival, Home, Place

_ATTRIBUTE = "_moefp8_places"


class Places:
    """All places of a model by name.

    inventory: its slots, of tensors on the meta device. layout: see `_contents_of`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.inventory = inventory = Inventory(model)
        self.by_name: dict[str, Place | None] = {}
        self.buckets = Buckets()
        self.homes: dict[ModelTensor, Home] = {}
        if inventory.problems:
            return
        self.layout, _ = _contents_of(model)
        skeleton = skeleton_around(model)
        self._rename: Rename | None = None
        if skeleton is not None:
            self._rename = renaming(model, skeleton.conversions, inventory)
        for slot in (*inventory.slots.values(), *inventory.scales.values()):
            if slot.owner not in self.homes:
                self.homes[slot.owner] = _home_of(slot)
        for part, slot in inventory.parts.items():
            if slot.role is not Role.SCALE and slot.pieces:
                self.homes[slot.owner].needed[part] = None
        for owner in inventory.tensors.values():
            owner.tensor = torch.empty_like(owner.tensor, device="meta")
            owner.places.clear()
        inventory.tensors.clear()

    @classmethod
    def of(cls, model: nn.Module) -> tuple["Places", dict[ModelTensor, torch.Tensor]]:
        """The places of a model, and its current tensors.

        Places are made again only if the model's layout has changed. Raises ValueError.
        """
        layout, tensors = _contents_of(model)
        places: Places | None = vars(model).get(_ATTRIBUTE)
        if places is None or places.layout != layout:
            places = cls(model)
            if problems := places.inventory.problems:
                raise ValueError(f"updating: the model cannot be written to:\n{listed(problems)}")
            setattr(model, _ATTRIBUTE, places)
        homes = [home for home in places.homes.values() if home.name]
        return places, {home.owner: tensors[home.module, home.name] for home in homes}

    def __reduce__(self) -> Any:
        """A copy of the model makes its own."""
        return type(None), ()

    def find(self, name: str, model: nn.Module) -> Place | None:
        """The place of a name, or None for tensors that other ranks hold or loaders leave out.

        Raises KeyError for other names.
        """
        if name not in self.by_name:
            slot = self.inventory.find(name)
            inner = name if slot is not None or self._rename is None else self._rename(name)
            slot = slot or self.inventory.find(inner)
            is_elsewhere = canonical(inner) in self.inventory.foreign
            if slot is None and not is_elsewhere and not is_leftover(config_of(model), name):
                raise KeyError(name)
            self.by_name[name] = None if slot is None else self._place_of(slot)
        return self.by_name[name]

    def unknown(self, arrival: Arrival) -> str:
        """Say that the model has no place for it, and name the nearest pattern."""
        near = get_close_matches(folded(arrival.key), self._patterns, 1)
        way_out = f"near is {near[0]}" if near else "no name is near"
        extra = f"extra, the model has no place for it; {way_out}"
        return f"{arrival}: {expert_problem(arrival.key, self.inventory) or extra}"

    def misfit(self, arrival: Arrival, place: Place) -> str | None:
        """Say why arrival cannot go to place, or None if it can."""
        if place.home.is_rearranged and not place.is_scale and arrival.dtype != FP8:
            return (
                f"{place.slot.module} was converted from experts that are stored as [in, out], or "
                "with rows of gate and of up in turns, and nothing says which order came; load a "
                "checkpoint instead"
            )
        problem = None
        if TORCH_DTYPES.get(arrival.dtype) not in place.dtypes:
            problem = _dtype_problem(arrival, place)
        return problem or shape_problem(arrival, place.slot, self.inventory)

    @cached_property
    def _patterns(self) -> set[str]:
        return {folded(name) for name in (*self.inventory.slots, *self.inventory.scales)}

    def _place_of(self, slot: Slot) -> Place:
        home = self.homes[slot.owner]
        weight = home
        if slot.role is Role.SCALE:
            weight = self.homes[self.inventory.slots[slot.weight_name].owner]
        place = Place(
            slot=slot,
            home=home,
            weight=weight,
            shape=slot.shape,
            parts=slot.parts,
            dtypes=_dtypes_of(slot, home),
            is_weight=slot.role is Role.WEIGHT,
            is_scale=slot.role is Role.SCALE,
            is_here=bool(slot.pieces),
        )
        if home.num_matrices and place.is_here:
            ((stored, here),) = slot.pieces
            place.first, place.count = _matrices_of(home, here)
            if stored and isinstance(stored[0], slice) and not slot.index:
                place.stored = stored[0]
        return place

    def scales_of(self, home: Home) -> Home:
        """The home of the scales of an FP8 weight."""
        name = home.owner.names[0]
        return self.homes[self.inventory.slots[scale_of_weight(name)].owner]


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return config.json of the latest load, or the config of a model of transformers, or {}."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    config: dict[str, Any] = recall(model).config or to_dict()
    return config


def listed(problems: list[str]) -> str:
    """The first ten problems, a line each, and how many more there are."""
    lines = [f"  - {problem}" for problem in problems[:10]]
    return "\n".join(lines + [f"  ... and {len(problems) - 10} more"] * (len(problems) > 10))


def _contents_of(model: nn.Module) -> tuple[list[Any], dict[tuple[str, str], torch.Tensor]]:
    """(layout, tensors by module and name).

    layout: all that places depend on: names, kinds, layouts, ties and the parts of ranks.
    """
    seen: dict[int, int] = {}
    layout: list[Any] = []
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        layout.append((prefix, type(module), parts_of(module) or None))
        for name, x in persistent_tensors(module).items():
            which = seen.setdefault(id(x), len(seen))
            layout.append((name, which, x.shape, x.stride(), x.dtype))
            tensors[prefix, name] = x
    return layout, tensors


def _home_of(slot: Slot) -> Home:
    """The home of the first slot of a tensor, which is the whole tensor."""
    owner = slot.owner
    if not owner.places:  # scales of codes that become a master weight
        return Home("", "", owner, slot.role)
    module, name = owner.places[0]
    home = Home(owner.names[0].removesuffix(name).removesuffix("."), name, owner, slot.role)
    weight = name.removesuffix("_scale_inv")
    is_ours = isinstance(module, FixedDtypeModule) and weight in module.fp8_names
    home.quantizes = is_ours and slot.role is Role.WEIGHT
    home.is_rearranged = getattr(module, "is_rearranged", False)
    axes = set(owner.shard)
    is_stack = owner.tensor.ndim == 3 and axes <= {0}
    if isinstance(module, TrainableModule) and weight in module.halved_names:
        home.parts = 2
    if is_ours and _is_filled(owner.tensor) and (is_stack or not axes):
        home.num_matrices = home.parts * (owner.tensor.shape[0] if is_stack else 1)
    return home


def _matrices_of(home: Home, here: tuple[int | slice, ...]) -> tuple[int, int]:
    """(first, count) of the matrices of a stack at an index of it."""
    if not here:
        return 0, home.num_matrices
    lead, *others = here
    if isinstance(lead, slice):
        return 0, home.num_matrices
    num_rows = home.owner.tensor.shape[1]
    rows = others[0] if others else slice(None)
    assert isinstance(rows, slice)
    start, stop, _ = rows.indices(num_rows)
    size = num_rows // home.parts
    return lead * home.parts + start // size, (stop - start) // size


def _is_filled(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() > 0


def _dtypes_of(slot: Slot, home: Home) -> frozenset[torch.dtype]:
    """The dtypes that may come for a slot."""
    if home.is_rearranged and slot.role is not Role.SCALE:
        return frozenset((E4M3,) if slot.role is Role.WEIGHT else ())
    if slot.role is Role.WEIGHT:
        return frozenset((E4M3, *(FLOATS if home.quantizes else ())))
    tried = {dtype: Arrival(slot.name, name, slot.shape) for dtype, name in DTYPE_NAMES.items()}
    return frozenset(
        dtype for dtype, x in tried.items() if not (dtype_problem(x, slot) or widens(x, slot))
    )


def _dtype_problem(arrival: Arrival, place: Place) -> str | None:
    """Say why the dtype of arrival cannot go to place."""
    slot, dtype = place.slot, place.slot.owner.tensor.dtype
    wanted = DTYPE_NAMES.get(dtype, str(dtype))
    if place.is_weight and place.home.quantizes:
        return f"dtype must be BF16, F16, F32 or {FP8}, got {arrival.dtype}"
    if place.is_weight:
        return (
            f"dtype must be {FP8}, got {arrival.dtype}: {slot.module} is no module of moefp8 that "
            "quantizes it"
        )
    if widens(arrival, slot):
        return (
            f"dtype must be {wanted}, got F32, which a load would keep: rounding makes biases "
            "equal; load a checkpoint that has it in F32 first, or cast it"
        )
    if slot.role is Role.PLAIN and arrival.dtype == FP8:
        return (
            f"an FP8 weight, but {slot.module or 'the model'} takes {wanted}; send it in {wanted}"
        )
    return dtype_problem(arrival, slot)
