"""What a checkpoint does not give is not left at random, whatever the model calls its layers."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    CLIPConfig,
    CLIPForImageClassification,
    CLIPModel,
    DbrxConfig,
    DbrxForCausalLM,
    DecisionTransformerConfig,
    DecisionTransformerModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Mamba2Config,
    Mamba2ForCausalLM,
)

from tests.checkpoint.cases import refusal
from tests.checkpoint.transformers_cases import fp8_of
from tests.hf.model_cases import RELEASE, change_config, change_tensors

H = {"hidden_size": 128, "vocab_size": 256}
GPT2 = GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=256)
BERT = BertConfig(**H, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
LLAMA = LlamaConfig(**H, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
DBRX = DbrxConfig(
    **{"d_model": 128, "n_heads": 4, "n_layers": 2, "vocab_size": 256, "max_seq_len": 64},
    ffn_config={"ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2},
    attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
)
MAMBA = Mamba2Config(**H, num_hidden_layers=2, num_heads=8, head_dim=32, n_groups=1)
BLOOM = BloomConfig(**H, n_layer=2, n_head=4)
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = CLIPConfig(
    text_config={**SMALL, "intermediate_size": 128, "vocab_size": 64},
    vision_config={**SMALL, "intermediate_size": 128, "image_size": 16, "patch_size": 8},
    projection_dim=32,
)
DECISION = DecisionTransformerConfig(hidden_size=128, n_layer=2, n_head=4, max_ep_len=16)

# kind, config, a key that is taken out
MISSING = {
    "dbrx, a layer": (DbrxForCausalLM, DBRX, "transformer.blocks.1."),
    "dbrx, an expert's projection": (DbrxForCausalLM, DBRX, "blocks.1.ffn.experts.mlp.v1"),
    "dbrx, head": (DbrxForCausalLM, DBRX, "lm_head.weight"),
    "gpt2, a layer": (GPT2LMHeadModel, GPT2, "transformer.h.1."),
    "gpt2, a bias": (GPT2LMHeadModel, GPT2, "h.0.mlp.c_fc.bias"),
    "gpt2, embedding": (GPT2LMHeadModel, GPT2, "transformer.wte.weight"),
    "gpt2, positions": (GPT2LMHeadModel, GPT2, "transformer.wpe.weight"),
    "gpt2, norm": (GPT2LMHeadModel, GPT2, "transformer.ln_f.weight"),
    "bloom, a layer": (BloomForCausalLM, BLOOM, "transformer.h.0."),
    "mamba, a layer": (Mamba2ForCausalLM, MAMBA, "backbone.layers.0."),
    "llama, head": (LlamaForCausalLM, LLAMA, "lm_head.weight"),
    "llama, norm": (LlamaForCausalLM, LLAMA, "model.norm.weight"),
    "bert, a layer": (BertForMaskedLM, BERT, "encoder.layer.1."),
    "bert, head": (BertForMaskedLM, BERT, "cls.predictions.transform.dense.weight"),
}


def saved(kind, config, path, without: str = "\0") -> None:
    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(path)
    assert any(without in key for key in load_file(path / "model.safetensors")) or without == "\0"
    change_tensors(path, lambda key, x: [(key, x)] if without not in key else [])


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_told(case, tmp_path):
    kind, config, key = MISSING[case]
    saved(kind, config, tmp_path, without=key)
    message = refusal(fp8_of, tmp_path, kind)
    for needle in (key, "does not fill the model", "not in the checkpoint"):
        assert needle in message


# kind, config, what loads the checkpoint
WHOLE = {
    "gpt2": (GPT2LMHeadModel, GPT2, GPT2LMHeadModel),
    "bert": (BertForMaskedLM, BERT, BertForMaskedLM),
    "dbrx": (DbrxForCausalLM, DBRX, DbrxForCausalLM),
    "gpt2, another head": (GPT2LMHeadModel, GPT2, GPT2ForSequenceClassification),
    "bert, another head": (BertForMaskedLM, BERT, BertForSequenceClassification),
    "bert, a pooler": (BertForMaskedLM, BERT, BertModel),
    "clip, a head and no base model": (CLIPModel, CLIP, CLIPForImageClassification),
    "no input embedding": (DecisionTransformerModel, DECISION, DecisionTransformerModel),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_whole_or_needs_a_head_alone_loads(case, tmp_path):
    if case == "dbrx" and RELEASE < (5, 20):
        pytest.skip("its DBRX takes hidden sizes for intermediate ones: convert refuses it")
    kind, config, other = WHOLE[case]
    saved(kind, config, tmp_path)
    fp8_of(tmp_path, other)


def test_fewer_layers_than_the_config_says(tmp_path):
    saved(DbrxForCausalLM, DBRX, tmp_path)
    change_config(tmp_path, n_layers=3)
    assert "transformer.blocks.2." in refusal(fp8_of, tmp_path, DbrxForCausalLM)


def test_what_lies_below_another_task_s_head_may_not(tmp_path):
    saved(GPT2LMHeadModel, GPT2, tmp_path, without="transformer.ln_f.weight")
    message = refusal(fp8_of, tmp_path, GPT2ForSequenceClassification)
    assert "transformer.ln_f.weight: not in" in message


@pytest.mark.parametrize(
    ("kind", "config", "base", "key"),
    [
        (LlamaForCausalLM, LLAMA, LlamaModel, "norm.weight"),
        (GPT2LMHeadModel, GPT2, GPT2Model, "ln_f.weight"),
        (BertForMaskedLM, BERT, BertModel, "embeddings.LayerNorm.bias"),
    ],
)
def test_a_model_without_a_head_needs_all(kind, config, base, key, tmp_path):
    saved(kind, config, tmp_path / "whole")
    fp8_of(tmp_path / "whole", base)
    saved(kind, config, tmp_path / "less", without=f".{key}")
    assert f"{key}: not in" in refusal(fp8_of, tmp_path / "less", base)


@pytest.mark.parametrize("key", ["lm_head.weight", "model.norm.weight"])
def test_where_no_class_is_named(key, tmp_path):
    saved(LlamaForCausalLM, LLAMA, tmp_path, without=key)
    change_config(tmp_path, "architectures")
    assert f"{key}: not in the checkpoint" in refusal(fp8_of, tmp_path, LlamaForCausalLM)
