"""Lists of experts that a block calls one by one: where they are, and what can be stacked.

E experts, H hidden, I intermediate.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...functional.kept import is_plain
from ...kernels.common.checks import FLOATS
from ..module import is_wrapped
from ..parts import parts_of
from .selection import is_linear, widths

Leaves = tuple[str, str, str]


@dataclass(frozen=True)
class ExpertList:
    """A block with experts in an `nn.ModuleList`, all of one class and of three linears each.

    block: the block's dotted name. name: the list's name in the block. gate: the name of the
    block's one linear from H to E, or "". leaves: the names of an expert's linears, two from H to I
    and then one from I to H; gate, up and down once a trial has told gate from up. sizes: E, H, I.
    """

    block: str
    name: str
    gate: str
    leaves: Leaves
    sizes: tuple[int, int, int]

    @property
    def place(self) -> str:
        """The list's dotted name in the model."""
        return f"{self.block}.{self.name}".lstrip(".")

    def names_of(self, leaf: str) -> list[str]:
        """The names of a linear of all experts, in the block."""
        return [f"{self.name}.{expert}.{leaf}" for expert in range(self.sizes[0])]

    def linears(self) -> list[str]:
        """The dotted names of all experts' linears, in the model."""
        inner = [name for leaf in self.leaves for name in self.names_of(leaf)]
        return [f"{self.block}.{name}".lstrip(".") for name in inner]

    def weights(self, block: nn.Module) -> tuple[list[nn.Parameter], ...]:
        """Each of the three linears' weights, of all experts."""
        return tuple(
            [block.get_submodule(name).get_parameter("weight") for name in self.names_of(leaf)]
            for leaf in self.leaves
        )

    def with_leaves(self, leaves: Leaves) -> "ExpertList":
        return replace(self, leaves=leaves)

    def recipe(self, trainable: bool) -> str:
        """The two lines with which the block runs its experts at once, whatever its forward is."""
        gate, up, down = (f"e.{leaf}.weight" for leaf in self.leaves)
        experts = f"self.{self.name}"
        return (
            f"    {experts} = moefp8.GroupedExperts.from_weights(torch.stack([torch.cat([{gate}, "
            f"{up}]) for e in {experts}]), torch.stack([{down} for e in {experts}])"
            f"{', trainable=True' if trainable else ''})\n"
            f"    y = {experts}(x, top_k_index, top_k_weights)"
        )


def expert_lists(modules: Mapping[str, nn.Module]) -> Iterator[ExpertList]:
    """The lists of experts of a model, by structure alone: a trial tells what they compute.

    modules: `dict(model.named_modules(remove_duplicate=False))`. Models that transformers brings
    are left out: their checkpoints, and its loader, know each expert by its own name.
    """
    for place, experts in modules.items():
        block, _, name = place.rpartition(".")
        if not place or type(experts) is not nn.ModuleList or len(experts) < 2:
            continue
        if type(modules[block]).__module__.partition(".")[0] == "transformers":
            continue
        if len({type(expert) for expert in experts}) > 1:
            continue
        shapes = [_shapes(expert) for expert in experts]
        roles = _leaves(shapes[0]) if all(x == shapes[0] for x in shapes) else None
        if roles is None:
            continue
        leaves, hidden_size, intermediate_size = roles
        gate = _gate(modules[block], hidden_size, len(experts))
        if not hidden_size * intermediate_size:
            continue
        if gate or "expert" in f"{name} {type(experts[0]).__name__}".lower():
            sizes = len(experts), hidden_size, intermediate_size
            yield ExpertList(block, name, gate, leaves, sizes)


def _shapes(expert: nn.Module) -> dict[str, tuple[int, int]]:
    """(in, out) of each linear that is a child of `expert`, if its weight can be quantized."""
    return {
        name: widths(child)
        for name, child in expert.named_children()
        if is_linear(child) and isinstance(child, nn.Linear)
    }


def _leaves(shapes: Mapping[str, tuple[int, int]]) -> tuple[Leaves, int, int] | None:
    """Names of two linears from H to I and of one back, and H and I; None for other linears."""
    for down, (i, h) in reversed([*shapes.items()]):
        others = [name for name in shapes if name != down]
        if len(others) == 2 and all(shapes[name] == (h, i) for name in others):
            return (others[0], others[1], down), h, i
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
        return "its experts have biases, which GroupedExperts has not"
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
