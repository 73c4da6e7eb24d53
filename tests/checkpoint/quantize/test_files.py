"""What quantize_checkpoint writes beside weights: names, other files, shards and their index."""

import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moefp8.checkpoint import CheckpointError, quantize_checkpoint
from moefp8.checkpoint.files.header import DTYPE_NAMES
from moefp8.checkpoint.quantize.shard_file import create
from moefp8.checkpoint.quantize.shard_file import write as write_tensor
from tests.checkpoint.quantize.cases import (
    LINEAR,
    OTHERS,
    PLAIN,
    bf16,
    deepseek_v3,
    files_of,
    quantized,
    write_source,
)


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "s", {LINEAR: bf16(4, 4)})


def test_other_files(tmp_path):
    path, config = tmp_path / "snapshots" / "revision", {**PLAIN, "order": {"b": 1, "a": 2}}
    source = write_source(path, {LINEAR: bf16(4, 4)}, config)  # as in a hub cache
    (tmp_path / "blobs").mkdir()
    (source / "tokenizer.json").rename(tmp_path / "blobs" / "1f2e")
    (source / "tokenizer.json").symlink_to("../../blobs/1f2e")
    quantize_checkpoint(source, tmp_path / "t")
    files = files_of(tmp_path / "t")
    assert set(files) == {"config.json", "model.safetensors", *OTHERS}
    for name in OTHERS:
        assert files[name] == (source / name).read_bytes()
    assert not (tmp_path / "t" / "tokenizer.json").is_symlink()
    written = json.loads(files["config.json"])
    written.pop("quantization_config")
    assert written == config


def test_links_out_of_the_source_are_not_copied(source, tmp_path):
    (tmp_path / "secret").write_text("x")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=rf"notes\.txt: a link out .*{tmp_path}/secret"):
        quantize_checkpoint(source, tmp_path / "t")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "secret"]


@pytest.mark.parametrize("kind", ["dangling", "loop", "folder", "pipe"])
def test_what_cannot_be_copied_is_not_left_out_silently(source, tmp_path, kind):
    path = source / "tokenizer.json"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"dangling": "gone.json", "loop": path.name, "folder": "templates"}[kind])
    for origin in (source, source / "model.safetensors"):
        if kind == "folder" and origin != source:  # below it is nothing that belongs to one file
            continue
        with pytest.raises(
            CheckpointError, match=r"s/tokenizer\.json: is .*would be left out; put"
        ):
            quantize_checkpoint(origin, tmp_path / "t")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


def test_of_one_file_only_what_belongs_to_it_is_copied(source, tmp_path):
    """What else lies in that directory, or below, is left out."""
    (source / "photo.png").write_bytes(b"x")
    quantize_checkpoint(source / "model.safetensors", tmp_path / "t")
    assert set(files_of(tmp_path / "t")) == {"config.json", "model.safetensors", *OTHERS[:3]}


def test_a_target_that_no_rename_can_replace(source, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "t").symlink_to(tmp_path / "empty")
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "empty")
    for name in ("t", "empty"):
        with pytest.raises(CheckpointError, match="must not be a link or a mount point"):
            quantize_checkpoint(source, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "s", "t"]


def test_shards_and_their_index(tmp_path):
    done = quantized(tmp_path, deepseek_v3()[0], 3, max_shard_bytes=100_000)
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


KEYS = st.text(min_size=1).filter(lambda key: key.isprintable() and key != "__metadata__")
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])


@given(
    st.dictionaries(KEYS, st.tuples(st.lists(st.integers(0, 5), max_size=3), DTYPES), max_size=5)
)
def test_the_writer_s_files_are_those_of_the_library(tmp_path_factory, kinds):
    """Both are equal byte by byte where dtypes differ in size; the library orders others too."""
    folder = tmp_path_factory.mktemp("shards")
    tensors = {key: torch.randn(shape).to(dtype) for key, (shape, dtype) in kinds.items()}
    told = [(key, DTYPE_NAMES[x.dtype], tuple(x.shape)) for key, x in tensors.items()]
    descriptor, entries = create(folder / "ours", told)
    with open(descriptor, "rb"):
        for key, tensor in tensors.items():
            write_tensor(descriptor, entries[key], 0, tensor)
    save_file(tensors, folder / "theirs", {"format": "pt"})
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
