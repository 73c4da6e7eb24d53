"""Which tensors of a checkpoint become FP8 if it is known what model will hold them.

Those whose modules `convert` would swap, as long as a loader finds them again. E experts, H hidden,
I intermediate.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..kernels import BLOCK
from ..layers import Conversion, plan_conversion
from ..layers.conversion import SKIPPED
from ..layers.selection import matches
from .errors import CheckpointError
from .header import Entry
from .names import scale_of_weight
from .skeleton import Skeleton
from .slots import Slot
from .source import Source

_ONE_BY_ONE = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass
class ByModel:
    """What becomes FP8, by key, and what stays.

    matrices: of [N, K] weights; apart: of stacks [E, N, K] to be stored one by one; whole: of
    stacks that stay so, and the model's names for them. swapped: what `convert` swaps; kept:
    module -> why it stays; experts: those of kept that are experts. unknown: keys of no module.
    """

    matrices: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    whole: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    swapped: dict[str, str] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)


def choose_by_model(
    source: Source, skeleton: Skeleton, skip: Sequence[str], is_skipped: Callable[[str], bool]
) -> ByModel:
    """skip: patterns; is_skipped: whether they keep a key. Raises CheckpointError."""
    names = [name for name, _ in skeleton.model.named_modules()]
    parts = [part for part in skip if any(matches(name, part) for name in names)]
    try:
        conversion = plan_conversion(skeleton.model, skip=parts)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source.path} cannot be quantized: {error}") from error
    chosen = ByModel(kept=dict(conversion.kept), experts=set(conversion.experts))
    found = _entries_of(source, skeleton, conversion, chosen)
    for module, kind in conversion.swapped.items():
        why = "stored transposed" if kind == "Conv1D" else None
        why = why or _take(chosen, module, found[module], skeleton, is_skipped)
        if why is None:
            chosen.swapped[module] = kind
            continue
        chosen.kept[module] = why
        chosen.experts |= {module} if kind == "experts" else set()
    return chosen


def _entries_of(
    source: Source, skeleton: Skeleton, conversion: Conversion, chosen: ByModel
) -> dict[str, list[tuple[Entry, Slot]]]:
    """Module to swap -> what fills its weights."""
    found: dict[str, list[tuple[Entry, Slot]]] = defaultdict(list)
    for key, entry in source.entries.items():
        slot = skeleton.inventory.find(skeleton.rename(key))
        if slot is None:
            chosen.unknown.add(key)
        elif slot.module in conversion.swapped and not slot.name.endswith("bias"):
            found[slot.module].append((entry, slot))
    return found


def _take(
    chosen: ByModel,
    module: str,
    entries: list[tuple[Entry, Slot]],
    skeleton: Skeleton,
    is_skipped: Callable[[str], bool],
) -> str | None:
    """Add the keys of a module, all of them; or say why it stays."""
    if not entries or _weights_of(module, skeleton) - {id(slot.owner) for _, slot in entries}:
        return "its weights are stored in another form, which is converted when they are loaded"
    skipped = [is_skipped(entry.key) for entry, _ in entries]
    if all(skipped):
        return SKIPPED
    if any(skipped):
        key = entries[skipped.index(True)][0].key
        raise CheckpointError(f"{module}: must be skipped whole, or not at all; {key} is skipped")
    if any(entry.shape != slot.shape for entry, slot in entries):
        entry, slot = next((e, s) for e, s in entries if e.shape != s.shape)
        return f"stored as {list(entry.shape)}, and not as {list(slot.shape)}"
    stacks = [(entry, slot) for entry, slot in entries if len(entry.shape) == 3]
    found = [slot.name if stacks else entry.key for entry, slot in entries]
    if not all(_are_found(name, skeleton) for name in found):
        return "its weights or scales would not be found"
    if not stacks:
        chosen.matrices.update(entry.key for entry, _ in entries)
        return None
    if all(_can_be_apart(entry, slot, skeleton) for entry, slot in stacks):
        chosen.apart.update(entry.key for entry, _ in stacks)
        return None
    if any(_rows_of(entry, slot) % BLOCK for entry, slot in stacks):
        return f"stacks of sizes that {BLOCK} does not divide, which loaders cut otherwise"
    chosen.whole.update((entry.key, slot.name) for entry, slot in stacks)
    return None


def _weights_of(module: str, skeleton: Skeleton) -> set[int]:
    """All that must be stored in FP8 if one of them is."""
    slots = skeleton.inventory.slots.values()
    return {id(x.owner) for x in slots if x.module == module and not x.name.endswith("bias")}


def _rows_of(entry: Entry, slot: Slot) -> int:
    """Rows of what is cut into blocks by itself: gate and up are, in one stack."""
    return entry.shape[1] // 2 if slot.name.endswith("gate_up_proj") else entry.shape[1]


def _are_found(key: str, skeleton: Skeleton) -> bool:
    """Whether a loader finds a weight of this key and its scales: some renamings miss these."""
    name = skeleton.rename(key)
    is_known = skeleton.inventory.find(name) is not None
    return is_known and skeleton.rename(scale_of_weight(key)) == scale_of_weight(name)


def _can_be_apart(entry: Entry, slot: Slot, skeleton: Skeleton) -> bool:
    """Whether transformers stacks `X.0.gate_proj.weight` and such to what `X.gate_up_proj` is."""
    home, _, leaf = entry.key.rpartition(".")
    pieces = _ONE_BY_ONE.get(leaf)
    return pieces is not None and all(
        skeleton.stacks(f"{home}.0.{piece}.weight", slot.name) for piece in pieces
    )
