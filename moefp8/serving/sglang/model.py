"""A model that SGLang makes: which layers run on moefp8, and their kernels, compiled ahead."""

import logging
import time
from typing import Any
from weakref import WeakKeyDictionary

from sglang.srt.runtime_context import get_model, get_parallel, get_schedule
from torch import nn

from ..common import LINEARS, CompileAhead, line
from .linear import is_batch_invariant

logger = logging.getLogger(__name__)

# Of each FP8 layer: what it is, in the plural, and why it stays with SGLang; None: it does not.
_decisions: WeakKeyDictionary[nn.Module, tuple[str, str | None]] = WeakKeyDictionary()
_compilers: WeakKeyDictionary[nn.Module, CompileAhead] = WeakKeyDictionary()


def decide(layer: nn.Module, kind: str, reason: str | None) -> bool:
    """Note where a layer runs; return whether on moefp8. kind: what it is, in the plural."""
    _decisions[layer] = kind, reason
    return reason is None


def max_tokens() -> int:
    """The most tokens of one call of a layer, as the server's options say."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size
    if not chunk or chunk < 0:  # a whole prompt at once
        chunk = max(schedule.max_prefill_tokens, get_model().context_length or 0)
    return int(chunk) * int(get_parallel().attn_dp_size)  # ranks of attention bring tokens together


def begin_to_compile(model: nn.Module) -> CompileAhead | None:
    """Begin to compile what the layers of a model need; None if nothing runs on a GPU."""
    ours = _layers_on_moefp8(model)
    if not ours or next(ours[0].parameters()).device.type != "cuda":
        return None
    if model not in _compilers:
        _compilers[model] = CompileAhead(
            max_tokens(), ours[0].params_dtype, batch_invariant=is_batch_invariant()
        )
        ask(_compilers[model], model)
    return _compilers[model]


def ask(compiler: CompileAhead, model: nn.Module) -> None:
    """Let `compiler` begin with each layer that runs on moefp8."""
    for layer in _layers_on_moefp8(model):
        if _decisions[layer][0] == LINEARS:
            bias = getattr(layer, "bias", None)
            n, k = layer.weight.shape
            compiler.linear(n, k, None if bias is None else bias.dtype)
            continue
        config = layer.moe_runner_config
        e, h, i = layer.w2_weight.shape
        if config.top_k is not None:  # else only calls show it, and the first one compiles
            compiler.experts(e, h, i, top_k=config.top_k, num_global_experts=config.num_experts)


def _layers_on_moefp8(model: nn.Module) -> list[Any]:
    return [x for x in model.modules() if _decisions.get(x, (None, "no FP8 layer"))[1] is None]


def report(model: nn.Module) -> None:
    """Wait for the kernels of a model that is loaded, and log what runs where, and why."""
    decisions = [_decisions[layer] for layer in model.modules() if layer in _decisions]
    text = line(type(model).__name__, "SGLang", decisions)
    started = time.perf_counter()
    if compiler := begin_to_compile(model):
        num_kernels, seconds = compiler.wait(), time.perf_counter() - started
        text += (
            f"; {num_kernels} kernels for up to {compiler.max_tokens} tokens are compiled, "
            f"for which loading waited {seconds:.1f} s"
        )
    if get_parallel().tp_rank == 0:
        logger.info("%s", text)
