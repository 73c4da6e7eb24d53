"""`moefp8.hf`: models of transformers, loaded, quantized, saved and run."""

import json
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moefp8
import moefp8.hf

from . import BF16, attempt, case, choices, randn
from ._small import write_checkpoint
from .distributed import single_group


def _ids(device: str) -> torch.Tensor:
    return torch.randint(2, 500, (2, 9)).to(device)


@torch.inference_mode()
def _logits(model: Any, device: str) -> torch.Tensor:
    return model.to(device)(_ids(device)).logits


def _loaded(path: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **options)


@case
def fp8_checkpoints(device: str) -> Any:
    outcomes = []
    for family in ("deepseek_v3", "mixtral"):
        write_checkpoint(family)
        config = moefp8.hf.FP8Config()
        model = _loaded("CHECKPOINT", quantization_config=config)
        model.save_pretrained("COPY")
        outcomes.append((_logits(model, device), Path("COPY"), repr(model)))
        for folder in ("CHECKPOINT", "ORIGINAL", "COPY"):
            Path(folder).rename(f"{folder}-{family}")
    return outcomes


@case
def quantized_when_loaded(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    config = moefp8.hf.FP8Config(
        skip=("*.layers.0.self_attn.*",),
        only=None,
        filter_fn=None,
        overrides={"*.1.mlp.experts": {"layout": "masked"}},
        modules_to_not_convert=["layers.2"],
        activation_scheme="dynamic",
        weight_block_size=(128, 128),
        dequantize=False,
        modules_to_convert=None,
        scale_fmt="float",
        expert_dtype="fp8",
    )
    model = _loaded("ORIGINAL", quantization_config=config)
    model.save_pretrained("SAVED")
    conversion = str(model.hf_quantizer.conversion)
    again = _loaded("SAVED", quantization_config=moefp8.hf.FP8Config())
    texts = repr(config), config.to_dict(), conversion
    return texts, _logits(model, device), _logits(again, device), Path("SAVED")


@case
def by_its_config(device: str) -> Any:
    """A checkpoint of compressed-tensors."""
    write_checkpoint("qwen3_moe")
    folder = Path("CHECKPOINT")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        named = {key.replace("_scale_inv", "_scale"): x for key, x in tensors.items()}
        save_file(named, file, metadata={"format": "pt"})
    for file in folder.glob("*.json"):
        content = json.loads(file.read_text().replace("_scale_inv", "_scale"))
        if file.name == "config.json":
            block = {"strategy": "block", "block_structure": [128, 128], "num_bits": 8}
            content["quantization_config"] = {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": block}},
                "ignore": ["lm_head"],
            }
        file.write_text(json.dumps(content))
    config = moefp8.hf.pretrained_config(path="CHECKPOINT")
    model = _loaded("CHECKPOINT", config=config)
    model.save_pretrained("COPY")
    return config.quantization_config, _logits(model, device), Path("COPY")


@case
def experts_by_name(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    model = _loaded("ORIGINAL", experts_implementation="moefp8").to(device)
    logits = [_logits(model, device)]
    experts = model.model.layers[0].mlp.experts
    x, (ids, scores) = randn(5, 256, device=device), choices(5, 2, 8, device)
    with torch.no_grad():
        outputs = [
            moefp8.hf.experts_forward(
                module=experts, hidden_states=x, top_k_index=ids, top_k_weights=scores.to(BF16)
            ),
            moefp8.hf.fp8_experts_forward(experts, x, ids, scores),
        ]
    model.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_()
    model(_ids(device)).logits.float().square().mean().backward()
    model.set_experts_implementation("eager")
    return logits, outputs, _logits(model, device), model.model.embed_tokens.weight.grad


@case
def converted_in_memory(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    model = moefp8.convert(_loaded("ORIGINAL", dtype=BF16).to(device))
    model.save_pretrained("SAVED")
    logits = _logits(model, device)
    plain = moefp8.dequantize(model)
    plain.save_pretrained("PLAIN")
    return logits, _logits(plain, device), Path("SAVED"), Path("PLAIN/config.json").read_text()


@case
def trained(device: str) -> Any:
    """Adapters beside a loaded model; masters of another."""
    write_checkpoint("qwen3_moe")
    model = _loaded("CHECKPOINT", quantization_config=moefp8.hf.FP8Config()).to(device)
    names = moefp8.adapters.add_lora(model, rank=4, targets=["q_proj", "experts"])
    model(_ids(device)).logits.float().square().mean().backward()
    adapters = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    other = moefp8.convert(_loaded("ORIGINAL", dtype=BF16).to(device), trainable=True)
    other(_ids(device)).logits.float().square().mean().backward()
    layer = {name: x.grad for name, x in other.model.layers[1].named_parameters()}
    other.save_pretrained("SAVED")
    return names, adapters, layer, Path("SAVED")


@case
def generated(device: str) -> Any:
    write_checkpoint("deepseek_v3")
    model = _loaded("CHECKPOINT", quantization_config=moefp8.hf.FP8Config()).to(device)
    return model.generate(_ids(device), do_sample=False, max_new_tokens=4)


@case
def expert_parallel_alone(device: str) -> Any:
    if "ep_size" not in signature(DistributedConfig).parameters:
        return "transformers from 5.23 on has ep_size"
    write_checkpoint("deepseek_v3")
    with single_group(device):
        with torch.device("meta"):
            plan = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained("CHECKPOINT")
            ).tp_plan
        distributed = DistributedConfig(
            tp_size=1,
            ep_size=1,
            ep_implementation="moefp8",
            tp_plan=dict.fromkeys(plan, "replicate"),
        )
        model = _loaded(
            "CHECKPOINT",
            quantization_config=moefp8.hf.FP8Config(),
            distributed_config=distributed,
        )
        return _logits(model, device)


@case
def decoding_graphs(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    model = _loaded("CHECKPOINT", quantization_config=moefp8.hf.FP8Config()).to(device)
    graphs = moefp8.hf.DecodingGraphs(model=model, compile=False, max_graphs=2)
    ids = torch.arange(20, 40, device=device)[None]
    tokens = graphs.generate(ids, max_new_tokens=4, do_sample=False)
    refused = attempt(lambda: moefp8.hf.DecodingGraphs(model, max_graphs=0))
    return [tokens, graphs.num_graphs, refused]


@case
def errors(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    folder = Path("CHECKPOINT")
    fp8 = moefp8.hf.FP8Config
    outcomes = [
        attempt(lambda: fp8(skip=3)),
        attempt(lambda: fp8(weight_block_size=(64, 64))),
        attempt(lambda: fp8(dequantize=True)),
        attempt(lambda: fp8(no_such_keyword=1)),
        attempt(lambda: moefp8.hf.pretrained_config("ORIGINAL")),
        attempt(lambda: _loaded("ORIGINAL", quantization_config=fp8(skip="no_such_name"))),
        type(moefp8.hf.FP8Quantizer(quantization_config=fp8())).__name__,
    ]
    file = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(file)
    dropped = next(key for key in sorted(tensors) if key.endswith("_scale_inv"))
    del tensors[dropped]
    save_file(tensors, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][dropped]
    index.write_text(json.dumps(content))
    return [*outcomes, attempt(lambda: _loaded("CHECKPOINT", quantization_config=fp8()))]
