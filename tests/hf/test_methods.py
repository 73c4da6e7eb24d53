"""Formats that are not ours are refused by name; no advice calls them by another name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import moefp8
from moefp8.checkpoint import inspect_checkpoint, quantize_checkpoint
from moefp8.hf import pretrained_config
from tests.checkpoint.cases import assert_same_tensors, refusal
from tests.checkpoint.quantize.cases import quantization_of
from tests.checkpoint.transformers_cases import fp8_of, saved
from tests.hf.model_cases import change_config, tensors_of

OURS = {"fp8", "compressed-tensors"}
KNOWN = sorted(AUTO_QUANTIZATION_CONFIG_MAPPING.keys() - OURS)
UNKNOWN = ["modelopt", "modelopt_fp4", "FP8", "fp8_block", "nvfp4a16", ""]
CODES = "model.layers.0.mlp.up_proj.weight_scale_inv"  # where there are codes
RELABELS = "into config.json", "'quant_method': 'fp8'", "set quant_method"


@pytest.fixture(scope="module", params=["codes", "16 bits"])
def checkpoint(request, tmp_path_factory):
    """A Llama whose config.json a test changes; its codes and scales are those of moefp8."""
    path = tmp_path_factory.mktemp("llama") / "saved"
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    saved(LlamaConfig(**sizes, **heads, num_hidden_layers=1), path)
    if request.param == "codes":
        fp8_of(path).save_pretrained(path)
    return path


def says(path, method) -> None:
    quantization = {"quant_method": method, "quant_algo": "NVFP4", "weight_block_size": [128, 128]}
    change_config(path, quantization_config=quantization)


def places_of(path) -> nn.Module:
    """A model that has a place for each tensor, FP8 where the checkpoint has it."""
    root = nn.Module()
    for key, x in tensors_of(path).items():
        *homes, leaf = key.split(".")
        module = root
        for home in homes:
            if home not in module._modules:
                module.add_module(home, nn.Module())
            module = module.get_submodule(home)
        module.register_parameter(leaf, nn.Parameter(torch.empty_like(x), requires_grad=False))
    return root


@pytest.mark.parametrize("method", UNKNOWN)
def test_what_transformers_does_not_know_is_refused_by_name(checkpoint, method, tmp_path):
    """transformers itself would take codes for weights."""
    says(checkpoint, method)
    messages = [
        refusal(fp8_of, checkpoint),
        refusal(moefp8.load_checkpoint, places_of(checkpoint), checkpoint),
        refusal(quantize_checkpoint, checkpoint, tmp_path / "t", progress=False),
        *(a.examples[0] for a in inspect_checkpoint(checkpoint).anomalies if a.severity == "error"),
    ]
    with pytest.raises(ValueError, match="pretrained_config: ") as caught:
        pretrained_config(str(checkpoint))
    for message in (*messages, str(caught.value)):
        assert repr(method) in message
        assert "NVFP4" in message
        assert not any(words in message for words in RELABELS)
    assert len(messages) == 4


@pytest.mark.parametrize("method", KNOWN)
def test_what_transformers_knows_is_refused_too(checkpoint, method, tmp_path):
    """Some of them by transformers, before moefp8 is asked."""
    says(checkpoint, method)
    with pytest.raises((ValueError, ImportError, RuntimeError, TypeError, AttributeError)):
        fp8_of(checkpoint)
    assert repr(method) in refusal(moefp8.load_checkpoint, places_of(checkpoint), checkpoint)
    assert repr(method) in refusal(quantize_checkpoint, checkpoint, tmp_path / "t", progress=False)
    with pytest.raises(ValueError, match=f"it says quant_method '{method}'"):
        pretrained_config(str(checkpoint))


@pytest.mark.parametrize("place", ["compression_config", "text_config"])
def test_other_places_in_a_config_are_looked_at(checkpoint, place, tmp_path):
    quantization = {"quant_method": "modelopt", "weight_block_size": [128, 128]}
    nested = {"quantization_config": quantization}
    path = shutil.copytree(checkpoint, tmp_path / "s")
    value = nested if place == "text_config" else quantization
    change_config(path, "quantization_config", **{place: value})
    assert "'modelopt'" in refusal(moefp8.load_checkpoint, places_of(path), path)
    assert "modelopt" in refusal(quantize_checkpoint, path, tmp_path / "t", progress=False)
    assert "'modelopt'" in inspect_checkpoint(path).anomalies[0].examples[0]
    if place == "compression_config":  # a Llama has no other
        assert "'modelopt'" in refusal(fp8_of, path)
    with pytest.raises(ValueError, match="quant_method 'modelopt', a format"):
        pretrained_config(str(path))


def test_a_format_in_another_place_is_loaded_and_saved_in_one(checkpoint, tmp_path):
    if CODES not in tensors_of(checkpoint):
        pytest.skip("of weights in 16 bits")
    path, target = shutil.copytree(checkpoint, tmp_path / "s"), tmp_path / "t"
    says(path, "fp8")
    stored = quantization_of(path)
    change_config(path, "quantization_config", compression_config=stored)
    model = AutoModelForCausalLM.from_pretrained(path, config=pretrained_config(str(path)))
    assert_same_tensors(model.state_dict(), tensors_of(path))
    moefp8.save_checkpoint(model, target)
    assert "compression_config" not in json.loads((target / "config.json").read_text())
    assert quantization_of(target)["quant_method"] == "fp8"


def test_a_config_that_says_nothing_of_quantization_counts_for_nothing(checkpoint, tmp_path):
    if CODES in tensors_of(checkpoint):
        pytest.skip("of codes")
    path = shutil.copytree(checkpoint, tmp_path / "s")
    change_config(path, quantization_config={})
    assert inspect_checkpoint(path).is_loadable
    moefp8.load_checkpoint(places_of(path), path)
    quantize_checkpoint(path, tmp_path / "t", progress=False)


def test_a_pickle_beside_a_config_that_says_another_format(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / "s")
    says(path, "modelopt")
    torch.save(tensors_of(path), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert "quant_method 'modelopt', quant_algo 'NVFP4'" in refusal(fp8_of, path)


def test_keys_and_values_of_a_config_are_never_arguments(checkpoint):
    """Where an `FP8Config` is passed, transformers makes them arguments before moefp8 is asked."""
    says(checkpoint, "fp8")
    stored = quantization_of(checkpoint)
    odd = {"self": 1, "cls": 2, "activation_scheme": 5, "scale_fmt": [], "ignored_layers": {}}
    change_config(checkpoint, quantization_config=stored | odd)
    config = pretrained_config(str(checkpoint))
    if CODES in tensors_of(checkpoint):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, config=config)
        assert_same_tensors(model.state_dict(), tensors_of(checkpoint))
    change_config(checkpoint, quantization_config=stored, self=1)
    with pytest.raises(ValueError, match=r"pretrained_config: .* transformers cannot read it"):
        pretrained_config(str(checkpoint))
    change_config(checkpoint, "self")


@pytest.mark.parametrize("dtype", [None, torch.int32, torch.uint8, torch.int8])
def test_config_and_tensors_must_agree(checkpoint, dtype, tmp_path):
    """The error says both what config.json says and what the tensors are, and what to do then."""
    path = shutil.copytree(checkpoint, tmp_path / "s")
    says(path, "fp8")
    extra = {} if dtype is None else {"extra": torch.zeros(2, dtype=dtype)}
    has_codes = CODES in tensors_of(path)
    save_file(tensors_of(path) | extra, path / "model.safetensors", metadata={"format": "pt"})
    if has_codes:
        assert inspect_checkpoint(path).is_loadable
        fp8_of(path)
        return
    for message in (
        refusal(fp8_of, path),
        refusal(moefp8.load_checkpoint, places_of(path), path),
        refusal(quantize_checkpoint, path, tmp_path / "t", progress=False),
        inspect_checkpoint(path).anomalies[0].examples[0],
    ):
        assert "config.json says quant_method 'fp8'" in message
        assert "no tensor is F8_E4M3: dtypes are BF16" in message
        assert ("whose config.json states no format" in message) == (dtype is None)
        assert ("quantize the 16-bit original" in message) == (dtype is not None)
    if dtype is None:  # the way out
        change_config(path, "quantization_config")
        fp8_of(path)
        quantize_checkpoint(path, tmp_path / "t", progress=False)
