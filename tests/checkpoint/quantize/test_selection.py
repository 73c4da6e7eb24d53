"""quantize_checkpoint chooses what convert and FP8Config choose, and writes what loaders find."""

import re

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoint import small_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    DbrxConfig,
    GPT2Config,
    GraniteMoeSWAConfig,
    PretrainedConfig,
)

from benchmarks.families.models import tiny_model
from moefp8 import GroupedExperts
from moefp8.checkpoint import CheckpointError, quantize_checkpoint
from moefp8.layers import plan_conversion
from tests.checkpoint.cases import read
from tests.checkpoint.quantize.cases import bf16, quantization_of
from tests.checkpoint.transformers_cases import assert_equal, fp8_of, loaded_alike, saved
from tests.hf.model_cases import RELEASE


def stacks_only(intermediate_size: int = 384) -> PretrainedConfig:
    """Return a family whose checkpoints hold stacks, and no other form of experts."""
    sizes = {"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GraniteMoeSWAConfig(**sizes, intermediate_size=intermediate_size)


def dbrx(d_model: int = 256, ffn_hidden_size: int = 384) -> PretrainedConfig:
    attention = {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}
    sizes = {"vocab_size": 256, "n_layers": 2, "d_model": d_model, "n_heads": 4}
    experts = {"ffn_hidden_size": ffn_hidden_size, "moe_num_experts": 4, "moe_top_k": 2}
    return DbrxConfig(**sizes, ffn_config=experts, attn_config=attention)


def test_a_family_of_stacks_keeps_its_stacks(tmp_path):
    """transformers would not find its experts under DeepSeek's names."""
    saved(stacks_only(), tmp_path / "s")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert "GraniteMoeSWAForCausalLM" in done.basis
    stack = "model.layers.1.block_sparse_moe.experts.gate_up_proj"
    assert read(tmp_path / "t")[stack].dtype == torch.float8_e4m3fn
    model = loaded_alike(tmp_path)
    assert sum(isinstance(module, GroupedExperts) for module in model.modules()) == 2


@pytest.mark.parametrize(("rows", "is_said"), [(320, False), (328, True), (96, True)])
def test_stacks_that_blocks_do_not_divide(tmp_path, rows, is_said):
    """Where scales do not tell how gate and up are cut, config.json does, and only there."""
    saved(stacks_only(rows), tmp_path / "s")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert set(done.conversion.swapped.values()) == {"linear", "experts"}
    assert ("gate_up_blocks" in quantization_of(tmp_path / "t")) == is_said
    loaded_alike(tmp_path)


def test_dbrx_gets_the_stacks_that_convert_makes(tmp_path):
    """Gate, up and the transposed down lie in files of their own here."""
    saved(dbrx(), tmp_path / "s", max_shard_size="300KB")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert set(done.conversion.swapped.values()) == {"linear", "experts"}
    home = "transformer.blocks.1.ffn.experts"
    stored = read(tmp_path / "t")
    assert stored[f"{home}.gate_up_proj"].shape == (4, 768, 256)
    assert stored[f"{home}.down_proj_scale_inv"].shape == (4, 2, 3)
    assert not any(f"{home}.mlp" in key for key in stored)
    model = loaded_alike(tmp_path)
    assert sum(isinstance(module, GroupedExperts) for module in model.modules()) == 2


@pytest.mark.parametrize(
    "sizes", [{"ffn_hidden_size": 320}, {"ffn_hidden_size": 104}, {"d_model": 192}]
)
def test_dbrx_of_sizes_that_blocks_do_not_divide(tmp_path, sizes):
    saved(dbrx(**sizes), tmp_path / "s")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert set(done.conversion.swapped.values()) == {"linear", "experts"}
    loaded_alike(tmp_path)
    ids = torch.randint(0, 256, (1, 9))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "s")
        got, wanted = fp8_of(tmp_path / "t")(ids).logits, model(ids).logits
    assert (got - wanted).norm() / wanted.norm() < 0.2


def test_a_base_of_dbrx_loads_as_the_whole_model(tmp_path):
    """DBRX's experts have no slot of that name before they are converted."""
    torch.manual_seed(0)
    AutoModel.from_config(dbrx(), dtype=torch.bfloat16).save_pretrained(tmp_path / "s")
    quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    base = fp8_of(tmp_path / "s", AutoModel)
    base.save_pretrained(tmp_path / "saved")
    for path in (tmp_path / "t", tmp_path / "saved"):
        assert "blocks.0.ffn.experts.gate_up_proj_scale_inv" in read(path)
        assert_equal(fp8_of(path).transformer, base)


def test_dbrx_is_skipped_whole_or_not_at_all(tmp_path):
    saved(dbrx(), tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"must be skipped whole, or not at all; .*mlp\.v1"):
        quantize_checkpoint(tmp_path / "s", tmp_path / "t", skip="*.v1")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t", skip="ffn.experts")
    assert set(done.conversion.swapped.values()) == {"linear"}


@pytest.mark.skipif(RELEASE < (5, 20), reason="older transformers build no tiny model of these")
@pytest.mark.parametrize("family", ["ernie4_5_vl_moe", "step3p7"])
def test_what_transformers_fuses_when_it_loads_is_stored_fused(family, tmp_path):
    """ERNIE stores experts one by one, Step a stack of gate and one of up; both in many files."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "s", max_shard_size="400KB")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t", max_shard_bytes=500_000)
    assert "experts" in done.conversion.swapped.values()
    loaded_alike(tmp_path, type(model)).save_pretrained(tmp_path / "saved")
    again, written = (
        {key for key in read(tmp_path / name) if "experts" in key} for name in ("saved", "t")
    )
    assert written == again


@pytest.mark.skipif(RELEASE < (5, 20), reason="older transformers build no tiny model of these")
def test_what_is_fused_is_told_by_its_keys(tmp_path):
    """A value is not finite, a part is skipped, or an expert is missing."""
    tiny_model("ernie4_5_vl_moe").save_pretrained(tmp_path / "s")
    path, key = tmp_path / "s" / "model.safetensors", "model.layers.1.mlp.experts.9.up_proj.weight"
    with pytest.raises(CheckpointError, match=r"mlp\.text_moe\.experts: must be skipped whole"):
        quantize_checkpoint(tmp_path / "s", tmp_path / "t", skip="experts.3.up_proj")
    tensors = read(tmp_path / "s")
    tensors[key][-1, -1] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{re.escape(key)} in .*holds NaN or Inf"):
        quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    del tensors[key]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="experts stay in 16 bits: .*stored in another form"):
        quantize_checkpoint(tmp_path / "s", tmp_path / "u")


def test_conv1d_is_stored_as_the_linear_that_it_stands_for(tmp_path):
    """The Conv1D has more rows than are quantized at once, and a last block that is not full."""
    sizes = {"vocab_size": 256, "n_embd": 512, "n_inner": 2000, "n_layer": 1, "n_head": 2}
    saved(GPT2Config(**sizes), tmp_path / "s")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert set(done.conversion.swapped.values()) == {"Conv1D"}
    assert read(tmp_path / "t")["transformer.h.0.mlp.c_fc.weight"].shape == (2000, 512)
    loaded_alike(tmp_path)


def test_layers_for_multi_token_prediction_are_quantized_by_name(tmp_path):
    """Models hold no such layers, but servers do."""
    saved(small_config("deepseek_v3"), tmp_path / "s")
    tensors = read(tmp_path / "s")
    extra = "model.layers.3.self_attn.o_proj.weight", "model.layers.3.eh_proj.weight"
    tensors |= {key: bf16(256, 256) for key in extra}
    save_file(tensors, tmp_path / "s" / "model.safetensors", metadata={"format": "pt"})
    quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    got = read(tmp_path / "t")
    assert [got[key].dtype for key in extra] == [torch.float8_e4m3fn, torch.bfloat16]
    loaded_alike(tmp_path)


@pytest.mark.parametrize("pattern", ["model.layers.*.experts", "block_sparse_moe", "*.q_proj"])
def test_skip_takes_what_convert_takes(tmp_path, pattern):
    model = saved(stacks_only(), tmp_path / "s")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t", skip=pattern)
    assert done.conversion.swapped == plan_conversion(model, skip=pattern).swapped
    assert done.conversion.swapped
    assert "skipped" in done.conversion.kept.values()
