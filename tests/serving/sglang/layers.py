"""Layers that SGLang makes, and loads as checkpoints are.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moefp8 import FP8Linear, GroupedExperts
from tests.serving.sglang import engine

T, TOP_K, E, H, I = 7, 2, 4, 256, 384


def make_linear(**options: Any) -> Any:
    from sglang.srt.layers.linear import ReplicatedLinear

    blocks = {"quant_config": engine.config(), "params_dtype": torch.bfloat16, "bias": False}
    return ReplicatedLinear(H, 128, **(blocks | options))


def make_experts(**options: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    blocks = {"quant_config": engine.config(), "params_dtype": torch.bfloat16}
    return FusedMoE(E, H, I, 0, TOP_K, **(blocks | options))


def experts_of(made: Any, reference: GroupedExperts) -> Any:
    """Load the experts of `reference` into a FusedMoE, by its own loaders, as checkpoints are."""
    i, blocks = reference.intermediate_size, reference.gate_up_proj_scale_inv.shape[1] // 2
    for expert in range(reference.num_experts):
        for name, stack, half in (
            ("weight", reference.gate_up_proj, i),
            ("weight_scale_inv", reference.gate_up_proj_scale_inv, blocks),
        ):
            w13, w2 = getattr(made, f"w13_{name}"), getattr(made, f"w2_{name}")
            down = reference.down_proj if half == i else reference.down_proj_scale_inv
            w13.weight_loader(w13, stack[expert, :half], f"w13_{name}", "w1", expert)
            w13.weight_loader(w13, stack[expert, half:], f"w13_{name}", "w3", expert)
            w2.weight_loader(w2, down[expert], f"w2_{name}", "w2", expert)
    made.quant_method.process_weights_after_loading(made)
    return made


def fused_moe(reference: GroupedExperts, **options: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    sizes = reference.num_experts, reference.hidden_size, reference.intermediate_size
    blocks = {"quant_config": engine.config(), "prefix": "experts"}
    made = FusedMoE(*sizes, 0, TOP_K, params_dtype=torch.bfloat16, **(blocks | options))
    return experts_of(made, reference)


def linear(made: Any, reference: FP8Linear) -> Any:
    """Load a linear as checkpoints are."""
    for name in ("weight", "weight_scale_inv", "bias"):
        parameter, value = getattr(made, name), getattr(reference, name)
        if value is not None:
            parameter.weight_loader(parameter, value)
    made.quant_method.process_weights_after_loading(made)
    return made


def tokens() -> torch.Tensor:
    return torch.randn(T, H).bfloat16()


def choices() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 [T, k] and scores fp32 [T, k]."""
    scores, ids = torch.rand(T, E).softmax(1).topk(TOP_K)
    return ids.int(), scores


def run(made: Any, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    y: torch.Tensor = made(x, StandardTopKOutput(scores, ids, torch.zeros(T, E)))
    return y


def log_line(caplog: pytest.LogCaptureFixture, *layers: Any) -> str:
    """What is logged when a model of these layers is loaded."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    caplog.clear()
    with caplog.at_level(logging.INFO, "moefp8"):
        ModelRunner.load_model(SimpleNamespace(model=nn.ModuleList(layers)))
    (record,) = [x for x in caplog.records if x.name.startswith("moefp8")]
    return re.sub(r"; \d+ kernels for .*", "", record.getMessage())  # which a GPU needs
