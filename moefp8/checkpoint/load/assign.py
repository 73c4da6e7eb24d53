"""Assign the tensors of a checkpoint to places of a model, from headers alone."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...kernels import E4M3
from ..errors import raise_if_any
from ..files.config import is_leftover, says_separate
from ..files.header import FP8, Entry
from ..files.names import SCALE_SUFFIX, Rename, canonical, renamed, weight_of_scale
from ..files.source import Source, disagreement, kept_entries
from ..model.fit import expert_problem, misfit, widens
from ..model.slots import Inventory, ModelTensor, Role, Slot


@dataclass(frozen=True)
class Copy:
    """An entry of the checkpoint, and the slot of the model that it fills."""

    entry: Entry
    slot: Slot


@dataclass
class Assignment:
    """copies: to be read on this rank; twins: pairs of entries for one tied tensor, to be compared.

    ignored: keys left out; names: model key -> checkpoint key, where they differ or are fused;
    widened: 16-bit correction biases that the checkpoint holds in FP32. unsure: stacks of gate and
    up whose codes must show how they are cut, and the problem if they do not.
    """

    copies: list[Copy] = field(default_factory=list)
    twins: list[tuple[Entry, Entry]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    widened: set[ModelTensor] = field(default_factory=set)
    unsure: list[tuple[Entry, str]] = field(default_factory=list)

    def entries(self) -> list[Entry]:
        """All entries that are read."""
        twins = [entry for twin in self.twins for entry in twin]
        return [*(copy.entry for copy in self.copies), *twins, *(x for x, _ in self.unsure)]


def assign(
    source: Source, inventory: Inventory, ignore: Iterable[str], rename: Rename | None
) -> Assignment:
    """Assign all keys but ignore to a whole model. Raises CheckpointError, listing misfits."""
    kept = kept_entries(source, ignore)
    assignment = _Matcher(source, inventory, rename).match(kept, "; the model is unchanged")
    left_out = [key for key in source.entries if key not in kept]
    assignment.ignored = left_out + assignment.ignored
    return assignment


def assign_fp8(source: Source, inventory: Inventory, rename: Rename | None) -> Assignment:
    """Assign the model's FP8 weights and scales alone. Raises CheckpointError if one has no key.

    Keys for which the model has no place are skipped.
    """
    return _Matcher(source, inventory, rename, only_fp8=True).match(source.entries, "")


class _Matcher:
    """Fills an assignment and collects problems. taken: part -> the entry that fills it."""

    def __init__(
        self, source: Source, inventory: Inventory, rename: Rename | None, only_fp8: bool = False
    ) -> None:
        self.source, self.inventory, self.rename = source, inventory, rename
        self.only_fp8 = only_fp8
        self.roles = (Role.WEIGHT, Role.SCALE) if only_fp8 else tuple(Role)
        self.assignment = Assignment()
        self.problems = [] if only_fp8 else list(inventory.problems)
        self.taken: dict[str, Entry] = {}
        self.fp8: set[str] = set()  # canonical names of weights stored in FP8

    def match(self, entries: dict[str, Entry], outcome: str) -> Assignment:
        """Raise CheckpointError unless all fits; the headline ends with outcome."""
        names = {key: renamed(key, self.rename) for key in entries}
        self.fp8 = {canonical(name) for key, name in names.items() if entries[key].dtype == FP8}
        if problem := disagreement(self.source, entries.values()):
            self.problems.append(problem)
        for key, name in names.items():
            self._place(entries[key], name)
        self._check_missing()
        self._check_cuts()
        headline = f"checkpoint {self.source.path} does not fit the model{outcome}"
        raise_if_any(self.problems, headline)
        return self.assignment

    def _place(self, entry: Entry, name: str) -> None:
        slot = self.inventory.find(name)
        if slot is not None and slot.role in self.roles and not self._is_left_out(slot):
            self._fill(entry, slot)
        elif self.only_fp8:
            if slot is not None and entry.dtype == FP8:
                self.problems.append(f"{entry}: an FP8 weight without its scale")
        elif canonical(name) in self.inventory.foreign:
            return
        elif is_leftover(self.source.config, entry.key):
            self.assignment.ignored.append(entry.key)
        elif not self._is_reported_at_weight(name):
            extra = "extra, the model has no place for it; ignore= it if that is intended"
            self.problems.append(f"{entry}: {expert_problem(name, self.inventory) or extra}")

    def _is_left_out(self, slot: Slot) -> bool:
        """Whether slot is the scale of a master weight, and only FP8 modules are assigned."""
        return self.only_fp8 and not slot.owner.places

    def _check_missing(self) -> None:
        unscaled: dict[Entry, str] = {}
        for part in self.inventory.scale_parts:
            master, scale = self.taken.get(part.removesuffix(SCALE_SUFFIX)), self.taken.get(part)
            if master is not None and master.dtype == FP8 and scale is None:
                unscaled.setdefault(master, part)
            elif master is not None and master.dtype != FP8 and scale is not None:
                self.problems.append(f"{scale}: extra, the scale of {master}, which is not FP8")
        for part, slot in self.inventory.parts.items():
            if part in self.taken or slot.role not in self.roles:
                continue
            weight = part.removesuffix(SCALE_SUFFIX) if slot.role is Role.SCALE else None
            if weight in self.taken:
                unscaled.setdefault(self.taken[weight], part)
            else:
                names = slot.owner.names if part in slot.owner.names else [part]
                self.problems.append(f"{' or '.join(names)}: missing from {self.source.path}")
        self.problems += [
            f"{entry}: an FP8 weight without its scale: {part} is missing"
            for entry, part in unscaled.items()
            if entry.dtype == FP8  # others are reported for their dtype
        ]

    def _fill(self, entry: Entry, slot: Slot) -> None:
        other = next((self.taken[part] for part in slot.parts if part in self.taken), None)
        if other is not None and self._are_twins(entry, other, slot):
            self.assignment.twins.append((other, entry))
            return
        if other is not None:
            self.problems.append(f"{entry}: {other} fills {slot.name} already; ignore one of them")
            return
        self.taken.update(dict.fromkeys(slot.parts, entry))
        if problem := misfit(entry, slot, self.inventory):
            self.problems.append(f"{entry}: {problem}")
            return
        if widens(entry, slot):
            self.assignment.widened.add(slot.owner)
        if slot.pieces:
            self.assignment.copies.append(Copy(entry, slot))
        name = slot.name if slot.is_fused else slot.parts[0]
        if slot.is_fused or entry.key != name:
            self.assignment.names[name] = entry.key

    def _are_twins(self, entry: Entry, other: Entry, slot: Slot) -> bool:
        """Whether both fill one tied tensor, under two of its names."""
        first = self.inventory.find(renamed(other.key, self.rename))
        is_tied = first is not None and first.parts == slot.parts and first.name != slot.name
        return is_tied and (entry.dtype, entry.shape) == (other.dtype, other.shape)

    def _check_cuts(self) -> None:
        """Find stacks of gate and up whose scales fit two cuts, unless config.json states one."""
        if says_separate(self.source.config):
            return
        for slot in (*self.inventory.slots.values(), *self.inventory.scales.values()):
            if slot.role is not Role.SCALE or not self.inventory.is_ambiguous(slot):
                continue
            scale = self.taken.get(slot.parts[0])
            if scale is None or scale.shape != slot.shape:
                continue
            num_rows = self.inventory.slots[slot.weight_name].shape[1]
            problem = (
                f"{scale}: nothing tells whether gate and up, {num_rows // 2} rows each, were cut "
                f"into blocks one after the other or as {num_rows} rows, since there are as many; "
                "store experts one by one (experts.0.gate_proj.weight and such), or quantize the "
                "16-bit original (python -m moefp8 quantize), which writes down the cut"
            )
            weight = self.taken.get(slot.parts[0].removesuffix(SCALE_SUFFIX))
            if weight is not None and weight.dtype == FP8 and len(weight.shape) == 3:
                self.assignment.unsure.append((weight, problem))
            elif weight is not None:
                self.problems.append(problem)

    def _is_reported_at_weight(self, name: str) -> bool:
        """Whether name is the scale of an FP8 weight that is reported, as its slot takes no FP8."""
        weight = weight_of_scale(name)
        slot = self.inventory.find(weight) if weight and canonical(weight) in self.fp8 else None
        return slot is not None and slot.role is Role.PLAIN and slot.owner.tensor.dtype != E4M3
