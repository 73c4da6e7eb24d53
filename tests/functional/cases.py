"""What the tests of the routed experts share: layers, and how gate and up are cut into tiles.

The module imports no more than `sanitizer` may need.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode

from moefp8.functional.experts import experts
from moefp8.kernels.common.activation import SWIGLU
from moefp8.kernels.registry import Op, as_in_schema
from moefp8.quant.quantize import quantize_128x128
from tests.kernels.gemm.cases import filled
from tests.layers.cases import assert_matches_up_to_codes
from tests.routing.cases import ids_of


class Weights(NamedTuple):
    """The weights of E experts, as the op takes them."""

    gate_up_proj: torch.Tensor
    gate_up_proj_scale_inv: torch.Tensor
    down_proj: torch.Tensor
    down_proj_scale_inv: torch.Tensor


def weights_of(num_experts: int, hidden_size: int, intermediate_size: int, device="cpu") -> Weights:
    """Random experts whose outputs are about as large as their inputs."""
    gate_up = torch.randn(num_experts, 2, intermediate_size, hidden_size, device=device)
    down = torch.randn(num_experts, hidden_size, intermediate_size, device=device)
    quantize = quantize_128x128.overload  # a fake GPU is not asked to quantize
    gate_up, gate_up_scales = quantize(gate_up * max(hidden_size, 1) ** -0.5, False)
    down, down_scales = quantize(down * max(intermediate_size, 1) ** -0.5, False)
    return Weights(gate_up.flatten(1, 2), gate_up_scales.flatten(1, 2), down, down_scales)


def tokens_of(num_tokens: int, hidden_size: int, device="cpu") -> torch.Tensor:
    """bf16 [T, H]; magnitudes differ from token to token."""
    sizes = torch.exp2(torch.randint(-3, 4, (num_tokens, 1), device=device))
    return (torch.randn(num_tokens, hidden_size, device=device) * sizes).bfloat16()


def inputs(
    num_tokens: int,
    hidden_size: int,
    top_k: int = 2,
    num_experts: int = 3,
    kind: str = "distinct",
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, ids, which are of a kind that `ids_of` knows, and top_k_weights."""
    x, ids = (
        tokens_of(num_tokens, hidden_size, device),
        ids_of(kind, num_tokens, top_k, num_experts),
    )
    return x, ids.to(device), torch.rand(num_tokens, top_k, device=device) + 0.1


def every_other(weights: Weights) -> Weights:
    """Experts 1, 3, ... where they lie; their scales lie in another order."""
    gate_up, gate_up_scales, down, down_scales = (x[1::2] for x in weights)
    of_down = down_scales.transpose(0, 2).contiguous().transpose(0, 2)
    return Weights(gate_up, gate_up_scales.mT.contiguous().mT, down, of_down)


def run(
    x,
    ids,
    top_k_weights,
    weights: Weights,
    activation=SWIGLU,
    masked=False,
    rank=(0, None),
    addend=None,
):
    """rank: the id of the first expert, and how many the whole model has; None: these."""
    return experts(x, ids, top_k_weights, *weights, activation, masked, *rank, addend)


def ids_here(ids: torch.Tensor, num_experts: int, expert_offset: int = 0) -> torch.Tensor:
    """Ids as experts are counted here; E is every other."""
    ids = ids.long()
    is_here = (ids >= expert_offset) & (ids < expert_offset + num_experts)
    return torch.where(is_here, ids - expert_offset, num_experts)


def body(
    x,
    ids,
    top_k_weights,
    weights: Weights,
    activation=SWIGLU,
    masked=False,
    rank=(0, None),
    addend=None,
):
    """What the op's body in PyTorch gives, on any device, of ids that are mapped by hand."""
    ids = ids_here(ids, weights.down_proj.shape[0], rank[0])
    arguments = x, ids, top_k_weights, *weights, activation, masked
    return run_body(experts, *arguments, 0, None, addend)


def run_body(op: Op, *arguments) -> torch.Tensor:
    """The op's body in PyTorch, on tensors of any device."""
    return op.overload.redispatch(DispatchKeySet(DispatchKey.CPU), *as_in_schema(arguments))


class Calls(TorchDispatchMode):
    """The arguments, by name, of all calls of an op of moefp8 in this context."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.came = f"moefp8::{name}", []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op._schema.name == self.name:
            defaults = {x.name: x.default_value for x in op._schema.arguments}
            self.came.append({**defaults, **dict(zip(defaults, args, strict=False))})
        return op(*args, **(kwargs or {}))


def assert_right(*arguments) -> torch.Tensor:
    """Check that `run` gives of them what `body` does, and return it."""
    y = run(*arguments)
    assert_matches_up_to_codes(y, body(*arguments))
    return y


# Tokens of experts: a tile, its rows, or the tail behind them begin to be too small. The last ones
# are few, and their tiles begin with tokens of others.
LOADS_AT_EDGES = 0, 1, 24, 63, 64, 65, 127, 128, 129, 151, 152, 153, 256, 257, 280, 281, 40, 24, 1


def ids_of_loads(loads: tuple[int, ...]) -> torch.Tensor:
    """int64 [T, 1]: so many tokens choose each expert, in any order."""
    experts = torch.arange(len(loads)).repeat_interleave(torch.tensor(loads))
    return experts[torch.randperm(len(experts))][:, None]


_down = partial(filled, grouped=True)
_gate_up = partial(_down, gate_up=True)
_FEW_OF_DOWN = {"k_blocks_per_stage": 2, "ctas_per_sm": 2, "swap_ab": True}
_FEW = {"parts": 2, **_FEW_OF_DOWN}
# Every family of kernels for gate and up.
GATE_UP_FAMILIES = {
    **{f"weights are rows, {n}": _gate_up(128, n, **_FEW) for n in (8, 16, 24, 32)},
    "two buffers": _gate_up(64, 128, num_product_buffers=2),
    "whole blocks": _gate_up(64, 256, parts=2),
    "whole blocks, two math groups": _gate_up(128, 256, parts=2),
    "two buffers, two math groups": _gate_up(128, 128, num_product_buffers=2),
    "two buffers, multicast": _gate_up(128, 128, num_product_buffers=2, multicast=2),
    "three math groups": _gate_up(192, 128),
    "a tail": _gate_up(128, 128, tail=24),
    "three math groups, multicast": _gate_up(192, 128, multicast=2),
}
# Every family that is chosen for down.
DOWN_FAMILIES = {
    **{f"weights are rows, {n}": _down(128, n, **_FEW_OF_DOWN) for n in (8, 16, 24, 32)},
    "two buffers": _down(64, 128, num_product_buffers=2),
    "two buffers, two math groups": _down(128, 128, num_product_buffers=2),
    "two buffers, multicast": _down(128, 128, num_product_buffers=2, multicast=2),
    "three math groups": _down(192, 128),
    "three math groups, multicast": _down(192, 128, multicast=2),
    "a tail": _down(128, 128, tail=24),
    "two parts": _down(128, 256, parts=2),
}
# (gate and up, down): one is a family; None stands for any.
EXPERTS_FAMILIES = {
    **{f"gate and up: {name}": (config, None) for name, config in GATE_UP_FAMILIES.items()},
    **{f"down: {name}": (None, config) for name, config in DOWN_FAMILIES.items()},
}
