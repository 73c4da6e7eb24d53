"""Parts that records of routed experts share: their tensors, and GEMMs of experts' rows.

T tokens, k choices each, E experts, H hidden, I intermediate, R rows.
"""

from typing import NamedTuple, Protocol

import torch

from ..kernels.common.blocks import E4M3, TMA_BYTES, num_blocks
from ..kernels.common.tma_operands import fitting, with_strides_of
from ..kernels.gemm.interface import Config, GateUp, GroupLayout, GroupsOfTokens
from ..kernels.gemm.sizes import Sizes, mean_load
from ..kernels.program import Codes, Place, Record, Tensor, Word, layouts
from ..quant.weight_format import tile_scales
from ..routing.dispatch import Dispatched
from .expert_biases import BiasGradients

# Timed at 1 to 32 tokens of whole layers and ranks of five models on an H200: first weights are
# prefetched by a guess if there is a choice for every eighth expert.
_MAX_EXPERTS_PER_CHOICE = 8


class Choices(NamedTuple):
    """The router's choices: int32 or int64 ids [T, k], and their scores [T, k]."""

    ids: Tensor
    scores: Tensor


class ExpertWeights(NamedTuple):
    """Codes and scales of all experts, which TMA can address, and their biases.

    gate, up: [E, I, H], of one layout. down: [E, H, I].
    gate_up_bias: [E, 2I], gate first. down_bias: [E, H]. Both are contiguous.
    """

    gate: Codes
    up: Codes
    down: Codes
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class TransposedWeights(NamedTuple):
    """Codes and scales of W_down^T [E, I, H] and W_gate_up^T [E, H, 2 I], which TMA can address.
    Gate and up begin at multiples of 128."""

    down: Codes
    gate_up: Codes


class Combine(Protocol):
    """Replaces `describe_combine`, which sums the rows of each token. It is hashable; equal ones
    describe the same step."""

    def describe(
        self,
        r: Record,
        y: Tensor,
        token_to_row: Place,
        weights: Tensor,
        out: Tensor,
        *,
        grad_weights: Place | None,
        word: Word,
    ) -> None:
        """Add the step to r.

        y, token_to_row, weights: as in `describe_combine`.
        out: a tensor at the address that the kernel takes for its output.
        grad_weights: fp32 [T, k], the gradients of scores in a backward; else None.
        word: a number for the kernel, which may differ from call to call.
        """


def describe_rows_gemm(
    r: Record,
    config: Config,
    a: Codes,
    b: Codes,
    d: Tensor,
    sizes: Sizes,
    dispatched: Dispatched,
    *,
    follows_dispatch: bool,
    bias: Tensor | None = None,
    gate_up: GateUp | None = None,
) -> None:
    """Add the GEMM of the rows of all experts to r.

    bias: [E, N]; with gate_up [E, 2N], gate first; contiguous.
    follows_dispatch: it is the first of two GEMMs, so the step right before it writes its bounds.
        Each of the two has its own tile counter.
    """
    maps, num_experts = dispatched.maps, sizes.num_experts
    groups = GroupsOfTokens(
        GroupLayout.MASKED if sizes.masked else GroupLayout.OFFSETS,
        maps.tokens_per_expert if sizes.masked else maps.expert_offsets,
        num_experts,
        num_experts,
        expected_tokens(sizes) if follows_dispatch else 0,
        bounds_ready=not follows_dispatch,
    )
    shape = d.shape[1], d.shape[2]
    if r.target.gemms.takes_tiles(config, sizes, shape, groups):
        counter = dispatched.tile_counters.after(0 if follows_dispatch else 4)
        groups = groups._replace(tile_counter=counter)
    _, load = mean_load(sizes)
    r.target.gemms.describe(r, config, a, b, d, load, bias=bias, groups=groups, gate_up=gate_up)


def expected_tokens(sizes: Sizes) -> int:
    """A guess of the tokens of an expert; 0: too few experts are chosen for a guess to be right."""
    num_choices = sizes.num_tokens * sizes.top_k
    if num_choices * _MAX_EXPERTS_PER_CHOICE < sizes.num_to_choose_from:
        return 0
    return mean_load(sizes)[1]


def results_layout(name: str, shape: tuple[int, int], alignment: int) -> Tensor:
    """The layout of a contiguous bf16 result."""
    return Tensor(shape, (shape[1], 1), torch.bfloat16, Place(name), alignment)


# ---- Contiguous tensors, for records that are made from sizes only ----


BiasDtypes = tuple[torch.dtype | None, torch.dtype | None]


class CallTensors(NamedTuple):
    """The contiguous tensors of a call: their dtypes and alignment.

    dtype: of the tokens, or of their gradients; e4m3 if they have scales.
    scores: the dtype of the scores.
    is_aligned: whether tokens and results are at multiples of 16 bytes.
    saved: the dtype of gate and up, saved for a backward; None: they are not saved.
    biases: the dtypes of the biases of gate and up, and of down; None: there is none.
    """

    dtype: torch.dtype = torch.bfloat16
    scores: torch.dtype = torch.float32
    is_aligned: bool = True
    saved: torch.dtype | None = None
    biases: BiasDtypes = (None, None)

    def tokens(self, name: str, sizes: Sizes) -> Tensor:
        x = Tensor.contiguous(name, sizes.num_tokens, sizes.hidden_size, dtype=self.dtype)
        return x if self.is_aligned else x._replace(alignment=self.dtype.itemsize)

    def results(self, name: str, sizes: Sizes) -> Tensor:
        shape = sizes.num_tokens, sizes.hidden_size
        return results_layout(name, shape, TMA_BYTES if self.is_aligned else 2)

    def scales(self, name: str, sizes: Sizes) -> Tensor | None:
        """The scales of tokens; None if these are not codes."""
        if self.dtype != E4M3:
            return None
        shape = sizes.num_tokens, num_blocks(sizes.hidden_size)
        return Tensor.contiguous(name, *shape, dtype=torch.float32)

    def choices(self, sizes: Sizes) -> Choices:
        shape = sizes.num_tokens, sizes.top_k
        ids = Tensor.contiguous("ids", *shape, dtype=torch.int64)
        return Choices(ids, Tensor.contiguous("scores", *shape, dtype=self.scores))

    def saved_tensors(self, sizes: Sizes) -> tuple[Tensor, Tensor | None]:
        """Gate and up of all rows, and their scales; None if they are not codes."""
        rows, i = sizes.num_tokens * sizes.top_k, sizes.intermediate_size
        if self.saved != E4M3:
            return Tensor.contiguous("saved", rows, 2, i), None
        scales = Tensor.contiguous("saved_scales", num_blocks(i), 2 * rows, dtype=torch.float32)
        return Tensor.contiguous("saved", 2 * rows, i, dtype=E4M3), scales.mT

    def weights(self, sizes: Sizes) -> ExpertWeights:
        """The weights of the inputs "gate", "up" and "down", and their biases."""
        e, h, i = sizes[2:5]
        gate, up = (Codes.contiguous(name, e, i, h) for name in ("gate", "up"))
        down, gate_up_bias = Codes.contiguous("down", e, h, i), None
        if (dtype := self.biases[0]) is not None:
            gate_up_bias = Tensor.contiguous("gate_up_bias", e, 2 * i, dtype=dtype)
        return ExpertWeights(gate, up, down, gate_up_bias, self._down_bias(sizes))

    def bias_gradients(self, sizes: Sizes) -> BiasGradients:
        """The bias of down, and the gradients of all biases."""
        e, h, i = sizes[2:5]
        widths = {"grad_gate_up_bias": 2 * i, "grad_down_bias": h}
        gradients = [
            None if dtype is None else Tensor.contiguous(name, e, width, dtype=torch.float32)
            for (name, width), dtype in zip(widths.items(), self.biases, strict=True)
        ]
        return BiasGradients(self._down_bias(sizes), *gradients)

    def _down_bias(self, sizes: Sizes) -> Tensor | None:
        if (dtype := self.biases[1]) is None:
            return None
        shape = sizes.num_experts, sizes.hidden_size
        return Tensor.contiguous("down_bias", *shape, dtype=dtype)


BF16_CALL = CallTensors()


# ---- The tensors of a call ----

Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # see `ExpertsInputs`


class Weights(NamedTuple):
    """The weights of all experts, gate and up separate: e4m3 matrices and their fp32 scales."""

    gate: torch.Tensor  # [E, I, H]
    gate_scale_inv: torch.Tensor
    up: torch.Tensor
    up_scale_inv: torch.Tensor
    down: torch.Tensor  # [E, H, I]
    down_scale_inv: torch.Tensor


def split_weights(projections: Projections) -> Weights:
    """Views of gate, up and down, and of the scales of their tiles."""
    gate_up, gate_up_scale_inv, down, down_scale_inv = projections
    gate, up = gate_up.chunk(2, 1)
    gate_scales, up_scales = gate_up_scale_inv.chunk(2, 1)
    return Weights(
        gate=gate,
        gate_scale_inv=tile_scales(gate, gate_scales),
        up=up,
        up_scale_inv=tile_scales(up, up_scales),
        down=down,
        down_scale_inv=tile_scales(down, down_scale_inv),
    )


def fitting_weights(weights: Weights) -> Weights:
    """Each weight itself, or a copy that TMA can address."""
    gate = fitting(weights.gate)
    return weights._replace(
        gate=gate, up=with_strides_of(gate, weights.up), down=fitting(weights.down)
    )


def weights_layout(
    weights: Weights,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> ExpertWeights:
    """The layouts of the weights and biases of a call."""
    gate, gate_scales, up, up_scales, down, down_scales = weights
    return ExpertWeights(
        Codes.of(gate, gate_scales, "gate"),
        Codes.of(up, up_scales, "up"),
        Codes.of(down, down_scales, "down"),
        **layouts(gate_up_bias=gate_up_bias, down_bias=down_bias),
    )
