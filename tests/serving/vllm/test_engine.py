"""A small checkpoint through the whole engine of vLLM, beside our plug-in for transformers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from moefp8.adapters import add_lora, save_lora
from moefp8.checkpoint import quantize_checkpoint
from moefp8.hf import FP8Config

pytestmark = pytest.mark.slow
ENGINE = """
import json, sys
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

def send(worker, how, path):
    # Tensors of a trainer: all through reload_weights, or those of FP8 layers one by one.
    named, runner = load_file(f"{path}/model.safetensors").items(), worker.model_runner
    if how == "stream":
        runner.reload_weights(weights_iterator=iter(named))
    for name, x in named if how == "one by one" else ():
        if "_proj." in name:  # vLLM packs the other weights on a CPU
            runner.model.load_weights([(name, x)])

if __name__ == "__main__":
    states, prompts, options = map(json.loads, sys.argv[1:])
    llm = LLM(
        states[0][1], skip_tokenizer_init=True, max_model_len=128, max_num_batched_tokens=256,
        max_num_seqs=4, dtype="bfloat16", enable_prefix_caching=False, disable_log_stats=False,
        **options,
    )
    sampling = SamplingParams(
        max_tokens=16, temperature=0, ignore_eos=True, prompt_logprobs=0, detokenize=False
    )
    inputs = [{"prompt_token_ids": x} for x in prompts]
    for how, path in states:
        if how == "file":
            llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        elif how in ("stream", "one by one"):
            llm.collective_rpc(send, args=(how, path))
        lora = LoRARequest("adapter", 1, path) if how == "adapter" else None
        outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        scores = [
            [x[id].logprob for x, id in zip(y.prompt_logprobs[1:], y.prompt_token_ids[1:])]
            for y in outputs
        ]
        tokens = [list(y.outputs[0].token_ids) for y in outputs]
        accepted = sum(
            x.value for x in llm.get_metrics() if x.name == "vllm:spec_decode_num_accepted_tokens"
        )
        print("\\nserved:" + json.dumps([scores, tokens, accepted]))
"""


class Served(NamedTuple):
    """What an engine says of 4 prompts of 60 tokens.

    scores: [4, 59], log-probabilities of the prompts' tokens. tokens: [4, 16], what it generates.
    accepted: how many drafts were right, since it started.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    accepted: int


def serve(
    states: list[tuple[str, Path]], options: dict[str, Any], with_moefp8: bool = True
) -> tuple[list[Served], str]:
    """What an engine says in each state in turn, and the log.

    A state is how weights come and the checkpoint: the first one is "start", and the others come
    as "file", as a "stream" of tensors, or "one by one", those of FP8 layers alone; or as
    "adapter", beside the weights that are there.
    """
    environment = {
        **os.environ,
        "MOEFP8_VLLM": str(int(with_moefp8)),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of the function that sends tensors
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    named = [(how, str(path)) for how, path in states]
    arguments = map(json.dumps, (named, drawn_prompts().tolist(), options))
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (x for x in done.stdout.splitlines() if x.startswith("served:"))
    results = (json.loads(x.removeprefix("served:")) for x in lines)
    served = [Served(torch.tensor(x), torch.tensor(y), accepted) for x, y, accepted in results]
    return served, done.stdout + done.stderr


COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
}
EAGER = {"enforce_eager": True}
PROJECTIONS = tuple(f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down"))
GROUPS = {"n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
HEADS = {"num_key_value_heads": 2, "head_dim": 64}
CONFIGS = {
    "qwen3": lambda: Qwen3MoeConfig(**COMMON, **HEADS, num_experts=16),
    "wide": lambda: Qwen3MoeConfig(
        **COMMON | {"moe_intermediate_size": 256}, **HEADS | {"head_dim": 128}, num_experts=16
    ),
    "dense": lambda: Qwen3Config(**COMMON, **HEADS),
    "glm4": lambda: Glm4MoeConfig(**COMMON, **GROUPS, **HEADS, attention_bias=True),
    "deepseek": lambda: DeepseekV3Config(
        **COMMON, **GROUPS, **LATENT, n_group=4, topk_group=2, topk_method="noaux_tc"
    ),
}
LAYERS = {
    "qwen3": "6 linears, 3 MoE layers of Qwen3MoeForCausalLM",
    "wide": "6 linears, 3 MoE layers of Qwen3MoeForCausalLM",
    "glm4": "12 linears, 2 MoE layers of Glm4MoeForCausalLM",
    "deepseek": "18 linears, 2 MoE layers of DeepseekV3ForCausalLM",
}


def write(directory: Path, family: str, seed: int = 0) -> tuple[Path, Path]:
    """A checkpoint in BF16, and the same in FP8."""
    torch.manual_seed(seed)
    plain, path = (directory / f"{name}-{seed}" for name in ("bf16", "fp8"))
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.bfloat16)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.05)
    model.save_pretrained(plain)
    quantize_checkpoint(plain, path)
    return plain, path


def mixed(path: Path, other: Path) -> Path:
    """A copy of a checkpoint with the FP8 weights of another one."""
    tensors, others = (load_file(x / "model.safetensors") for x in (path, other))
    made = Path(shutil.copytree(path, path.parent / "mixed"))
    tensors |= {name: x for name, x in others.items() if "_proj." in name}
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


def drawn_prompts() -> torch.Tensor:
    return torch.randint(2, 300, (4, 60), generator=torch.Generator().manual_seed(0))


# How far vLLM may be from BF16, times as far as transformers with our plug-in. vLLM's own BF16 of
# DeepSeek is as far from that of transformers as FP8 is.
FACTORS = {"qwen3": 1.3, "wide": 1.3, "glm4": 1.3, "deepseek": 2.0}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("glm4", {}),
        ("deepseek", EAGER),
        ("wide", EAGER | {"tensor_parallel_size": 2}),
        ("wide", EAGER | {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_log_probabilities_are_those_of_transformers(tmp_path, family, options):
    """As near as two orders of sums are; and the log says what runs on moefp8."""
    pytest.importorskip("vllm")
    plain, path = write(tmp_path, family)
    prompts = drawn_prompts()
    (served,), log = serve([("start", path)], options)
    assert f"moefp8 runs {LAYERS[family]}" in log

    def scores_of(directory, **arguments) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **arguments)
        with torch.no_grad():
            logits = model.eval()(prompts).logits[:, :-1].float().log_softmax(-1)
        return logits.gather(2, prompts[:, 1:, None])[..., 0]

    def off(other: torch.Tensor) -> float:
        return float((other - exact).square().mean().sqrt())

    exact = scores_of(plain)
    ours = scores_of(path, quantization_config=FP8Config())
    assert off(served.scores) < FACTORS[family] * off(ours)


@pytest.mark.parametrize(
    ("family", "options"), [("qwen3", {}), ("wide", EAGER | {"tensor_parallel_size": 2})]
)
def test_weights_that_come_while_it_serves(tmp_path, family, options):
    """As those of an engine that starts with them, to the bit: from a file, or in BF16."""
    pytest.importorskip("vllm")
    (_, first), (plain, second) = (write(tmp_path, family, seed) for seed in (0, 1))
    of_linears = mixed(first, second)
    states = [
        ("start", first),
        ("file", second),
        ("file", first),
        ("stream", plain),
        ("file", first),
        ("one by one", plain),
        ("file", first),
        ("one by one", second),  # codes and scales
    ]
    found = [x.scores for x in serve(states, options)[0]]
    of_first = found[0]
    fresh, fresh_linears = (
        serve([("start", path)], options)[0][0].scores for path in (second, of_linears)
    )
    for (how, path), scores in zip(states, found, strict=True):
        expected = fresh_linears if how == "one by one" else fresh
        assert torch.equal(scores, of_first if path is first else expected)
    assert not any(torch.equal(of_first, x) for x in (fresh, fresh_linears))


def with_drafts(path: Path) -> Path:
    """The GLM of `write`, whose last layer becomes an MTP layer, which drafts a token.

    Embeddings are large, so that what follows a token depends on it most, for the draft as well.
    """
    config = json.loads((path / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    tensors = load_file(path / "model.safetensors")
    embeddings, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    embeddings *= 20
    eye = torch.eye(len(norm), dtype=norm.dtype)
    draft_weights = {
        "enorm": norm,
        "hnorm": norm,
        "eh_proj": torch.cat([eye, torch.zeros_like(eye)], 1),
        "embed_tokens": embeddings,
        "shared_head.norm": norm,
        "shared_head.head": tensors["lm_head.weight"],
    }
    for name, x in draft_weights.items():
        tensors[f"model.layers.{last}.{name}.weight"] = x.clone()
    kept = [f"model.layers.{last}.{name}" for name in draft_weights]
    config["quantization_config"]["modules_to_not_convert"] += kept
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_drafts_by_an_mtp_layer_change_no_token(tmp_path):
    pytest.importorskip("vllm")
    states = [("start", with_drafts(write(tmp_path, "glm4")[1]))]
    (plain,), _ = serve(states, EAGER)
    mtp = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    (drafted,), log = serve(states, EAGER | mtp)
    assert torch.equal(drafted.tokens, plain.tokens)
    assert plain.accepted == 0
    assert drafted.accepted > 10
    assert "moefp8 runs 8 linears, 1 MoE layers of Glm4MoeForCausalLM" in log
    assert "moefp8 runs 4 linears, 1 MoE layers of Glm4MoeForCausalLM" in log  # the draft's


def test_an_adapter_beside_linears(tmp_path):
    """It moves FP8 in vLLM as it moves BF16 in vLLM without moefp8."""
    pytest.importorskip("vllm")
    plain, path = write(tmp_path, "dense")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    add_lora(model, targets=PROJECTIONS)
    for name, x in model.named_parameters():
        if name.endswith("lora_weight.B"):
            torch.nn.init.normal_(x, std=0.1)
    save_lora(model, tmp_path / "adapter")

    # vLLM scores no prompt where the head, too, may have an adapter.
    options = EAGER | {"enable_lora": True, "lora_target_modules": list(PROJECTIONS)}
    adapter = "adapter", tmp_path / "adapter"
    (base, adapted), log = serve([("start", path), adapter], options)
    (base_16, adapted_16), _ = serve([("start", plain), adapter], options, with_moefp8=False)
    assert "moefp8 runs 12 linears of Qwen3ForCausalLM" in log

    def apart(x: Served, y: Served) -> float:
        return float((x.scores - y.scores).square().mean().sqrt())

    assert apart(adapted, adapted_16) < 1.5 * apart(base, base_16)
    assert apart(adapted, base) > 5 * apart(base, base_16)
    assert not torch.equal(adapted.tokens, base.tokens)
