"""A weight format of one's own: one scale for each matrix, of which no other file knows.

Every op takes it, and gives bit for bit what it gives of the same scale in each block.
"""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn

from moefp8 import FP8Linear, GroupedExperts, shard
from moefp8.adapters import add_lora
from moefp8.kernels.common.blocks import E4M3, E4M3_MAX
from moefp8.layers.moe import SharedExperts
from moefp8.quant import BlockScaled, dequantize, weight_format
from moefp8.quant.weight_format import BLOCKS, WeightFormat, tile_scales
from tests.fakes.emulator import emulated
from tests.gpu import on_gpu


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale_inv = w.float().abs().amax((-2, -1), keepdim=True).clamp(min=1e-4) / E4M3_MAX
    return (w.float() / scale_inv).to(E4M3), scale_inv


TENSOR = WeightFormat("tensor", None, None, quantize)


def linear_of(n: int, k: int, **options) -> FP8Linear:
    linear = FP8Linear(k, n, trainable=True, dtype=torch.float32, **options)
    linear.weight_format = TENSOR
    return linear.freeze()


def experts_of(h: int, i: int, **options) -> GroupedExperts:
    experts = GroupedExperts(3, h, i, trainable=True, dtype=torch.float32, **options)
    experts.weight_format = TENSOR
    with torch.no_grad():
        experts.gate_up_proj[:, i:] *= 1.7  # gate and up have scales of their own
    return experts.freeze()


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setattr(weight_format, "FORMATS", (BLOCKS, TENSOR))


def in_blocks(module: nn.Module) -> nn.Module:
    """The same weights, with the scale of each tile in memory."""
    if isinstance(module, FP8Linear):
        options = {"bias": module.bias is not None, "dtype": torch.float32}
        blocks = FP8Linear(module.in_features, module.out_features, **options)
    else:
        e, h, i = module.down_proj.shape
        blocks = GroupedExperts(e, h, i, activation=module.activation)
    for name, x in module.named_parameters():
        if name.endswith("_scale_inv"):
            weight = module.get_parameter(name.removesuffix("_scale_inv"))
            x = tile_scales(weight, x, parts=2 if name.startswith("gate_up") else 1)
        blocks.get_parameter(name).data.copy_(x)
    return blocks.to(next(module.parameters()).device)


def assert_alike(module: nn.Module, blocks: nn.Module, x: torch.Tensor, *others) -> None:
    """Check that outputs and gradients in x have the same bits."""
    results = []
    for each in (module, blocks):
        own = x.clone().requires_grad_()
        y = each(own, *others)
        y.square().sum().backward()
        results.append((y.detach(), own.grad))
        assert all(torch.isfinite(z).all() and z.any() for z in results[-1])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def choices(t: int, k: int, e: int, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack([torch.randperm(e)[:k] for _ in range(t)])
    return ids.to(device), torch.rand(t, k).to(device)


machines = pytest.mark.parametrize("machine", [nullcontext, emulated], ids=["CPU", "emulated GPU"])
SHAPES = [(128, 128), (272, 144), (200, 72), (20, 260)]  # N, K, or H, I


def test_grids_and_rules():
    grids = [x.grid(300, 500, parts=n) for x in (TENSOR, BLOCKS) for n in (1, 2)]
    assert grids == [(1, 1), (2, 1), (3, 4), (4, 4)]
    assert (TENSOR.alignment, BLOCKS.alignment) == (1, 128)
    scale = torch.rand(4, 2, 1)
    tiles = tile_scales(torch.empty(4, 600, 300), scale, 2)
    assert torch.equal(tiles, scale.repeat_interleave(3, 1).expand(4, 6, 3))
    assert tile_scales(torch.empty(4, 300, 300), scale[:, :1]).data_ptr() == scale.data_ptr()


@machines
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear(machine, n, k):
    linear = linear_of(n, k)
    assert linear.weight_scale_inv.shape == (1, 1)
    with machine():
        assert_alike(linear, in_blocks(linear), torch.randn(5, k))


@machines
@pytest.mark.parametrize(("h", "i"), SHAPES)
def test_experts(machine, h, i):
    experts = experts_of(h, i)
    assert experts.gate_up_proj_scale_inv.shape == (3, 2, 1)
    with machine():
        assert_alike(experts, in_blocks(experts), torch.randn(7, h), *choices(7, 2, 3))


@machines
@pytest.mark.parametrize(("h", "i"), SHAPES)
def test_shared_experts(machine, h, i):
    made = [SharedExperts(h, i), SharedExperts(h, i)]
    for name, k, n in (("gate_proj", h, i), ("up_proj", h, i), ("down_proj", i, h)):
        linear = linear_of(n, k, bias=False)
        for shared, x in zip(made, (linear, in_blocks(linear)), strict=True):
            setattr(shared, name, x)
    with machine():
        assert_alike(*made, torch.randn(7, h))


def adapted(h: int, i: int) -> list[nn.Module]:
    """Experts with adapters in both formats."""
    experts, made = experts_of(h, i), []
    for each in (experts, in_blocks(experts)):
        model = nn.ModuleDict({"experts": each})
        add_lora(model, 4, 8)
        torch.manual_seed(3)
        for x in model.parameters():
            if x.requires_grad:
                nn.init.normal_(x, std=0.1)
        made.append(model["experts"])
    return made


@pytest.mark.parametrize(("h", "i"), SHAPES)
def test_adapters(h, i):
    assert_alike(*adapted(h, i), torch.randn(7, h), *choices(7, 2, 3))


def test_values_are_those_of_the_weights():
    w = torch.randn(300, 200)
    linear = linear_of(300, 200).unfreeze(torch.float32)
    with torch.no_grad():
        linear.weight.copy_(w)
    linear.freeze()
    assert torch.equal(linear.dequantize(torch.float32), dequantize(BlockScaled(*quantize(w))))
    assert (linear.dequantize(torch.float32) - w).abs().max() < w.abs().max() / 16
    experts = experts_of(72, 200)
    gate_up, down = experts.dequantize(torch.float32)
    values = experts.gate_up_proj.float().unflatten(1, (2, 200))
    values = values * experts.gate_up_proj_scale_inv[..., None]
    assert torch.equal(gate_up, values.flatten(1, 2))
    assert torch.equal(down, experts.down_proj.float() * experts.down_proj_scale_inv)


def test_training_and_freezing_keep_it():
    experts = experts_of(72, 200)
    codes = {name: x.clone() for name, x in experts.state_dict().items()}
    experts.unfreeze(torch.float32).freeze()
    assert {name: x.shape for name, x in experts.state_dict().items()} == {
        name: x.shape for name, x in codes.items()
    }
    linear = linear_of(200, 72).unfreeze(torch.float32).freeze()
    assert linear.weight_scale_inv.shape == (1, 1)


@pytest.mark.parametrize("kind", ["rows", "columns", "intermediate", "experts"])
def test_ranks_keep_the_scale_and_have_no_padding(kind):
    whole = linear_of(200, 300) if kind in ("rows", "columns") else experts_of(72, 200)
    x = torch.randn(5, 300 if kind in ("rows", "columns") else 72)
    others = () if kind in ("rows", "columns") else choices(5, 2, 3)
    expected, parts = whole(x, *others), []
    for rank in range(3):
        model = nn.ModuleDict({"layer": deepcopy(whole)})
        layer = shard(model, {"layer": kind}, rank, 3)["layer"]
        columns = slice(rank * 300 // 3, (rank + 1) * 300 // 3)
        parts.append(layer(x[:, columns] if kind == "columns" else x, *others))
    y = torch.cat(parts, 1) if kind == "rows" else sum(z.float() for z in parts)
    if kind == "rows":
        assert torch.equal(y, expected)
    else:
        assert (y - expected.float()).norm() < 0.04 * expected.float().norm()


def test_other_shapes_are_refused_by_the_names_of_both():
    linear = linear_of(200, 300)
    linear.weight_scale_inv = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    message = r"weight_scale_inv must be \[ceil\(N/128\), ceil\(K/128\)\] = \[2, 3\] or \[1, 1\] = "
    with pytest.raises(ValueError, match=message + r"\[1, 1\], got \[2, 2\]"):
        linear(torch.randn(2, 300))
    experts = experts_of(72, 200)
    experts.gate_up_proj_scale_inv = nn.Parameter(torch.ones(3, 1, 1), requires_grad=False)
    with pytest.raises(ValueError, match=r"\[E, 2, 1\] = \[3, 2, 1\], got \[3, 1, 1\]"):
        experts(torch.randn(2, 72), *choices(2, 2, 3))


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1)])
def test_scales_of_no_format_are_not_repeated(monkeypatch, shape):
    weight, scale_inv = torch.empty(2, 300, 300), torch.ones(2, *shape)
    monkeypatch.setattr(weight_format, "FORMATS", (BLOCKS,))
    with pytest.raises(ValueError, match=r"\[E, ceil\(N/128\), ceil\(K/128\)\] = \[2, 3, 3\], got"):
        tile_scales(weight, scale_inv)
    monkeypatch.setattr(weight_format, "FORMATS", (BLOCKS, TENSOR))
    with pytest.raises(ValueError, match=r"or \[E, 1, 1\] = \[2, 1, 1\], got \[1, 1, 1\]"):
        tile_scales(weight, torch.ones(1, 1, 1))


def test_adapters_refuse_scales_of_no_format(monkeypatch):
    monkeypatch.setattr(weight_format, "FORMATS", (BLOCKS,))
    model = nn.ModuleDict({"experts": GroupedExperts(3, 72, 200)})
    add_lora(model, 4, 8)
    model["experts"].down_proj_scale_inv.data = torch.ones(1, 1, 1)
    with pytest.raises(
        ValueError, match=r"scale_inv must be \[E, .* = \[3, 1, 2\], got \[1, 1, 1\]"
    ):
        model["experts"](torch.randn(2, 72), *choices(2, 2, 3))


@on_gpu
@pytest.mark.parametrize(("h", "i"), SHAPES)
@pytest.mark.parametrize("t", [1, 40, 600])
def test_on_a_gpu(t, h, i):
    linear = linear_of(i, h).cuda()
    assert_alike(linear, in_blocks(linear), torch.randn(t, h, device="cuda"))
    experts = experts_of(h, i).cuda()
    x = torch.randn(t, h, device="cuda")
    assert_alike(experts, in_blocks(experts), x, *choices(t, 2, 3, "cuda"))
    made = [each.cuda() for each in adapted(h, i)]
    assert_alike(*made, x, *choices(t, 2, 3, "cuda"))
