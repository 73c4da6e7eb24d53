"""The models that engines serve."""

from transformers import Glm4MoeConfig

from benchmarks.model.checkpoint import MODELS as WHOLE_MODELS
from benchmarks.model.checkpoint import Model

_GLM = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "first_k_dense_replace": 0,  # one dense layer would say nothing of experts
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "attention_bias": True,
    "use_qk_norm": False,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
_TINY_GLM = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
MODELS = {
    "qwen3_30b_a3b": WHOLE_MODELS["qwen3_30b_a3b"],
    "glm_4_5_air": Model("GLM-4.5-Air", Glm4MoeConfig, _GLM, _TINY_GLM, most_layers=8),
}
