"""Adapters of a model as PEFT stores them: `lora_state_dict`, `save_lora`."""

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ..layers.parts import parts_of
from ..system.files import sync
from .config import CONFIG, Options, Settings, config_for, settings_for
from .layout import Keys, keys_of, to_file
from .lora import LoRA
from .targets import Target, bare, join, modules_of

WEIGHTS = "adapter_model.safetensors"


def lora_state_dict(
    model: nn.Module, state_dict: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The adapters of a model under PEFT's keys, in PEFT's layout; memory is shared if possible.

    All ranks must call it for a model in `fully_shard`, and each gets whole tensors. state_dict: a
    `state_dict()` of the model, as FSDP gathers it, to take the adapters from instead.
    """
    adapters: dict[str, torch.Tensor] = {}
    state = None if state_dict is None else {bare(name): x for name, x in state_dict.items()}
    for target, keys in keys_by_target(adapted(model)).items():
        lora, name = lora_of(target), join(target.path, f"lora_{target.parameter}")
        a, b = lora.A, lora.B
        if state is not None:
            a, b = state[f"{name}.A"], state[f"{name}.B"]
        adapters |= zip(keys, to_file(_whole(a), _whole(b)), strict=True)
    return adapters


def save_lora(
    model: nn.Module,
    directory: str | os.PathLike[str],
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the adapters of a model, and nothing else, as PEFT does: two files in `directory`.

    PEFT reads them for the model in BF16, `PeftModel.from_pretrained(model, directory)`, and can
    merge them there. Files of these names in the directory are replaced. state_dict: as in
    `lora_state_dict`.

    Weights never stand beside the config of other weights: a save that fails replaces neither file
    or both, and one that is killed leaves the old files, the new ones, or no adapter_config.json,
    which PEFT and `load_lora` refuse. It also leaves temporary files, whose names begin with a dot.

    Raises:
        ValueError: the model has no adapters, or has one rank's part of the experts.
        OSError: the directory cannot be written, or the disk is full.
    """
    targets = adapted(model)
    if not targets:
        raise ValueError("save_lora: the model has no adapters; moefp8.adapters.add_lora adds them")
    if parts := [target.name for target in targets if parts_of(target.module)]:
        raise ValueError(
            f"save_lora: the model must be whole, but {parts[0]} is one rank's part; keep the "
            "state_dict() of every rank"
        )
    tensors = {key: x.contiguous() for key, x in lora_state_dict(model, state_dict).items()}
    config = config_for(model, settings_of(targets), targets)
    _write(Path(directory), tensors, json.dumps(config, indent=2, sort_keys=True))


def _write(folder: Path, tensors: Mapping[str, torch.Tensor], config: str) -> None:
    """Replace both files or neither. If the process is killed in between, there is no config."""
    random = secrets.token_hex(8)
    new_weights, new_config, old_config = (
        folder / f".{name}.{random}" for name in (WEIGHTS, CONFIG, f"{CONFIG}.old")
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), new_weights, {"format": "pt"})
        new_config.write_text(config, encoding="utf-8")
        for path in (new_weights, new_config):
            sync(path)
        if _is(folder / CONFIG, config):  # as of a run that saves again and again
            os.replace(new_weights, folder / WEIGHTS)
            sync(folder)
            return
        try:
            with suppress(FileNotFoundError):
                os.replace(folder / CONFIG, old_config)
                sync(folder)
            os.replace(new_weights, folder / WEIGHTS)
            sync(folder)
        finally:
            with suppress(FileNotFoundError):  # there was no old one
                os.replace(old_config if new_weights.exists() else new_config, folder / CONFIG)
            old_config.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"save_lora: the adapters cannot be written to {folder} ({reason}); mend that and save "
            "again, or elsewhere"
        ) from error
    finally:
        for path in (new_weights, new_config):
            path.unlink(missing_ok=True)


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_bytes() == text.encode()


def save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    is_main_process: bool = True,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """`add_lora` makes this the `save_pretrained` of a model of transformers.

    It writes adapters alone, as transformers does of a model with adapters of PEFT, so that its
    `Trainer` saves what it trained.
    """
    if push_to_hub:
        raise ValueError(
            "save_pretrained: push_to_hub must be False for adapters of moefp8; upload the "
            "directory with huggingface_hub"
        )
    if is_main_process:
        save_lora(model, save_directory, state_dict)


def adapted(model: nn.Module) -> list[Target]:
    """The weights that have an adapter."""
    return [
        Target(path, module, name.removeprefix("lora_"))
        for path, module in modules_of(model).items()
        for name, child in module.named_children()
        if isinstance(child, LoRA)
    ]


def lora_of(target: Target) -> Any:
    return target.module.get_submodule(f"lora_{target.parameter}")


def settings_of(targets: Iterable[Target]) -> Settings:
    return settings_for({target: options_of(target) for target in targets})


def options_of(target: Target) -> Options:
    lora = lora_of(target)
    return Options(lora.rank, lora.alpha, lora.use_rslora)


def keys_by_target(targets: Iterable[Target]) -> dict[Target, Keys]:
    stacks: dict[str, list[str]] = {}
    for target in targets:
        stacks.setdefault(target.path, []).append(target.parameter)
    return {target: keys_of(target, stacks[target.path]) for target in targets}


def _whole(x: torch.Tensor) -> torch.Tensor:
    """x, gathered from all ranks if `fully_shard` has sharded it."""
    x = x.detach()
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()
