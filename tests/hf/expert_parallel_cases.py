"""What a rank does with a model whose experts lie on all ranks, and what one process does."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import moefp8.hf  # noqa: F401


def load(path: Path, **options: Any) -> PreTrainedModel:
    distributed = options.pop("distributed", None)
    if distributed is not None:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(**distributed)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)


def logits(path: Path, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    model = load(path, **options)
    with torch.no_grad():
        return model(ids).logits


def trained(path: Path, ids: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """logits, and gradients of some weights."""
    model = load(path, **options)
    y = model(ids).logits
    y.float().square().mean().backward()
    found = {"logits": y.detach()}
    for name, p in model.named_parameters():
        if p.grad is not None and any(x in name for x in ("embed", "gate.weight", "down_proj", "q_proj")):
            found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    return found


def call(function: Any, path: Path, ids: torch.Tensor, options: dict[str, Any]) -> Any:
    return function(path, ids, **options)
