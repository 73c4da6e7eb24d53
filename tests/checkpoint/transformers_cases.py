"""Models that transformers saves before, and loads after, they are quantized as checkpoints."""

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from moefp8.checkpoint import inspect_checkpoint
from moefp8.hf import FP8Config
from tests.checkpoint.cases import assert_same_tensors


def saved(config: PretrainedConfig, path, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path, **options)
    return model


def fp8_of(path, kind: type = AutoModelForCausalLM, **options) -> torch.nn.Module:
    return kind.from_pretrained(path, quantization_config=FP8Config(**options))


def assert_equal(got: torch.nn.Module, wanted: torch.nn.Module) -> None:
    assert_same_tensors(got.state_dict(), wanted.state_dict())


def loaded_alike(folder, kind: type = AutoModelForCausalLM, **options) -> torch.nn.Module:
    """The model of `folder/t`; it is that of `folder/s`, which is converted with options."""
    model = fp8_of(folder / "t", kind)
    assert_equal(model, fp8_of(folder / "s", kind, **options))
    assert inspect_checkpoint(folder / "t").is_loadable
    return model
