"""Which lists of experts `convert` stacks, and what it says of the others."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ..experts import GroupedExperts
from .converted_moe import ConvertedMoE, Formula
from .expert_lists import ExpertList, expert_lists, other_lists
from .list_trial import Tried, try_list

Settings = Mapping[str, Any]


class Stacked(NamedTuple):
    """A block whose experts are stacked, and the settings of its `GroupedExperts`."""

    experts: ExpertList
    formula: Formula
    settings: dict[str, Any]

    def weights(self, block: nn.Module) -> list[nn.Parameter]:
        """All experts' weights."""
        return [x for weights in self.experts.weights(block) for x in weights]

    def replacement(self, block: nn.Module, experts: GroupedExperts) -> ConvertedMoE:
        """The module that takes the block's place, with `experts` in it."""
        gate, name = self.experts.gate, self.experts.name
        return ConvertedMoE(gate, block.get_submodule(gate), name, experts, self.formula)


def stack_lists(
    modules: Mapping[str, nn.Module],
    is_wanted: Callable[[str], bool],
    swapped: Iterable[str],
    settings_of: Callable[[str], dict[str, Any]],
) -> tuple[dict[str, Stacked], dict[str, str]]:
    """Return block -> how its experts are stacked, and list -> why its experts are not.

    is_wanted: whether the arguments of `convert` allow to swap the linear of a name. A list is
    left out if they forbid one of its linears. swapped: linears to swap if there were no lists.
    settings_of: the settings for a name.
    """
    stacked, one_by_one = dict[str, Stacked](), dict[str, str]()
    known: dict[Any, Tried] = {}
    swapped = {*swapped}
    places = set[str]()
    for experts in expert_lists(modules):
        places.add(experts.place)
        linears, block = experts.linears(), modules[experts.block]
        if not all(map(is_wanted, linears)):
            continue
        settings = settings_of(experts.place)
        tried = try_list(block, experts, known)
        experts = experts if tried.leaves is None else experts.with_leaves(tried.leaves)
        problem = tried.problem or _problem(modules[""], experts, swapped, settings["trainable"])
        if tried.formula is not None and not problem:
            stacked[experts.block] = Stacked(experts, tried.formula, settings)
        elif swapped & {*linears}:
            one_by_one[experts.place] = f"({type(block).__name__}): {problem}"
            if tried.leaves is not None:
                one_by_one[experts.place] += (
                    f". To run them at once, put two lines into {type(block).__name__}: the first "
                    "where its weights are loaded, the second in place of the loop over experts, "
                    "with x [T, H] and the router's ids and weights [T, k]; what the loop does "
                    "besides, such as a capacity, dropout or a scale, is then gone:\n"
                    f"{experts.recipe(settings['trainable'])}"
                )
    for other in other_lists(modules):
        is_left_out = other.place in places or not all(map(is_wanted, other.linears))
        if not is_left_out and swapped & {*other.linears}:
            block = modules[other.place.rpartition(".")[0]]
            one_by_one[other.place] = f"({type(block).__name__}): {other.why}"
    return stacked, one_by_one


def _problem(
    model: nn.Module, experts: ExpertList, swapped: set[str], trainable: bool
) -> str | None:
    """What forbids to stack experts whose block has passed the trial."""
    if trainable:
        return "a stack of master weights would be a parameter that no optimizer knows"
    if callable(getattr(model, "save_pretrained", None)):
        return "the model's save_pretrained has to write them by their own names"
    if experts.block.rpartition(".")[2] == "_orig_mod":
        return "it is compiled as a whole, and a swap would not be seen; convert before compiling"
    if f"{experts.block}.{experts.gate}".lstrip(".") in swapped:
        return f"{experts.gate}, which routes to them, becomes FP8"
    return None
