"""Which linears and experts of a model become FP8 by default, and why others stay.

What the model says of itself counts first, then its structure and names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..experts import GroupedExperts
from ..linear import FP8Linear
from .conversion import OTHER_MAKE
from .source_code import read_weights
from .stacks import foreign_experts, stacks_of

# These are small, and errors in them cost much: output heads, routers, gates to one number, weights
# of tokens in sparse and linear attention, projections of multi-token prediction. Published FP8
# checkpoints keep them too.
DEFAULT_SKIP = (
    "lm_head", "gate", "router", "shared_expert_gate", "gating", "w_gate", "moe_router",
    "router_gate", "indexer.weights_proj", "in_proj_ba", "in_proj_b", "in_proj_a", "eh_proj",
    "shared_head",
)  # fmt: skip

# Names of heads outside of layers; within a layer, an `output` is a projection.
HEADS = (
    "head", "heads", "output", "classifier", "score", "embed_out", "qa_outputs", "readout",
    "proj_out",
)  # fmt: skip

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Modules = Mapping[str, nn.Module]


def matches(name: str, part: str) -> bool:
    """Whether `part`, a dotted piece or a pattern (fnmatch), names a module or one around it."""
    return f".{part}." in f".{name}." or fnmatchcase(name, part) or fnmatchcase(name, f"{part}.*")


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, a linear with weight [in, out], as GPT-2 has it."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear that can be swapped: its weight is an initialised parameter."""
    weight = module._parameters.get("weight") if _is_plain_kind(module) else None
    return weight is not None and not is_lazy(weight) and weight.ndim == 2


def _is_plain_kind(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_conv1d(module)


def can_swap(module: nn.Module) -> bool:
    return is_linear(module) or stacks_of(module) is not None


def widths(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear."""
    weight = module.get_parameter("weight")
    rows, columns = weight.shape
    return (rows, columns) if is_conv1d(module) else (columns, rows)


def reasons(modules: Modules) -> dict[str, str]:
    """Name -> why it stays, for each linear and experts module that stays.

    modules: `dict(model.named_modules(remove_duplicate=False))` of the whole model.
    """
    reason_of: dict[str, str] = {}
    for rule in _RULES:
        for name, why in rule(modules):
            reason_of.setdefault(name, why)
    return reason_of


def _by_name(modules: Modules) -> Iterator[tuple[str, str]]:
    has_layers = any(is_linear(m) and _in_layer(name, modules) for name, m in modules.items())
    taken = {_taken(module) for module in modules.values()}
    for name, module in modules.items():
        if not can_swap(module):
            continue
        part = next((part for part in DEFAULT_SKIP if matches(name, part)), None)
        is_outside = is_linear(module) and not _in_layer(name, modules)
        if part is None and is_outside and (has_layers or widths(module)[1] not in taken):
            part = next((part for part in HEADS if part in name.split(".")), None)
        if part is not None:
            yield name, f"called {part}"


def _other_makes(modules: Modules) -> Iterator[tuple[str, str]]:
    """Modules that no FP8 module can replace."""
    for name, module in modules.items():
        kind, parent = type(module).__name__, modules.get(_parent(name))
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            if not isinstance(module, FP8Linear):
                yield name, f"a subclass of nn.Linear ({kind})"
        elif _is_plain_kind(module) and not is_linear(module):
            yield name, "its weight is no parameter, or not there yet"
        elif isinstance(parent, nn.TransformerEncoderLayer | nn.MultiheadAttention):
            if is_linear(module):
                yield name, f"its weight is read by nn.{type(parent).__name__}"
        elif stacks_of(module) is None and (shape := foreign_experts(name, module)):
            yield name, f"{OTHER_MAKE} ({kind}, {list(shape)})"


def _output_embeddings(modules: Modules) -> Iterator[tuple[str, str]]:
    """Heads that the model names, and linears that share their weight with an embedding."""
    embedded = {id(m.weight) for m in modules.values() if isinstance(m, nn.Embedding)}
    heads = {id(asked(module, "get_output_embeddings")) for module in modules.values()}
    for name, module in modules.items():
        if is_linear(module):
            if id(module) in heads:
                yield name, "the output embedding"
            elif id(module.get_parameter("weight")) in embedded:
                yield name, "tied to an embedding"


def asked(module: nn.Module, method: str) -> Any:
    """What a method of a model returns, or None if the model has no such thing."""
    ask = getattr(module, method, None)
    try:
        return ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):
        return None


def _beside_text(modules: Modules) -> Iterator[tuple[str, str]]:
    """All but the language model of models that also see or hear; checkpoints keep that too."""
    model = modules[""]
    has_text = getattr(getattr(model, "config", None), "text_config", None) is not None
    decoder = asked(model, "get_decoder") if has_text else None
    if not isinstance(decoder, nn.Module):
        return
    text = {id(module) for module in decoder.modules()}
    for name, module in modules.items():
        if can_swap(module) and id(module) not in text:
            yield name, "not of the language model"


def _in_fp32(modules: Modules) -> Iterator[tuple[str, str]]:
    """Modules in transformers' lists of what a forward expects in FP32."""
    for prefix, model in modules.items():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            for part in getattr(model, attribute, None) or ():
                for name in _below(modules, prefix):
                    inner = name.removeprefix(prefix).lstrip(".")
                    if can_swap(modules[name]) and f".{part}." in f".{inner}.weight.":
                        yield name, f"{type(model).__name__} keeps {part} in FP32"


def _routers(modules: Modules) -> Iterator[tuple[str, str]]:
    """Linears with one output, or as many as there are experts nearby, or one more."""
    outputs = {name: widths(module)[1] for name, module in modules.items() if is_linear(module)}
    for name, width in outputs.items():
        if width == 1:
            yield name, "a gate or a score: it gives one number"
    neighbours: dict[str, list[str]] = {}
    for name in outputs:
        neighbours.setdefault(_parent(name), []).append(name)
    for container, module in modules.items():
        num_experts = _num_experts(container, module) if container else 0
        if not num_experts:
            continue
        home = _parent(container)
        is_list = isinstance(module, _LISTS) and "expert" not in container.rpartition(".")[2]
        around = neighbours.get(_parent(home), []) if home else []
        beside = neighbours.get(home, []) if is_list else [*_below(outputs, home), *around]
        for name in beside:
            inner = name.removeprefix(_parent(home) if name in around else home).lower()
            # In experts or in attention, such a width may be chance.
            is_other = any(word in inner for word in ("expert", "attn", "attention"))
            if outputs[name] in (num_experts, num_experts + 1) and not is_other:
                yield name, f"a router: {outputs[name]} outputs for {num_experts} experts"


def _num_experts(name: str, module: nn.Module) -> int:
    """How many experts `module` holds, in stacks or one by one; 0 if it holds none."""
    if isinstance(module, GroupedExperts):
        return module.num_experts
    if stacks := stacks_of(module):
        return len(stacks.down)
    if isinstance(module, _LISTS):
        return len(module) if len(module) > 1 else 0
    shape = foreign_experts(name, module)
    return shape[0] if shape else 0


def _readers(modules: Modules) -> Iterator[tuple[str, str]]:
    """Linears and experts whose weights, or their dtype, another module reads."""
    for prefix, module in modules.items():
        kind: Any = type(module)
        for chain in read_weights(kind):
            names: Iterable[str] = [f"{prefix}.{chain}".lstrip(".")]
            if "*" in chain:  # it stands for one element of a list
                pattern = re.compile(re.escape(*names).replace(r"\*", "[^.]+"))
                names = filter(pattern.fullmatch, modules)
            for name in names:
                if name in modules and can_swap(modules[name]):
                    yield name, f"{kind.__name__} reads its weight"


def _heads(modules: Modules) -> Iterator[tuple[str, str]]:
    """The last linears of a model, as long as nothing in it takes the width that they give."""
    if sum(bool(module._parameters) for module in modules.values()) < 2:
        return  # a lone linear is no head
    taken = {_taken(module) for module in modules.values()}
    linears = [name for name, module in modules.items() if is_linear(module)]
    for name in reversed(linears):
        if widths(modules[name])[1] in taken or _in_layer(name, modules):
            return
        yield name, "a head: nothing takes what it gives"


def _taken(module: nn.Module) -> int | None:
    """The width of the input that a module takes, if that is known."""
    if isinstance(module, FP8Linear):
        return module.in_features
    if isinstance(module, GroupedExperts):
        return module.hidden_size
    if is_linear(module):
        return widths(module)[0]
    if stacks := stacks_of(module):
        return stacks.down.shape[1]
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight) or isinstance(module, nn.Embedding) or not weight.ndim:
        return None
    return weight.shape[min(1, weight.ndim - 1)]


def _in_layer(name: str, modules: Modules) -> bool:
    """Whether a module is within an element of a list of modules that are not experts."""
    above = _parent(name)
    while above:
        home = _parent(above)
        is_list = isinstance(modules.get(home), nn.ModuleList | nn.Sequential)
        if is_list and "expert" not in home.rpartition(".")[2]:
            return True
        above = home
    return False


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _below(modules: Iterable[str], prefix: str) -> Iterable[str]:
    return (name for name in modules if not prefix or name.startswith(f"{prefix}."))


_RULES = (
    _other_makes,
    _output_embeddings,
    _beside_text,
    _in_fp32,
    _by_name,
    _routers,
    _readers,
    _heads,
)
