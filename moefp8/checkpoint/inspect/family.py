"""Tell the family of a checkpoint and the sizes of its model by config.json and by its keys."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...layers.router import TOP_K_NAMES
from ..errors import printable
from ..files.config import block_sizes, layer_of, told
from .contents import Contents
from .missing import expert_numbers, num_experts_of

_MAX_NAME, _MAX_NAMES, _MAX_QUANTIZATION = 100, 10, 400
_NAMINGS = (
    ("DeepSeek's", re.compile(r"\.mlp\.experts\.\d+\.(?:gate|up|down)_proj\.")),
    ("w1, w2, w3", re.compile(r"\.experts\.\d+\.w[123]\.")),
    ("fused experts", re.compile(r"\.experts\.(?:gate_up_proj|down_proj)(?:_blocks)?$")),
    ("compressed-tensors'", re.compile(r"\.(?:weight_scale|weight_packed)$")),
)


@dataclass(frozen=True)
class Family:
    """A number is None if nothing tells it.

    model_type, architectures, hidden_size, top_k: as in config.json. naming: how tensors are
    called. intermediate_size: that of dense layers; moe_intermediate_size: I of experts.
    quantization: what config.json says of it, in words.
    """

    model_type: str | None
    architectures: tuple[str, ...]
    naming: tuple[str, ...]
    num_layers: int | None
    num_experts: int | None
    hidden_size: int | None
    intermediate_size: int | None
    moe_intermediate_size: int | None
    top_k: int | None
    quantization: str


def family_of(contents: Contents) -> Family:
    """Take what config.json does not tell from the names and shapes of tensors."""
    config = contents.config
    model_type, architectures = config.get("model_type"), config.get("architectures")
    layers = {n for name in contents.weights if (n := layer_of(name)) is not None}
    hidden_size, moe_size = _expert_sizes(contents)
    return Family(
        printable(model_type, _MAX_NAME) if isinstance(model_type, str) else None,
        _names(architectures),
        tuple(_namings(contents)),
        told(config, ["num_hidden_layers"]) or (max(layers) + 1 if layers else None),
        num_experts_of(contents, expert_numbers(contents)),
        told(config, ["hidden_size"]) or hidden_size,
        told(config, ["intermediate_size"]),
        told(config, ["moe_intermediate_size"]) or moe_size,
        told(config, TOP_K_NAMES),
        _quantization(config),
    )


def _namings(contents: Contents) -> Iterator[str]:
    for name, pattern in _NAMINGS:
        if any(pattern.search(key) for key in contents.scan.source.entries):
            yield name


def _expert_sizes(contents: Contents) -> tuple[int | None, int | None]:
    """Return (H, I) of the first down projection of an expert, or None and None without one."""
    for name, entry in contents.weights.items():
        if re.search(r"\.experts\.(?:\d+\.down_proj\.weight|down_proj)$", name):
            *_, hidden_size, intermediate_size = (None, None, *entry.shape)
            return hidden_size, intermediate_size
    return None, None


def _quantization(config: dict[str, Any]) -> str:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return "not told"
    blocks = dict.fromkeys(map(str, block_sizes(config)))
    facts = [str(quantization.get("quant_method", "no quant_method"))]
    if "scale_fmt" in quantization:
        facts.append(f"scale_fmt {quantization['scale_fmt']}")
    text = ", ".join([*facts, f"blocks {' and '.join(blocks) or 'not told'}"])
    return printable(text, _MAX_QUANTIZATION)


def _names(value: Any) -> tuple[str, ...]:
    named = value[:_MAX_NAMES] if isinstance(value, list) else []
    return tuple(printable(str(name), _MAX_NAME) for name in named)
