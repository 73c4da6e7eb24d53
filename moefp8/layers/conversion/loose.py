"""Matrices that no module which `convert` knows holds."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ...kernels.common.checks import FLOATS
from .selection import is_conv1d
from .stacks import foreign_experts, stacks_of

_NOTABLE = 0.5  # of all weights besides embeddings


class Loose(NamedTuple):
    """held: name -> its holder and shape. share: of the weights besides embeddings."""

    held: Mapping[str, str]
    share: float


def loose_matrices(modules: Mapping[str, nn.Module], is_skipped: Callable[[str], bool]) -> Loose:
    """The matrices in 16 or 32 bits that a model holds itself, if most of its weights are such.

    Modules of PyTorch and of this package are known, and so are experts in stacks.

    modules: `dict(model.named_modules(remove_duplicate=False))`.
    """
    embeddings = [m for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    experts = [m for name, m in modules.items() if stacks_of(m) or foreign_experts(name, m)]
    left_out, known = _ids(embeddings), _ids(experts)
    held, sizes = dict[str, str](), dict[int, int]()
    num_held = 0
    for place, module in modules.items():
        for leaf, x in module._parameters.items():
            if x is None or is_lazy(x) or id(x) in left_out or id(x) in sizes:
                continue
            if "embed" in leaf:
                continue
            sizes[id(x)] = x.numel()
            is_matrix = x.ndim > 1 and x.dtype in FLOATS
            name = f"{place}.{leaf}".lstrip(".")
            if not is_matrix or id(x) in known or _is_known(module) or is_skipped(name):
                continue
            held[name] = f"{type(module).__name__}, {list(x.shape)}"
            num_held += x.numel()
    share = num_held / max(1, sum(sizes.values()))
    return Loose(held, share) if share > _NOTABLE else Loose({}, 0.0)


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(x) for module in modules for x in module.parameters()}


def _is_known(module: nn.Module) -> bool:
    """Whether its class, but for containers, comes from PyTorch or from this package."""
    homes = [kind.__module__ for kind in type(module).__mro__ if kind is not nn.Module]
    is_ours = any(home.partition(".")[0] == "moefp8" for home in homes)
    is_of_torch = any(
        home.startswith("torch.nn.") and not home.endswith(".container") for home in homes
    )
    return is_ours or is_of_torch or is_conv1d(module)
