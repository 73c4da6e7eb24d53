"""`moefp8.adapters`: LoRA beside FP8 weights, its files, and PEFT."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import moefp8
from moefp8.adapters import (
    LoRA,
    add_lora,
    load_lora,
    lora_state_dict,
    register_with_peft,
    remove_lora,
    save_lora,
)

from . import BF16, attempt, case, randn, step


def _model(device: str) -> nn.Sequential:
    experts = moefp8.MoE(136, 72, 4, 2, shared_intermediate_size=72, device=device)
    return nn.Sequential(moefp8.FP8Linear(136, 136, device=device), experts)


def _drawn(model: nn.Module) -> nn.Module:
    """Fill adapters, whose B is zeros at first."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora" in name:
                x.copy_(0.1 * randn(*x.shape, device=str(x.device), dtype=torch.float32))
    return model


@case
def beside_all(device: str) -> Any:
    model = _model(device)
    names = add_lora(model, rank=4, alpha=8)
    _drawn(model)
    return names, step(model, randn(9, 136, device=device)), model


@case
def chosen_targets(device: str) -> Any:
    models = [_model(device) for _ in range(3)]
    names = [
        add_lora(models[0], targets=["experts"]),
        add_lora(model=models[1], rank=2, alpha=3.5, targets=r".*down_proj", use_rslora=True),
        add_lora(models[2], dtype=BF16),
    ]
    x = randn(9, 136, device=device)
    return names, [(_drawn(model), model(x)) for model in models]


@case
def alone(device: str) -> Any:
    lora = LoRA(
        shape=(72, 136), rank=4, alpha=8, use_rslora=True, device=device, dtype=torch.float32
    )
    with torch.no_grad():
        lora.B.copy_(randn(72, 4, device=device))
    x = randn(9, 136, device=device)
    return lora, lora(y=randn(9, 72, device=device), x=x), LoRA((3, 72, 136), 2, 1.0)


@case
def files(device: str) -> Any:
    model = _model(device)
    add_lora(model, rank=4)
    save_lora(_drawn(model), "adapter")
    other = remove_lora(model=copy.deepcopy(model))
    names = load_lora(model=other, directory="adapter")
    state = lora_state_dict(model)
    twice = {name: 2 * x for name, x in model.state_dict().items() if "lora" in name}
    save_lora(model=model, directory="twice", state_dict=twice)
    chosen = lora_state_dict(model=model, state_dict=twice)
    x = randn(9, 136, device=device)
    return Path("."), names, state, chosen, other(x), remove_lora(other)(x)


@case
def trained_by_peft(device: str) -> Any:
    from peft import LoraConfig, get_peft_model

    config = register_with_peft(config=LoraConfig(target_modules=["0"], r=4))
    model = get_peft_model(nn.Sequential(moefp8.FP8Linear(136, 72, device=device)), config)
    return step(_drawn(model), randn(5, 136, device=device))


@case
def all_linear(device: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model = _model(device)
    names = add_lora(copy.deepcopy(model), targets="all-linear")
    theirs = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
    return names, step(_drawn(theirs), randn(5, 136, device=device))


@case
def errors(device: str) -> Any:
    model = _model(device)
    add_lora(model)
    return [
        attempt(lambda: add_lora(model)),
        attempt(lambda: add_lora(_model(device), targets=["no_such_name"])),
        attempt(lambda: add_lora(_model(device), rank=0)),
        attempt(lambda: load_lora(model, "nowhere")),
        attempt(lambda: moefp8.dequantize(model)),
        attempt(lambda: register_with_peft(3)),
    ]
