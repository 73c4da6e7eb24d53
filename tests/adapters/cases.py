"""A small model, its adapters, and what they are in plain PyTorch."""

import copy

import torch
from torch import nn

import moefp8
from moefp8.adapters import LoRA

H, I, E, K = 128, 72, 4, 2


class Net(nn.Module):
    """A linear, a whole MoE layer, and a linear that is not FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = moefp8.FP8Linear(H, H)
        self.moe = moefp8.MoE(H, I, E, K, shared_intermediate_size=40)
        self.head = nn.Linear(H, 16, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.moe(self.first(x)))


def tokens(num: int = 12) -> torch.Tensor:
    return torch.randn(num, H, dtype=torch.bfloat16)


@torch.no_grad()
def trained(model: nn.Module, size: float = 0.05) -> nn.Module:
    """The model, with other values in every B, which are zeros at first."""
    for module in model.modules():
        if isinstance(module, LoRA):
            module.B.normal_(std=size)
    return model


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """The model in FP32, without adapters: each weight is the sum that its adapter stands for."""
    plain = moefp8.dequantize(moefp8.adapters.remove_lora(copy.deepcopy(model)), torch.float32)
    for name, lora in model.named_modules():
        if isinstance(lora, LoRA):
            path, _, parameter = name.rpartition(".lora_")
            weight = plain.get_submodule(path).get_parameter(parameter)
            weight += lora.scaling * (lora.B.float() @ lora.A.float())
    return plain.float()


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())
