"""Lists of experts that a block calls one by one: where they are, and what can be stacked.

E experts, H hidden, I intermediate.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from ...functional.kept import is_plain
from ...kernels.common.checks import FLOATS
from ..module import is_wrapped
from ..parts import parts_of
from .selection import is_linear, widths

Leaves = tuple[str, ...]

_WAY_OUT = (
    ". If they compute SwiGLU, GroupedExperts.from_weights(gate_up_proj, down_proj) of stacks "
    "[E, 2I, H], gate rows first, and [E, H, I] runs them at once"
)
_OTHER_FORM = (
    "each expert must hold three linears, gate, up and down, or two, with gate and up in one, and "
    f"holds others{_WAY_OUT}"
)


@dataclass(frozen=True)
class ExpertList:
    """A block with experts in an `nn.ModuleList` or `nn.ModuleDict`, all of one class.

    block: the block's dotted name. name: the list's name in the block. keys: the experts' names in
    the list. gate: the name of the block's one linear from H to E, or "". leaves: the names of an
    expert's linears, two from H to I, or one from H to 2I, and then one from I to H; gate, up and
    down once a trial knows which of them is gate. sizes: E, H, I.
    """

    block: str
    name: str
    keys: tuple[str, ...]
    gate: str
    leaves: Leaves
    sizes: tuple[int, int, int]

    @property
    def place(self) -> str:
        """The list's dotted name in the model."""
        return f"{self.block}.{self.name}".lstrip(".")

    def names_of(self, leaf: str) -> list[str]:
        """The names of a linear of all experts, in the block."""
        return [f"{self.name}.{key}.{leaf}" for key in self.keys]

    def linears(self) -> list[str]:
        """The dotted names of all experts' linears, in the model."""
        inner = [name for leaf in self.leaves for name in self.names_of(leaf)]
        return [f"{self.block}.{name}".lstrip(".") for name in inner]

    def weights(self, block: nn.Module) -> tuple[list[nn.Parameter], ...]:
        """Each linear's weights, of all experts, in the order of `leaves`."""
        return tuple(
            [block.get_submodule(name).get_parameter("weight") for name in self.names_of(leaf)]
            for leaf in self.leaves
        )

    def with_leaves(self, leaves: Leaves) -> "ExpertList":
        return replace(self, leaves=leaves)

    def recipe(self, trainable: bool) -> str:
        """The two lines with which the block runs its experts at once, whatever its forward is."""
        *gate_up, down = (f"e.{leaf}.weight" for leaf in self.leaves)
        rows = gate_up[0] if len(gate_up) == 1 else f"torch.cat([{', '.join(gate_up)}])"
        experts = f"self.{self.name}"
        is_list = self.keys == tuple(map(str, range(len(self.keys))))
        each = f"for e in {experts}" if is_list else f"for e in {experts}.values()"
        return (
            f"    {experts} = moefp8.GroupedExperts.from_weights(torch.stack([{rows} {each}]), "
            f"torch.stack([{down} {each}]){', trainable=True' if trainable else ''})\n"
            f"    y = {experts}(x, top_k_index, top_k_weights)"
        )


def expert_lists(modules: Mapping[str, nn.Module]) -> Iterator[ExpertList]:
    """The lists of experts of a model, by structure alone: a trial shows what they compute.

    modules: `dict(model.named_modules(remove_duplicate=False))`. Models that transformers brings
    are left out: their checkpoints, and its loader, know each expert by its own name.
    """
    for place, experts in modules.items():
        block, _, name = place.rpartition(".")
        by_key = _experts_of(experts)
        if not place or _is_of_transformers(modules[block]) or not by_key:
            continue
        shapes = [_shapes(expert) for expert in by_key.values()]
        roles = _leaves(shapes[0]) if all(x == shapes[0] for x in shapes) else None
        if roles is None:
            continue
        leaves, hidden_size, intermediate_size = roles
        gate = _gate(modules[block], hidden_size, len(by_key))
        if not hidden_size * intermediate_size:
            continue
        if gate or _is_called_experts(name, by_key):
            sizes = len(by_key), hidden_size, intermediate_size
            yield ExpertList(block, name, tuple(by_key), gate, leaves, sizes)


class OtherList(NamedTuple):
    """Experts in a list that cannot be stacked: its place, its linears' names in the model, why."""

    place: str
    linears: list[str]
    why: str


def other_lists(modules: Mapping[str, nn.Module]) -> Iterator[OtherList]:
    """The lists of experts of other forms than `expert_lists` gives, by names and structure.

    modules: as in `expert_lists`, whose lists may be among these, too.
    """
    for place, module in modules.items():
        if _is_of_transformers(module):
            continue
        for name, child in module.named_children():
            by_key = _experts_of(child)
            if (
                by_key
                and _is_called_experts(name, by_key)
                and not all(map(is_linear, by_key.values()))
            ):
                inner = [path for path, each in child.named_modules() if is_linear(each)]
                home = f"{place}.{name}".lstrip(".")
                yield OtherList(home, [f"{home}.{path}" for path in inner], _OTHER_FORM)
        if lists := _parallel_lists(module):
            homes = {name: f"{place}.{name}".lstrip(".") for name in lists}
            inner = [f"{homes[name]}.{key}" for name, keys in lists.items() for key in keys]
            why = f"each expert's linears are in several lists, {', '.join(lists)}{_WAY_OUT}"
            yield OtherList(next(iter(homes.values())), inner, why)


def _parallel_lists(block: nn.Module) -> dict[str, list[str]]:
    """Name -> keys of the lists, with a linear of each expert in each, that a block has."""
    by_length: dict[int, dict[str, dict[str, nn.Module]]] = {}
    for name, child in block.named_children():
        by_key = _experts_of(child)
        if by_key and len({widths(x) for x in by_key.values() if is_linear(x)}) == 1:
            by_length.setdefault(len(by_key), {})[name] = by_key
    for num_experts, lists in by_length.items():
        roles = _leaves({name: widths(next(iter(x.values()))) for name, x in lists.items()})
        if roles is not None and _gate(block, roles[1], num_experts):
            return {name: [*by_key] for name, by_key in lists.items()}
    return {}


def _experts_of(module: nn.Module) -> dict[str, nn.Module]:
    """Key -> expert if `module` is a list or a dictionary of modules of one class, else {}."""
    if type(module) not in (nn.ModuleList, nn.ModuleDict):
        return {}
    by_key = {key: child for key, child in module._modules.items() if child is not None}
    is_one_class = len({type(child) for child in by_key.values()}) == 1
    return by_key if is_one_class and len(by_key) > 1 else {}


def _is_of_transformers(block: nn.Module) -> bool:
    return type(block).__module__.partition(".")[0] == "transformers"


def _is_called_experts(name: str, by_key: Mapping[str, nn.Module]) -> bool:
    return "expert" in f"{name} {type(next(iter(by_key.values()))).__name__}".lower()


def _shapes(expert: nn.Module) -> dict[str, tuple[int, int]]:
    """(in, out) of each linear that is a child of `expert`, if its weight can be quantized."""
    return {
        name: widths(child)
        for name, child in expert.named_children()
        if is_linear(child) and isinstance(child, nn.Linear)
    }


def _leaves(shapes: Mapping[str, tuple[int, int]]) -> tuple[Leaves, int, int] | None:
    """Names of two linears from H to I, or one to 2I, and of one back; H; I. None for others."""
    for down, (i, h) in reversed([*shapes.items()]):
        others = [name for name in shapes if name != down]
        rows = 2 * i // max(1, len(others))
        if len(others) in (1, 2) and all(shapes[name] == (h, rows) for name in others):
            return (*others, down), h, i
    return None


def _gate(block: nn.Module, hidden_size: int, num_experts: int) -> str:
    shapes = _shapes(block)
    names = [name for name, shape in shapes.items() if shape == (hidden_size, num_experts)]
    return names[0] if len(names) == 1 else ""


def tensors_problem(block: nn.Module, experts: ExpertList) -> str | None:
    """Why a block's tensors, or what is around its modules, do not allow to stack its experts."""
    tensors = dict((*block.named_parameters(), *block.named_buffers()))
    biases = [name for leaf in experts.leaves for name in experts.names_of(leaf)]
    if any(f"{name}.bias" in tensors for name in biases):
        return "its experts have biases, which are not stacked"
    inner = {f"{name}.weight" for name in biases}
    if extra := sorted(
        name for name in tensors if name not in inner and _is_in(name, experts.name)
    ):
        return f"its experts hold {extra[0]} besides"
    if not experts.gate:
        return (
            f"it has no linear of its own from {experts.sizes[1]} to {experts.sizes[0]}, a router"
        )
    allowed = {*inner, f"{experts.gate}.weight", f"{experts.gate}.bias"}
    if extra := sorted(tensors.keys() - allowed):
        return f"it holds {extra[0]} besides its router and experts"
    weights = [x for name, x in tensors.items() if name in inner]
    if len(weights) < len(inner):
        return "its experts share weights"
    if any(parts_of(module) or is_wrapped(module) for module in block.modules()):
        return "it, or a module in it, has hooks or a forward of its own"
    if not all(is_plain(x) and x.layout == torch.strided for x in tensors.values()):
        return "its weights are no plain tensors"
    if len({(x.dtype, x.device) for x in weights}) > 1 or weights[0].dtype not in FLOATS:
        return "its experts' weights are of several devices or dtypes"
    return None


def _is_in(name: str, home: str) -> bool:
    return name.startswith(f"{home}.")
