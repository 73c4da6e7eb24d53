"""What a rank does with a model whose experts lie on all ranks, and what one process does."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import moefp8.hf


def load(path: Path, *, is_fp8: bool = False, **options: Any) -> PreTrainedModel:
    """distributed: of `DistributedConfig`; on a whole process there is none."""
    if options.get("distributed") is not None:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(**options["distributed"])
    options.pop("distributed", None)
    if is_fp8:
        options["quantization_config"] = moefp8.hf.FP8Config()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)


def shared(path: Path, **options: Any) -> dict[str, Any]:
    """Two ranks with one batch, and with whole linears."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    sizes = {"tp_size": 2, "ep_size": 2, "ep_implementation": "moefp8"}
    return {**sizes, "tp_plan": dict.fromkeys(model.tp_plan, "replicate"), **options}


OWN = {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "moefp8"}  # each rank has its own batch


def logits(path: Path, ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    model = load(path, **options)
    with torch.no_grad():
        return model(ids).logits


def trained(path: Path, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of some weights."""
    model = load(path, **options)
    y = model(ids).logits
    y.float().square().mean().backward()
    found = {"logits": y.detach()}
    kinds = "embed", "gate.weight", "down_proj", "q_proj"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and any(kind in name for kind in kinds):
            grad: Any = parameter.grad
            found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found
