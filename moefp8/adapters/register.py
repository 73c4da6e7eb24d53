"""`register_with_peft`: PEFT's own LoRA beside `FP8Linear`."""

from typing import Any

from ..layers import FP8Linear
from .config import INITS, SILENT, is_set

# What PEFT does around a layer, whatever the weight is.
_AROUND = {
    *("alpha_pattern", "bias", "ensure_weight_tying", "fan_in_fan_out", "layer_replication"),
    *("lora_alpha", "lora_bias", "modules_to_save", "peft_type", "r", "rank_pattern"),
    *("target_modules", "target_parameters", "trainable_token_indices", "use_rslora"),
}


def register_with_peft(config: Any) -> Any:
    """Let `get_peft_model(model, config)` take `FP8Linear` modules, and return `config`.

    PEFT then trains and saves its adapters as beside `nn.Linear`; merging them raises ValueError.
    Without this, PEFT refuses `FP8Linear`. Experts are not PEFT's to adapt in FP8: see `add_lora`.

    Raises ImportError without PEFT, TypeError unless config is a `peft.LoraConfig`, ValueError for
    variants of LoRA that compute with the weight itself, such as DoRA.
    """
    from peft import LoraConfig

    from .peft import PeftFP8Linear

    if not isinstance(config, LoraConfig):
        raise TypeError(
            f"register_with_peft: config must be a peft.LoraConfig, got {type(config).__name__}"
        )
    for key, value in config.to_dict().items():
        is_known = key in _AROUND | SILENT or (key == "init_lora_weights" and value in INITS)
        if not is_known and is_set(value):
            raise ValueError(
                f"register_with_peft: {key}={value!r} would take FP8 codes for weights, or is not "
                "known to do without them; use it on moefp8.dequantize(model)"
            )
    config._register_custom_module({FP8Linear: PeftFP8Linear})
    return config
