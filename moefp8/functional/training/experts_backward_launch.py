"""Launch the gradients of trained experts on a Hopper GPU: kernels in a row.

T tokens, k choices each, E experts, H hidden, I intermediate, R = T k rows.

1. `routing/dispatch.cu` plans the routing as the forward did, quantizes the gradient of every token
   once, and copies it to its rows.
2. `gemm.cu` with W_down^T.
3. `swiglu_columns.cu`: the weights of choices, d[gate | up] in codes of rows and of columns, w a in
   codes of columns.
4. `gemm.cu` with W_gate_up^T, and `routing/combine.cu`: the gradient of each token.
5. `columns.cu` with the gradients of tokens, and `k_grouped.cu`: the gradient of W_down.
6. `columns.cu` with the tokens, and `k_grouped.cu`: the gradient of W_gate_up.

None waits for the host, and all that lies between them is in one workspace.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.common.blocks import (
    BLOCK,
    MIN_GRADIENT_AMAX,
    TMA_BYTES,
    num_blocks,
    round_up,
)
from ...kernels.common.prepared import Launches, layout_of
from ...kernels.common.tma_operands import fits
from ...kernels.gemm.config import GroupLayout
from ...kernels.gemm.k_grouped import output_of
from ...kernels.gemm.k_grouped.config import choose_config
from ...kernels.gemm.k_grouped.launch import KGroupedOperands, KGroupedSources, prepare_k_grouped
from ...kernels.gemm.launch import GemmSources, GroupsOfTokens, prepare_gemm
from ...kernels.gemm.tuned import ConfigSource, config_source_of
from ...kernels.jit import Launch, Source, current_driver
from ...quant.columns import empty_columns, num_column_blocks
from ...quant.columns_launch import ColumnsSources, prepare_columns, readable
from ...routing.combine_launch import CombineSources, prepare_combine
from ...routing.dispatch_launch import DispatchSources, most_count_bytes, prepare_dispatch
from ...routing.plan_launch import RoutingSources
from ..expert_configs import Sizes, backward_configs, mean_load
from ..experts_launch import expected_tiles, takes_tiles
from ..swiglu import saved_as_read
from ..workspace import Memory, backward_operands_of, scale_pitch
from .swiglu_columns_launch import SwigluColumnsSources, prepare_swiglu_columns

_OP = "trained_experts_backward"


class Tensors(NamedTuple):
    """The tensors of a call, in the order of its addresses.

    grad: [T, H]. hidden_states: [T, H]. ids, weights: [T, k].
    gate_up: bf16 [R, 2, I], or codes e4m3 [2R, I] with gate_up_scale_inv.
    down, gate_up_proj: codes of W^T, e4m3 [E, I, H] and [E, H, 2 (I rounded up to 128)], and their
        scales.
    of_down, of_gate_up: bf16 or fp32 [E, H, I] and [E, 2I, H], which gradients of weights go to.
    dx: bf16 [T, H]. of_weights: fp32 [T, k].
    """

    grad: torch.Tensor
    hidden_states: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scale_inv: torch.Tensor | None
    down: torch.Tensor
    down_scale_inv: torch.Tensor
    gate_up_proj: torch.Tensor
    gate_up_proj_scale_inv: torch.Tensor
    of_down: torch.Tensor | None
    of_gate_up: torch.Tensor | None
    dx: torch.Tensor
    of_weights: torch.Tensor


class Options(NamedTuple):
    """accumulate: whether of_down, and of_gate_up, are added to."""

    limit: float | None
    expert_offset: int
    num_global_experts: int | None
    blocks: bool
    accumulate: tuple[bool, bool]


def launch_backward(
    check: Callable[[], object], tensors: Tensors, num_experts: int, options: Options
) -> None:
    """All gradients on the current stream; nothing waits for them.

    check: raises if the tensors are wrong; called for layouts that are new. There is at least one
    choice, and no size is 0.
    """
    tensors = _as_kernels_read(tensors)
    driver = current_driver()
    key = (
        _OP,
        tuple([None if x is None else (layout_of(x), x.data_ptr() % 16) for x in tensors]),
        num_experts,
        options,
        driver.max_sms,
    )
    found = driver.prepared().get(key)
    if found is None:
        check()
        found = driver.keep(key, _Preparation(tensors, num_experts, options).launches())
    addresses = tuple([0 if x is None else x.data_ptr() for x in tensors])
    found(tensors.grad.get_device(), addresses)


def _as_kernels_read(tensors: Tensors) -> Tensors:
    """The tensors themselves, or copies of those that lie otherwise."""
    gate_up, scales = saved_as_read(tensors.gate_up, tensors.gate_up_scale_inv)
    grad = tensors.grad if tensors.grad.stride(1) == 1 else tensors.grad.contiguous()
    return tensors._replace(
        grad=readable(grad),
        hidden_states=readable(tensors.hidden_states),
        gate_up=gate_up,
        gate_up_scale_inv=scales,
    )


_Columns = tuple[torch.Tensor, torch.Tensor, Source, Source]  # data, scales and their places


class _Preparation:
    """The launches for one layout of the tensors."""

    def __init__(self, tensors: Tensors, num_experts: int, options: Options) -> None:
        (num_tokens, h), top_k = tensors.hidden_states.shape, tensors.ids.shape[1]
        i = tensors.gate_up.shape[-1]
        rank = options.num_global_experts
        self.sizes = Sizes(num_tokens, top_k, num_experts, h, i, False, rank)
        self.tensors, self.options = tensors, options
        self.num_rows = num_tokens * top_k
        self.at = {name: Source(i) for i, name in enumerate(Tensors._fields)}
        self.memory = memory = Memory(Source(len(Tensors._fields)))
        rows, pitch = self.num_rows, scale_pitch(self.num_rows)
        self.offsets = memory.take(4 * num_experts + 4)
        self.to_row, self.is_first = memory.take(4 * rows), memory.take(4 * rows)
        self.to_token = memory.take(4 * max(rows, num_experts))
        self.counters = memory.take(8)
        self.of_activated = memory.take(max(rows * round_up(i, 8) * 2, self._count_bytes()))
        self.gate_up = memory.take(rows * 2 * round_up(i, BLOCK))
        self.gate_up_scales = memory.take(2 * num_blocks(i) * pitch * 4)
        # The rows of gradients give way to those of results, which are larger.
        self.rows = memory.take(rows * max(round_up(h, 16), round_up(h, 8) * 2))
        self.row_scales = memory.take(num_blocks(h) * pitch * 4)
        self.of_gate_up = self._take_columns(2 * i, blocks=False)
        self.activated = self._take_columns(i, blocks=options.blocks)
        # The columns of gradients give way to those of tokens.
        self.columns = self._take_columns(h, blocks=False)

    def _count_bytes(self) -> int:
        return most_count_bytes(*self.sizes[:3])

    def _take_columns(self, features: int, *, blocks: bool) -> _Columns:
        count = num_column_blocks(self.num_rows, self.sizes.num_experts)
        data, scales = empty_columns(count, features, torch.device("meta"), blocks=blocks)
        place = self.memory.take(data.nbytes)
        return data, scales, place, self.memory.take(count * scales.stride(0) * 4)

    def launches(self) -> Launches:
        first, second = self._gemms(config_source_of(self.tensors.grad.get_device()))
        listed = [*self._dispatch(), first, *self._swiglu(), second, self._combine()]
        grad, x = self.tensors.grad, self.tensors.hidden_states
        accumulate, at = self.options.accumulate, self.at
        if self.tensors.of_down is not None:
            of_y = self._gather(grad, at["grad"], blocks=False)
            to = self.tensors.of_down, at["of_down"]
            listed += [of_y[0], self._wgrad(of_y[1], self.activated, to, accumulate[0])]
        if self.tensors.of_gate_up is not None:
            of_x = self._gather(x, at["hidden_states"], blocks=self.options.blocks)
            to = self.tensors.of_gate_up, at["of_gate_up"]
            listed += [of_x[0], self._wgrad(self.of_gate_up, of_x[1], to, accumulate[1])]
        return Launches(listed, self.memory.size)

    def _dispatch(self) -> tuple[Launch, ...]:
        h, at = self.sizes.hidden_size, self.at
        routing = RoutingSources(
            ids=at["ids"],
            tokens_per_expert=self.to_token,  # it is not yet in use
            expert_offsets=self.offsets,
            token_to_row=self.to_row,
        )
        return prepare_dispatch(
            self.tensors.grad,
            self.tensors.ids,
            self.sizes.num_experts,
            None,
            row_pitch=round_up(h, 16),
            scale_pitch=scale_pitch(self.num_rows),
            sources=DispatchSources(
                x=at["grad"],
                rows=self.rows,
                row_scales=self.row_scales,
                counts=self.of_activated,  # it is not yet in use
                zeros=self.counters,
                routing=routing,
            ),
            expert_offset=self.options.expert_offset,
            min_amax=MIN_GRADIENT_AMAX,
        )

    def _gemms(self, configs: ConfigSource) -> tuple[Launch, Launch]:
        sizes, sms, tensors, at = self.sizes, configs.sms, self.tensors, self.at
        (_, load), weights = mean_load(sizes), tensors[6:10]
        of_down, of_gate_up = backward_operands_of(sizes, weights)
        given = (
            (of_down, (self.rows, self.row_scales), ("down", "down_scale_inv"), self.of_activated),
            (
                of_gate_up,
                (self.gate_up, self.gate_up_scales),
                ("gate_up_proj", "gate_up_proj_scale_inv"),
                self.rows,
            ),
        )
        made = []
        pair = backward_configs(configs, sizes)
        for place, (config, (operands, a, b, d)) in enumerate(zip(pair, given, strict=True)):
            tiles = expected_tiles(config, sizes) if place == 0 else 0
            of_groups = GroupsOfTokens(
                GroupLayout.OFFSETS, sizes.num_experts, tiles, bounds_ready=place > 0
            )
            takes = takes_tiles(config, sizes, operands, of_groups, sms)
            counter = self.counters._replace(plus=self.counters.plus + 4 * place)
            sources = GemmSources(
                a=a[0],
                a_scale_inv=a[1],
                b=at[b[0]],
                b_scale_inv=at[b[1]],
                d=d,
                bounds=self.offsets,
                tile_counter=counter if takes else None,
            )
            made.append(prepare_gemm(config, operands, sources, sms, load, groups=of_groups))
        return made[0], made[1]

    def _swiglu(self) -> list[Launch]:
        tensors, at, i = self.tensors, self.at, self.sizes.intermediate_size
        limit = self.options.limit
        sums = self.memory.take(num_blocks(i) * self.num_rows * 4)
        return prepare_swiglu_columns(
            tensors.gate_up,
            tensors.gate_up_scale_inv,
            tensors.weights,
            self.sizes.num_experts,
            math.inf if limit is None else limit,
            grad_row_pitch=round_up(i, 8),
            scale_pitch=scale_pitch(self.num_rows),
            sources=SwigluColumnsSources(
                grad=self.of_activated,
                saved=at["gate_up"],
                saved_scales=None if tensors.gate_up_scale_inv is None else at["gate_up_scale_inv"],
                expert_offsets=self.offsets,
                token_to_row=self.to_row,
                weights=at["weights"],
                rows=self.gate_up,
                row_scales=self.gate_up_scales,
                gate_up_columns=self.of_gate_up[2],
                gate_up_scales=self.of_gate_up[3],
                activated_columns=self.activated[2],
                activated_scales=self.activated[3],
                of_weights=at["of_weights"],
                is_first=self.is_first,
                weight_of_row=self.memory.take(self.num_rows * 4),
                partial_sums=sums,
                row_to_token=self.to_token,
            ),
            blocks=self.options.blocks,
        )

    def _combine(self) -> Launch:
        h, dx = self.sizes.hidden_size, self.at["dx"]
        return prepare_combine(
            self.tensors.dx.new_empty(self.tensors.ids.shape, dtype=torch.float32),
            h,
            y_row_pitch=round_up(h, 8),
            is_aligned=self.tensors.dx.data_ptr() % 16 == 0,
            sources=CombineSources(self.rows, self.to_row, self.is_first, dx),
            programmatic=True,
        )

    def _gather(self, x: torch.Tensor, source: Source, *, blocks: bool) -> tuple[Launch, _Columns]:
        """Column codes of tokens, in the rows of their experts."""
        data, _, *places = self.columns
        count = len(data)
        _, scales = empty_columns(count, x.shape[1], torch.device("meta"), blocks=blocks)
        launch = prepare_columns(
            x,
            self.num_rows,
            self.sizes.num_experts,
            count,
            scales.stride(0),
            False,
            MIN_GRADIENT_AMAX,
            ColumnsSources(
                x=source,
                data=places[0],
                scale_inv=places[1],
                expert_offsets=self.offsets,
                row_to_token=self.to_token,
            ),
            blocks=blocks,
            programmatic=True,
        )
        return launch, (data, scales, places[0], places[1])

    def _wgrad(
        self, a: _Columns, b: _Columns, to: tuple[torch.Tensor, Source], accumulates: bool
    ) -> Launch:
        d, place = to
        config = choose_config(
            *d.shape[1:],
            output_of(d, accumulates),
            blocks_b=b[1].shape[1] != b[0].shape[1],
            d_fits=fits(d) and d.shape[2] * d.element_size() % TMA_BYTES == 0,
        )
        sources = KGroupedSources(a[2], a[3], b[2], b[3], place, self.offsets)
        sms = config_source_of(d.get_device()).sms
        operands = KGroupedOperands(a[0], a[1], b[0], b[1], d)
        return prepare_k_grouped(config, operands, sources, sms, BLOCK * len(a[0]))
