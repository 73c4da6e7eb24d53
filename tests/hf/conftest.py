"""Small checkpoints that the tests of the plug-in load; only `qwen` may be changed by a test."""

import pytest
from safetensors.torch import save_file
from small_checkpoint import FAMILIES, small_config, write_small_checkpoint

from tests.checkpoint.transformers_cases import fp8_of, saved
from tests.hf.model_cases import tensors_of


@pytest.fixture(scope="session", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """An FP8 checkpoint of each family; its BF16 original lies beside it as `fp8-bf16`."""
    directory = tmp_path_factory.mktemp(request.param) / "fp8"
    write_small_checkpoint(directory, request.param)
    return directory


@pytest.fixture
def qwen(tmp_path):
    """An FP8 checkpoint in the file model.safetensors; the BF16 original lies beside it."""
    directory = tmp_path / "fp8"
    write_small_checkpoint(directory, "qwen3_moe")
    tensors = tensors_of(directory)
    for file in [*directory.glob("*.safetensors*")]:
        file.unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def bf16(tmp_path_factory):
    """A Qwen3-MoE as transformers saves it."""
    path = tmp_path_factory.mktemp("qwen") / "bf16"
    saved(small_config("qwen3_moe"), path)
    return path


@pytest.fixture(scope="session")
def fp8(bf16):
    """The same, quantized by `from_pretrained` and saved."""
    path = bf16.with_name("fp8")
    fp8_of(bf16).save_pretrained(path)
    return path
