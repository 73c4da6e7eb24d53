"""Select what becomes FP8 by the model that will hold it.

That is each tensor whose module `convert` would swap, as long as a loader finds it again.
E experts, H hidden, I intermediate.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from ...kernels import BLOCK
from ...layers import Conversion, plan_conversion
from ...layers.conversion.conversion import SKIPPED, pattern_of
from ...layers.conversion.selection import matches
from ...layers.conversion.stacks import STACKS, stacks_of
from ..errors import CheckpointError
from ..files.header import Entry
from ..files.source import Source
from .fillings import Filling, converted_fillings
from .moves import Move, Piece, Selected, apart, fused, transposed, transposed_stack, whole
from .skeleton import Skeleton

_ONE_BY_ONE = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_OTHER_FORM = "its weights are stored in another form, which is converted when they are loaded"
_LOST = "its weights or scales would not be found"
_UNEVEN = f"made of parts of sizes that {BLOCK} does not divide, which loaders cut otherwise"


def select_by_model(
    source: Source, skeleton: Skeleton, skip: Sequence[str], is_skipped: Callable[[str], bool]
) -> Selected:
    """Select by the model; is_skipped tells whether skip keeps a key. Raises CheckpointError."""
    parts = [part for part in skip if any(matches(name, part) for name in skeleton.modules)]
    try:
        conversion = plan_conversion(skeleton.model, skip=parts)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source.path} cannot be quantized: {error}") from error
    basis = f"transformers' {type(skeleton.model).__name__}"
    selected = Selected(basis, kept=dict(conversion.kept), experts=set(conversion.experts))
    fillings = _fillings(source, skeleton, conversion, selected)
    made = {
        module: _moves_of(module, kind, fillings[module], skeleton, is_skipped)
        for module, kind in conversion.swapped.items()
    }
    while parted := _parted(made, fillings):
        made |= parted
    for module, kind in conversion.swapped.items():
        came = made[module]
        if isinstance(came, dict):
            selected.moves |= came
            selected.homes |= dict.fromkeys(came, module)
            selected.swapped[module] = kind
            continue
        selected.kept[module] = came
        selected.experts |= {module} if kind == "experts" else set()
    return selected


def _fillings(
    source: Source, skeleton: Skeleton, conversion: Conversion, selected: Selected
) -> dict[str, list[Filling]]:
    """Return module to swap -> what fills its weights."""
    found: dict[str, list[Filling]] = defaultdict(list)
    for key, entry in source.entries.items():
        slot = skeleton.inventory.find(skeleton.rename(key))
        if slot is None:
            selected.unknown.add(key)
        elif not slot.name.endswith("bias"):
            homes = {slot.module, slot.module.rpartition(".")[0]}  # DBRX's weights are in a child
            for module in homes & conversion.swapped.keys():
                found[module].append(Filling(slot, (Piece(entry, entry.begin, entry.num_bytes),)))
    modules = {*conversion.swapped, *conversion.kept}
    for filling in converted_fillings(source, selected.unknown, skeleton, modules):
        found[filling.slot.module].append(filling)
    return found


def _parted(
    made: dict[str, dict[str, list[Move]] | str], fillings: dict[str, list[Filling]]
) -> dict[str, str]:
    """Return module -> why it stays, for modules filled together with one that stays.

    Without the keys of these, the conversion would make something else of what is left.
    """
    swapped = {module for module, came in made.items() if isinstance(came, dict)}
    found = {}
    for module in swapped:
        together = {home for x in fillings[module] for home in x.together}
        if others := sorted(together - swapped):
            found[module] = f"converted together with {pattern_of(others[0])}, which stays"
    return found


def _moves_of(
    module: str,
    kind: str,
    fillings: list[Filling],
    skeleton: Skeleton,
    is_skipped: Callable[[str], bool],
) -> dict[str, list[Move]] | str:
    """Return key -> what becomes of it, for all weights of a module, or why the module stays."""
    entries = {entry.key: entry for filling in fillings for entry in filling.entries()}
    if not entries or _weights_of(module, skeleton) - {id(x.slot.owner) for x in fillings}:
        return _OTHER_FORM
    if kind == "Conv1D" and any(x.is_converted for x in fillings):
        return _OTHER_FORM
    skipped = [key for key in entries if is_skipped(key)]
    if len(skipped) == len(entries):
        return SKIPPED
    if twice := _stored_twice(fillings):
        return twice
    if skipped:
        raise CheckpointError(
            f"{module}: must be skipped whole, or not at all; {skipped[0]} is skipped"
        )
    direct = [(x.entries()[0], x.slot) for x in fillings if not x.is_converted]
    for entry, slot in direct:
        if entry.shape != slot.shape:
            return f"stored as {list(entry.shape)}, and not as {list(slot.shape)}"
    stacks = stacks_of(skeleton.model.get_submodule(module))
    if stacks is not None and stacks.names != STACKS:
        named = {slot.name.removeprefix(f"{module}."): entry for entry, slot in direct}
        num_experts = len(stacks.down)
        return _dbrx(module, [named[name] for name in stacks.names], num_experts, skeleton)
    if len(direct) == len(fillings) and all(len(entry.shape) == 2 for entry, _ in direct):
        if not all(skeleton.is_found(key, skeleton.rename(key)) for key in entries):
            return _LOST
        is_turned = kind == "Conv1D"
        return {
            key: [transposed(entry) if is_turned else whole(entry, key, is_fp8=True)]
            for key, entry in entries.items()
        }
    spelled = skeleton.spelled([x.slot.name for x in fillings], entries)
    if spelled is None:
        return _LOST
    if all(_can_be_apart(x, skeleton) for x in fillings):
        return {key: list(apart(entry)) for key, entry in entries.items()}
    if not all(map(_is_even, fillings)):
        return _UNEVEN
    moves: dict[str, list[Move]] = {key: [] for key in entries}
    for x in fillings:
        move = Move(x.pieces, spelled[x.slot.name], x.slot.shape, is_fp8=True)
        moves[move.entry.key].append(move)
    return moves


def _dbrx(
    module: str, weights: list[Entry], num_experts: int, skeleton: Skeleton
) -> dict[str, list[Move]] | str:
    """Make the stacks that `convert` makes of DBRX's weights, or say why they stay."""
    gate, up, down = weights
    if gate.shape[0] // num_experts % BLOCK or down.shape[1] % BLOCK:
        return _UNEVEN
    names = [f"{module}.{name}" for name in STACKS]
    spelled = skeleton.spelled(names, [entry.key for entry in weights])
    if spelled is None:
        return _LOST
    gate_up_name, down_name = (spelled[name] for name in names)
    return {
        gate.key: [fused(gate, up, gate_up_name, num_experts)],
        up.key: [],
        down.key: [transposed_stack(down, down_name, num_experts)],
    }


def _stored_twice(fillings: list[Filling]) -> str | None:
    """Say whether two keys fill one weight; then the module stays, since loaders differ."""
    first: dict[str, Filling] = {}
    for filling in fillings:
        other = first.setdefault(filling.slot.name, filling)
        if other is not filling:
            keys = sorted(x.entries()[0].key for x in (other, filling))
            return f"stored twice, as {keys[0]} and {keys[1]}"
    return None


def _weights_of(module: str, skeleton: Skeleton) -> set[int]:
    """Return all weights that must be stored in FP8 if one of them is."""
    slots = skeleton.inventory.slots.values()
    named = (x for x in slots if x.name.startswith(f"{module}.") and not x.name.endswith("bias"))
    return {id(x.owner) for x in named}


def _is_even(filling: Filling) -> bool:
    """Whether each part that is cut by itself, as gate and up are, ends with a whole block."""
    *stack, num_rows, num_columns = filling.slot.shape
    parts = 2 if filling.slot.name.endswith("gate_up_proj") else 1
    rows = [num_rows // parts] if stack else []
    rows += [piece.num_rows(num_columns) for piece in filling.pieces[:-1]]
    return not any(n % BLOCK for n in rows)


def _can_be_apart(filling: Filling, skeleton: Skeleton) -> bool:
    """Whether transformers would stack `X.0.gate_proj.weight` and such to `X.gate_up_proj`."""
    home, _, leaf = filling.entries()[0].key.rpartition(".")
    pieces = () if filling.is_converted else _ONE_BY_ONE.get(leaf, ())
    return bool(pieces) and all(
        skeleton.stacks(f"{home}.0.{piece}.weight", filling.slot.name) for piece in pieces
    )
