"""Stacks of gate and up whose scales fit two cuts load only if their codes leave no doubt."""

import pytest
import torch
from torch import nn

from moefp8 import GroupedExperts, load_checkpoint
from moefp8.checkpoint import inspect_checkpoint
from moefp8.quant import BlockScaled, quantize_128x128
from tests.checkpoint.cases import CONFIG, refuse, write


def stack(path, gate_up: BlockScaled):
    """A checkpoint of experts, whose config.json does not say how gate and up are cut."""
    num_experts, num_rows, hidden_size = gate_up.data.shape
    down = quantize_128x128(torch.randn(num_experts, hidden_size, num_rows // 2))
    tensors = {"gate_up_proj": gate_up, "down_proj": down}
    stored = {f"experts.{name}": x.data for name, x in tensors.items()}
    stored |= {f"experts.{name}_scale_inv": x.scale_inv for name, x in tensors.items()}
    model = nn.ModuleDict({"experts": GroupedExperts(num_experts, hidden_size, num_rows // 2)})
    return model, write(path / "c", stored, {"quantization_config": CONFIG["quantization_config"]})


def refused(path, gate_up: BlockScaled) -> None:
    model, path = stack(path, gate_up)
    refuse(path, "nothing tells whether gate and up", model=model)
    assert not inspect_checkpoint(path).is_loadable


def loaded(path, gate_up: BlockScaled) -> None:
    model, path = stack(path, gate_up)
    load_checkpoint(model, path)
    assert model["experts"].gate_up_proj.view(torch.uint8).equal(gate_up.data.view(torch.uint8))
    assert inspect_checkpoint(path).is_loadable


def cut(w: torch.Tensor, quantize) -> BlockScaled:
    """Cut [E, 2I, H] as 2I rows. quantize: block -> scale."""
    data, scales = torch.empty_like(w), torch.empty(len(w), -(-w.shape[1] // 128), 1)
    for expert, whole in enumerate(w):
        for row, block in enumerate(whole.split(128)):
            scales[expert, row] = scale = quantize(block)
            data[expert, 128 * row :][:128] = (block / scale).clamp(-448, 448)
    return BlockScaled(data.to(torch.float8_e4m3fn), scales)


def largest_but_for(num_experts: int, size: int, lacking: int, row: int) -> BlockScaled:
    """Codes 448, but for a block of all 2I rows in each of the first `lacking` experts."""
    codes = torch.full((num_experts, 2 * size, 128), 448.0)
    codes[:lacking, 128 * row :][:, :128] = 256
    scales = torch.ones(num_experts, -(-2 * size // 128), 1)
    return BlockScaled(codes.to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("size", [96, 224])
def test_scales_that_are_powers_of_two_do_not_mislead(tmp_path, size):
    w = torch.randn(1, 2 * size, 64)
    w[0, -1], w[0, [0, size - 1, size, 2 * size - 65]] = 5, 7  # 7 is 448 / 64
    refused(tmp_path, cut(w, lambda x: 2.0 ** (x.abs().amax() / 448).log2().ceil()))


@pytest.mark.parametrize("size", [96, 224])
def test_a_quantizer_that_clips_does_not_mislead(tmp_path, size):
    """It clips whole blocks alone, so that the last rows of up lack the largest code."""
    w = torch.randn(32, 2 * size, 128)

    def scale(block: torch.Tensor) -> torch.Tensor:
        values = block.abs().flatten()
        return values.quantile(0.99) / 448 if len(block) == 128 else values.amax() / 400

    refused(tmp_path, cut(w, scale))


def test_a_few_blocks_that_lack_the_largest_code_are_no_proof(tmp_path):
    refused(tmp_path / "last", largest_but_for(32, 224, 32, row=3))
    refused(tmp_path / "few", largest_but_for(32, 224, 15, row=2))
    loaded(tmp_path / "enough", largest_but_for(32, 224, 16, row=2))


@pytest.mark.parametrize("is_separate", [True, False])
def test_weights_load_if_gate_and_up_were_cut_apart(tmp_path, is_separate):
    w = torch.randn(8, 2, 712, 1024)
    codes = quantize_128x128(w.flatten(0, 1) if is_separate else w.flatten(1, 2))
    gate_up = BlockScaled(codes.data.view(8, 1424, 1024), codes.scale_inv.view(8, 12, 8))
    (loaded if is_separate else refused)(tmp_path, gate_up)
