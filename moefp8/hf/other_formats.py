"""What `from_pretrained` says of an `FP8Config` for a checkpoint that is in another format.

transformers compares the checkpoint's config with the one that it gets, and names their classes if
these differ. A user of moefp8 needs to know what loads such a checkpoint.
"""

from typing import Any

from transformers.quantizers.auto import AutoHfQuantizer

from ..checkpoint import CheckpointError
from ..checkpoint.files.config import format_name, format_problem
from .config import FP8Config

_merge = AutoHfQuantizer.merge_quantization_configs


def _merge_or_explain(quantization_config: Any, quantization_config_from_args: Any) -> Any:
    """transformers' function. Raises CheckpointError for an `FP8Config` that does not fit."""
    try:
        return _merge(quantization_config, quantization_config_from_args)
    except Exception as error:  # of a class that does not fit, or of a package that is missing
        if not isinstance(quantization_config_from_args, FP8Config):
            raise
        stored = quantization_config
        config = {"quantization_config": stored if isinstance(stored, dict) else stored.to_dict()}
        problem = format_problem(config) or (
            f"config.json says {format_name(config)}: pass config="
            "moefp8.hf.pretrained_config(path) in place of quantization_config=FP8Config()"
        )
        raise CheckpointError(problem) from error


setattr(AutoHfQuantizer, _merge.__name__, staticmethod(_merge_or_explain))
