"""The config by which `from_pretrained` hands the FP8 of a model to moefp8."""

import copy
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.quantizers.auto import register_quantization_config

from ..checkpoint.errors import printable
from ..checkpoint.files.config import (
    FP8_QUANTIZATION,
    SEPARATE,
    format_problem,
    modelopt_quantization,
    quantization_of,
)
from ..layers.conversion.choose import FilterFn, Overrides, Patterns, patterns_of

METHOD = "moefp8"
_STORED = "stored"


@register_quantization_config(METHOD)
class FineGrainedFP8Config(transformers.FineGrainedFP8Config):
    """`from_pretrained(path, quantization_config=FP8Config())`: load into moefp8's modules.

    In an FP8 checkpoint, all linears and experts whose weights have 128x128 block scales become
    `FP8Linear` and `GroupedExperts`, whatever its config.json lists. In any other, what
    `moefp8.convert` swaps is quantized once it is loaded. `save_pretrained` writes the checkpoint's
    own `quantization_config` back, or one that lists what stayed.

    The class has the name of transformers' own, which transformers looks for where config.json says
    `fp8`, and from which it takes what `get_loading_attributes` returns.

    Args:
        skip, only, filter_fn, overrides: as in `convert`, for checkpoints that are not FP8 yet; a
            UserWarning says if one is. None is the same as ().
        modules_to_not_convert: transformers' name for skip; both may be passed.
        activation_scheme, weight_block_size, dequantize, modules_to_convert, scale_fmt,
            expert_dtype: transformers' other keywords, which must have their defaults.

    Raises TypeError for what is no keyword or no name of modules, ValueError for a value of
    transformers' keywords that moefp8 cannot honour.
    """

    def __init__(
        self,
        skip: Patterns | None = (),
        *,
        only: Patterns | None = None,
        filter_fn: FilterFn | None = None,
        overrides: Overrides | None = None,
        modules_to_not_convert: Patterns | None = None,
        activation_scheme: str = "dynamic",
        weight_block_size: Sequence[int] = (128, 128),
        dequantize: bool = False,
        modules_to_convert: Iterable[str] | None = None,
        scale_fmt: str = "float",
        expert_dtype: str = "fp8",
    ) -> None:
        super().__init__()
        _check("activation_scheme", activation_scheme, "dynamic")
        _check("weight_block_size", weight_block_size, (128, 128))
        _check("dequantize", dequantize, False, "; use moefp8.dequantize(model) once it is loaded")
        _check("modules_to_convert", modules_to_convert, None, "; embeddings stay in 16 bits")
        _check("scale_fmt", scale_fmt, "float", "; scales are never rounded")
        _check("expert_dtype", expert_dtype, "fp8")
        self.quant_method: Any = METHOD
        skips = {"skip": skip, "modules_to_not_convert": modules_to_not_convert}
        self.skip = tuple(x for item in skips.items() for x in patterns_of("FP8Config", *item))
        self.only = None if only is None else patterns_of("FP8Config", "only", only)
        self.filter_fn, self.overrides = filter_fn, overrides
        self.stored: dict[str, Any] = {}  # the checkpoint's own quantization_config
        self.kept: list[str] | None = None  # what config.json lists as not FP8; None: as stored
        self.says_separate = False  # whether config.json says how gate and up are cut

    __init__.__qualname__ = "FP8Config.__init__"  # as users call it, so Python's errors do

    @classmethod
    def of_checkpoint(cls, stored: dict[str, Any]) -> "FineGrainedFP8Config":
        """The config for a checkpoint whose config.json has the `quantization_config` `stored`."""
        config = cls()
        config.stored = copy.deepcopy(stored)
        return config

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """transformers calls this on a config that names moefp8; see `pretrained_config`."""
        stored = config_dict.get(_STORED)
        config = cls.of_checkpoint(stored if isinstance(stored, dict) else {})
        return (config, kwargs) if return_unused_kwargs else config

    def get_loading_attributes(self) -> dict[str, Any]:
        """What transformers writes into the config of a checkpoint that is FP8 already."""
        if names := ", ".join(name for name, value in self.arguments.items() if value):
            warnings.warn(
                f"FP8Config: {names} must be for a checkpoint in 16 bits and changes nothing: "
                "this one is FP8 already and is loaded as it is; moefp8.dequantize(model.part) "
                "takes a part of the model back to 16 bits",
                stacklevel=2,
            )
        return {"quant_method": METHOD}

    def to_dict(self) -> dict[str, Any]:
        """What config.json gets: plain `fp8`, or the checkpoint's own format; nothing of moefp8."""
        config = {"quant_method": "fp8", **copy.deepcopy(self.stored or FP8_QUANTIZATION)}
        config |= SEPARATE if self.says_separate else {}
        if self.kept or (self.stored and self.kept is not None):
            name = "ignore" if "config_groups" in config else "modules_to_not_convert"
            config[name] = list(self.kept)
        return config

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `convert`."""
        return {name: getattr(self, name) for name in ("skip", "only", "filter_fn", "overrides")}

    def __repr__(self) -> str:
        arguments = (f"{name}={value!r}" for name, value in self.arguments.items() if value)
        return f"FP8Config({', '.join(arguments)})"


FP8Config = FineGrainedFP8Config


def _check(name: str, value: Any, wanted: Any, way_out: str = "") -> None:
    if (tuple(value) if isinstance(value, list) else value) != wanted:
        raise ValueError(f"FP8Config: {name} must be {wanted!r}, got {value!r}{way_out}")


def pretrained_config(path: str, **kwargs: Any) -> PretrainedConfig:
    """`AutoConfig.from_pretrained(path)`, naming moefp8: for `from_pretrained(path, config=...)`.

    Use it where `quant_method` is not `fp8`, as in FP8_BLOCK of compressed-tensors: transformers
    does not let an `FP8Config` take such a checkpoint over. kwargs are those of AutoConfig. Raises
    ValueError if the checkpoint is not quantized in FP8 blocks of 128x128.
    """
    try:
        config = AutoConfig.from_pretrained(path, **kwargs)
    except (TypeError, AttributeError) as error:  # a key of the file is an argument there
        reason = printable(str(error), 200)
        raise ValueError(
            f"pretrained_config: config.json of {path}: transformers cannot read it ({reason}); "
            "fetch the file again"
        ) from error
    stored = quantization_of(config.to_dict())
    if stored is None and os.path.isdir(path):
        stored = modelopt_quantization(path)
    if stored is None:
        raise ValueError(
            f"pretrained_config: {path} must have a quantization_config, got none; pass "
            "quantization_config=FP8Config() to from_pretrained, which quantizes"
        )
    if problem := format_problem({"quantization_config": stored}):
        raise ValueError(f"pretrained_config: {path}: {problem}")
    config.quantization_config = {"quant_method": METHOD, _STORED: stored}
    return config
