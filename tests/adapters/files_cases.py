"""What tests of adapters in files share: a directory is changed, and a load changed nothing."""

import copy
import json
from pathlib import Path

import torch

from moefp8.adapters import remove_lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def bare(model):
    """The model without its adapters."""
    return remove_lora(copy.deepcopy(model))


def change(path: Path, **settings) -> None:
    file = path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def states(model) -> list[tuple[str, torch.Tensor]]:
    return [(name, x.clone()) for name, x in model.state_dict().items() if "lora_" in name]


def unchanged(model, before) -> bool:
    after = states(model)
    return [n for n, _ in before] == [n for n, _ in after] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True)
    )
