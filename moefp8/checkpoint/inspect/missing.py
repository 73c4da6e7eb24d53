"""Find layers and experts that are missing, by config.json and by the other layers.

A tensor that cannot be read counts as there, since its file is told as broken.
"""

from collections.abc import Container, Iterator
from itertools import islice

from ..files.config import is_leftover, layer_of, text_config, told
from ..files.names import folded, split_expert
from .anomalies import Anomaly, error
from .contents import Contents

EXPERTS_NAMES = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"
_ZERO_EXPERTS = ("zero_expert_num",)  # these return their input; a stack may hold rows for them
_NUM_EXAMPLES = 3
_FUSED = ".experts.down_proj"

Numbers = dict[str, dict[str, set[int]]]


def expert_numbers(contents: Contents) -> Numbers:
    """Return `X.experts` -> `gate_proj.weight` -> the numbers of experts that have it."""
    numbers: Numbers = {}
    for name in contents.kept:
        if expert := split_expert(name):
            module, number = expert
            leaf = name.removeprefix(f"{module}.{number}.")
            numbers.setdefault(module, {}).setdefault(leaf, set()).add(number)
    return numbers


def num_experts_of(contents: Contents, numbers: Numbers) -> int | None:
    """Return E of config.json, else one more than the largest number, or as many as are fused."""
    found = [n + 1 for leaves in numbers.values() for some in leaves.values() for n in some]
    fused = [x.shape[0] for name, x in contents.weights.items() if _is_fused(name, x.shape)]
    return told(contents.config, EXPERTS_NAMES) or max([*found, *fused], default=None)


def missing_experts(contents: Contents) -> Iterator[Anomaly]:
    numbers = expert_numbers(contents)
    num_experts = num_experts_of(contents, numbers) or 0
    most = _num_kinds(contents) * num_experts + (told(contents.config, _ZERO_EXPERTS) or 0)
    path = contents.scan.source.path
    leaves = {leaf for module in numbers.values() for leaf in module}
    for module, found in numbers.items():
        for leaf in sorted(leaves):
            kind, present = folded(f"{module}.0.{leaf}"), found.get(leaf, set())
            absent = islice(_absent(present, num_experts), _NUM_EXAMPLES)
            examples = tuple(f"{module}.{i}.{leaf}: missing from {path}" for i in absent)
            if num_missing := num_experts - sum(n < num_experts for n in present):
                yield Anomaly("error", "experts are missing", kind, examples, num_missing)
            for number in sorted(n for n in present if n >= most):
                text = f"{module}.{number}.{leaf} in {path}: config.json tells of {num_experts}"
                yield error("more experts than config.json tells of", kind, text)
    allowed = {num_experts, most, *_of_single_layers(contents)}
    yield from _misfits(contents, allowed, numbers)


def _num_kinds(contents: Contents) -> int:
    """Count the sorts of experts: ERNIE 4.5 VL numbers on to as many again for images."""
    sizes = text_config(contents.config).get("moe_intermediate_size")
    return len(sizes) if isinstance(sizes, list) and sizes else 1


def _of_single_layers(contents: Contents) -> Iterator[int]:
    """Yield E that config.json gives for single layers: Dots 3 has more in later ones."""
    layers = text_config(contents.config).get("per_layer_config")
    for layer in layers.values() if isinstance(layers, dict) else ():
        if isinstance(layer, dict) and (number := told(layer, EXPERTS_NAMES)):
            yield number


def _misfits(contents: Contents, allowed: set[int], numbers: Numbers) -> Iterator[Anomaly]:
    """Find fused experts of another number, and routers that have no experts at all."""
    named = (name for name in (*numbers, *contents.named) if ".mlp." in name)
    experts = (name for name in named if ".experts." in f"{name}.")
    with_experts = {name.partition(".mlp.")[0] + ".mlp" for name in experts}
    for name, entry in contents.weights.items():
        if _is_fused(name, entry.shape) and entry.shape[0] not in allowed:
            sizes = " or ".join(map(str, sorted(allowed)))
            text = f"{entry}: {entry.shape[0]} experts, config.json tells of {sizes}"
            yield error("experts are missing, or too many", folded(name), text)
        block = name.removesuffix(".gate.weight")
        is_router = name.endswith(".mlp.gate.weight") and not is_leftover(contents.config, name)
        if is_router and block not in with_experts:
            yield error("a router without experts", folded(name), f"{entry}: no {block}.experts.*")


def missing_layers(contents: Contents) -> Iterator[Anomaly]:
    present = {n for name in contents.kept if (n := layer_of(name)) is not None}
    num_layers = told(contents.config, ["num_hidden_layers"]) or max(present, default=-1) + 1
    if not present:
        return
    path = contents.scan.source.path
    if num_missing := num_layers - sum(n < num_layers for n in present):
        names = (f"layers.{n}.*: missing from {path}" for n in _absent(present, num_layers))
        examples = tuple(islice(names, _NUM_EXAMPLES))
        yield Anomaly("error", "layers are missing", "layers.*", examples, num_missing)
    for number in sorted(n for n in present if n >= num_layers):
        text = f"layers.{number}.* in {path}: config.json tells of {num_layers}"
        yield error("more layers than config.json tells of", "layers.*", text)


def _is_fused(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(_FUSED) and len(shape) == 3


def _absent(present: Container[int], end: int) -> Iterator[int]:
    return (number for number in range(end) if number not in present)
