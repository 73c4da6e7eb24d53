"""Read config.json: the format and scale block, and the tensors that a load leaves out."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import printable, quoted
from .safe_read import check_there, read_object

BLOCK = [128, 128]
FP8_QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": BLOCK,
}

# Scales of gate and up in one tensor [E, 2I, H] may fit two cuts; others ignore this key of ours.
SEPARATE = {"gate_up_blocks": "separate"}

MODELOPT_NAME = "hf_quant_config.json"  # all that older releases of NVIDIA's modelopt say

_METHODS = ("fp8", "compressed-tensors")
_FILE = "stated_in"  # key for the name of the file that states the format, if not config.json
_WAY_OUT = (
    "quantize the 16-bit original (python -m moefp8 quantize), or fetch its FP8 release in 128x128 "
    "blocks"
)
_WAYS_OUT = {
    "mxfp4": "import moefp8.hf, which runs its experts in FP8: from_pretrained(path, "
    'quantization_config=transformers.Mxfp4Config(dequantize=True), experts_implementation="moefp8"'
    ")"
}
_QUANTIZATIONS = ("quantization_config", "compression_config")
_FORMAT_KEYS = ("quant_method", "quant_algo", "format", "fmt")
_DECODER_LAYER = re.compile(
    r"(?:model\.|language_model\.|model\.language_model\.|language_model\.model\.)?"
    r"layers\.(0|[1-9][0-9]{0,8})\."  # int() refuses thousands of digits
)


def config_path(path: str | os.PathLike[str]) -> Path:
    """Return the place of config.json for a checkpoint directory, or a file beside it."""
    path = Path(path)
    return (path if path.is_dir() else path.parent) / "config.json"


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the config.json of the checkpoint at path: a directory, or a .safetensors file in it."""
    file = config_path(path)
    if not os.path.lexists(file):
        check_there(Path(path))
    return read_object(file)


def has_ambiguous_blocks(intermediate_size: int, block: int = BLOCK[0]) -> bool:
    """Whether gate and up, each cut into blocks by itself, have as many as all their 2I rows."""
    return 2 * (intermediate_size % block) > block


def says_separate(config: Mapping[str, Any]) -> bool:
    """Whether config says that gate and up of one tensor have blocks of their own."""
    quantization = quantization_of(config)
    return isinstance(quantization, dict) and quantization.items() >= SEPARATE.items()


def quantization_of(config: Mapping[str, Any]) -> Any:
    """Return the entry of config on quantization, under any of its names, or None."""
    places = (part.get(key) for part in (config, text_config(config)) for key in _QUANTIZATIONS)
    return next((x for x in places if x is not None), None)


def modelopt_quantization(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read modelopt's file beside the config.json of the checkpoint at path; None if there is none.

    The result has the form of a quantization_config. Raises CheckpointError if the file is broken.
    """
    file = config_path(path).with_name(MODELOPT_NAME)
    if not os.path.lexists(file):
        return None
    stated = read_object(file).get("quantization")
    facts = stated if isinstance(stated, dict) else {}
    return {**facts, "quant_method": "modelopt", _FILE: MODELOPT_NAME}


def format_problem(config: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the format that config states; if it states none, shapes decide."""
    quantization = quantization_of(config)
    if quantization is None:
        return None
    method = quantization.get("quant_method", "fp8") if isinstance(quantization, dict) else None
    if method not in _METHODS:
        is_of_modelopt = isinstance(quantization, dict) and _FILE in quantization
        return (
            f"{MODELOPT_NAME if is_of_modelopt else 'config.json'}: quant_method must be one of "
            f"{', '.join(_METHODS)}, but it says {format_name(config)}, a format that moefp8 does "
            f"not load; {_WAYS_OUT.get(method, _WAY_OUT) if isinstance(method, str) else _WAY_OUT}"
        )
    sizes = block_sizes(config)
    if sizes and all(block == BLOCK for block in sizes):
        return None
    stated = printable(", ".join(map(str, sizes)), 200) or "none"
    return (
        "config.json: quantization_config.weight_block_size must be [128, 128], "
        f"got {stated} ({format_name(config)}); requantize the checkpoint in 128x128 blocks"
    )


def format_name(config: Mapping[str, Any]) -> str:
    """Name the format that config states, in its own words: `quant_method 'fp8', fmt 'e4m3'`."""
    quantization = quantization_of(config)
    if not isinstance(quantization, dict):
        return f"quantization_config {quoted(quantization)}"
    facts = [f"{key} {quoted(quantization[key])}" for key in _FORMAT_KEYS if key in quantization]
    return printable(", ".join(facts) or "no quant_method", 200)


def block_sizes(config: Mapping[str, Any]) -> list[Any]:
    """Return the sizes that config states as fp8 or compressed-tensors do, right or wrong."""
    quantization = quantization_of(config)
    if not isinstance(quantization, dict):
        return []
    groups = quantization.get("config_groups")
    if "weight_block_size" in quantization or not isinstance(groups, dict):
        block = quantization.get("weight_block_size")
        return [] if block is None else [block]
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    return [
        scheme.get("block_structure") or f"strategy {scheme.get('strategy')!r}"
        for scheme in weights
        if isinstance(scheme, dict)
    ]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config for the language model; multimodal models nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def number_in(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Return the first positive integer that config has under one of these names, or None."""
    values = (text_config(config).get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config without its entries on quantization."""
    changed = {key: x for key, x in config.items() if key not in _QUANTIZATIONS}
    if isinstance(config.get("text_config"), dict):
        changed["text_config"] = without_quantization(config["text_config"])
    return changed


def without_mtp(config: dict[str, Any]) -> dict[str, Any]:
    """Return config without MTP layers: models do not hold them, so no save has them."""
    changed = dict(config)
    if isinstance(config.get("text_config"), dict):
        changed["text_config"] = without_mtp(config["text_config"])
    if config.get("num_nextn_predict_layers"):
        changed["num_nextn_predict_layers"] = 0
    return changed


def is_leftover(config: dict[str, Any], key: str) -> bool:
    """Whether a load leaves key out: it is of an MTP layer, or a rotary table."""
    if key.startswith("mtp.") or key.endswith("rotary_emb.inv_freq"):
        return True
    layer = layer_of(key)
    text = text_config(config)
    num_layers, num_mtp = text.get("num_hidden_layers"), text.get("num_nextn_predict_layers")
    if layer is None or type(num_layers) is not int or type(num_mtp) is not int:
        return False
    return num_layers <= layer < num_layers + num_mtp


def layer_of(key: str) -> int | None:
    """Return 3 for `model.layers.3.mlp.gate.weight`, and None outside of the decoder."""
    layer = _DECODER_LAYER.match(key)
    return int(layer[1]) if layer else None
