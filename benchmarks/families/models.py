"""A tiny model of each family of transformers that has routed experts, with random weights.

Sizes are unlike one another, so that a shape tells which is which.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    PretrainedConfig,
)

_EXPERTS = re.compile(r"(num|n)_(local_|routed_)?experts|moe_num_experts|moe_intermediate_size")
_KINDS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
)

# Whatever a config calls its sizes; those that it does not know are left out.
SIZES: dict[str, Any] = {
    **{"vocab_size": 512, "unpadded_vocab_size": 512},
    **{"hidden_size": 256, "d_model": 256, "n_embd": 256},
    **{"num_hidden_layers": 4, "n_layers": 4, "num_layers": 4, "n_layer": 4},
    **{"num_decoder_layers": 2, "encoder_layers": 2, "decoder_layers": 2},
    **{"num_attention_heads": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 64, "intermediate_size": 384, "ffn_dim": 384, "d_ff": 384, "d_kv": 64},
    **{"moe_intermediate_size": 128, "shared_expert_intermediate_size": 640},
    **{"expert_ffn_hidden_size": 128, "ffn_hidden_size": 384, "expert_dim": 128},
    **{"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 8},
    **{"num_experts_per_tok": 2, "num_experts_per_token": 2, "top_k_experts": 2, "moe_topk": 2},
    **{"moe_top_k": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "num_expert_group": 1},
    **{"kv_lora_rank": 64, "q_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64},
    **{"v_head_dim": 96, "first_k_dense_replace": 1, "zero_expert_num": 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    **{"mamba_chunk_size": 32},  # on a CPU, time grows with its square, and 24 tokens are padded
    **{"encoder_ffn_dim": 384, "decoder_ffn_dim": 384, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    **{"index_n_heads": 2, "index_head_dim": 64, "index_topk": 64, "num_nextn_predict_layers": 0},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 512},
}
# Attention by latents has a key and a value for each head, and tells heads by their parts.
LATENT = {"num_key_value_heads": 4}


QWEN4 = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 64},
    **{"indexer_compress_ratio": 4, "ple_embed_dim": 64},
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 384, "moe_num_experts": 8, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"text_config": {"per_layer_config": {}}},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [256, 128], "head_dim": 128}},
    "gemma4": {"text_config": {"enable_moe_block": True, "num_global_key_value_heads": 2}},
    "gemma4_text": {"enable_moe_block": True, "num_global_key_value_heads": 2},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glm4v_moe_text": {"head_dim": 128},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "hy_v4_vl": {"text_config": {"qk_rope_head_dim": 64}},
    "hy_v4_vl_text": {"qk_rope_head_dim": 64},
    "inkling2": {"vision_config": {"text_hidden_size": 256}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 256}},
    "longcat_flash": {"head_dim": 32},
    "muse_spark": {"audio_config": {"out_hidden_size": 256}},
    "nemo_speechlm": {"head_config": {"audio_hidden_size": 256}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "step3p7": {"text_config": {"sliding_window": 8}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
}


class NotBuilt(Exception):
    """No tiny model of a family could be made."""


def families() -> list[str]:
    """All model types whose config tells of experts, and which have a language model."""
    return sorted(name for name in CONFIG_MAPPING if _tells_of_experts(name))


def _tells_of_experts(name: str) -> bool:
    try:
        config = CONFIG_MAPPING[name]()
    except Exception:  # a config that cannot be made of defaults
        return False
    is_language = any(type(config) in kind for kind in _KINDS)
    return is_language and bool(_EXPERTS.search(" ".join(map(str, _names(config.to_dict())))))


def _names(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield name
        if isinstance(value, dict):
            yield from _names(value)


def tiny_config(name: str, changes: dict[str, Any] | None = None) -> PretrainedConfig:
    """Return a small config. changes: values to set besides, nested as in config.json.

    Raises whatever transformers raises for sizes that do not fit each other.
    """
    config_class = CONFIG_MAPPING[name]
    defaults = config_class()
    given = _shrunk(defaults)
    given = _merged(given, OVERRIDES.get(name, {}))
    return config_class(**_merged(given, changes or {}))


def _shrunk(config: PretrainedConfig) -> dict[str, Any]:
    """SIZES of the names that config has, and so of the configs in it."""
    known = config.to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in known}
    if "kv_lora_rank" in sizes:
        sizes |= {name: size for name, size in LATENT.items() if name in sizes}
        sizes.pop("head_dim", None)
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig):
            sizes[name] = _shrunk(inner)
    return sizes


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    merged = dict(first)
    for name, value in second.items():
        inner = merged.get(name)
        both = isinstance(inner, dict) and isinstance(value, dict)
        merged[name] = _merged(inner, value) if both else value
    return merged


def tiny_model(
    name: str, dtype: torch.dtype = torch.bfloat16, changes: dict[str, Any] | None = None
) -> nn.Module:
    """Return a model of random weights, in eval mode; changes are those of `tiny_config`.

    Raises NotBuilt.
    """
    try:
        config = tiny_config(name, changes)
        kinds = (_KINDS[1], *_KINDS) if hasattr(config, "text_config") else _KINDS
        kind = next(kind[type(config)] for kind in kinds if type(config) in kind)
        kind = kind[0] if isinstance(kind, tuple) else kind
        torch.manual_seed(0)
        model = kind._from_config(copy.deepcopy(config), dtype=dtype)
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {str(error)[:200]}") from error
    return model.eval()
