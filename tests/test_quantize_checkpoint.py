"""quantize_checkpoint: which tensors become FP8, bit by bit, and what is said of their errors."""

import json
import math
import subprocess
import sys

import pytest
import torch
from checkpoint_cases import CONFIG, Tiny, assert_holds, bytes_of, deepseek_tensors, write
from hypothesis import given
from hypothesis import strategies as st
from quantize_cases import (
    FAMILIES,
    PLAIN,
    E,
    H,
    I,
    bf16,
    deepseek_v3,
    expert_tensors,
    files_of,
    quantization_of,
    read,
    stacked_tensors,
    write_source,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_checkpoint import small_config

from moefp8.checkpoint import CheckpointError, load_checkpoint, quantize_checkpoint, stream
from moefp8.checkpoint.report import ErrorSums
from moefp8.checkpoint.shard_file import create, lay_out
from moefp8.checkpoint.shard_file import write as write_tensor
from moefp8.quant import BlockScaled, dequantize, quantize_128x128

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


def assert_same(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (got[key].dtype, got[key].shape) == (tensor.dtype, tensor.shape), key
        assert bytes_of(got[key]) == bytes_of(tensor), key


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
    assert_same(read(tmp_path / "t"), wanted)
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
    assert_same(read(tmp_path / "t"), expected(tensors, ["lm_head"]))


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
        assert_same(got, pair(LINEAR, tensors[LINEAR]))
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
    assert_same(read(tmp_path / "t"), expected(tensors, kept))
    assert sorted(quantization_of(tmp_path / "t")["modules_to_not_convert"]) == sorted(kept)


def test_skipped_stacks_stay_stacked(tmp_path):
    tensors = {**stacked_tensors(EXPERTS), LINEAR: bf16(4, 4)}
    source = write_source(tmp_path / "s", tensors)
    quantize_checkpoint(source, tmp_path / "t", skip=["experts"])
    assert_same(read(tmp_path / "t"), expected(tensors, [EXPERTS]))
    assert quantization_of(tmp_path / "t")["modules_to_not_convert"] == [EXPERTS, "lm_head"]


MEMORY = """
import sys, torch
from moefp8.checkpoint import quantize_checkpoint, stream
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
    with pytest.raises(CheckpointError) as caught:
        quantize_checkpoint(source, tmp_path / "t", **options)
    for needle in needles:
        assert needle in str(caught.value)
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
    with pytest.raises(CheckpointError) as caught:
        quantize_checkpoint(source, tmp_path / "t")
    piece = f"{EXPERTS}.1.up_proj.weight" if key != LINEAR else LINEAR
    assert f"{key} in {source / 'model.safetensors'}: holds NaN or Inf in {piece}" in str(
        caught.value
    )
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
    with pytest.raises(ValueError, match="max_shard_bytes"):
        quantize_checkpoint(source, tmp_path / "t", max_shard_bytes=0)
    with pytest.raises(CheckpointError, match="holds neither"):
        quantize_checkpoint(tmp_path, tmp_path / "t")


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


# What else is in the directory


def test_other_files(tmp_path):
    tensors = {LINEAR: bf16(4, 4)}
    path = tmp_path / "snapshots" / "revision"  # as in a hub cache
    source = write_source(path, tensors, {**PLAIN, "order": {"b": 1, "a": 2}})
    (tmp_path / "blobs").mkdir()
    (source / "tokenizer.json").rename(tmp_path / "blobs" / "1f2e")
    (source / "tokenizer.json").symlink_to("../../blobs/1f2e")
    quantize_checkpoint(source, tmp_path / "t")
    files = files_of(tmp_path / "t")
    assert set(files) == {
        *("config.json", "model.safetensors"),
        *("tokenizer.json", "chat_template.jinja", "modeling_own.py", "templates/tool.jinja"),
    }
    for name in set(files) - {"config.json", "model.safetensors"}:
        assert files[name] == (source / name).read_bytes()
    assert not (tmp_path / "t" / "tokenizer.json").is_symlink()
    config = json.loads(files["config.json"])
    config.pop("quantization_config")
    assert config == {**PLAIN, "order": {"b": 1, "a": 2}}


def test_links_out_of_the_source_are_not_copied(tmp_path):
    source = write_source(tmp_path / "s", {LINEAR: bf16(4, 4)})
    (tmp_path / "secret").write_text("x")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=rf"notes\.txt: a link out .*{tmp_path}/secret"):
        quantize_checkpoint(source, tmp_path / "t")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "secret"]


def test_of_one_file_only_what_belongs_to_it_is_copied(tmp_path):
    """Whatever else lies in that directory, or below."""
    source = write_source(tmp_path / "s", {LINEAR: bf16(4, 4)})
    (source / "photo.png").write_bytes(b"x")
    quantize_checkpoint(source / "model.safetensors", tmp_path / "t")
    names = {"config.json", "model.safetensors"}
    names |= {"tokenizer.json", "chat_template.jinja", "modeling_own.py"}
    assert {path.name for path in (tmp_path / "t").iterdir()} == names


def test_a_target_that_no_rename_can_replace(tmp_path, monkeypatch):
    source = write_source(tmp_path / "s", {LINEAR: bf16(4, 4)})
    (tmp_path / "empty").mkdir()
    (tmp_path / "t").symlink_to(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="must not be a link or a mount point"):
        quantize_checkpoint(source, tmp_path / "t")
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "empty")
    with pytest.raises(CheckpointError, match="must not be a link or a mount point"):
        quantize_checkpoint(source, tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "s", "t"]


def test_shards_and_their_index(tmp_path):
    tensors = deepseek_v3()
    source = write_source(tmp_path / "s", tensors, num_shards=3)
    done = quantize_checkpoint(source, tmp_path / "t", max_shard_bytes=100_000)
    files = sorted((tmp_path / "t").glob("*.safetensors"))
    assert done.num_shards == len(files) > 4
    assert [x.name for x in files] == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    index = json.loads((tmp_path / "t" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.target_bytes
    for file in files:
        with safe_open(file, "pt") as opened:
            keys = set(opened.keys())
            assert opened.metadata() == {"format": "pt"}
        assert keys == {key for key, name in index["weight_map"].items() if name == file.name}
        assert {key for key in keys if key.endswith("_inv")} == {
            f"{key}_scale_inv" for key in keys if f"{key}_scale_inv" in index["weight_map"]
        }
        is_alone = len([key for key in keys if not key.endswith("_inv")]) == 1
        assert is_alone or sum(t.nbytes for t in load_file(file).values()) <= 100_000


def test_an_empty_directory_is_filled_and_a_file_alone_is_enough(tmp_path):
    save_file({LINEAR: bf16(4, 4)}, tmp_path / "own.safetensors")
    (tmp_path / "t").mkdir()
    quantize_checkpoint(tmp_path / "own.safetensors", tmp_path / "t")
    assert set(files_of(tmp_path / "t")) == {"config.json", "model.safetensors"}


@given(st.data())
def test_the_writer_s_files_are_those_of_the_library(tmp_path_factory, data):
    """Byte by byte, where dtypes differ in size: the library also orders those that do not."""
    folder = tmp_path_factory.mktemp("shards")
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]
    keys = data.draw(st.lists(st.text(min_size=1).filter(str.isprintable), unique=True, max_size=5))
    keys = [key for key in keys if key != "__metadata__"]
    tensors = {
        key: torch.randn(data.draw(st.lists(st.integers(0, 5), max_size=3))).to(
            data.draw(st.sampled_from(dtypes))
        )
        for key in keys
    }
    names = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}
    header, entries = lay_out(
        folder / "ours",
        [(k, names.get(t.dtype, "F8_E4M3"), tuple(t.shape)) for k, t in tensors.items()],
    )
    with open(create(folder / "ours", header), "rb") as file:
        for key, tensor in tensors.items():
            write_tensor(file.fileno(), entries[key], 0, tensor)
    save_file(tensors, folder / "theirs", {"format": "pt"})
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()


# Errors


def test_errors_by_hand(tmp_path):
    """One block: 448, so that its scale is 1. 17 lies between the E4M3 numbers 16 and 18."""
    w = torch.zeros(2, 130)
    w[0, 0], w[0, 1], w[1, 0] = 448, 17, -30  # exact, 1 off, exact
    w[1, 129] = 4  # alone in its block: exact
    w[1, 128] = 4 * 2**-10 * 448 / 448 * 1.0  # 2**-8: 2**-8 / (4 / 448) = 0.4375, an E4M3 number
    source = write_source(tmp_path / "s", {LINEAR: w})
    (got,) = quantize_checkpoint(source, tmp_path / "t").weights
    norm = math.sqrt(448**2 + 17**2 + 30**2 + 4**2 + 2**-16)
    assert got.error == pytest.approx(1 / norm, rel=1e-5)
    assert got.max_error == pytest.approx(1 / 448, rel=1e-5)
    assert (got.key, got.shape) == (LINEAR, (2, 130))


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e-3, 1.0, 1e30, 4e37])
def test_errors_are_those_of_the_whole_weight(size, tmp_path, monkeypatch):
    """In FP64; also where squares would vanish or overflow. Tiny ones become zeros."""
    monkeypatch.setattr(stream, "_BAND_ELEMENTS", 1)
    monkeypatch.setattr(stream, "_COLUMNS", 128)
    w = torch.randn(300, 200) * size
    w[130:, 130:] *= 1e-2
    (got,) = quantize_checkpoint(write_source(tmp_path / "s", {LINEAR: w}), tmp_path / "t").weights
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
    tensors["model.layers.3.q_proj.weight"][0] *= 1e-7  # 0 in FP8, but of no weight in the norm
    tensors["model.layers.5.q_proj.weight"] *= 2.0**-60  # all 0
    source = write_source(tmp_path / "s", tensors)
    done = quantize_checkpoint(source, tmp_path / "t")
    assert done.worst(1)[0].key == "model.layers.5.q_proj.weight"
    errors = sorted(weight.error for weight in done.weights)
    assert done.median_error() == (errors[5] + errors[6]) / 2
    lines = str(done).splitlines()
    assert len(lines) == 1 + 10 + 2
    assert lines[1].split() == [
        "1.00000",
        lines[1].split()[1],
        "130",
        "x",
        "130",
        done.worst(1)[0].key,
    ]
    assert f"{done.median_error():.5f}" in lines[11]
    assert "0.39 MiB became 0.19 MiB in 1 shards" in lines[12]
    assert json.loads(json.dumps(done.to_dict()))["weights"][0]["shape"] == [130, 130]


def test_the_config_class_of_transformers_reads_what_is_written(tmp_path):
    """And agrees which modules of the model it stands for are FP8."""
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
    assert_same(read(write(tmp_path / "c", tensors, PLAIN, 2)), tensors)
