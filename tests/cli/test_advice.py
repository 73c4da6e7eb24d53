"""What commands advise: it works, and errors name options as the command line has them."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from moefp8.cli.main import main
from tests.checkpoint.cases import CONFIG, deepseek_tensors, write
from tests.checkpoint.inspect.cases import headers_only
from tests.kernels.jit.cases import fail

LAYER = "model.layers.0.mlp"
MATRIX = {f"{LAYER}.up_proj.weight": ("BF16", [8, 8])}
FOREIGN = {
    "16 bits": MATRIX,
    "integers": {f"{LAYER}.up_proj.weight": ("U8", [8, 8])},
    "NVFP4": {
        f"{LAYER}.up_proj.weight": ("U8", [8, 8]),
        f"{LAYER}.up_proj.weight_scale": ("F8_E4M3", [8, 1]),
    },
    "MXFP4": {
        f"{LAYER}.experts.down_proj_blocks": ("U8", [2, 8, 1, 16]),
        f"{LAYER}.experts.down_proj_scales": ("U8", [2, 8, 1]),
    },
    "8 bits of another format": {f"{LAYER}.up_proj.weight": ("F8_E5M2", [8, 8])},
    "no layer": {"model.norm.weight": ("BF16", [8])},
    "experts of another make": {
        f"{LAYER}.experts.gate_up_proj": ("BF16", [2, 8, 8]),
        f"{LAYER}.experts.down_proj": ("BF16", [2, 8, 8]),
    },
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_inspect_advises_quantize_where_that_works(kind, tmp_path, capsys):
    path = headers_only(tmp_path / "model.safetensors", FOREIGN[kind])
    main(["inspect", str(path)])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("FP8 ")]
    status = main(["quantize", str(path), str(tmp_path / "t")])
    errors = capsys.readouterr().err
    assert ("`moefp8 quantize` makes one of it" in line) == (status == 0)
    assert (status == 0) == (kind == "16 bits")
    if status:
        assert line.partition("refuses it: ")[2] in errors
        assert line.partition("refuses it: ")[2]


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4"])
def test_a_format_of_config_json_is_told_first_and_alone(kind, tmp_path, capsys):
    headers_only(tmp_path / "model.safetensors", FOREIGN[kind])
    config = {"quantization_config": {"quant_method": kind.lower()}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = f"config.json: quant_method must be one of fp8, compressed-tensors, but it says {kind}"
    told = told.replace(kind, f"quant_method '{kind.lower()}', a format that")
    assert main(["inspect", str(tmp_path)]) == 1
    errors = capsys.readouterr().out.partition("\nerror: ")[2]
    assert errors.startswith("another format: config.json\n")
    assert told in " ".join(errors.split())
    assert errors.endswith("\n1 errors, 0 notes: load_checkpoint refuses it\n")
    assert main(["quantize", str(tmp_path), str(tmp_path / "t")]) == 1
    errors = capsys.readouterr().err
    assert f"(1 problem):\n  - {told}" in errors
    assert main(["precompile", str(tmp_path)]) == 1
    assert f"precompile: {tmp_path}: {told}" in capsys.readouterr().err


WRONG = {
    "precompile FP8 --max-tokens 0": "--max-tokens must be at least 1, got 0",
    "precompile FP8 --num-sms 0": "--num-sms must be at least 1, got 0",
    "precompile FP8 --num-threads 0": "--num-threads must be at least 1, got 0",
    "precompile FP8 --top-k 0": "--top-k must be at least 1, got 0",
    "precompile FP8 --top-k 99": "--top-k must be at most the number of experts, which is 3 in ",
    "precompile FP8 --expert-parallel-size 0": "--expert-parallel-size must be at least 1, got 0",
    "precompile FP8 --expert-parallel-size 4": (
        "--expert-parallel-size must be at most the number of experts, since each rank holds one, "
        "and there are 3 of model.layers.0.mlp.experts.2.down_proj.weight, got 4"
    ),
    "bench FP8 --top-k 99": "--top-k must be at most the number of experts, which is 3 in ",
    "bench --linear 0 8": "all sizes must be at least 1, got linear, 0 x 8",
    "bench --experts 2 1 8 8 --expert-parallel-size 3": (
        "--expert-parallel-size must be at most the number of experts, since each rank holds one, "
        "and there are 2, got 3"
    ),
    "bench --experts 2 1 8 8 --ranks 0": "--ranks must be at least 1, got 0",
    "quantize BF16 NEW --skip nothing": "--skip: every pattern must match a key of ",
    "quantize BF16 NEW --skip=": "--skip must be a part of a name, or a pattern, got ''",
    "quantize BF16 NEW --device nowhere": "--device must be one that there is (cpu",
    "quantize BF16 NEW --device meta": "--device must be a real one, got meta",
    "quantize BF16 NEW --max-shard-bytes 0": "--max-shard-bytes must be positive, got 0",
    "quantize INF NEW": "; --skip it, which keeps it as it is",
    "quantize DOWN NEW": "; --skip 'model.layers.0.mlp.experts' to keep it as it is",
}


@pytest.mark.parametrize("command", WRONG)
def test_errors_name_options_as_the_command_line_has_them(command, tmp_path, capsys):
    fp8 = write(tmp_path / "fp8", deepseek_tensors(), {**CONFIG, "num_experts_per_tok": 2})
    headers_only(tmp_path / "bf16.safetensors", MATRIX)
    save_file({next(iter(MATRIX)): torch.full((8, 8), torch.inf)}, tmp_path / "inf.safetensors")
    down = {f"{LAYER}.experts.down_proj": ("BF16", [2, 8, 8])}
    headers_only(tmp_path / "down.safetensors", down)
    places = {"FP8": fp8, "NEW": tmp_path / "new"}
    places |= {name: tmp_path / f"{name.lower()}.safetensors" for name in ("BF16", "INF", "DOWN")}
    assert main([str(places.get(word, word)) for word in command.split()]) == 1
    assert WRONG[command] in capsys.readouterr().err


def test_a_begun_target_names_the_options_that_differ(tmp_path, capsys, monkeypatch):
    """The first run ends before its config.json."""
    path = headers_only(tmp_path / "model.safetensors", MATRIX)
    fail(monkeypatch, os, "rename", errno.EIO)
    fail(monkeypatch, os, "replace", errno.EIO, lambda *paths: "config.json" in str(paths))
    command = ["quantize", str(path), str(tmp_path / "t")]
    assert main(command) == 1
    assert main([*command, "--max-shard-bytes", "7"]) == 1
    assert "was begun with another --max-shard-bytes than now" in capsys.readouterr().err


def test_names_in_a_checkpoint_are_left_as_they_are(tmp_path, capsys):
    """`model.top_k.skip` is no option."""
    tensors = dict.fromkeys(["model.top_k.skip", "max_shard_bytes.skip"], ("F8_E5M2", [8, 8]))
    main(["quantize", str(headers_only(tmp_path / "x.safetensors", tensors)), str(tmp_path / "t")])
    errors = capsys.readouterr().err
    assert "- model.top_k.skip in " in errors
    assert "- max_shard_bytes.skip in " in errors
