"""Checkpoints that somebody made to hurt: pipes, devices, links, costly JSON, keys for terminals."""

import json
import os
import signal
from contextlib import contextmanager

import pytest
from checkpoint_cases import CONFIG, Tiny, deepseek_tensors, model_bytes, write
from quantize_cases import PLAIN, bf16, write_source

from moefp8.checkpoint import (
    CheckpointError,
    fp8_layers,
    inspect_checkpoint,
    load_checkpoint,
    quantize_checkpoint,
    read_config,
)

INDEX = "model.safetensors.index.json"
LINEAR = "model.layers.0.q_proj.weight"


@contextmanager
def within(seconds: float):
    """TimeoutError after that; a hang would otherwise be one of the whole suite."""

    def late(*_):
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refused(call, *arguments, **options) -> str:
    with within(5), pytest.raises(CheckpointError) as caught:
        call(*arguments, **options)
    return str(caught.value)


# ---- What files are ----


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/null")  # an endless one is told by the same look


def folder(path):
    path.mkdir()


KINDS = {"a pipe": pipe, "a device": device, "a folder": folder}
RULES = {
    "a pipe": "must be a regular file",
    "a device": "a link out of the checkpoint, to /dev/null",
    "a folder": "must be a regular file",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_what_is_no_regular_file_is_not_read(tmp_path, kind, name):
    path = write(tmp_path / "c", deepseek_tensors(), num_shards=2)
    (path / name).unlink()
    KINDS[kind](path / name)
    model = Tiny()
    before = model_bytes(model)
    calls = [(load_checkpoint, model, path), (fp8_layers, path)]
    calls += [(quantize_checkpoint, path, tmp_path / "t")]
    calls += [(read_config, path)] if name == "config.json" else []
    for call, *arguments in calls:
        message = refused(call, *arguments)
        assert f"{path / name}: {RULES[kind]}" in message
    assert model_bytes(model) == before
    with within(5):
        told = [x for anomaly in inspect_checkpoint(path).anomalies for x in anomaly.examples]
    assert any(f"{path / name}: {RULES[kind]}" in x for x in told)


def test_a_pipe_in_the_place_of_a_job_is_refused(tmp_path):
    source = write_source(tmp_path / "s", {LINEAR: bf16(4, 4)})
    (tmp_path / ".t.partial").mkdir()
    os.mkfifo(tmp_path / ".t.partial" / "job.json")
    message = refused(quantize_checkpoint, source, tmp_path / "t")
    assert f"{tmp_path}/.t.partial/job.json: must be a regular file" in message


def test_what_a_config_links_to_is_not_copied(tmp_path):
    """A secret that whoever runs quantize can read, and whoever made the source cannot."""
    source = write_source(tmp_path / "s", {LINEAR: bf16(4, 4)})
    (source / "config.json").rename(tmp_path / "secret.json")
    (source / "config.json").symlink_to(tmp_path / "secret.json")
    for given in (source, source / "model.safetensors"):
        message = refused(quantize_checkpoint, given, tmp_path / "t")
        assert f"{source}/config.json: a link out of the checkpoint, to {tmp_path}" in message
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("subfolder", [".", "text_encoder"])
def test_a_hub_cache_links_to_its_blobs(tmp_path, subfolder):
    path = write(tmp_path / "snapshots" / "1f2e" / subfolder, deepseek_tensors(), num_shards=2)
    (tmp_path / "blobs").mkdir()
    for file in list(path.iterdir()):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(os.path.relpath(tmp_path / "blobs" / file.name, path))
    load_checkpoint(Tiny(), path)
    assert read_config(path) == CONFIG


def test_small_files_are_small(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors())
    os.truncate(path / "config.json", 200 << 30)  # a hole
    assert "at most 100,000,000 bytes" in refused(load_checkpoint, Tiny(), path)
