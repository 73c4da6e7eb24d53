"""The parts of `benchmarks.training`: who is timed at what."""

from collections.abc import Mapping

from benchmarks import gradient_peers
from benchmarks.gradient_parts import Part
from benchmarks.gradient_peers import COPY
from benchmarks.gradient_swiglu import SwigluOfExperts
from benchmarks.peers import OURS, Peer
from benchmarks.training import cases, kernels, peers
from benchmarks.training.cases import LayerStep, LinearStep
from benchmarks.training.kernels import Quantize, Wgrad

LINEARS, GROUPED, LAYERS = "linears", "grouped", "layers"
WGRAD, QUANTIZERS, SWIGLU = "wgrad", "quantizers", "activation_columns"

_QUANTIZERS: Mapping[str, Peer] = {
    OURS: Peer("moefp8", "codes", lambda operands: operands.quantize()),
    COPY: Peer("a copy", "codes", lambda operands: operands.copy()),
}
PARTS = {
    LINEARS: Part(
        "linears", "us", peers.LINEARS, {}, LinearStep.random, cases.LINEARS, is_step=True
    ),
    GROUPED: Part(
        "grouped linears", "us", peers.GROUPED, {}, LinearStep.random, cases.GROUPED, is_step=True
    ),
    LAYERS: Part(
        "expert layers with their router",
        "us",
        peers.LAYERS,
        {},
        LayerStep.random,
        cases.LAYERS,
        is_step=True,
    ),
    WGRAD: Part("dW alone", "tflops", kernels.WGRAD_PEERS, {}, Wgrad.random, kernels.WGRADS),
    QUANTIZERS: Part(
        "quantization", "gbps", _QUANTIZERS, {}, Quantize.random, kernels.QUANTIZE_CASES
    ),
    SWIGLU: Part(
        "gradient of SwiGLU, codes of rows and of columns",
        "gbps",
        gradient_peers.SWIGLUS,
        {},
        SwigluOfExperts.random,
        kernels.SWIGLUS,
    ),
}
# What can be asked for by one word.
GROUPS = {
    LINEARS: (LINEARS,),
    GROUPED: (GROUPED,),
    LAYERS: (LAYERS,),
    "kernels": (WGRAD, QUANTIZERS, SWIGLU),
}
