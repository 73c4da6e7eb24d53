"""Models that accelerate places on several devices: its hooks stay where FP8 modules come in."""

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM, DbrxConfig

import moefp8
from moefp8 import FP8Linear, GroupedExperts
from moefp8.hf import FP8Config, FP8Quantizer
from tests.checkpoint.transformers_cases import fp8_of, saved
from tests.gpu import NEEDS_TWO_GPUS, on_cpu_and_gpu, on_gpu
from tests.hf.model_cases import RELEASE, plain, prompt

PARTS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0")


@pytest.fixture
def placed(bf16):
    return dispatched(bf16)


def dispatched(path):
    """A model as `from_pretrained` leaves one with two devices in its device_map."""
    return dispatch_model(plain(path), {"": "cpu"}, main_device="cpu", force_hooks=True)


def assert_quantizes(placed, path) -> None:
    FP8Quantizer(FP8Config(), pre_quantized=False).postprocess_model(placed)
    ids = prompt()
    with torch.no_grad():
        assert torch.equal(placed(ids).logits, fp8_of(path)(ids).logits)


def test_hooks_go_to_what_takes_the_place(placed, bf16):
    hooks = {name: m._hf_hook for name, m in placed.named_modules() if hasattr(m, "_hf_hook")}
    assert_quantizes(placed, bf16)
    now = dict(placed.named_modules())
    assert all(now[name]._hf_hook is hook for name, hook in hooks.items())
    assert any(isinstance(now[name], FP8Linear) for name in hooks)
    assert any(isinstance(now[name], GroupedExperts) for name in hooks)


@pytest.mark.skipif(RELEASE < (5, 20), reason="older DBRX computes something else")
def test_so_they_do_where_experts_hold_modules(tmp_path):
    """The weights of DBRX's experts lie in a module of their own."""
    attention = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}
    experts = {"ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2}
    sizes = {"vocab_size": 512, "n_layers": 1, "d_model": 128, "n_heads": 4}
    config = DbrxConfig(**sizes, ffn_config=experts, attn_config=attention)
    saved(config, tmp_path)
    assert_quantizes(dispatched(tmp_path), tmp_path)


def test_convert_would_lose_hooks_and_names_the_way_out(placed):
    with pytest.raises(ValueError, match=r"q_proj.*pass quantization_config=FP8Config\(\) to"):
        moefp8.convert(placed)


@pytest.mark.parametrize("is_fp8", [False, True])
@on_cpu_and_gpu
def test_what_is_offloaded_is_refused(bf16, fp8, is_fp8, device, tmp_path):
    places = dict.fromkeys((*PARTS, "model.layers.2"), device)
    places["model.layers.1"] = "disk" if device == "cpu" else "cpu"
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self.*must not be offloaded.*GPUs"):
        AutoModelForCausalLM.from_pretrained(
            fp8 if is_fp8 else bf16,
            quantization_config=FP8Config(),
            device_map=places,
            offload_folder=tmp_path,
        )


@on_gpu
@NEEDS_TWO_GPUS
def test_two_gpus_give_what_one_gives(bf16):
    places = {**dict.fromkeys(PARTS, 0), "model.layers.1": 1, "model.layers.2": 1}
    one, two = (
        AutoModelForCausalLM.from_pretrained(
            bf16, quantization_config=FP8Config(), device_map=where
        )
        for where in (0, places)
    )
    assert two.model.layers[1].mlp.experts.down_proj.device.index == 1
    ids = prompt().to(0)
    with torch.no_grad():
        assert torch.equal(one(ids).logits, two(ids).logits.to(0))
