"""quantize_checkpoint: which tensors become FP8, bit by bit, and what is refused."""

import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from moefp8.checkpoint import CheckpointError, quantize_checkpoint
from moefp8.checkpoint.quantize import stream
from moefp8.quant import quantize_128x128
from tests.checkpoint.cases import CONFIG, assert_same_tensors, read, refusal
from tests.checkpoint.quantize.cases import (
    EXPERTS,
    FAMILIES,
    LAYER,
    LINEAR,
    E,
    H,
    I,
    bf16,
    deepseek_v3,
    expert_tensors,
    quantization_of,
    quantized,
    stacked_tensors,
    write_source,
)


@pytest.fixture
def small_bands(monkeypatch):
    """Make bands of one block, so that each weight is of several."""
    monkeypatch.setattr(stream, "_BAND_ELEMENTS", 1)
    monkeypatch.setattr(stream, "_COLUMNS", 128)
    monkeypatch.setattr(stream, "_CHUNK_BYTES", 100)


def expected(tensors: dict, kept: list[str]) -> dict:
    """Return every matrix in FP8, but for embeddings and those of the modules in kept."""
    made = {}
    for key, tensor in tensors.items():
        stays = any(f"{key}.".startswith(f"{module}.") for module in kept) or "embed" in key
        if stays or tensor.ndim == 1 or "conv" in key:
            made[key] = tensor
        elif tensor.ndim == 2:
            made |= pair(key, tensor)
        else:
            base, name = key.rsplit(".", 1)
            for expert, matrix in enumerate(tensor):
                pieces = {"down_proj": matrix}
                if name == "gate_up_proj":
                    pieces = {"gate_proj": matrix[:I], "up_proj": matrix[I:]}
                for piece, rows in pieces.items():
                    made |= pair(f"{base}.{expert}.{piece}.weight", rows)
    return made


def pair(key: str, tensor: torch.Tensor) -> dict:
    data, scale_inv = quantize_128x128(tensor)
    return {key: data, f"{key}_scale_inv": scale_inv}


# What becomes FP8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.usefixtures("small_bands")
def test_families(tmp_path, family, num_shards):
    tensors, kept = FAMILIES[family]()
    done = quantized(tmp_path, tensors, num_shards, max_shard_bytes=10**6 // num_shards)
    wanted = expected(tensors, kept)
    assert_same_tensors(read(tmp_path / "t"), wanted)
    quantization = quantization_of(tmp_path / "t")
    assert sorted(quantization.pop("modules_to_not_convert")) == sorted(kept)
    assert quantization == CONFIG["quantization_config"]
    assert {w.key for w in done.weights} == {k for k, t in wanted.items() if t.itemsize == 1}
    assert {*done.kept} == {k for k in wanted if k in tensors} - {w.key for w in done.weights}
    assert done.source_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert done.target_bytes == sum(tensor.nbytes for tensor in wanted.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_floats(tmp_path, dtype):
    tensors = {LINEAR: torch.randn(200, 300).to(dtype), "lm_head.weight": torch.ones(3).to(dtype)}
    quantized(tmp_path, tensors)
    assert_same_tensors(read(tmp_path / "t"), expected(tensors, ["lm_head"]))


@pytest.mark.parametrize("scale", [0, 1])
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0), (1, 1), (129, 127), (3, 1000)])
@pytest.mark.usefixtures("small_bands")
def test_shapes(tmp_path, shape, scale):
    tensors = {LINEAR: bf16(*shape) * scale}
    (report,) = quantized(tmp_path, tensors).weights
    got = read(tmp_path / "t")
    assert got[LINEAR].shape == shape
    assert got[f"{LINEAR}_scale_inv"].shape == tuple(-(-size // 128) for size in shape)
    if math.prod(shape):
        assert_same_tensors(got, pair(LINEAR, tensors[LINEAR]))
    if not math.prod(shape) * scale:
        assert (got[f"{LINEAR}_scale_inv"] > 0).all()
        assert (report.error, report.max_error) == (0, 0)


@pytest.mark.parametrize(
    ("skip", "stay"),
    [
        (["mlp.shared_experts"], ["mlp.shared_experts.gate_proj"]),
        (["*.kv_a_*.weight"], ["self_attn.kv_a_proj_with_mqa"]),
        (f"{LAYER}.mlp.experts", ["mlp.experts"]),
        ([f"{LAYER}.self_attn.indexer.wk.weight"], ["self_attn.indexer.wk"]),
        (["layers.0.mlp", "*.wk.weight"], ["self_attn.indexer.wk", "mlp.experts",
          "mlp.shared_experts.gate_proj"]),
    ],
)  # fmt: skip
def test_skip(tmp_path, skip, stay):
    tensors, kept = deepseek_v3()
    tensors = {key: tensor for key, tensor in tensors.items() if ".1." not in key or "lm_" in key}
    tensors |= expert_tensors()
    kept = [module for module in kept if "layers.1" not in module]
    quantized(tmp_path, tensors, skip=skip)
    kept += [f"{LAYER}.{module}" for module in stay]
    assert_same_tensors(read(tmp_path / "t"), expected(tensors, kept))
    assert sorted(quantization_of(tmp_path / "t")["modules_to_not_convert"]) == sorted(kept)


def test_skipped_stacks_stay_stacked(tmp_path):
    tensors = {**stacked_tensors(), LINEAR: bf16(4, 4)}
    done = quantized(tmp_path, tensors, skip=["experts"])
    assert done.basis == "names (transformers knows no model_type 'tiny')"
    assert done.conversion.swapped == {f"{LAYER}.q_proj": "linear"}
    assert_same_tensors(read(tmp_path / "t"), expected(tensors, [EXPERTS]))
    assert quantization_of(tmp_path / "t")["modules_to_not_convert"] == [EXPERTS, "lm_head"]


MEMORY = """
import sys, torch
from moefp8.checkpoint import quantize_checkpoint
from moefp8.checkpoint.quantize import stream
from moefp8.quant import quantize_128x128

def peak_kib():  # getrusage would tell that of the process before exec
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

stream.num_processors = lambda: 8
quantize_128x128(torch.randn(256, 256))
before = peak_kib()
quantize_checkpoint(*sys.argv[1:])
print((peak_kib() - before) >> 10)
"""


def test_memory_does_not_grow_with_tensors(tmp_path):
    """Eight threads work on four weights of 640 MB at once."""
    save_file(
        {f"model.layers.{n}.q_proj.weight": torch.zeros(5120, 16384).bfloat16() for n in range(4)},
        tmp_path / "model.safetensors",
    )
    command = [sys.executable, "-c", MEMORY, tmp_path, tmp_path / "t"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256


# What is refused


def refuse(folder, tensors, *needles, config=None, **options):
    source = write_source(folder / "s", tensors, config)
    message = refusal(quantize_checkpoint, source, folder / "t", **options)
    assert all(needle in message for needle in needles), message
    assert [path.name for path in folder.iterdir()] == ["s"]


ONE, SCALE = {LINEAR: bf16(4, 4)}, {f"{LINEAR}_scale_inv": torch.ones(1, 1)}
CODES = {LINEAR: bf16(4, 4).to(torch.float8_e4m3fn)}
REFUSED = {
    "FP8": (CODES, [LINEAR, "is F8_E4M3, so it is"], {}),
    "FP8 by config": (CODES, ["quantization_config", "made from"], {"config": CONFIG}),
    "scaled": (ONE | SCALE, [f"{LINEAR}_scale_inv in ", "is a scale of"], {}),
    "16 bits": (ONE, ["says quant_method 'fp8'", "states no format"], {"config": CONFIG}),
    "nested": (ONE, ["says quant_method 'fp8'"], {"config": {"text_config": CONFIG}}),
    "some experts": (expert_tensors(), ["skipped all, or none"], {"skip": "experts.1"}),
    "some stacks": (stacked_tensors(), ["only down_proj"], {"skip": "experts.down_proj"}),
    "no layer": ({"lm_head.weight": bf16(4, 4)}, ["no 2-D weight of a decoder layer"], {}),
    "all skipped": (ONE, ["is left for FP8"], {"skip": "layers"}),
    "integers": ({LINEAR: torch.zeros(4, 4, dtype=torch.int8)}, [LINEAR, "got I8"], {}),
    "FP64": (
        stacked_tensors() | {f"{EXPERTS}.down_proj": torch.ones(E, H, I).double()},
        [EXPERTS, "got F64"],
        {},
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(tmp_path, kind):
    tensors, needles, options = REFUSED[kind]
    refuse(tmp_path, tensors, *needles, **options)


BAD_STACKS = {
    "transposed": ({"gate_up_proj": (E, H, 2 * I), "down_proj": (E, I, H)}, "transposed"),
    "with biases": ({"gate_up_proj_bias": (E, 2 * I)}, "neither biases"),
    "incomplete": ({"down_proj": None}, "gate_up_proj"),
    "of unequal numbers": ({"down_proj": (E + 1, H, I)}, "[3, 256, 192]"),
    "of other names": ({"w1": (E, I, H)}, "w1"),
    "of rank 2": ({"gate_up_proj": (2 * I, H)}, "[384, 256]"),
    "with one expert less": ({"0.gate_proj.weight": (I, H)}, "0.gate_proj.weight, as "),
}


@pytest.mark.parametrize("kind", BAD_STACKS)
def test_bad_stacks(tmp_path, kind):
    changes, told = BAD_STACKS[kind]
    tensors = {**stacked_tensors(), LINEAR: bf16(4, 4)}
    for name, shape in changes.items():
        if shape is None:
            del tensors[f"{EXPERTS}.{name}"]
        else:
            tensors[f"{EXPERTS}.{name}"] = bf16(*shape)
    refuse(tmp_path / "w", tensors, EXPERTS, told, f"{tmp_path}/w/s/model.safetensors")
    if kind != "with one expert less":
        quantize_checkpoint(tmp_path / "w" / "s", tmp_path / "t", skip=[EXPERTS])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", [LINEAR, f"{EXPERTS}.gate_up_proj"])
def test_numbers_that_are_none(tmp_path, bad, key):
    tensors = {**stacked_tensors(), LINEAR: bf16(300, 300)}
    tensors[key].view(-1)[-1] = bad
    piece = f"{EXPERTS}.1.up_proj.weight" if key != LINEAR else LINEAR
    told = f"{key} in {tmp_path}/s/model.safetensors: holds NaN or Inf in {piece}; skip it"
    assert told in refusal(quantized, tmp_path, tensors)
    assert not list(tmp_path.rglob("t*/**/*.safetensors*"))


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"skip": ["nowhere"]}, ValueError, "skip: every pattern must match a key of .* 'nowhere'"),
        ({"skip": 5}, TypeError, "quantize_checkpoint: skip must be a name, or names"),
        ({"device": "meta"}, ValueError, "meta"),
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes"),
        ({"max_shard_bytes": math.nan}, ValueError, "max_shard_bytes"),
    ],
)
def test_arguments_that_are_refused(tmp_path, options, kind, told):
    with pytest.raises(kind, match=told):
        quantized(tmp_path, ONE, **options)
    assert "holds neither" in refusal(quantize_checkpoint, tmp_path, tmp_path / "t")


def test_broken_sources(tmp_path):
    source = write_source(tmp_path / "s", deepseek_v3()[0], num_shards=2)
    shard = source / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"nothing was written(.|\n)*truncated"):
        quantize_checkpoint(source, tmp_path / "t")
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*cannot be read"):
        quantize_checkpoint(source, tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
