"""What quantize_checkpoint says of the errors that it makes."""

import json
import math

import pytest
import torch

from moefp8.checkpoint.quantize import stream
from moefp8.checkpoint.quantize.report import ErrorSums
from moefp8.quant import BlockScaled, dequantize, quantize_128x128
from tests.checkpoint.quantize.cases import LINEAR, bf16, quantized


def test_errors_by_hand(tmp_path):
    """A block holds 448, so that its scale is 1; 17 lies between the E4M3 numbers 16 and 18."""
    w = torch.zeros(2, 130)
    w[0, 0], w[0, 1], w[1, 0] = 448, 17, -30  # exact, 1 off, exact
    w[1, 129] = 4  # alone in its block: exact
    w[1, 128] = 2**-8  # 2**-8 / (4 / 448) = 0.4375, an E4M3 number
    (got,) = quantized(tmp_path, {LINEAR: w}).weights
    norm = math.sqrt(448**2 + 17**2 + 30**2 + 4**2 + 2**-16)
    assert got.error == pytest.approx(1 / norm, rel=1e-5)
    assert got.max_error == pytest.approx(1 / 448, rel=1e-5)
    assert (got.key, got.shape) == (LINEAR, (2, 130))


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e-3, 1.0, 1e30, 4e37])
def test_errors_are_those_of_the_whole_weight(size, tmp_path, monkeypatch):
    """FP64 tells, also where squares would vanish or overflow. Tiny weights become zeros."""
    monkeypatch.setattr(stream, "_BAND_ELEMENTS", 1)
    monkeypatch.setattr(stream, "_COLUMNS", 128)
    w = torch.randn(300, 200) * size
    w[130:, 130:] *= 1e-2
    (got,) = quantized(tmp_path, {LINEAR: w}).weights
    data, scale_inv = quantize_128x128(w)
    scale = scale_inv.double().repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    difference = (data.double() * scale - w.double()).abs()
    assert got.error == pytest.approx(float(difference.norm() / w.double().norm()), rel=1e-4)
    assert got.max_error == pytest.approx(float((difference / scale).max() / 448), rel=1e-4)
    assert (got.error == 1) == (size < 1e-10)
    assert got.max_error <= 1 / 28 + 1e-6


def test_a_wrong_scale_is_seen():
    w = torch.randn(256, 256)
    q = quantize_128x128(w)
    q.scale_inv[1, 1] *= 1.5
    sums = ErrorSums()
    sums.add(w, BlockScaled(q.data, q.scale_inv))
    report = sums.report("w", (256, 256))
    wanted = float((dequantize(q) - w).norm() / w.norm())
    assert report.error == pytest.approx(wanted, rel=1e-4)
    assert report.max_error > 0.3


def test_the_report_as_text_and_json(tmp_path):
    tensors = {f"model.layers.{n}.q_proj.weight": bf16(130, 130) * 2**-n for n in range(12)}
    tensors["model.layers.3.q_proj.weight"][0] *= 1e-7  # 0 in FP8, but it hardly adds to the norm
    tensors["model.layers.5.q_proj.weight"] *= 2.0**-60  # all 0
    done = quantized(tmp_path, tensors)
    assert done.worst(1)[0].key == "model.layers.5.q_proj.weight"
    errors = sorted(weight.error for weight in done.weights)
    assert done.median_error() == (errors[5] + errors[6]) / 2
    lines = str(done).splitlines()
    assert len(lines) == 1 + 10 + 2
    assert lines[1].startswith(" 1.00000 ")
    assert lines[1].endswith("  130 x 130  model.layers.5.q_proj.weight")
    assert f"{done.median_error():.5f}" in lines[11]
    assert "0.39 MiB became 0.19 MiB in 1 shards" in lines[12]
    assert json.loads(json.dumps(done.to_dict()))["weights"][0]["shape"] == [130, 130]
