"""`GroupedExperts`: the routed experts of a MoE layer, in FP8.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ..functional.expert_biases import BIASES, bias_shapes
from ..functional.experts import ExpertsInputs, check_saved_dtype, routed_experts
from ..functional.training.experts import trainable_experts
from ..functional.training.wgrad import Wgrad, check_wgrad
from ..kernels import E4M3
from ..kernels.common.activation import Activation, activation_of
from ..kernels.common.checks import (
    FLOATS,
    check_group_bias,
    check_rows_contiguous,
    check_same_device,
    check_tensor,
)
from ..quant import BlockScaled, dequantize
from .conversion.plain import PlainExperts
from .module import attributes_repr, check_dtype, draw_as_linear, frozen_parameter
from .parts import note_parts, parts_of_plain, without_padding
from .trainable import TrainableModule, check_own_weights, check_whole, master_parameter

ExpertLayout = Literal["auto", "contiguous", "masked"]
Matrices = torch.Tensor | list[torch.Tensor]  # E of them
# `moefp8.distributed` adds a function that spreads experts over a mesh's ranks: (experts, mesh).
PARALLELIZERS: list[Callable[["GroupedExperts", Any], None]] = []
WEIGHTS = "gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"


class GroupedExperts(TrainableModule):
    """E gated experts with FP8 weights: `down(silu(gate(x)) * up(x))`, weighted and summed.

    A drop-in for the experts modules of transformers 5: same names, shapes and forward. Gradients
    flow to hidden states, `top_k_weights` and `addend`. Weights are frozen codes, or with
    `trainable` master weights that have gradients, too, by FP8 GEMMs.

    Args:
        num_experts, hidden_size, intermediate_size: E (those held here), H and I, any sizes.
        activation: "swiglu", "geglu", "geglu_tanh", "gpt_oss", or an `Activation`.
        swiglu_limit: the limit of any activation: it clamps gate from above and up on both sides.
        layout: of rows between the GEMMs on a GPU; no result depends on it. "contiguous" packs
            them; "masked" gives every expert T rows, and takes 0 to 9 % longer for up to 128 tokens
            and up to twice as long for 1024 (H200). So "auto" is contiguous.
        device: as in `nn.Linear`; "meta" allocates nothing.
        keep_transposed: as in `FP8Linear`.
        saved_dtype: in which gate and up of each choice are saved for a backward: bf16 takes 4 I
            bytes for each of a token's k choices, e4m3 (with 1x128 scales) 2 I.
        trainable, wgrad: as in `FP8Linear`.
        bias, dtype: whether gate, up and down have biases; the dtype of these, and of master
            weights: bf16, fp16 or fp32.

    Attributes:
        expert_offset, num_global_experts: the id of its first expert, and how many the whole model
            has, by which tiles are chosen on a GPU; 0 and None unless `shard` left a part.
        parallel: how tokens travel to the experts of other ranks, which
            `moefp8.distributed.ExpertParallel` sets; None: they do not.
        gate_up_proj: e4m3 [E, 2I, H], gate rows first; or the master weights, as down_proj, and
            then there are no scales.
        gate_up_proj_scale_inv: fp32 [E, 2 * ceil(I/128), ceil(H/128)]; gate and up are cut into
            blocks separately, as checkpoints do.
        down_proj: e4m3 [E, H, I].
        down_proj_scale_inv: fp32 [E, ceil(H/128), ceil(I/128)].
        gate_up_proj_bias, down_proj_bias: [E, 2I], gate first, and [E, H], or None. They have
            gradients if they ask for them, in either form.
    """

    fp8_names = ("gate_up_proj", "down_proj")
    fp32_names = ("gate_up_proj_scale_inv", "down_proj_scale_inv")
    master_names = ("gate_up_proj", "down_proj")
    halved_names = ("gate_up_proj",)
    runs_in_steps = False  # as those with adapters do: each step is an op of its own
    expert_offset = 0
    num_global_experts: int | None = None
    parallel: Any = None
    keep_transposed: bool | None = None
    saved_dtype = torch.bfloat16
    is_rearranged = False  # whether `convert` turned stacks, which keep their names, see `Stacks`
    gate_up_proj: nn.Parameter
    gate_up_proj_scale_inv: nn.Parameter
    down_proj: nn.Parameter
    down_proj_scale_inv: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str | Activation = "swiglu",
        swiglu_limit: float | None = None,
        layout: ExpertLayout = "auto",
        device: torch.device | str | None = None,
        keep_transposed: bool | None = None,
        saved_dtype: torch.dtype = torch.bfloat16,
        trainable: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        wgrad: Wgrad = "128x1",
        bias: bool = False,
    ) -> None:
        super().__init__()
        check_saved_dtype("GroupedExperts", saved_dtype)
        check_wgrad("GroupedExperts", wgrad)
        self.keep_transposed, self.saved_dtype = keep_transposed, saved_dtype
        self.wgrad = wgrad
        if layout not in ("auto", "contiguous", "masked"):
            raise ValueError(
                f"GroupedExperts: layout must be 'auto', 'contiguous' or 'masked', got {layout!r}"
            )
        e, h, i = num_experts, hidden_size, intermediate_size
        self.num_experts, self.hidden_size, self.intermediate_size = e, h, i
        self.activation = activation_of("GroupedExperts", activation, swiglu_limit)
        self.layout: ExpertLayout = layout
        if trainable or bias:
            check_dtype("GroupedExperts", dtype)
        for name, size in bias_shapes(e, h, i).items():
            self.register_parameter(name, frozen_parameter(size, device, dtype) if bias else None)
        if trainable:
            shapes = self._code_shapes()
            weights = {x: master_parameter(shapes[x], device, dtype) for x in self.master_names}
            self._train_masters(weights, wgrad)
        else:
            for name, shape in self._code_shapes().items():
                setattr(self, name, frozen_parameter(shape, device, _code_dtype(name)))
        self.reset_parameters()

    def _code_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of codes and scales, by the names of `WEIGHTS`."""
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        gate_up_grid = self.weight_format.grid(2 * i, h, parts=2)
        down_grid = self.weight_format.grid(h, i)
        shapes = (e, 2 * i, h), (e, *gate_up_grid), (e, h, i), (e, *down_grid)
        return dict(zip(WEIGHTS, shapes, strict=True))

    def _train_masters(self, weights: dict[str, nn.Parameter], wgrad: Wgrad) -> None:
        self._hold_master_weights(weights, wgrad)
        for bias in self.biases.values():
            bias.requires_grad_()

    @property
    def biases(self) -> dict[str, nn.Parameter]:
        """The biases that there are, by name."""
        held = {name: self._parameters.get(name) for name in BIASES}
        return {name: x for name, x in held.items() if x is not None}

    @property
    def swiglu_limit(self) -> float | None:
        """The limit of `activation`."""
        return self.activation.limit

    @swiglu_limit.setter
    def swiglu_limit(self, limit: float | None) -> None:
        self.activation = self.activation._replace(limit=limit)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every projection as `nn.Linear` does, and quantize it, one expert at a time."""
        widths = {"gate_up_proj_bias": self.hidden_size, "down_proj_bias": self.intermediate_size}
        for name, bias in self.biases.items():
            if not bias.is_meta:
                draw_as_linear(bias, widths[name])
        if self.trainable:
            if not self.down_proj.is_meta:
                for weight in (self.gate_up_proj, self.down_proj):
                    draw_as_linear(weight, weight.shape[2])
            return
        held = {name: self.get_parameter(name) for name in WEIGHTS}
        for expert in range(0 if self.gate_up_proj.is_meta else self.num_experts):
            gate_up, down = (
                draw_as_linear(torch.empty_like(x[0], dtype=torch.float32), x.shape[2])
                for x in (self.gate_up_proj, self.down_proj)
            )
            self._quantize_expert(expert, (gate_up,), down, held)

    @torch.no_grad()
    def _quantize_from(self, gate_up: Sequence[Matrices], down: Matrices) -> None:
        """Take codes of weights, on their device.

        gate_up: one stack [E, 2I, H], gate rows first, or gate and up [E, I, H]; down: [E, H, I].
        """
        device = down.device if isinstance(down, torch.Tensor) else down[0].device
        codes = {
            name: torch.empty(shape, dtype=_code_dtype(name), device=device)
            for name, shape in self._code_shapes().items()
        }
        for expert in range(0 if device.type == "meta" else self.num_experts):
            self._quantize_expert(expert, [x[expert] for x in gate_up], down[expert], codes)
        self._hold_codes(codes)

    @torch.no_grad()
    def _quantize_expert(
        self,
        expert: int,
        gate_up: Sequence[torch.Tensor],
        down: torch.Tensor,
        codes: Mapping[str, torch.Tensor],
    ) -> None:
        """Quantize gate_up, [2I, H] or two [I, H], and down [H, I] into the slots of `codes`."""
        rows = gate_up[0] if len(gate_up) == 1 else torch.cat([*gate_up])
        halves = rows.view(2, self.intermediate_size, self.hidden_size)
        data, scale_inv = self.weight_format.quantize(halves)
        codes["gate_up_proj"][expert].copy_(data.flatten(0, 1))
        codes["gate_up_proj_scale_inv"][expert].copy_(scale_inv.flatten(0, 1))
        data, scale_inv = self.weight_format.quantize(down)
        codes["down_proj"][expert].copy_(data)
        codes["down_proj_scale_inv"][expert].copy_(scale_inv)

    @classmethod
    @torch.no_grad()
    def from_weights(
        cls,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        *,
        activation: str | Activation = "swiglu",
        swiglu_limit: float | None = None,
        layout: ExpertLayout = "auto",
        trainable: bool = False,
        wgrad: Wgrad = "128x1",
        gate_up_proj_bias: torch.Tensor | None = None,
        down_proj_bias: torch.Tensor | None = None,
    ) -> "GroupedExperts":
        """Quantize stacked weights: gate_up_proj [E, 2I, H], gate first, and down_proj [E, H, I].

        trainable: they are the master weights themselves, and parameters stay what they are.
        gate_up_proj_bias, down_proj_bias: [E, 2I], gate first, and [E, H], which are shared, or
            None.

        Raises TypeError unless they are bf16, fp16 or fp32, ValueError if shapes do not fit, or
        rows of master weights are not contiguous.
        """
        op = "GroupedExperts.from_weights"
        check_tensor(op, "gate_up_proj", gate_up_proj, FLOATS, 3)
        check_tensor(op, "down_proj", down_proj, FLOATS, 3)
        _check_stacks(op, gate_up_proj.shape, down_proj.shape)
        options: dict[str, Any] = {"activation": activation, "swiglu_limit": swiglu_limit}
        options |= {"layout": layout, "wgrad": wgrad}
        experts = cls(*down_proj.shape, device="meta", **options)
        biases = dict(zip(BIASES, (gate_up_proj_bias, down_proj_bias), strict=True))
        for name, shape in bias_shapes(*down_proj.shape).items():
            if (bias := biases[name]) is not None:
                check_group_bias(op, name, bias, shape, "[E, N]")
        check_same_device(op, down_proj=down_proj, **biases)
        experts._share_biases(biases, trainable=trainable)
        if trainable:
            weights = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
            for name, x in weights.items():
                check_rows_contiguous(op, name, x)
            made = {
                name: x if isinstance(x, nn.Parameter) else nn.Parameter(x)
                for name, x in weights.items()
            }
            experts._hold_master_weights(made, wgrad)
            return experts
        experts._quantize_from((gate_up_proj,), down_proj)
        return experts

    def _share_biases(
        self, biases: Mapping[str, torch.Tensor | None], *, trainable: bool = False
    ) -> None:
        """Hold these biases; if not trainable in parameters that ask for no gradient."""
        for name, bias in biases.items():
            if bias is None or (trainable and isinstance(bias, nn.Parameter)):
                held = bias
            else:
                held = nn.Parameter(bias.detach(), requires_grad=trainable)
            self.register_parameter(name, held)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (gate_up_proj [E, 2I, H], down_proj [E, H, I]), like `FP8Linear.dequantize`."""
        check_dtype("GroupedExperts.dequantize", dtype)
        if self.trainable:
            weights = self.gate_up_proj.detach(), self.down_proj.detach()
            return weights[0].to(dtype, copy=True), weights[1].to(dtype, copy=True)
        gate_up, down = (
            torch.empty(x.shape, dtype=dtype, device=x.device)
            for x in (self.gate_up_proj, self.down_proj)
        )
        for expert in range(0 if down.is_meta else self.num_experts):
            halves, scales, *down_codes = (self._look_up(name)[expert] for name in WEIGHTS)
            q = BlockScaled(*(x.unflatten(0, (2, len(x) // 2)) for x in (halves, scales)))
            gate_up[expert] = dequantize(q, dtype).flatten(0, 1)
            down[expert] = dequantize(BlockScaled(*down_codes), dtype)
        gate_up = without_padding(self, "gate_up_proj", gate_up)
        return gate_up, without_padding(self, "down_proj", down)

    def check_alone(self, op: str, name: str = "the module") -> None:
        """Raise ValueError if other ranks have experts to which tokens travel from here."""
        if self.parallel is not None and self.num_global_experts is not None:
            raise ValueError(
                f"{op}: {name} has experts on other ranks, and what takes its place would send "
                "them no tokens; load the whole model into one process, without expert_parallel"
            )

    @torch.no_grad()
    def to_plain(self, dtype: torch.dtype = torch.bfloat16) -> PlainExperts:
        """`PlainExperts` with the dequantized weights, otherwise as `FP8Linear.to_linear`."""
        own = {name: without_padding(self, name, x.detach()) for name, x in self.biases.items()}
        biases = {name: nn.Parameter(x.to(dtype, copy=True)) for name, x in own.items()}
        gate_up, down = map(nn.Parameter, self.dequantize(dtype))
        return self._plain_of(gate_up, down, biases)

    def sharing_plain(self) -> PlainExperts:
        """`PlainExperts` that hold these master weights themselves, and biases of their dtype."""
        dtype, biases = self.down_proj.dtype, self.biases
        for name, bias in biases.items():
            if bias.dtype != dtype:
                biases[name] = nn.Parameter(bias.detach().to(dtype), bias.requires_grad)
        return self._plain_of(self.gate_up_proj, self.down_proj, biases)

    def _plain_of(
        self, gate_up_proj: nn.Parameter, down_proj: nn.Parameter, biases: dict[str, nn.Parameter]
    ) -> PlainExperts:
        self.check_alone("dequantize")
        experts = PlainExperts(*down_proj.shape, activation=self.activation, device="meta")
        experts.gate_up_proj, experts.down_proj = gate_up_proj, down_proj
        for name, bias in biases.items():
            experts.register_parameter(name, bias)
        note_parts(experts, parts_of_plain(self))
        experts.expert_offset = self.expert_offset
        experts.num_global_experts = self.num_global_experts
        return experts.train(self.training)

    @torch.no_grad()
    def freeze(self) -> "GroupedExperts":
        """Quantize the master weights in place; biases ask for no gradient any more."""
        if self.trainable:
            check_whole("GroupedExperts.freeze", self)
            check_own_weights("GroupedExperts.freeze", self)
            gate_up, down = self.gate_up_proj.detach(), self.down_proj.detach()
            sizes = self.num_experts, self.hidden_size, self.intermediate_size
            if down.shape != sizes:
                raise ValueError(
                    f"GroupedExperts.freeze: down_proj must be [E, H, I] = {list(sizes)}, got "
                    f"{list(down.shape)}"
                )
            _check_stacks("GroupedExperts.freeze", gate_up.shape, down.shape)
            self._quantize_from((gate_up,), down)
            for bias in self.biases.values():
                bias.requires_grad_(False).grad = None  # else an optimizer would move it
        return self

    @torch.no_grad()
    def unfreeze(
        self, dtype: torch.dtype = torch.bfloat16, *, wgrad: Wgrad | None = None
    ) -> "GroupedExperts":
        """Make master weights of the codes, in place; they and the biases ask for gradients.

        Biases of another dtype become new parameters of this one.
        """
        if not self.trainable:
            check_whole("GroupedExperts.unfreeze", self)
            weights = map(nn.Parameter, self.dequantize(dtype))
            made = dict(zip(self.master_names, weights, strict=True))
            for name, bias in self.biases.items():
                if bias.dtype != dtype:
                    self.register_parameter(name, nn.Parameter(bias.detach().to(dtype)))
            self._train_masters(made, wgrad or self.wgrad)
        elif wgrad is not None:
            self.wgrad = wgrad
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run every token through its experts.

        Args:
            hidden_states: [T, H] bf16, fp16 or fp32, or [..., H] with T rows in all. NaN and Inf
                stay in their own token's row.
            top_k_index: int32 or int64 [T, k], in [0, E]; E marks an expert held elsewhere, which
                counts with score 0. Ids are checked on the CPU; on a GPU others count as E too.
                A part that `shard` left takes the ids of the whole model.
            top_k_weights: [T, k] bf16, fp16 or fp32.
            addend: bf16 [T, H], or in the shape of `hidden_states`; it is added to the result in
                BF16, before the cast to another dtype of `hidden_states`. So for BF16 it equals an
                addition after the layer to the bit.

        Returns:
            A tensor in the shape and dtype of `hidden_states`, rounded to BF16 on the way.

        With `parallel`, tokens are those of this rank, and results as `ExpertParallel` says.

        Raises TypeError or ValueError for other inputs; `backward()` raises NotImplementedError if
        a frozen weight asks for a gradient.
        """
        if self.parallel is not None:  # it also reports errors to the other ranks
            exchanged: torch.Tensor = self.parallel(
                self, hidden_states, top_k_index, top_k_weights, addend
            )
            return exchanged
        if hidden_states.ndim != 2 and hidden_states.ndim:
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            added = {} if addend is None else {"addend": addend.reshape(-1, addend.shape[-1])}
            y = self.forward(rows, top_k_index, top_k_weights, **added)
            return y.view(hidden_states.shape)
        return self.compute(hidden_states, top_k_index, top_k_weights, addend)

    def compute(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` of tokens [T, H] with the experts held here, whatever other ranks hold."""
        tokens = hidden_states, top_k_index, top_k_weights
        options = self.activation, self.layout == "masked"
        rank = self.expert_offset, self.num_global_experts
        held = self._parameters
        biases = [held[x] if x in held else getattr(self, x) for x in BIASES]
        if self.trainable:
            weights = map(self._look_up, self.master_names)
            master: tuple[Any, ...] = (*tokens, *weights, *biases, *options, *rank, addend)
            y = trainable_experts(
                "GroupedExperts", master, self.saved_dtype, self.wgrad, reuse_codes=self.training
            )
            return y if y.dtype == hidden_states.dtype else y.to(hidden_states.dtype)
        weights = map(self._look_up, WEIGHTS)
        args: tuple[Any, ...] = (*tokens, *weights, *options, *rank, addend, None, *biases)
        inputs = ExpertsInputs(*args)
        y = routed_experts("GroupedExperts", inputs, self.saved_dtype, self.keep_transposed)
        return y if y.dtype == hidden_states.dtype else y.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        sizes = "num_experts", "hidden_size", "intermediate_size"
        activation = () if self.activation.kind == "swiglu" else ("activation",)
        trained = ("wgrad",) if self.trainable else ()
        names = *sizes, *activation, "swiglu_limit", "layout", "trainable", *trained
        return attributes_repr(self, *names) + (", bias=True" if self.biases else "")


def _code_dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith("_scale_inv") else E4M3


def _check_stacks(op: str, gate_up: Sequence[int], down: Sequence[int]) -> None:
    """Raise ValueError unless the shapes are [E, 2I, H] and [E, H, I]; name what is transposed."""

    def turned(shape: Sequence[int]) -> tuple[int, ...]:
        return (shape[0], *reversed(shape[1:]))

    def fit(gate_up: Sequence[int], down: Sequence[int]) -> bool:
        e, h, i = down
        return tuple(gate_up) == (e, 2 * i, h)

    if fit(gate_up, down):
        return
    names: tuple[str, ...] = ()
    if fit(gate_up, turned(down)):
        names = ("down_proj",)
    elif fit(turned(gate_up), down):
        names = ("gate_up_proj",)
    elif fit(turned(gate_up), turned(down)):
        names = "gate_up_proj", "down_proj"
    ways = " and ".join(f"{name}.transpose(1, 2)" for name in names)
    raise ValueError(
        f"{op}: gate_up_proj must be [E, 2I, H], gate rows first, and down_proj [E, H, I], got "
        f"{list(gate_up)} and {list(down)}" + (f", transposed; pass {ways}" if ways else "")
    )
