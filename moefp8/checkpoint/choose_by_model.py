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
from ..layers.stacks import STACKS, stacks_of
from .errors import CheckpointError
from .header import Entry
from .moves import Move, apart, fused, transposed, transposed_stack, whole
from .names import scale_of_weight
from .skeleton import Skeleton
from .slots import Slot
from .source import Source

_ONE_BY_ONE = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_LOST = "its weights or scales would not be found"
_UNEVEN = f"stacks of sizes that {BLOCK} does not divide, which loaders cut otherwise"


@dataclass
class ByModel:
    """What becomes FP8, and what stays.

    moves: key -> what becomes of it; none of a key that goes into another's. swapped: what
    `convert` swaps; kept: module -> why it stays; experts: those of kept that are experts.
    unknown: keys of no module.
    """

    moves: dict[str, list[Move]] = field(default_factory=dict)
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
        came = _moves_of(module, kind, found[module], skeleton, is_skipped)
        if isinstance(came, dict):
            chosen.moves |= came
            chosen.swapped[module] = kind
            continue
        chosen.kept[module] = came
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
        elif not slot.name.endswith("bias"):
            homes = {slot.module, slot.module.rpartition(".")[0]}  # DBRX's weights are in a child
            for module in homes & conversion.swapped.keys():
                found[module].append((entry, slot))
    return found


def _moves_of(
    module: str,
    kind: str,
    entries: list[tuple[Entry, Slot]],
    skeleton: Skeleton,
    is_skipped: Callable[[str], bool],
) -> dict[str, list[Move]] | str:
    """Key -> what becomes of it, of all weights of a module; or why it stays."""
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
    stacks = stacks_of(skeleton.model.get_submodule(module))
    if stacks is not None and stacks.names != STACKS:
        named = {slot.name.removeprefix(f"{module}."): entry for entry, slot in entries}
        num_experts = len(stacks.down_proj)
        return _fused(module, [named[name] for name in stacks.names], num_experts, skeleton)
    in_stacks = [(entry, slot) for entry, slot in entries if len(entry.shape) == 3]
    names = [slot.name if in_stacks else entry.key for entry, slot in entries]
    if not all(_are_found(name, skeleton) for name in names):
        return _LOST
    if kind == "Conv1D":
        return {entry.key: [transposed(entry)] for entry, _ in entries}
    if not in_stacks:
        return {entry.key: [whole(entry, entry.key, is_fp8=True)] for entry, _ in entries}
    if all(_can_be_apart(entry, slot, skeleton) for entry, slot in in_stacks):
        return {entry.key: list(apart(entry)) for entry, _ in in_stacks}
    if any(_rows_of(entry, slot) % BLOCK for entry, slot in in_stacks):
        return _UNEVEN
    return {entry.key: [whole(entry, slot.name, is_fp8=True)] for entry, slot in in_stacks}


def _fused(
    module: str, weights: list[Entry], num_experts: int, skeleton: Skeleton
) -> dict[str, list[Move]] | str:
    """Of DBRX's weights, the stacks that `convert` makes of them."""
    gate, up, down = weights
    if gate.shape[0] // num_experts % BLOCK or down.shape[1] % BLOCK:
        return _UNEVEN
    first = fused(gate, up, f"{module}.gate_up_proj", num_experts)
    second = transposed_stack(down, f"{module}.down_proj", num_experts)
    keys = [key for move in (first, second) for key, _, _ in move.outputs()]
    if any(skeleton.rename(key) != key for key in keys):
        return _LOST
    return {gate.key: [first], up.key: [], down.key: [second]}


def _weights_of(module: str, skeleton: Skeleton) -> set[int]:
    """All that must be stored in FP8 if one of them is."""
    slots = skeleton.inventory.slots.values()
    named = (x for x in slots if x.name.startswith(f"{module}.") and not x.name.endswith("bias"))
    return {id(x.owner) for x in named}


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
