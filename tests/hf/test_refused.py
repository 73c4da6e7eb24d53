"""Checkpoints, configs and placements that `from_pretrained` refuses, naming what is wrong."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from moefp8.hf import pretrained_config
from tests.checkpoint.cases import refusal
from tests.checkpoint.quantize.cases import quantization_of
from tests.checkpoint.transformers_cases import fp8_of
from tests.hf.model_cases import change_config, change_tensors, without

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

EXPERT = "model.layers.1.mlp.experts.5"
UP, DOWN = f"{EXPERT}.up_proj.weight", f"{EXPERT}.down_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"


def replaced(name, tensor):
    return lambda key, x: [(key, tensor if key == name else x)]


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        (without(UP, f"{UP}_scale_inv"), [f"{UP}: missing"]),
        (without(f"{DOWN}_scale_inv"), [f"{DOWN} in"]),
        (without(f"{KEY}_scale_inv"), [f"{KEY} in", "without its scale"]),
        (
            replaced(f"{DOWN}_scale_inv", torch.ones(1, 3)),
            ["shape must be [2, 3], got [1, 3]"],
        ),
        (replaced(DOWN, torch.ones(256, 320).bfloat16()), [f"{DOWN} in", "got BF16"]),
        (
            replaced(f"{DOWN}_scale_inv", torch.full((2, 3), torch.nan)),
            [f"{DOWN}_scale_inv in", "6 of 6 scales are NaN or infinite"],
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit(qwen, change, needles):
    change_tensors(qwen, change)
    message = refusal(fp8_of, qwen)
    for needle in [*needles, str(qwen / "model.safetensors")]:
        assert needle in message


def test_what_only_a_checkpoint_can_give(qwen):
    """transformers would draw at random what is missing, all experts of a layer too."""
    change_config(qwen, num_hidden_layers=4)
    assert "layers.3.mlp.experts.gate_up_proj: not in" in refusal(fp8_of, qwen)
    change_config(qwen, num_hidden_layers=3)
    change_tensors(qwen, without(ROUTER))
    assert f"{ROUTER}: not in the checkpoint" in refusal(fp8_of, qwen)


def test_other_blocks(qwen):
    stored = quantization_of(qwen)
    change_config(qwen, quantization_config=stored | {"weight_block_size": [64, 64]})
    assert "must be [128, 128], got [64, 64]" in refusal(fp8_of, qwen)


@pytest.mark.parametrize("form", ["safetensors", "a pickle", "two pickles"])
def test_an_fp8_checkpoint_whose_config_does_not_say_so(qwen, form):
    """transformers would take codes for weights, and leave scales out."""
    change_config(qwen, "quantization_config")
    file = qwen / "model.safetensors"
    tensors = load_file(file)
    weight = next(key for key, x in tensors.items() if x.dtype == torch.float8_e4m3fn)
    if form != "safetensors":
        file.unlink()
        file = qwen / "pytorch_model.bin"
    if form == "a pickle":
        torch.save(tensors, file)
    elif form == "two pickles":  # only the second has FP8
        codes = {key: tensors.pop(key) for key in (weight, f"{weight}_scale_inv")}
        parts = {key: x.bfloat16() for key, x in tensors.items()}, codes
        weight_map = {}
        for i, part in enumerate(parts, 1):
            file = qwen / f"pytorch_model-{i:05}-of-00002.bin"
            torch.save(part, file)
            weight_map |= dict.fromkeys(part, file.name)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (qwen / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    message = refusal(fp8_of, qwen)
    assert "config has no quantization_config" in message
    assert f"_proj.weight in {file}: FP8" in message


def test_files_that_are_no_safetensors(qwen):
    (qwen / "model.safetensors").unlink()
    torch.save({}, qwen / "pytorch_model.bin")
    assert "pytorch_model.bin" in refusal(fp8_of, qwen)


PARALLEL = """
import sys
from transformers import AutoModelForCausalLM
import moefp8.hf
config = moefp8.hf.FP8Config()
AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=config, tp_plan="auto")
"""


def test_tensor_parallelism_of_transformers(qwen, tmp_path):
    """transformers would cut scales by integer division; `moefp8.shard` carries them."""
    (tmp_path / "script.py").write_text(PARALLEL)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, tmp_path / "script.py", qwen],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode != 0
    assert "cannot cut FP8 blocks; use moefp8.shard" in done.stderr, done.stderr


def test_a_config_for_a_checkpoint_that_is_not_fp8(qwen):
    with pytest.raises(ValueError, match="must have a quantization_config"):
        pretrained_config(qwen.with_name("fp8-bf16"))
    change_config(qwen, quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="it says quant_method 'awq', a format that"):
        pretrained_config(qwen)
