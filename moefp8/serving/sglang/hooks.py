"""Where SGLang makes FP8 layers, and what happens there.

The hooks leave parameters and dispatchers as SGLang makes them, and its weight loaders for what is
FP8; they replace what multiplies. Reloading weights, moving experts for load balance (EPLB) and
drafts of speculative decoding (MTP) therefore work as before.
"""

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..common import EXPERTS, LINEARS
from ..loaders import take_floats
from .experts import is_taken, register_runner, take_experts, why_not_experts
from .linear import take_linear, why_not_linear
from .model import begin_to_compile, decide, report

_FP8 = "sglang.srt.layers.quantization.fp8."


def _take_linear(result: None, method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """After a linear has its parameters."""
    if decide(layer, LINEARS, why_not_linear(method, layer)):
        take_linear(method)
        take_floats(layer, "weight")


def _take_experts(result: None, method: Any, layer: Any, moe_runner_config: Any) -> None:
    """After a MoE layer has its parameters and its runner."""
    if decide(layer, EXPERTS, why_not_experts(method, layer, moe_runner_config)):
        take_experts(method, moe_runner_config)
        for name in ("w13_weight", "w2_weight"):
            take_floats(layer, name)


def _apply_experts(
    original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any
) -> Any:
    """In place of a method that knows only SGLang's own runners."""
    if is_taken(method):
        return method.runner.run(dispatch_output, method.get_triton_quant_info(layer))
    return original(method, layer, dispatch_output)


def _model_is_made(model: Any, *args: Any, **kwargs: Any) -> None:
    begin_to_compile(model)


def _model_is_loaded(result: None, runner: Any) -> None:
    report(runner.model)


_HOOKS = {
    _FP8 + "Fp8LinearMethod.create_weights": (_take_linear, HookType.AFTER),
    _FP8 + "Fp8MoEMethod.create_moe_runner": (_take_experts, HookType.AFTER),
    _FP8 + "Fp8MoEMethod.apply": (_apply_experts, HookType.AROUND),
    "sglang.srt.model_loader.loader._initialize_model": (_model_is_made, HookType.AFTER),
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": (
        _model_is_loaded,
        HookType.AFTER,
    ),
}


def add_hooks() -> None:
    """Give SGLang the hooks, which it applies when all plug-ins are loaded.

    Raises ImportError or AttributeError for a place that this SGLang lacks: SGLang itself would
    log it and go on.
    """
    for target in _HOOKS:
        pkgutil.resolve_name(target)
    register_runner()
    for target, (hook, kind) in _HOOKS.items():
        HookRegistry.register(target, hook, kind)
