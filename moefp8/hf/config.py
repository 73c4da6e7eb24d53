"""What `from_pretrained` is told: that moefp8 does the FP8 of a model."""

import copy
from collections.abc import Iterable
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.quantizers.auto import register_quantization_config

from ..checkpoint.config import FP8_QUANTIZATION, block_problem
from ..layers import DEFAULT_SKIP

METHOD = "moefp8"


@register_quantization_config(METHOD)
class FineGrainedFP8Config(transformers.FineGrainedFP8Config):
    """`from_pretrained(path, quantization_config=FP8Config())`: load into moefp8's modules.

    Of an FP8 checkpoint, linears and experts whose weights have 128x128 block scales become
    `FP8Linear` and `GroupedExperts`; the presence of scales tells, not lists in its config.json.
    Of any other, all linears and experts are quantized once it is loaded, but those that `skip`
    names. `save_pretrained` writes the checkpoint's own `quantization_config` back.

    The class has the name of transformers' own, since transformers asks for a config of the name
    that config.json stands for, and takes from it what `get_loading_attributes` gives.

    Args:
        skip: for checkpoints that are not FP8 yet, as in `moefp8.convert`.
        stored_method, stored: the `quantization_config` of a checkpoint, key by key.
    """

    def __init__(
        self,
        skip: str | Iterable[str] = DEFAULT_SKIP,
        stored_method: str = "fp8",
        **stored: Any,
    ) -> None:
        super().__init__()
        self.quant_method: Any = METHOD
        self.skip = (skip,) if isinstance(skip, str) else tuple(skip)
        self.stored_method = stored_method
        self.stored = {key: value for key, value in stored.items() if key != "quant_method"}

    @classmethod
    def of_checkpoint(cls, stored: dict[str, Any]) -> "FineGrainedFP8Config":
        """stored: the `quantization_config` of its config.json."""
        return cls(stored_method=stored.get("quant_method", "fp8"), **stored)

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a merge with the checkpoint's own config takes over: who does it."""
        return {"quant_method": METHOD}

    def to_dict(self) -> dict[str, Any]:
        """For config.json: plain `fp8`, or what the checkpoint said; nothing of moefp8."""
        if self.stored:
            return {"quant_method": self.stored_method, **copy.deepcopy(self.stored)}
        return copy.deepcopy(FP8_QUANTIZATION)


FP8Config = FineGrainedFP8Config


def pretrained_config(path: str, **kwargs: Any) -> PretrainedConfig:
    """`AutoConfig.from_pretrained(path)`, naming moefp8: for `from_pretrained(path, config=...)`.

    For checkpoints whose `quant_method` is not `fp8`, such as FP8_BLOCK of compressed-tensors,
    with which transformers takes no config of another method. kwargs: as AutoConfig takes them.
    Raises ValueError if the checkpoint is not quantized in FP8 blocks of 128x128.
    """
    config = AutoConfig.from_pretrained(path, **kwargs)
    stored = getattr(config, "quantization_config", None)
    if not isinstance(stored, dict):
        raise ValueError(
            f"pretrained_config: {path} must have a quantization_config, got none; pass "
            "quantization_config=FP8Config() to from_pretrained, which quantizes"
        )
    if problem := block_problem({"quantization_config": stored}):
        raise ValueError(f"pretrained_config: {path}: {problem}")
    method = stored.get("quant_method", "fp8")
    config.quantization_config = {**stored, "quant_method": METHOD, "stored_method": method}
    return config
