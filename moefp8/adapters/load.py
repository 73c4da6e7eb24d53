"""`load_lora`: adapters from the files that `save_lora` and PEFT write."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..kernels.common.checks import FLOATS
from ..layers import GroupedExperts
from .add import put
from .config import CONFIG, LAYOUT, Options, Settings, names_stack, read_config
from .layout import KEY, Keys, from_file, shapes_of
from .save import WEIGHTS, adapted, keys_by_target, lora_of, options_of
from .targets import STACKS, Target, find_targets, join, modules_of

_Tensors = Mapping[str, torch.Tensor]


def load_lora(model: nn.Module, directory: str | os.PathLike[str]) -> list[str]:
    """Load the adapters that `save_lora` or PEFT wrote into a model.

    A model without adapters gets those of the files, as `add_lora` would add them, in the dtype of
    the files, each of the rank that PEFT's `rank_pattern` and `alpha_pattern` say. These regular
    expressions must be simple: at most 200 characters and three repeats, no repeated group, no
    flags, named groups, references or lookbehinds. Otherwise both must be the same but for dtypes.
    Of experts that `moefp8.shard` cut, a rank takes its own. Dropout in training is not carried
    over.

    Returns:
        The names of the weights that have an adapter.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: files and model differ in names, shapes, rank or alpha, or files hold what is no
            plain LoRA (DoRA, biases, whole modules), or the patterns are refused. The model is
            unchanged.
    """
    folder = Path(directory)
    settings, tensors = read_config(folder / CONFIG), _read(folder / WEIGHTS)
    if read_config(folder / CONFIG) != settings:
        raise ValueError(
            f"load_lora: {folder} was written while it was read; load the adapters again"
        )
    existing = adapted(model)
    targets = existing or _targets_in(model, tensors, settings)
    keys, options = keys_by_target(targets), settings.of(targets)
    if existing:
        _check_options(options)
    _check_layout(settings, targets)
    _check(tensors, keys, options)
    if not existing:
        dtype = next(iter(tensors.values())).dtype
        put(model, options, dtype)
    with torch.no_grad():
        for target, (key_a, key_b) in keys.items():
            lora = lora_of(target)
            a, b = from_file(tensors[key_a], tensors[key_b], target, lora.rank)
            lora.A.copy_(a)
            lora.B.copy_(b)
    return [target.name for target in targets]


# ---- The files' contents ----


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.exists():
        raise FileNotFoundError(
            f"load_lora: {path} is missing; PEFT writes it unless safe_serialization=False"
        )
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"load_lora: {path} cannot be read: {error}") from None
    if wrong := [key for key, x in tensors.items() if x.dtype not in FLOATS]:
        dtype = tensors[wrong[0]].dtype
        raise ValueError(f"load_lora: {path}: {wrong[0]} must be bf16, fp16 or fp32, got {dtype}")
    if not tensors:
        raise ValueError(f"load_lora: {path} holds no tensors")
    return tensors


def _targets_in(model: nn.Module, tensors: _Tensors, settings: Settings) -> list[Target]:
    """The weights of a model without adapters that the keys of a file stand for."""
    matches = {key: re.fullmatch(KEY, key) for key in tensors}
    if strange := [key for key, match in matches.items() if match is None]:
        raise ValueError(f"load_lora: {_some(strange)} must be named {KEY}, as LoRA of PEFT is")
    paths = dict.fromkeys(match[1].rstrip(".") for match in matches.values() if match)
    modules = modules_of(model)
    names = []
    for path in paths:
        outer, _, last = path.rpartition(".")
        if path not in modules and last == "base_layer" and outer in paths:
            names.append(join(outer, STACKS[0]))
        elif isinstance(modules.get(path), GroupedExperts):
            names.append(join(path, _stack_of(path, paths, settings)))
        elif path in modules:
            names.append(path)
        else:
            raise ValueError(
                f"load_lora: the model must have what the adapters are for, but has no {path}"
            )
    return find_targets("load_lora", model, "|".join(map(re.escape, names)))


def _stack_of(path: str, paths: Iterable[str], settings: Settings) -> str:
    """Which weight of experts the adapter under `path` itself is for."""
    if join(path, "base_layer") in paths:
        return STACKS[1]
    stacks = [stack for stack in STACKS if names_stack(settings.parameters, path, stack)]
    if len(stacks) != 1:
        raise ValueError(
            f"load_lora: target_parameters in {CONFIG} must name one weight of the experts {path} "
            f"beside which one adapter is stored, got {list(settings.parameters)}"
        )
    return stacks[0]


def _check_options(options: Mapping[Target, Options]) -> None:
    for target, theirs in options.items():
        ours = options_of(target)
        if ours != theirs:
            raise ValueError(
                f"load_lora: the model's adapter of {target.name} has {ours}, that of the files "
                f"{theirs}; moefp8.adapters.remove_lora(model), and load_lora then adds those of "
                "the files"
            )
    if any(hasattr(lora_of(target).A, "full_tensor") for target in options):
        raise ValueError("load_lora: the model is in fully_shard; load the adapters before that")


def _check_layout(settings: Settings, targets: Iterable[Target]) -> None:
    """Shapes show the layout of adapters of experts, unless each expert's weights are square."""
    stacks = [x for x in targets if x.parameter != "weight" and x.shape[1] == x.shape[2]]
    if settings.is_old and stacks:
        raise ValueError(
            f"load_lora: {CONFIG} must be of PEFT {LAYOUT} or later, since older releases lay "
            f"adapters of experts the other way, which shapes do not tell for {stacks[0].name} "
            f"{list(stacks[0].shape)}; if it is, add its peft_version"
        )


def _check(
    tensors: _Tensors, keys: Mapping[Target, Keys], options: Mapping[Target, Options]
) -> None:
    """Raise ValueError, which lists all differences, unless the files have just these tensors."""
    ranks = {key: options[target].rank for target, pair in keys.items() for key in pair}
    wanted = {
        key: shape
        for target, pair in keys.items()
        for key, shape in zip(pair, shapes_of(target, ranks[pair.A]), strict=True)
    }
    problems = []
    if missing := wanted.keys() - tensors.keys():
        problems.append(f"missing in the file: {_some(missing)}")
    if extra := tensors.keys() - wanted.keys():
        problems.append(f"no such adapter in the model: {_some(extra)}")
    for key in wanted.keys() & tensors.keys():
        if list(tensors[key].shape) != wanted[key]:
            came = list(tensors[key].shape)
            problems.append(f"{key} must be {wanted[key]} for rank {ranks[key]}, got {came}")
    if problems:
        raise ValueError(
            "load_lora: files and model must have the same adapters; "
            f"{'; '.join(sorted(problems))}; moefp8.adapters.remove_lora(model), and load_lora "
            "then adds those of the files, or give add_lora the targets of the files"
        )


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
