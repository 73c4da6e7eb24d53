"""adapter_config.json: the fields that `save_lora` writes, and those that `load_lora` reads."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..layers import GroupedExperts
from ..system.patterns import MAX_NAME, Deadline, compile_simple
from .targets import Target, join, modules_of

CONFIG = "adapter_config.json"
LAYOUT = "0.19.0"  # the release of PEFT since which adapters of experts are as in layout.py
_READ = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("target_modules", "target_parameters"),
}
# Fields that say how an adapter was trained or obtained, not what it computes.
SILENT = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "task_type"),
}
# In MoE models of transformers, PEFT takes target_modules of these names for weights of experts
# (`_convert_peft_config_moe`), also where they are of shared experts or of dense layers.
_RENAMED = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
INITS = (True, False, "gaussian", "eva", "orthogonal")  # others change the model's own weights


def is_set(value: Any) -> bool:
    """Whether a setting of PEFT's says something."""
    return bool(value) and value != "none"


class Options(NamedTuple):
    """Those of one adapter, as in `add_lora`."""

    rank: int
    alpha: float
    use_rslora: bool

    def __str__(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}, use_rslora={self.use_rslora}"


class Settings(NamedTuple):
    """What a file says of its adapters.

    usual: the options of adapters of which the patterns, regular expressions for names, say
        nothing else.
    parameters: the file's target_parameters.
    is_old: whether PEFT before `LAYOUT` wrote the file, or nothing says which.
    """

    usual: Options
    parameters: tuple[str, ...] = ()
    is_old: bool = False
    rank_pattern: Mapping[str, int] = {}
    alpha_pattern: Mapping[str, float] = {}

    def of(self, targets: Iterable[Target]) -> dict[Target, Options]:
        """The options of each adapter, by PEFT's rule: the first pattern that matches counts.

        Raises ValueError for patterns that cannot be read, or take too long to match.
        """
        options, deadline = {}, Deadline()
        try:
            ranks = _compiled("rank_pattern", self.rank_pattern, deadline)
            alphas = _compiled("alpha_pattern", self.alpha_pattern, deadline)
            for target in targets:
                rank = _first(ranks, target, self.usual.rank, deadline)
                alpha = _first(alphas, target, self.usual.alpha, deadline)
                options[target] = self.usual._replace(rank=rank, alpha=alpha)
        except TimeoutError as error:
            raise ValueError(
                f"load_lora: rank_pattern and alpha_pattern in {CONFIG} must be simple, but {error}"
            ) from None
        return options


def _compiled(
    key: str, values: Mapping[str, Any], deadline: Deadline
) -> dict[re.Pattern[str], Any]:
    patterns = {}
    for text, value in values.items():
        deadline.check("there are too many")
        try:
            patterns[compile_simple(text)] = value
        except ValueError as error:
            raise ValueError(
                f"load_lora: {key} in {CONFIG} has {text[:200]!r}, which is not matched, "
                f"since {error}; names of modules or their ends do as well"
            ) from None
    return patterns


def _first(
    patterns: Mapping[re.Pattern[str], Any], target: Target, usual: Any, deadline: Deadline
) -> Any:
    """The value of the first pattern that matches a name, or its end after a dot.

    Raises TimeoutError.
    """
    names = {target.name, join(target.path, target.parameter)}
    if patterns and max(map(len, names)) > MAX_NAME:
        raise ValueError(
            "load_lora: rank_pattern and alpha_pattern are matched with names of at most "
            f"{MAX_NAME} characters, got {target.name[:200]!r}; remove both from {CONFIG}"
        )
    starts = {name: [0, *(i + 1 for i, x in enumerate(name) if x == ".")] for name in names}
    for pattern, value in patterns.items():
        deadline.check(f"to match them up to {pattern.pattern!r} took too long")
        if any(pattern.fullmatch(name, start) for name in names for start in starts[name]):
            return value
    return usual


def settings_for(options: Mapping[Target, Options]) -> Settings:
    """What a file says of adapters with these options, which have one `use_rslora`."""
    usual = Counter(options.values()).most_common(1)[0][0]
    name_of = {x: rf"^{re.escape(x.name)}(\.weight)?" for x in options}
    return Settings(
        usual,
        tuple(target.name for target in options if target.parameter != "weight"),
        rank_pattern={name_of[t]: x.rank for t, x in options.items() if x.rank != usual.rank},
        alpha_pattern={name_of[t]: x.alpha for t, x in options.items() if x.alpha != usual.alpha},
    )


def names_for(model: nn.Module, targets: Iterable[Target]) -> tuple[str | list[str], list[str]]:
    """`target_modules` and `target_parameters`, from which PEFT finds these targets alone.

    It matches whole names, and names that end as these after a dot.
    """
    own: Any = getattr(model, "config", None)
    renames = hasattr(own, "model_type") and any(
        isinstance(x, GroupedExperts) for x in model.modules()
    )
    modules, stacks, parameters = [], [], []
    for target in targets:
        if target.parameter != "weight":
            stacks.append(target.name)
        elif renames and target.path.rpartition(".")[2] in _RENAMED:
            parameters.append(join(target.path, "weight"))  # the keys are the same
        else:
            modules.append(target.path)
    ends = {name[i + 1 :] for name in modules_of(model) for i, x in enumerate(name) if x == "."}
    is_ambiguous = not ends.isdisjoint(modules)
    return "|".join(map(re.escape, modules)) if is_ambiguous else modules, stacks + parameters


def config_for(model: nn.Module, settings: Settings, targets: Iterable[Target]) -> dict[str, Any]:
    """The file's content."""
    modules, parameters = names_for(model, targets)
    own: Any = getattr(model, "config", None)
    config = {
        "base_model_name_or_path": getattr(own, "_name_or_path", None) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "alpha_pattern": dict(settings.alpha_pattern),
        "lora_alpha": settings.usual.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "peft_version": LAYOUT,
        "r": settings.usual.rank,
        "rank_pattern": dict(settings.rank_pattern),
        "target_modules": modules,
        "task_type": None,
        "use_rslora": settings.usual.use_rslora,
    }
    if parameters:  # PEFT before 0.17 knows no such thing
        config["target_parameters"] = parameters
    return config


def read_config(path: Path) -> Settings:
    """Raises ValueError, naming the setting, for one that changes what adapters compute."""
    if not path.exists():
        raise FileNotFoundError(
            f"load_lora: {path} is missing; what is on a hub is fetched first, by "
            "huggingface_hub.snapshot_download, and what a killed save left is saved again"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"load_lora: {path} must be JSON: {error}") from None
    if not isinstance(config, Mapping) or config.get("peft_type") != "LORA":
        raise ValueError(f"load_lora: {path} must be of peft_type 'LORA'")
    for key, value in config.items():
        if key == "init_lora_weights":
            if value not in INITS:
                raise ValueError(
                    f"load_lora: {path}: init_lora_weights={value!r} changed the weights that the "
                    "adapter was trained beside; let PEFT convert it (save_pretrained with "
                    "path_initial_model_for_weight_conversion)"
                )
        elif key not in _READ | SILENT and is_set(value):
            raise ValueError(
                f"load_lora: {path}: {key}={value!r} is not supported, only plain LoRA is; "
                "use PEFT on the model in BF16 (moefp8.dequantize)"
            )
    ranks, alphas = (_pattern(path, config, key) for key in ("rank_pattern", "alpha_pattern"))
    for key, rank in (*ranks.items(), ("r", config.get("r"))):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(
                f"load_lora: {path}: {key} must be an integer of at least 1, got {rank!r}"
            )
    for key, alpha in (*alphas.items(), ("lora_alpha", config.get("lora_alpha"))):
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e6:
            raise ValueError(f"load_lora: {path}: {key} must be a number above 0, got {alpha!r}")
    usual = Options(config["r"], config["lora_alpha"], bool(config.get("use_rslora")))
    parameters = tuple(config.get("target_parameters") or ())
    is_old = _release(config.get("peft_version")) < _release(LAYOUT)
    return Settings(usual, parameters, is_old, ranks, alphas)


def _pattern(path: Path, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    entry = config.get(key) or {}
    if not isinstance(entry, Mapping):
        raise ValueError(f"load_lora: {path}: {key} must be an object, got {entry!r}")
    return dict(entry)


def _release(version: Any) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", str(version or ""))[:2]))


def names_stack(parameters: Iterable[str], path: str, stack: str) -> bool:
    """Whether target_parameters name a weight of experts, by PEFT's rule."""
    name = join(path, stack)
    return any(name == x or name.endswith(f".{x}") for x in parameters)
