"""Whatever is wrong with a checkpoint: file and key are named, and nothing is written or kept."""

import errno
import gc
import json
import os
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefp8.checkpoint import load_checkpoint
from tests.checkpoint.cases import CONFIG, Tiny, deepseek_tensors, refusal, refuse, write

INDEX, FIRST, SECOND = (
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)
SCALE = "model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"
LINEAR = "model.layers.1.kv_a_proj_with_mqa.weight_scale_inv"


def fill(path: Path, key: str, value: float, at: int = 0) -> str:
    """Give element `at` of tensor key a value; return the name of its file."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if key in tensors:
            tensors[key].view(-1)[at] = value
            save_file(tensors, file)
            return file.name
    raise KeyError(key)


def cut(path: Path) -> None:
    os.truncate(path / SECOND, (path / SECOND).stat().st_size - 1)


def header_of(text: bytes):
    whole = struct.pack("<Q", len(text)) + text
    return lambda path: (path / FIRST).write_bytes(whole)


def place(name: object, key: str = "ghost"):
    def change(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        index["weight_map"][key] = name
        (path / INDEX).write_text(json.dumps(index))

    return change


def beside(path: Path) -> None:
    save_file({"x": torch.zeros(1)}, path / "model.safetensors")


def double_elsewhere(path: Path) -> None:
    """A shard has a key that the index places elsewhere."""
    tensors = {"lm_head.weight": torch.zeros(1), "more": torch.zeros(1)}
    save_file(tensors, path / "extra.safetensors")
    place("extra.safetensors", "more")(path)


def double(path: Path) -> None:
    tensors = load_file(path / FIRST)
    tensors["lm_head.weight"] = torch.zeros(16, 256, dtype=torch.bfloat16)
    save_file(tensors, path / FIRST)


def quantized_as(quantization: dict):
    return text_of(json.dumps({**CONFIG, "quantization_config": quantization}))


def blocks(block):
    return quantized_as({"quant_method": "fp8", "weight_block_size": block})


def grids_of_64(path: Path) -> None:
    """config.json says 128, the grids of one layer are of 64."""
    for file in (path / FIRST, path / SECOND):
        tensors = load_file(file)
        for key in tensors:
            if key.endswith("kv_a_proj_with_mqa.weight_scale_inv"):
                tensors[key] = torch.ones(9, 4)
        save_file(tensors, file)


def text_of(text: str, name: str = "config.json"):
    return lambda path: (path / name).write_text(text, encoding="latin-1")


BLOCKS = "weight_block_size must be [128, 128]"
EMBEDDING = "model.embed_tokens.weight"
CHANNEL = {"g": {"weights": {"strategy": "channel"}}}
DOUBLED = '{"a": 1, "a": 2}'
FAULTS = {
    "truncated": (cut, [SECOND, "truncated", "in "]),
    "corrupt": (header_of(b"\xff"), [FIRST, "header: not valid JSON"]),
    "missing file": (place("model-3.safetensors"), ["model-3.safetensors", "cannot be read"]),
    "file that is gone": (lambda path: (path / SECOND).unlink(), [SECOND, "broken"]),
    "shard lacks a key": (place(FIRST), ["ghost", INDEX, FIRST]),
    "key is elsewhere": (place(SECOND, EMBEDDING), [EMBEDDING, INDEX, SECOND]),
    "single file beside": (beside, [INDEX, "model.safetensors", "remove one"]),
    "key twice": (double, ["lm_head.weight in", FIRST, SECOND, "the same key"]),
    "key twice, unnamed": (double_elsewhere, ["lm_head.weight in", "extra.safetensors", SECOND]),
    "key twice in a header": (header_of(DOUBLED.encode()), [FIRST, "'a' appears twice"]),
    **{
        f"path {name!r}": (place(name), ["ghost", INDEX, "must lie in the directory"])
        for name in ("../x.safetensors", "../x", "/etc/passwd", "a/../../x", "..\\x", "", 3, None)
    },
    **{
        f"index {text[:20]!a}": (text_of(text, INDEX), [INDEX])
        for text in ("", "{", "[]", "{}", '{"weight_map": []}', "\xff", DOUBLED, "[" * 99999)
    },
    "grids of 64": (grids_of_64, [LINEAR, "shape must be [5, 2], got [9, 4]"]),
    **{
        f"says {block}": (blocks(block), ["config.json", BLOCKS, f"got {block}"])
        for block in ([64, 64], [64, 128], [128, 64], [], 128, "128x128", [[128, 128]], {"n": 128})
    },
    "says null": (blocks(None), ["config.json", BLOCKS, "got none"]),
    "says strings": (blocks(["128", "128"]), ["config.json", BLOCKS, "['128', '128']"]),
    "says nothing": (quantized_as({"quant_method": "fp8"}), ["config.json", BLOCKS]),
    "says channel": (quantized_as({"config_groups": CHANNEL}), ["config.json", BLOCKS]),
    "config is a list": (text_of("[]"), ["config.json", "must be a JSON object, got list"]),
    "config is not JSON": (text_of("{"), ["config.json", "not valid JSON"]),
    "NaN": (lambda path: fill(path, SCALE, float("nan"), 3), [SCALE, "1 of 6 scales are NaN"]),
    "Inf": (lambda path: fill(path, LINEAR, float("inf")), [LINEAR, "1 of 10 scales"]),
    "-Inf": (lambda path: fill(path, LINEAR, float("-inf"), 9), [LINEAR, "1 of 10 scales"]),
}


@pytest.fixture(scope="module", autouse=True)
def only_what_is_new():
    """Collections do not look through what was there before: libraries have millions of objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def num_open_and_kept() -> tuple[int, int]:
    """Open descriptors, and tensors that something refers to."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sum(type(x) is torch.Tensor for x in gc.get_objects())


def refuse_whole(path: Path, *needles, device: str = "cpu") -> None:
    """Check as `refuse` does, and that nothing stays open or in memory."""
    with torch.device(device):
        model = Tiny()
    at_first = num_open_and_kept()
    refuse(path, *needles, "the model is unchanged", model=model)
    assert num_open_and_kept() == at_first


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("fault", FAULTS)
def test_file_and_key_are_named_and_nothing_is_kept(tmp_path, fault, device):
    path = write(tmp_path / "c", deepseek_tensors(), num_shards=2)
    damage, needles = FAULTS[fault]
    damage(path)
    refuse_whole(path, *needles, path, device=device)


def test_the_measure_of_what_is_kept_sees_descriptors_and_tensors(tmp_path):
    before = num_open_and_kept()
    with (tmp_path / "x").open("w"):
        kept = [torch.zeros(1)]
        assert num_open_and_kept() == (before[0] + 1, before[1] + len(kept))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e8m0fnu"])
def test_scales_of_every_dtype_must_be_finite(tmp_path, name):
    path = write(tmp_path / "c", deepseek_tensors(2, getattr(torch, name)), num_shards=2)
    file = fill(path, SCALE, float("nan"), 5)
    refuse_whole(path, f"{SCALE} in {path / file}: 1 of 6 scales are NaN or infinite")


def test_many_problems_are_counted_and_ten_are_told(tmp_path):
    tensors = deepseek_tensors()
    scales = [key for key in tensors if key.endswith("_scale_inv")]
    for key in scales:
        tensors[key].fill_(float("inf"))
    counts = f"({len(scales)} problems)", f"... and {len(scales) - 10} more"
    message = refuse(write(tmp_path / "c", tensors), *counts)
    assert message.count("\n") == 11


def test_scales_that_are_left_out_may_be_anything(tmp_path):
    tensors = deepseek_tensors()
    extra = {"mtp.fc.weight_scale_inv": torch.full((1, 1), float("nan"))}
    load_checkpoint(Tiny(), write(tmp_path / "c", tensors | extra))
    zero = {**tensors, SCALE: torch.zeros_like(tensors[SCALE])}
    load_checkpoint(Tiny(), write(tmp_path / "d", zero))  # a block of zeros may be scaled by zero


DENIED = partial(PermissionError, errno.EACCES, "Permission denied")
READING = {  # None: the file ends
    "short": None,
    "error": partial(OSError, errno.EIO, "Input/output error"),
    "device": partial(RuntimeError, "driver"),
}


def break_reading(monkeypatch, fault, home=os, call: str = "preadv", after: int = 0) -> None:
    """Let a function of home raise a fault, but for its first calls."""
    real, first = getattr(home, call), iter(range(after))

    def broken(*arguments, **options):
        if next(first, None) is not None:
            return real(*arguments, **options)
        if fault is None:
            return 0
        raise fault()

    monkeypatch.setattr(home, call, broken)


@pytest.mark.parametrize("name", ["config.json", FIRST, INDEX])
def test_a_file_that_may_not_be_read(tmp_path, monkeypatch, name):
    """The fault is injected: tests may run as root, who may read everything."""
    path = write(tmp_path / "c", deepseek_tensors(), num_shards=2)
    real = os.open

    def denied(path_, *arguments, **options):
        if Path(path_).name == name:
            raise DENIED()
        return real(path_, *arguments, **options)

    monkeypatch.setattr(os, "open", denied)
    refuse_whole(path, f"{path / name}: cannot be read (Permission denied)")


def test_a_directory_that_may_not_be_entered(tmp_path, monkeypatch):
    path = write(tmp_path / "c", deepseek_tensors())
    break_reading(monkeypatch, DENIED, Path, "stat")
    refuse(path, f"{path}: cannot be read (Permission denied)")


@pytest.mark.parametrize("fault", READING.values(), ids=READING)
def test_a_fault_while_scales_are_read(tmp_path, monkeypatch, fault):
    path = write(tmp_path / "c", deepseek_tensors())
    break_reading(monkeypatch, fault)
    told = f"weight_scale_inv in {path / 'model.safetensors'}: reading failed"
    refuse_whole(path, told, device="meta")


@pytest.mark.parametrize("fault", READING.values(), ids=READING)
def test_a_fault_while_tensors_are_read(tmp_path, monkeypatch, fault):
    path = write(tmp_path / "c", deepseek_tensors())
    break_reading(monkeypatch, fault, after=4)
    message = refusal(load_checkpoint, Tiny(), path)
    assert f" in {path / 'model.safetensors'}: reading failed" in message
    assert "partly written" in message
    assert any(message.startswith(key) for key in deepseek_tensors())


def test_twins_that_cannot_be_read(tmp_path, monkeypatch):
    tensors = deepseek_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    path = write(tmp_path / "c", tensors)
    break_reading(monkeypatch, READING["error"], call="pread")
    told = f"in {path / 'model.safetensors'}: reading failed"
    refuse(path, told, "the model is unchanged", model=Tiny(tied=True))
