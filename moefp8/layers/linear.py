"""`FP8Linear`: `nn.Linear` with FP8 weights and activations."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..functional.linear import linear
from ..functional.training.linear import linear as trained_linear
from ..functional.training.wgrad import Wgrad
from ..kernels import E4M3
from ..kernels.common.checks import FLOATS, check_rows_contiguous, check_tensor
from ..quant import BlockScaled, dequantize
from .module import attributes_repr, check_dtype, draw_as_linear, frozen_parameter
from .parts import note_parts, parts_of_plain, without_padding
from .trainable import TrainableModule, check_own_weights, check_whole, master_parameter


class FP8Linear(TrainableModule):
    """`y = x @ dequantize(weight).T + bias`, with FP8 operands and FP32 accumulation.

    Activations are quantized to 1x128 blocks on the way in; the result is rounded to BF16, then
    cast to the dtype of `x`. Gradients flow to `x`, by an FP8 GEMM with the transposed weight, and
    to the bias. The weight is frozen codes, or with `trainable` a master weight that has a
    gradient, too, by an FP8 GEMM.

    Args:
        in_features, out_features: K and N, any sizes.
        bias, dtype: whether there is a bias, and its dtype: bf16, fp16 or fp32; the weight has it,
            too, if it is trainable.
        device: as in `nn.Linear`; "meta" allocates nothing.
        keep_transposed: whether the transposed weight, which gradients are made with, is kept on a
            GPU once it was needed. True takes 1 more byte for each weight; with False every
            backward transposes again; None keeps it if a quarter of the GPU's memory is free then.
            Beside a master weight, codes of both are kept: 2 bytes for each weight.
        trainable: whether the weight is a master weight, of which codes are made for each value
            that it has; `freeze` and `unfreeze` change that.
        wgrad: how its gradient is computed, at once or after `unfreeze`, see `TrainableModule`.
        batch_invariant: whether a row of the output has the same bits however many rows there are.
            On a Hopper GPU sums over K are then never divided among CTAs, which they may be up to
            512 rows where that is faster; elsewhere sums of 128 products are exact, in FP64. See
            `set_batch_invariant` for all layers of a model.

    Attributes:
        weight: e4m3 [N, K], or the master weight.
        weight_scale_inv: fp32 [ceil(N/128), ceil(K/128)], multiplies to dequantize; None beside a
            master weight.
        bias: [N] or None.
        rows_before, columns_before: how many rows and columns of zeros `shard` put in front of
            weight (and bias), so that blocks begin where they did.
    """

    fp8_names = ("weight",)
    fp32_names = ("weight_scale_inv",)
    master_names = ("weight",)
    rows_before = columns_before = 0
    keep_transposed: bool | None = None
    batch_invariant = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        keep_transposed: bool | None = None,
        trainable: bool = False,
        wgrad: Wgrad = "128x1",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        if trainable:
            check_dtype("FP8Linear", dtype)
        self.keep_transposed, self.wgrad = keep_transposed, wgrad
        self.batch_invariant = batch_invariant
        self.in_features, self.out_features = in_features, out_features
        self.bias = frozen_parameter((out_features,), device, dtype) if bias else None
        if trainable:
            weight = master_parameter((out_features, in_features), device, dtype)
            self._train_master(weight, wgrad)
        else:
            self.weight = frozen_parameter((out_features, in_features), device, E4M3)
            grid = self.weight_format.grid(out_features, in_features)
            self.weight_scale_inv = frozen_parameter(grid, device)
        self.reset_parameters()

    def _train_master(self, weight: nn.Parameter, wgrad: Wgrad) -> None:
        self._hold_master_weights({"weight": weight}, wgrad)
        if self.bias is not None:
            self.bias.requires_grad_()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weight and bias as `nn.Linear` does, and quantize the weight if frozen."""
        if self.weight.is_meta:
            return
        if self.trainable:
            draw_as_linear(self.weight, self.in_features)
        else:
            values = torch.empty(self.weight.shape, dtype=torch.float32, device=self.weight.device)
            self._assign(*self.weight_format.quantize(draw_as_linear(values, self.in_features)))
        if self.bias is not None:
            draw_as_linear(self.bias, self.in_features)

    @torch.no_grad()
    def _assign(self, data: torch.Tensor, scale_inv: torch.Tensor) -> None:
        self.weight.copy_(data)
        self.weight_scale_inv.copy_(scale_inv)

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, *, trainable: bool = False, wgrad: Wgrad = "128x1"
    ) -> "FP8Linear":
        """Quantize the weight of `linear`, which is not changed; the bias is shared with it.

        trainable: the weight is shared, too, and stays the parameter that it is: an optimizer that
            has it keeps working.

        Raises TypeError unless it is an `nn.Linear` whose weight is bf16, fp16 or fp32, ValueError
        if rows of a master weight are not contiguous.
        """
        op = "FP8Linear.from_linear"
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{op}: expected nn.Linear, got {type(linear)}")
        check_tensor(op, "weight", linear.weight, FLOATS, 2)
        layer = cls(linear.weight.shape[1], linear.weight.shape[0], bias=False, device="meta")
        if not trainable:
            layer._quantize_from(linear.weight.detach())
            layer._share_bias(linear.bias)
            return layer.train(linear.training)
        check_rows_contiguous(op, "weight", linear.weight)
        layer._hold_master_weights({"weight": linear.get_parameter("weight")}, wgrad)
        layer.bias = linear.bias
        return layer.train(linear.training)

    @torch.no_grad()
    def _quantize_from(self, weight: torch.Tensor) -> None:
        """Take codes of weight [N, K], on its device."""
        data, scale_inv = self.weight_format.quantize(weight)
        self._hold_codes({"weight": data, "weight_scale_inv": scale_inv})

    def _share_bias(self, bias: torch.Tensor | None) -> None:
        """Hold that bias, in a parameter that asks for no gradient."""
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[out_features, in_features]: `weight * weight_scale_inv` in FP32, rounded to dtype.

        The zeros that `shard` put in front are left out. Raises TypeError unless dtype is bf16,
        fp16 or fp32.
        """
        check_dtype("FP8Linear.dequantize", dtype)
        if self.weight_scale_inv is None:
            return self.weight.detach().to(dtype, copy=True)
        q = BlockScaled(self.weight.detach(), self.weight_scale_inv.detach())
        return without_padding(self, "weight", dequantize(q, dtype))

    @torch.no_grad()
    def to_linear(self, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
        """An `nn.Linear` with the dequantized weight; this module is not changed.

        Weight and bias have dtype and ask for gradients. One rank's part stays one rank's part.
        """
        bias = None
        if self.bias is not None:
            own = without_padding(self, "bias", self.bias.detach())
            bias = nn.Parameter(own.to(dtype, copy=True))
        return self._linear_of(nn.Parameter(self.dequantize(dtype)), bias)

    def sharing_plain(self) -> nn.Linear:
        """An `nn.Linear` that holds this master weight itself, and the bias, if of its dtype."""
        bias, dtype = self.bias, self.weight.dtype
        if bias is not None and bias.dtype != dtype:
            bias = nn.Parameter(bias.detach().to(dtype), bias.requires_grad)
        return self._linear_of(self.weight, bias)

    def _linear_of(self, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = weight
        linear.register_parameter("bias", bias)
        note_parts(linear, parts_of_plain(self))
        return linear.train(self.training)

    @torch.no_grad()
    def freeze(self) -> "FP8Linear":
        """Quantize a master weight in place; the bias asks for no gradient any more."""
        if self.trainable:
            check_whole("FP8Linear.freeze", self)
            check_own_weights("FP8Linear.freeze", self)
            self._quantize_from(self.weight.detach())
            if self.bias is not None:
                self.bias.requires_grad_(False).grad = None  # else an optimizer would move it
        return self

    @torch.no_grad()
    def unfreeze(
        self, dtype: torch.dtype = torch.bfloat16, *, wgrad: Wgrad | None = None
    ) -> "FP8Linear":
        """Make a master weight of the codes, in place; it and the bias ask for gradients.

        A bias of another dtype becomes a new parameter of this one.
        """
        if not self.trainable:
            check_whole("FP8Linear.unfreeze", self)
            check_dtype("FP8Linear.unfreeze", dtype)
            if self.bias is not None and self.bias.dtype != dtype:
                self.bias = nn.Parameter(self.bias.detach().to(dtype))
            self._train_master(nn.Parameter(self.dequantize(dtype)), wgrad or self.wgrad)
        elif wgrad is not None:
            self.wgrad = wgrad
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., K] bf16, fp16 or fp32 -> [..., N] in the dtype of `x`.

        Raises ValueError for another width; `backward()` raises NotImplementedError if a frozen
        weight asks for a gradient.
        """
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"FP8Linear: the last dimension of x must be in_features = {self.in_features}, "
                f"got shape {list(x.shape)}"
            )
        is_matrix = x.ndim == 2
        rows = x if is_matrix else x.reshape(math.prod(x.shape[:-1]), self.in_features)
        if self.columns_before:
            rows = F.pad(rows, (self.columns_before, 0))
        weight, scale_inv, bias = map(self._look_up, ("weight", "weight_scale_inv", "bias"))
        if scale_inv is None:
            y = trained_linear(
                "FP8Linear",
                rows,
                weight,
                bias,
                self.wgrad,
                reuse_codes=self.training,
                batch_invariant=self.batch_invariant,
            )
        else:
            y = linear(
                "FP8Linear",
                rows,
                weight,
                scale_inv,
                bias,
                self.keep_transposed,
                batch_invariant=self.batch_invariant,
            )
        if self.rows_before:
            y = y[:, self.rows_before :]
        if not is_matrix:
            y = y.view(*x.shape[:-1], self.out_features)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def extra_repr(self) -> str:
        has_bias = self.bias is not None
        names = ["trainable"] + ["wgrad"] * self.trainable
        names += ["batch_invariant"] * self.batch_invariant
        sizes = attributes_repr(self, "in_features", "out_features")
        return f"{sizes}, bias={has_bias}, {attributes_repr(self, *names)}"
