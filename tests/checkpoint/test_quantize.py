"""quantize_checkpoint: which tensors become FP8, bit by bit, and what is refused."""

import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoint import small_config

from moefp8.checkpoint import CheckpointError, load_checkpoint, quantize_checkpoint
from moefp8.checkpoint.quantize import stream
from moefp8.quant import quantize_128x128
from tests.checkpoint.cases import (
    CONFIG,
    Tiny,
    assert_holds,
    assert_same_tensors,
    deepseek_tensors,
    read,
    refusal,
    write,
)
from tests.checkpoint.quantize_cases import (
    FAMILIES,
    PLAIN,
    E,
    H,
    I,
    bf16,
    deepseek_v3,
    expert_tensors,
    quantization_of,
    stacked_tensors,
    write_source,
)

LAYER = "model.layers.0"
LINEAR = f"{LAYER}.q_proj.weight"
EXPERTS = f"{LAYER}.mlp.experts"


def expected(tensors: dict, kept: list[str]) -> dict:
    """Every matrix in FP8, but for embeddings and those of the modules in kept."""
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
def test_families(tmp_path, family, num_shards, monkeypatch):
    """Bands of one block, so that each weight is of several."""
    monkeypatch.setattr(stream, "_BAND_ELEMENTS", 1)
    monkeypatch.setattr(stream, "_COLUMNS", 128)
    monkeypatch.setattr(stream, "_CHUNK_BYTES", 100)
    make, kept = FAMILIES[family]
    tensors = make()
    source = write_source(tmp_path / "s", tensors, num_shards=num_shards)
    done = quantize_checkpoint(source, tmp_path / "t", max_shard_bytes=10**6 // num_shards)
    wanted = expected(tensors, kept)
    assert_same_tensors(read(tmp_path / "t"), wanted)
    quantization = quantization_of(tmp_path / "t")
    assert sorted(quantization.pop("modules_to_not_convert")) == sorted(kept)
    assert quantization == CONFIG["quantization_config"]
    assert {w.key for w in done.weights} == {k for k, t in wanted.items() if t.itemsize == 1}
    assert {*done.kept} == {k for k in wanted if k in tensors} - {w.key for w in done.weights}
    assert done.source_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert done.target_bytes == sum(tensor.nbytes for tensor in wanted.values())


def test_a_converted_model_loads_it(tmp_path):
    tensors = deepseek_tensors()
    for key in [key for key in tensors if key.endswith("_scale_inv")]:
        del tensors[key]
        weight = key.removesuffix("_scale_inv")
        tensors[weight] = bf16(*tensors[weight].shape)
    quantize_checkpoint(write_source(tmp_path / "s", tensors), tmp_path / "t")
    model = Tiny()
    load_checkpoint(model, tmp_path / "t")
    assert_holds(model, read(tmp_path / "t"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_floats(tmp_path, dtype):
    tensors = {
        LINEAR: torch.randn(200, 300).to(dtype),
        "lm_head.weight": torch.randn(3, 5, dtype=dtype),
    }
    quantize_checkpoint(write_source(tmp_path / "s", tensors), tmp_path / "t")
    assert_same_tensors(read(tmp_path / "t"), expected(tensors, ["lm_head"]))


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0), (1, 1), (129, 127), (3, 1000)])
def test_shapes(tmp_path, shape, monkeypatch):
    monkeypatch.setattr(stream, "_BAND_ELEMENTS", 1)
    monkeypatch.setattr(stream, "_COLUMNS", 128)
    tensors = {LINEAR: bf16(*shape)}
    done = quantize_checkpoint(write_source(tmp_path / "s", tensors), tmp_path / "t")
    got = read(tmp_path / "t")
    assert got[LINEAR].shape == shape
    assert got[f"{LINEAR}_scale_inv"].shape == tuple(-(-size // 128) for size in shape)
    if math.prod(shape):
        assert_same_tensors(got, pair(LINEAR, tensors[LINEAR]))
    else:
        assert (done.weights[0].error, done.weights[0].max_error) == (0, 0)


def test_zeros(tmp_path):
    source = write_source(tmp_path / "s", {LINEAR: torch.zeros(130, 130).bfloat16()})
    done = quantize_checkpoint(source, tmp_path / "t")
    got = read(tmp_path / "t")
    assert not got[LINEAR].float().any()
    assert (got[f"{LINEAR}_scale_inv"] > 0).all()
    assert (done.weights[0].error, done.weights[0].max_error) == (0, 0)


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
    make, kept = FAMILIES["deepseek_v3"]
    tensors = {key: tensor for key, tensor in make().items() if ".1." not in key or "lm_" in key}
    tensors |= expert_tensors(EXPERTS)
    kept = [module for module in kept if "layers.1" not in module]
    quantize_checkpoint(write_source(tmp_path / "s", tensors), tmp_path / "t", skip=skip)
    kept += [f"{LAYER}.{module}" for module in stay]
    assert_same_tensors(read(tmp_path / "t"), expected(tensors, kept))
    assert sorted(quantization_of(tmp_path / "t")["modules_to_not_convert"]) == sorted(kept)


def test_skipped_stacks_stay_stacked(tmp_path):
    tensors = {**stacked_tensors(EXPERTS), LINEAR: bf16(4, 4)}
    source = write_source(tmp_path / "s", tensors)
    quantize_checkpoint(source, tmp_path / "t", skip=["experts"])
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
    """640 MB in four weights, of which eight threads work on all at once."""
    save_file(
        {f"model.layers.{n}.q_proj.weight": torch.zeros(5120, 16384).bfloat16() for n in range(4)},
        tmp_path / "model.safetensors",
    )
    command = [sys.executable, "-c", MEMORY, tmp_path, tmp_path / "t"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256


# What is refused


def refuse(tmp_path, tensors, *needles, config=None, **options):
    source = write_source(tmp_path / "s", tensors, config)
    message = refusal(quantize_checkpoint, source, tmp_path / "t", **options)
    assert all(needle in message for needle in needles), message
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_fp8_sources(tmp_path):
    fp8 = {LINEAR: bf16(4, 4).to(torch.float8_e4m3fn)}
    refuse(
        tmp_path / "a", fp8, f"{LINEAR} in ", "is F8_E4M3, so it is quantized already", config={}
    )
    scaled = {LINEAR: bf16(4, 4), f"{LINEAR}_scale_inv": torch.ones(1, 1)}
    refuse(tmp_path / "b", scaled, f"{LINEAR}_scale_inv in ", "is a scale of", config={})
    for config in (CONFIG, {"text_config": CONFIG}):
        folder = tmp_path / str(len(config))
        refuse(folder, {LINEAR: bf16(4, 4)}, "quantization_config", "made from", config=config)


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
    tensors = {**stacked_tensors(EXPERTS), LINEAR: bf16(4, 4)}
    for name, shape in changes.items():
        if shape is None:
            del tensors[f"{EXPERTS}.{name}"]
        else:
            tensors[f"{EXPERTS}.{name}"] = bf16(*shape)
    refuse(tmp_path / "w", tensors, EXPERTS, told, str(tmp_path / "w" / "s" / "model.safetensors"))
    if kind != "with one expert less":
        quantize_checkpoint(tmp_path / "w" / "s", tmp_path / "t", skip=[EXPERTS])


def test_half_of_the_experts(tmp_path):
    tensors = expert_tensors(EXPERTS)
    refuse(tmp_path / "a", tensors, "skipped all, or none", skip=["experts.1"])
    stack = stacked_tensors(EXPERTS)
    refuse(tmp_path / "b", stack, "skipped whole", "only down_proj", skip=["experts.down_proj"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", [LINEAR, f"{EXPERTS}.gate_up_proj"])
def test_numbers_that_are_none(tmp_path, bad, key):
    tensors = {**stacked_tensors(EXPERTS), LINEAR: bf16(300, 300)}
    tensors[key].view(-1)[-1] = bad
    source = write_source(tmp_path / "s", tensors)
    piece = f"{EXPERTS}.1.up_proj.weight" if key != LINEAR else LINEAR
    told = f"{key} in {source / 'model.safetensors'}: holds NaN or Inf in {piece}; skip it"
    assert told in refusal(quantize_checkpoint, source, tmp_path / "t")
    assert not list(tmp_path.rglob("t*/**/*.safetensors*"))


def test_other_refusals(tmp_path):
    refuse(tmp_path / "a", {"lm_head.weight": bf16(4, 4)}, "no 2-D weight of a decoder layer")
    refuse(tmp_path / "b", {LINEAR: bf16(4, 4)}, "is left for FP8", skip=["layers"])
    refuse(tmp_path / "c", {LINEAR: torch.zeros(4, 4, dtype=torch.int8)}, LINEAR, "got I8")
    double = {**stacked_tensors(EXPERTS)}
    double[f"{EXPERTS}.down_proj"] = double[f"{EXPERTS}.down_proj"].double()
    refuse(tmp_path / "d", double, EXPERTS, "got F64")
    source = tmp_path / "a" / "s"
    with pytest.raises(ValueError, match="'nowhere'"):
        quantize_checkpoint(source, tmp_path / "t", skip=["nowhere"])
    with pytest.raises(ValueError, match="meta"):
        quantize_checkpoint(source, tmp_path / "t", device="meta")
    for size in (0, float("nan")):
        with pytest.raises(ValueError, match="max_shard_bytes"):
            quantize_checkpoint(source, tmp_path / "t", max_shard_bytes=size)
    assert "holds neither" in refusal(quantize_checkpoint, tmp_path, tmp_path / "t")


def test_broken_sources(tmp_path):
    source = write_source(tmp_path / "s", deepseek_v3(), num_shards=2)
    shard = source / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"nothing was written(.|\n)*truncated"):
        quantize_checkpoint(source, tmp_path / "t")
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*cannot be read"):
        quantize_checkpoint(source, tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_the_config_class_of_transformers_reads_what_is_written(tmp_path):
    """It also agrees which modules of its model are FP8."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = AutoModelForCausalLM.from_config(small_config("deepseek_v3"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "s")
    quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    kept = quantization_of(tmp_path / "t")["modules_to_not_convert"]
    keys = read(tmp_path / "t")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert should_convert_module(name, kept) == (f"{name}.weight_scale_inv" in keys), name
        if name.endswith(".experts"):
            assert should_convert_module(name, kept)
            assert f"{name}.0.up_proj.weight_scale_inv" in keys


def test_a_plain_write_is_read_back(tmp_path):
    """`write` of the cases, so that families are what their names say."""
    tensors = deepseek_v3()
    assert_same_tensors(read(write(tmp_path / "c", tensors, PLAIN, 2)), tensors)
