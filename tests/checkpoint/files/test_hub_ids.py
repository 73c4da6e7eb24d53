"""A hub id where a directory is expected: the error tells how to download it."""

from collections.abc import Callable

import pytest
from torch import nn

import moefp8
from moefp8.checkpoint import fp8_layers, fp8_modules, inspect_checkpoint, read_config
from moefp8.checkpoint.quantize import quantize_checkpoint
from moefp8.cli.main import main
from tests.checkpoint.cases import refusal

HUB_ID = "Qwen/Qwen3-30B-A3B-FP8"
WAY = f"hf download {HUB_ID} --local-dir DIR"
READERS: dict[str, Callable[[str], object]] = {
    "load_checkpoint": lambda path: moefp8.load_checkpoint(nn.Linear(1, 1), path),
    "inspect_checkpoint": inspect_checkpoint,
    "quantize_checkpoint": lambda path: quantize_checkpoint(path, "t", progress=False),
    "fp8_modules": fp8_modules,
    "fp8_layers": fp8_layers,
    "read_config": read_config,
}
COMMANDS = ["inspect {}", "quantize {} t", "precompile {}", "bench {}", "compare {} --text t"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("host", ["", "https://huggingface.co/", "https://hf.co/"])
def test_functions_tell_how_to_download(name, host):
    message = refusal(READERS[name], host + HUB_ID)
    assert "there is no such file or directory; " in message
    assert WAY in message


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_tell_how_to_download(command, capsys):
    assert main(command.format(HUB_ID).split()) == 1
    assert WAY in capsys.readouterr().err


@pytest.mark.parametrize("path", ["nowhere", "/a/b", "~/b", "a/b/c", "there/b", "../b/c"])
def test_what_is_no_hub_id_is_not_advised(path, tmp_path):
    (tmp_path / "there").mkdir()
    message = refusal(inspect_checkpoint, path)
    assert message.endswith(": there is no such file or directory")
