"""Where vLLM asks for the method of an FP8 layer, and what it gets from us."""

from importlib.metadata import version
from typing import Any

from vllm import envs
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from vllm.platforms import current_platform

from ..common import EXPERTS
from ..loaders import cut_problem, take_floats
from .experts import MoEFP8ExpertsMethod
from .linear import MoEFP8LinearKernel
from .model import ServedModel


class MoEFP8Config(Fp8Config):
    """vLLM's FP8 config; MoE layers that fit have our method, others that of vLLM."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        method: Any = super().get_quant_method(layer, prefix)
        if type(method) is Fp8LinearMethod:
            _take_floats_of_linears(method)
        if type(method) is not Fp8MoEMethod:
            return method
        served = ServedModel.current()
        if reason := MoEFP8ExpertsMethod.why_not(method, layer):
            served.leave(EXPERTS, reason)
            return method
        return MoEFP8ExpertsMethod(self, layer, served)


def _take_floats_of_linears(method: Fp8LinearMethod) -> None:
    """Let linears that run on moefp8 take weights in 16 and 32 bits.

    vLLM chooses how a linear loads weights by the name of its method's class, which has to stay.
    """
    create = method.create_weights

    def create_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
        create(layer, *args, **kwargs)
        if isinstance(method.fp8_linear, MoEFP8LinearKernel):
            take_floats(layer, "weight", _why_no_floats(layer))

    method.create_weights = create_weights


def _why_no_floats(layer: Any) -> str | None:
    """Why a linear cannot be quantized before vLLM cuts it, or None."""
    k, n = layer.input_size_per_partition, sum(layer.logical_widths)
    is_of_rank = (k, n) != (layer.input_size, layer.output_size)
    return cut_problem(layer.logical_widths, k, is_of_rank=is_of_rank)


def register_layers() -> None:
    """Put our classes before vLLM's own; calling it twice changes nothing.

    vLLM has no public way to add a kernel for linears with blocks of scales. It keeps compiled
    graphs on disk by the values of its environment variables, and a graph has calls of our linears
    or of its own: so it gets one variable more, our version.
    """
    envs.environment_variables["MOEFP8_VLLM"] = lambda: version("moefp8")
    register_quantization_config("fp8")(MoEFP8Config)
    kernels = _POSSIBLE_FP8_BLOCK_KERNELS.setdefault(current_platform._enum, [])
    if MoEFP8LinearKernel not in kernels:
        kernels.insert(0, MoEFP8LinearKernel)
