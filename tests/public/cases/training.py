"""Weights that train: steps of an optimizer, checkpointing, `main_grad`, codes that stay."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moefp8
from moefp8.functional.training.weights import codes_stay, requantize

from . import BF16, attempt, case, gpu_case, randn, step, warm_up


def _layer(device: str, **options: Any) -> moefp8.MoE:
    return moefp8.MoE(136, 72, 4, 2, shared_intermediate_size=72, device=device, **options)


@case
def optimizer_steps(device: str) -> Any:
    outcomes = {}
    for dtype in (BF16, torch.float32):
        layer = _layer(device, trainable=True, dtype=dtype)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            for _ in range(2):
                loss = (layer(randn(20, 136, device=device)).float() - 1).square().mean()
                loss.backward()
                losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
        outcomes[dtype] = losses, layer
    return outcomes


@case
def checkpointed(device: str) -> Any:
    layer, x = _layer(device), randn(20, 136, device=device).requires_grad_()
    outcomes = []
    for reentrant in (True, False):
        checkpoint(layer, x, use_reentrant=reentrant).float().square().sum().backward()
        outcomes.append(x.grad)
        x.grad = None
    return outcomes


@case
def main_grad(device: str) -> Any:
    """The attributes that Megatron's optimizers give to weights."""
    linear = moefp8.FP8Linear(136, 72, device=device, trainable=True)
    weight = linear.weight
    weight.main_grad = torch.ones(72, 136, device=device)
    weight.zero_out_wgrad = True  # else its own gradient is memory that nothing has written
    outcomes = []
    for overwrites in (True, False):
        weight.overwrite_main_grad, weight.grad_added_to_main_grad = overwrites, False
        outcomes.append(step(linear, randn(9, 136, device=device)))
        outcomes.append((weight.main_grad.clone(), weight.grad, weight.grad_added_to_main_grad))
    return outcomes


@case
def under_autocast(device: str) -> Any:
    layer = _layer(device, trainable=True, dtype=torch.float32)
    x = randn(20, 136, device=device, dtype=torch.float32)
    with torch.autocast(device, dtype=BF16):
        return step(layer, x)


@case
def around_frozen_parts(device: str) -> Any:
    features = nn.Sequential(nn.Linear(136, 256), nn.GELU(), nn.Linear(256, 136)).to(device, BF16)
    moefp8.convert(features).requires_grad_(False)
    model = nn.Sequential(nn.RMSNorm(136), features, nn.Linear(136, 10)).to(device)
    x = randn(20, 136, device=device, dtype=torch.float32)
    return step(model, x)


@case
def writes_through_data(device: str) -> Any:
    linear, x = (
        moefp8.FP8Linear(136, 72, device=device, trainable=True),
        randn(5, 136, device=device),
    )
    outputs = [linear(x)]
    linear.weight.data.mul_(-1)
    requantize(weights=linear)
    outputs.append(linear(x))
    with codes_stay():
        outputs.append(linear(x))
    return outputs


@gpu_case
def micro_batch_graph(device: str) -> Any:
    linear, x = (
        moefp8.FP8Linear(256, 128, device=device, trainable=True),
        randn(64, 256, device=device),
    )
    warm_up(lambda: linear(x).float().square().mean().backward())
    linear.weight.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with codes_stay(), torch.cuda.graph(graph):
        y = linear(x)
        y.float().square().mean().backward()
    graph.replay()
    with torch.no_grad():
        linear.weight.mul_(-1)
    requantize(linear)
    graph.replay()
    return y, linear.weight.grad


@gpu_case
def layer_graph(device: str) -> Any:
    layer, x = _layer(device), randn(16, 136, device=device)
    with torch.inference_mode():
        warm_up(lambda: layer(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(randn(16, 136, device=device))
        graph.replay()
        return y.clone(), layer(x)


@case
def errors(device: str) -> Any:
    linear, x = moefp8.FP8Linear(64, 48, device=device), randn(3, 64, device=device)
    codes = moefp8.FP8Linear(64, 48, bias=False, device=device)
    codes.weight.requires_grad_()
    y = codes(x.requires_grad_())
    dy = torch.ones(3, 48, device=device, dtype=BF16).requires_grad_()
    (dx,) = torch.autograd.grad(linear(x), x, dy, create_graph=True)
    return [
        attempt(lambda: requantize([3])),
        attempt(lambda: torch.func.jvp(linear, (x,), (x,))),
        attempt(lambda: y.float().sum().backward()),
        attempt(lambda: torch.autograd.grad(dx.float().sum(), dy)),
    ]
