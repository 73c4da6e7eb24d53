"""Select what becomes FP8 by the model that will hold it.

It selects each tensor whose module `convert` would swap, if a loader finds the result.
E experts, H hidden, I intermediate.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain

from ...kernels import BLOCK
from ...layers import Conversion, plan_conversion
from ...layers.conversion.conversion import SKIPPED, pattern_of
from ...layers.conversion.selection import matches
from ...layers.conversion.stacks import STACKS, stacks_of
from ..errors import CheckpointError, raise_if_any
from ..files.config import is_leftover
from ..files.header import Entry
from ..files.source import Source
from ..model.skeleton import Skeleton
from .fillings import Filling, converted_fillings
from .moves import ONE_BY_ONE, Move, Moves, Piece, Selected, apart, cut, turned, whole
from .select_by_name import dtype_problems, is_linear, is_named, split_modules, stays

_OTHER_FORM = "its weights are stored in another form, which is converted when they are loaded"
_LOST = "its weights or scales would not be found"
_UNEVEN = f"made of parts of sizes that {BLOCK} does not divide, which loaders cut otherwise"


def select_by_model(
    source: Source, skip: Sequence[str], headline: str, skeleton: Skeleton
) -> Selected:
    """Select by the model, and by name in layers for multi-token prediction: models hold none.

    Raises CheckpointError with headline.
    """

    def is_skipped(key: str) -> bool:
        return any(is_named(name, part) for part in skip for name in (key, skeleton.rename(key)))

    parts = [part for part in skip if any(matches(name, part) for name in skeleton.modules)]
    try:
        planned = plan_conversion(skeleton.model, skip=parts)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{headline}: {error}") from error
    fillings, unknown = _fillings(source, skeleton, planned)
    made: dict[str, Moves] = {}
    kept = dict(planned.kept)
    for module, kind in planned.swapped.items():
        result = _moves_of(module, kind, fillings[module], skeleton, is_skipped)
        if isinstance(result, str):
            kept[module] = result
        else:
            made[module] = result
    while parted := _parted(made, fillings):
        kept |= parted
        made = {module: moves for module, moves in made.items() if module not in parted}

    leftover = [entry for entry in unknown if is_leftover(source.config, entry.key)]
    moves = {e.key: [whole(e)] for e in leftover if is_linear(e) and not stays(e.key, skip)}
    swapped = {key.removesuffix(".weight"): "linear" for key in moves}
    problems = split_modules(leftover, moves.keys())
    for module in made:
        moves |= made[module]
        swapped[module] = planned.swapped[module]
    homes = {key: module for module in made for key in made[module]}
    problems += dtype_problems(source, moves, homes)
    if not moves and not problems:
        reasons = Conversion({}, kept).warning() or ""
        problems.append(
            f"{reasons}; convert the model instead, or load it by "
            "from_pretrained(..., quantization_config=FP8Config()), which may swap more"
        )
    raise_if_any(problems, headline)
    experts = {*planned.experts, *(x for x in kept if planned.swapped.get(x) == "experts")}
    basis = f"transformers' {type(skeleton.model).__name__}"
    return basis, moves, Conversion(swapped, kept, sorted(experts))


def _fillings(
    source: Source, skeleton: Skeleton, planned: Conversion
) -> tuple[dict[str, list[Filling]], list[Entry]]:
    """Return module to swap -> fillings of its weights, and the entries without a module."""
    fillings: dict[str, list[Filling]] = defaultdict(list)
    unknown = []
    for key, entry in source.entries.items():
        slot = skeleton.inventory.find(skeleton.rename(key))
        if slot is None:
            unknown.append(entry)
        elif not slot.name.endswith("bias"):
            homes = {slot.module, slot.module.rpartition(".")[0]}  # DBRX's weights are in a child
            for module in homes & planned.swapped.keys():
                fillings[module].append(Filling(slot, cut(entry)))
    for filling in converted_fillings(unknown, skeleton, {*planned.swapped, *planned.kept}):
        fillings[filling.slot.module].append(filling)
    return fillings, unknown


def _parted(made: Mapping[str, Moves], fillings: Mapping[str, list[Filling]]) -> dict[str, str]:
    """Return module -> why it stays, for modules filled together with one that stays.

    Without the keys of these modules, the conversion would make something else of the other keys.
    """
    reasons = {}
    for module in made:
        together = {home for x in fillings[module] for home in x.together}
        if others := sorted(together - made.keys()):
            reasons[module] = f"converted together with {pattern_of(others[0])}, which stays"
    return reasons


def _moves_of(
    module: str,
    kind: str,
    fillings: list[Filling],
    skeleton: Skeleton,
    is_skipped: Callable[[str], bool],
) -> Moves | str:
    """Return key -> its moves, for all weights of a module, or say why the module stays."""
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
    if stacks is not None and stacks.is_rearranged:
        raise CheckpointError(
            f"{module}: holds its experts as [in, out], or rows of gate and of up in turns, which "
            "no FP8 checkpoint does; convert the model instead, load it by from_pretrained(..., "
            f"quantization_config=FP8Config()), or pass skip={pattern_of(module)!r} to leave it as "
            "it is"
        )
    if stacks is not None and len(stacks.gate_up) == 1 and stacks.names[:2] != STACKS:
        return _LOST
    if stacks is not None and len(stacks.gate_up) > 1:
        named = {slot.name.removeprefix(f"{module}."): entry for entry, slot in direct}
        weights = [named[name] for name in stacks.names]
        return _dbrx(module, weights, len(stacks.down), skeleton)
    if len(direct) == len(fillings) and all(len(entry.shape) == 2 for entry, _ in direct):
        if not all(skeleton.is_loaded_as(key, skeleton.rename(key)) for key in entries):
            return _LOST
        move = turned if kind == "Conv1D" else whole
        return {key: [move(entry)] for key, entry in entries.items()}
    spelled = skeleton.spelled([x.slot.name for x in fillings], entries)
    if spelled is None:
        return _LOST
    if all(_can_be_apart(x, skeleton) for x in fillings):
        return {key: list(apart(entry)) for key, entry in entries.items()}
    moves: Moves = {key: [] for key in entries}
    for x in fillings:
        fused = _fused(x.pieces, spelled[x.slot.name], x.slot.shape)
        if not _begins_with_blocks(fused):
            return _UNEVEN
        moves[fused.entry.key].append(fused)
    return moves


def _dbrx(module: str, weights: list[Entry], num_experts: int, skeleton: Skeleton) -> Moves | str:
    """Make the stacks that `convert` makes of DBRX's weights, each [E * I, H], or say why not."""
    gate, up, down = weights
    rows, h = gate.shape
    i = rows // num_experts
    names = [f"{module}.{name}" for name in STACKS]
    spelled = skeleton.spelled(names, [entry.key for entry in weights])
    if spelled is None:
        return _LOST
    gate_up_name, down_name = (spelled[name] for name in names)
    pairs = zip(cut(gate, num_experts), cut(up, num_experts), strict=True)
    gate_up = tuple(chain.from_iterable(pairs))
    down_t = cut(down, num_experts, is_transposed=True)
    return {
        gate.key: [_fused(gate_up, gate_up_name, (num_experts, 2 * i, h))],
        up.key: [],
        down.key: [Move(down_t, down_name, (num_experts, h, i))],
    }


def _stored_twice(fillings: list[Filling]) -> str | None:
    """Say so if two keys fill one weight; then the module stays, since loaders differ."""
    first: dict[str, Filling] = {}
    for filling in fillings:
        other = first.setdefault(filling.slot.name, filling)
        if other is not filling:
            keys = sorted(x.entries()[0].key for x in (other, filling))
            return f"stored twice, as {keys[0]} and {keys[1]}"
    return None


def _weights_of(module: str, skeleton: Skeleton) -> set[int]:
    """Return the ids of all weights of a module, which must be stored in FP8 together."""
    slots = skeleton.inventory.slots.values()
    named = (x for x in slots if x.name.startswith(f"{module}.") and not x.name.endswith("bias"))
    return {id(x.owner) for x in named}


def _fused(pieces: tuple[Piece, ...], key: str, shape: tuple[int, ...]) -> Move:
    """Move pieces into one weight; in stacks of them, gate and up have blocks of their own."""
    is_gate_up = len(shape) == 3 and key.endswith("gate_up_proj")
    return Move(pieces, key, shape, halves=2 if is_gate_up else 1)


def _begins_with_blocks(move: Move) -> bool:
    """Whether each piece begins where a block does."""
    begins = accumulate(piece.num_rows(move.shape[-1]) for piece in move.pieces[:-1])
    return not any(begin % move.part_rows % BLOCK for begin in begins)


def _can_be_apart(filling: Filling, skeleton: Skeleton) -> bool:
    """Whether transformers would stack `X.0.gate_proj.weight` and such to `X.gate_up_proj`."""
    home, _, leaf = filling.entries()[0].key.rpartition(".")
    if filling.is_converted or leaf not in ONE_BY_ONE:
        return False
    keys = (f"{home}.0.{piece}.weight" for piece in ONE_BY_ONE[leaf])
    return all(skeleton.is_merged(key, filling.slot.name) for key in keys)
