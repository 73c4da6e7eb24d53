"""Register FP8 layers with PEFT: for a whole process at import, or for one config at a time."""

import warnings
from typing import Any

from ..system.imports import after_import
from .config import INITS, SILENT, is_set

# What PEFT does around a layer, whatever the weight is.
_AROUND = {
    *("alpha_pattern", "bias", "ensure_weight_tying", "fan_in_fan_out", "layer_replication"),
    *("lora_alpha", "lora_bias", "modules_to_save", "peft_type", "r", "rank_pattern"),
    *("target_modules", "target_parameters", "trainable_token_indices", "use_rslora"),
}


def register_with_peft(config: Any) -> Any:
    """Let `peft.LoraModel(model, config, name)` take FP8 layers, and return `config`.

    `get_peft_model`, `PeftModel` and transformers' `load_adapter` need no such call: once moefp8
    and PEFT are imported, PEFT trains, saves and loads adapters beside `FP8Linear` and
    `GroupedExperts` as beside 16-bit weights. Merging them into FP8 codes raises ValueError.

    Raises ImportError without PEFT, TypeError unless config is a `peft.LoraConfig`, ValueError for
    variants of LoRA that compute with the weight itself, such as DoRA.
    """
    from peft import LoraConfig

    from .peft import register

    if not isinstance(config, LoraConfig):
        raise TypeError(
            f"register_with_peft: config must be a peft.LoraConfig, got {type(config).__name__}"
        )
    check_variant("register_with_peft", config)
    register(config)
    return config


def check_variant(op: str, config: Any) -> None:
    """Raise ValueError for settings that compute with a weight itself, or are not known."""
    for key, value in config.to_dict().items():
        is_known = key in _AROUND | SILENT or (key == "init_lora_weights" and value in INITS)
        if not is_known and is_set(value):
            raise ValueError(
                f"{op}: {key}={value!r} would take FP8 codes for weights, or is not known to do "
                "without them; use it on moefp8.dequantize(model)"
            )


def tell_peft() -> None:
    """Let PEFT's functions take FP8 layers as soon as PEFT is imported."""
    after_import("peft", _tell)


def _tell() -> None:
    try:
        from .peft import put_tuner
    except ImportError as error:  # PEFT may be imported for other models
        warnings.warn(
            f"moefp8.adapters: this release of PEFT cannot be told of FP8 layers ({error}); "
            "moefp8.adapters.add_lora and load_lora do without it",
            stacklevel=2,
        )
    else:
        put_tuner()
