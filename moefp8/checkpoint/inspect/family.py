"""Infer the family of a checkpoint and the sizes of its model from config.json and its keys."""

import re
from dataclasses import dataclass

from ...layers.router import TOP_K_NAMES
from ..errors import printable
from ..files.config import block_sizes, layer_of, number_in
from .contents import Contents
from .missing import num_experts_of

_MAX_NAME, _MAX_NAMES, _MAX_QUANTIZATION = 100, 10, 400
_NAMINGS = {
    "DeepSeek's": re.compile(r"\.mlp\.experts\.\d+\.(?:gate|up|down)_proj\."),
    "w1, w2, w3": re.compile(r"\.experts\.\d+\.w[123]\."),
    "fused experts": re.compile(r"\.experts\.(?:gate_up_proj|down_proj)(?:_blocks)?$"),
    "compressed-tensors'": re.compile(r"\.(?:weight_scale|weight_packed)$"),
}
_DOWN = re.compile(r"\.experts\.(?:\d+\.down_proj\.weight|down_proj)$")


@dataclass(frozen=True)
class Family:
    """The family and sizes of a model. A number is None if it is unknown.

    model_type, architectures, hidden_size, top_k: as in config.json. naming: of its
    tensors. intermediate_size: I of dense layers; moe_intermediate_size: I of experts.
    quantization: a summary of its entry in config.json.
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
    """Read config.json, and infer what it lacks from the names and shapes of tensors."""
    config, keys = contents.config, contents.scan.source.entries
    model_type, architectures = config.get("model_type"), config.get("architectures")
    named = architectures[:_MAX_NAMES] if isinstance(architectures, list) else []
    layers = [n for name in contents.weights if (n := layer_of(name)) is not None]
    downs = (entry.shape for name, entry in contents.weights.items() if _DOWN.search(name))
    *_, hidden_size, moe_size = (None, None, *next(downs, ()))  # [H, I], or stacked [E, H, I]
    return Family(
        printable(model_type, _MAX_NAME) if isinstance(model_type, str) else None,
        tuple(printable(str(name), _MAX_NAME) for name in named),
        tuple(name for name, pattern in _NAMINGS.items() if any(map(pattern.search, keys))),
        number_in(config, ["num_hidden_layers"]) or (max(layers) + 1 if layers else None),
        num_experts_of(contents),
        number_in(config, ["hidden_size"]) or hidden_size,
        number_in(config, ["intermediate_size"]),
        number_in(config, ["moe_intermediate_size"]) or moe_size,
        number_in(config, TOP_K_NAMES),
        _quantization(contents),
    )


def _quantization(contents: Contents) -> str:
    quantization = contents.quantization
    if not quantization:
        return "not told"
    blocks = dict.fromkeys(map(str, block_sizes(contents.config)))
    facts = [str(quantization.get("quant_method", "no quant_method"))]
    if "scale_fmt" in quantization:
        facts.append(f"scale_fmt {quantization['scale_fmt']}")
    text = ", ".join([*facts, f"blocks {' and '.join(blocks) or 'not told'}"])
    return printable(text, _MAX_QUANTIZATION)
