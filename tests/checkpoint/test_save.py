"""Saving gives back the keys and the config that were loaded, in a directory that is whole."""

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from moefp8.checkpoint import (
    CheckpointError,
    load_checkpoint,
    quantize_checkpoint,
    read_config,
    save_checkpoint,
)
from moefp8.layers import FP8Linear, convert
from tests.checkpoint.cases import (
    CONFIG,
    H,
    Tiny,
    assert_loads,
    assert_same_tensors,
    deepseek_tensors,
    minimax_name,
    model_bytes,
    qwen_name,
    read,
    write,
)
from tests.layers.conversion.plain_experts import PlainExperts

BLOCK = CONFIG["quantization_config"]


@pytest.mark.parametrize("naming", [str, qwen_name, minimax_name])
@pytest.mark.parametrize("clone", ["same", "deepcopy", "pickle"])
def test_source_names_and_config_come_back(tmp_path, naming, clone):
    tensors = {naming(key): tensor for key, tensor in deepseek_tensors(1).items()}
    quantization = {**BLOCK, "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    config = {**CONFIG, "quantization_config": quantization, "order": {"b": 1, "a": 2}}
    model = Tiny(1)
    load_checkpoint(model, write(tmp_path / "source", tensors, config))
    if clone == "deepcopy":
        model = copy.deepcopy(model)
    elif clone == "pickle":
        model = pickle.loads(pickle.dumps(model))
    save_checkpoint(model, tmp_path / "saved")
    assert read_config(tmp_path / "saved") == config
    assert_same_tensors(read(tmp_path / "saved"), tensors)


@pytest.mark.parametrize("names", ["other scales", "fused", "narrow scales"])
def test_loaded_keys_come_back(tmp_path, names):
    """Scales that are narrower than F32 become F32."""
    tensors = deepseek_tensors(1, torch.bfloat16 if names == "narrow scales" else torch.float32)
    if names == "other scales":
        tensors = {key.replace("weight_scale_inv", "scale"): x for key, x in tensors.items()}
    elif names == "fused":
        tensors = dict(Tiny(1).state_dict())
    load_checkpoint(model := Tiny(1), write(tmp_path / "source", tensors))
    save_checkpoint(model, tmp_path / "saved")
    wanted = {k: t.float() if k.endswith("_scale_inv") else t for k, t in tensors.items()}
    assert_same_tensors(read(tmp_path / "saved"), wanted)


def test_a_model_of_ones_own_takes_deepseeks_names(tmp_path):
    model, other = Tiny(1), Tiny(1)
    save_checkpoint(model, tmp_path / "saved")
    assert read(tmp_path / "saved").keys() == deepseek_tensors(1).keys()
    assert read_config(tmp_path / "saved") == {"quantization_config": BLOCK}
    load_checkpoint(other, tmp_path / "saved")
    assert model_bytes(other) == model_bytes(model)


def test_config_of_the_model_where_none_was_loaded(tmp_path):
    model = Tiny(1)
    config = {"model_type": "own", "quantization_config": {"quant_method": "moefp8"}}
    model.config = SimpleNamespace(to_dict=lambda: config)
    save_checkpoint(model, tmp_path / "saved")
    wanted = {"model_type": "own", "quantization_config": BLOCK}
    assert read_config(tmp_path / "saved") == wanted


def test_scales_follow_the_weights_of_a_model_converted_after_loading(tmp_path):
    mlp = nn.ModuleDict({"experts": PlainExperts(2, 128, 128).bfloat16()})
    model = nn.ModuleDict({"x": nn.ModuleDict({"mlp": mlp})})
    tensors = {
        f"x.block_sparse_moe.experts.{e}.w{w}.weight": torch.randn(128, 128).bfloat16()
        for e in range(2)
        for w in (1, 2, 3)
    }
    load_checkpoint(model, write(tmp_path / "source", tensors, {"model_type": "m"}))
    convert(model)
    save_checkpoint(model, tmp_path / "saved")
    wanted = {key for weight in tensors for key in (weight, f"{weight}_scale_inv")}
    assert read(tmp_path / "saved").keys() == wanted
    assert read_config(tmp_path / "saved")["quantization_config"] == BLOCK


def test_no_quantization_config_without_fp8(tmp_path):
    save_checkpoint(nn.Linear(2, 2), tmp_path / "saved")
    assert read_config(tmp_path / "saved") == {}


def test_tied_weights_are_written_once(tmp_path):
    tensors = deepseek_tensors(1)
    del tensors["model.embed_tokens.weight"]
    model = Tiny(1, tied=True)
    load_checkpoint(model, write(tmp_path / "source", tensors))
    save_checkpoint(model, tmp_path / "saved")
    assert_same_tensors(read(tmp_path / "saved"), tensors)
    save_checkpoint(Tiny(1, tied=True), tmp_path / "fresh")
    assert "lm_head.weight" not in read(tmp_path / "fresh")


def test_shards_and_their_index(tmp_path):
    tensors = deepseek_tensors()
    load_checkpoint(model := Tiny(), write(tmp_path / "source", tensors))
    save_checkpoint(model, tmp_path / "saved", max_shard_bytes=300_000)
    files = sorted(file.name for file in (tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert all((tmp_path / "saved" / file).stat().st_size < 320_000 for file in files)
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for key, name in index["weight_map"].items():
        with safe_open(tmp_path / "saved" / name, "pt") as file:
            assert key in file.keys()  # noqa: SIM118
            assert file.metadata() == {"format": "pt"}
    assert_loads(tmp_path / "saved", tensors)


def test_strided_and_integer_tensors(tmp_path):
    model = nn.Module()
    model.strided = nn.Parameter(torch.randn(4, 6).T)
    model.register_buffer("steps", torch.tensor(7))
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("empty", torch.zeros(0, 3))
    save_checkpoint(model, tmp_path / "saved")
    assert_same_tensors(read(tmp_path / "saved"), dict(model.state_dict()))
    load_checkpoint(model, tmp_path / "saved")


def refuse(folder, rule: str, call, *arguments) -> None:
    """Writing must fail by that rule, a pattern, and leave the files in folder alone."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(CheckpointError, match=rule):
        call(*arguments)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("what", ["full", "file", "meta", "disk"])
def test_refusals_leave_nothing_behind(tmp_path, monkeypatch, what):
    model, target = nn.Linear(2, 2), tmp_path / "saved"
    match = "empty directory"
    if what == "full":
        target.mkdir()
        (target / "x").touch()
    elif what == "file":
        target.touch()
    elif what == "meta":
        model, match = FP8Linear(H, H, device="meta"), "weight: on the meta device"
    else:

        def full(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        match = "No space left"
    refuse(tmp_path, match, save_checkpoint, model, target)


TARGETS = {
    "/": "must not be a link or a mount point",
    "a\0b": "null byte",
    "x" * 300: "File name too long",
    "x" * 250: "File name too long",  # with what is added while it is written
    "/proc/self/saved": "No such file",
    "/sys/kernel/saved": "not permitted|Permission denied|Read-only",
    "\ud800": "surrogates not allowed",
    "file/saved": "exists|Not a directory",
}


@pytest.mark.parametrize("name", TARGETS, ids=ascii)
def test_a_target_that_cannot_be_is_told(tmp_path, name):
    (tmp_path / "file").touch()
    weight = {"model.layers.0.mlp.up_proj.weight": torch.ones(128, 128).bfloat16()}
    source = write(tmp_path / "source", weight, {"model_type": "of_no_library"})
    target = name if name.startswith("/") else f"{tmp_path}/{name}"
    refuse(tmp_path, TARGETS[name], save_checkpoint, nn.Linear(2, 2), target)
    refuse(tmp_path, TARGETS[name], quantize_checkpoint, source, target)


KILLED = """
import os, signal, sys, torch
from moefp8.checkpoint import save, save_checkpoint
save.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
save_checkpoint(torch.nn.Linear(2, 2), sys.argv[1])
"""


def test_what_a_killed_save_left_goes_with_the_next(tmp_path):
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "saved"])
        assert ran.returncode == -signal.SIGKILL
        assert [path.name for path in tmp_path.iterdir()] == [".saved.partial"]
    save_checkpoint(model := nn.Linear(3, 3), tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert_same_tensors(read(tmp_path / "saved"), dict(model.state_dict()))


def test_what_a_killed_quantize_left_is_not_lost_to_a_save(tmp_path):
    (tmp_path / ".saved.partial").mkdir(mode=0o700)
    (tmp_path / ".saved.partial" / "job.json").write_text('{"source": "elsewhere"}')
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"was begun with another .*remove the dir"):
        save_checkpoint(nn.Linear(2, 2), tmp_path / "saved")
    assert set(before) <= set(tmp_path.rglob("*"))


def test_a_sparse_tensor_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    save_checkpoint(model, tmp_path / "dense")
    model.weight = nn.Parameter(model.weight.detach().to_sparse())
    rule = r"weight: its layout is torch\.sparse_.*make it dense by \.to_dense\(\)"
    refuse(tmp_path, rule, save_checkpoint, model, tmp_path / "sparse")
    refuse(tmp_path, rule, load_checkpoint, model, tmp_path / "dense")


def test_two_threads_do_not_save_to_one_place(tmp_path, monkeypatch):
    told = []

    def while_it_is_written(*arguments, **options):
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(save_checkpoint, nn.Linear(2, 2), tmp_path / "saved")
            told.append(second.exception())
        return save_file(*arguments, **options)

    monkeypatch.setattr("moefp8.checkpoint.save.save_file", while_it_is_written)
    save_checkpoint(nn.Linear(2, 2), tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert isinstance(told[0], CheckpointError)
    assert "another thread writes it" in str(told[0])


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "saved").mkdir()
    save_checkpoint(nn.Linear(2, 2), tmp_path / "saved")
    names = sorted(file.name for file in (tmp_path / "saved").iterdir())
    assert names == ["config.json", "model.safetensors"]
    for size in (0, float("nan")):
        with pytest.raises(ValueError, match="max_shard_bytes"):
            save_checkpoint(nn.Linear(2, 2), tmp_path / "other", max_shard_bytes=size)


def test_a_model_of_no_transformers_imports_none_of_its_models(tmp_path):
    """It would take seconds."""
    pytest.importorskip("transformers")
    program = (
        "import sys, transformers, moefp8; from torch import nn\n"
        f"moefp8.save_checkpoint(nn.Linear(8, 8), {str(tmp_path / 'saved')!r})\n"
        "sys.exit('transformers.modeling_utils' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
