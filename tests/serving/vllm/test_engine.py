"""A small checkpoint through the whole engine of vLLM, beside our plug-in for transformers."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Qwen3MoeConfig,
)

from moefp8.checkpoint import quantize_checkpoint
from moefp8.hf import FP8Config

pytestmark = pytest.mark.slow
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    path, prompts, options = sys.argv[1], *map(json.loads, sys.argv[2:])
    llm = LLM(
        path, skip_tokenizer_init=True, max_model_len=128, max_num_batched_tokens=256,
        max_num_seqs=4, dtype="bfloat16", **options,
    )
    sampling = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": x} for x in prompts], sampling, use_tqdm=False)
    scores = [
        [each[token].logprob for each, token in zip(y.prompt_logprobs[1:], y.prompt_token_ids[1:])]
        for y in outputs
    ]
    print("\\nscores:" + json.dumps(scores))
"""


COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
}
GROUPS = {"n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
HEADS = {"num_key_value_heads": 2, "head_dim": 64}
CONFIGS = {
    "qwen3": lambda: Qwen3MoeConfig(**COMMON, **HEADS, num_experts=16),
    "glm4": lambda: Glm4MoeConfig(**COMMON, **GROUPS, **HEADS, attention_bias=True),
    "deepseek": lambda: DeepseekV3Config(
        **COMMON, **GROUPS, **LATENT, n_group=4, topk_group=2, topk_method="noaux_tc"
    ),
}
LAYERS = {
    "qwen3": "6 linears, 3 expert layers of Qwen3MoeForCausalLM",
    "glm4": "12 linears, 2 expert layers of Glm4MoeForCausalLM",
    "deepseek": "18 linears, 2 expert layers of DeepseekV3ForCausalLM",
}
# How far vLLM may be from BF16, times as far as transformers with our plug-in. vLLM's own BF16 of
# DeepSeek is as far from that of transformers as FP8 is.
FACTORS = {"qwen3": 1.3, "glm4": 1.3, "deepseek": 2.0}


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3", {"enforce_eager": True}), ("qwen3", {}), ("glm4", {}), ("deepseek", {})],
)
def test_log_probabilities_are_those_of_transformers(tmp_path, family, options):
    """As near as two orders of sums are; and the log says what runs on moefp8."""
    pytest.importorskip("vllm")
    torch.manual_seed(0)
    plain, path = tmp_path / "bf16", tmp_path / "fp8"
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.bfloat16)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.05) if weight.ndim > 1 else None
    model.save_pretrained(plain)
    quantize_checkpoint(plain, path)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 300, (4, 60), generator=generator)
    environment = {
        **os.environ,
        "MOEFP8_VLLM": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    command = [sys.executable, str(script), str(path), json.dumps(prompts.tolist())]
    done = subprocess.run(
        [*command, json.dumps(options)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = done.stdout + done.stderr
    assert f"moefp8 runs {LAYERS[family]}" in log
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("scores:"))
    scores = torch.tensor(json.loads(line.removeprefix("scores:")))

    def scores_of(directory, **arguments) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **arguments)
        with torch.no_grad():
            logits = model.eval()(prompts).logits[:, :-1].float().log_softmax(-1)
        return logits.gather(2, prompts[:, 1:, None])[..., 0]

    def off(other: torch.Tensor) -> float:
        return float((other - exact).square().mean().sqrt())

    exact = scores_of(plain)
    ours = scores_of(path, quantization_config=FP8Config())
    assert off(scores) < FACTORS[family] * off(ours)
