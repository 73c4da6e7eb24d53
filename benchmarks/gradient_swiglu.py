"""The gradient of SwiGLU in codes of rows and of columns, beside a copy of as many bytes.

Operands tell what those of `benchmarks.gradient_cases` tell.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks.gradient_cases import Results, error_of
from benchmarks.peers import OURS
from moefp8.functional.activation import activate_grad, empty_gate_up
from moefp8.functional.training.activation_columns import (
    ActivationColumnsGradients,
    ActivationColumnsInputs,
    activation_columns_backward,
)
from moefp8.kernels import E4M3, num_blocks, round_up
from moefp8.kernels.common.activation import SWIGLU
from moefp8.quant import BlockScaled, dequantize, quantize_1x128


class SwigluCase(NamedTuple):
    """Tokens of each of some experts, a multiple of 128, and I.

    saved_dtype: of gate and up. blocks: as in `ActivationColumnsInputs`.
    """

    num_experts: int
    tokens: int
    size: int
    saved_dtype: torch.dtype = torch.bfloat16
    blocks: bool = False

    def __str__(self) -> str:
        saved = "E4M3" if self.saved_dtype == E4M3 else "BF16"
        blocks = ", blocks of w a" if self.blocks else ""
        return f"{self.num_experts} x {self.tokens} tokens of {self.size}, saved in {saved}{blocks}"


# DeepSeek-V3 (32 local experts), Qwen3-30B-A3B, Mixtral 8x7B.
SWIGLU_CASES = tuple(
    SwigluCase(*sizes, dtype, blocks)
    for sizes in ((32, 1024, 2048), (128, 512, 768), (8, 4096, 14336))
    for dtype in (torch.bfloat16, E4M3)
    for blocks in (False, True)
)


@dataclass(frozen=True)
class SwigluOfExperts:
    case: SwigluCase
    inputs: ActivationColumnsInputs
    bytes: torch.Tensor  # half as many as are moved

    @classmethod
    def random(cls, case: SwigluCase, device: str = "cuda") -> "SwigluOfExperts":
        """Each row has a choice of its own, of tokens with eight, in any order."""
        num_rows, size = case.num_experts * case.tokens, case.size
        grad = torch.randn(num_rows, size, device=device).mul_(2.0**-20).bfloat16()
        gate_up = empty_gate_up(grad, num_rows, size).copy_(
            torch.randn(num_rows, 2, size, device=device, dtype=torch.bfloat16)
        )
        scales = None
        if case.saved_dtype == E4M3:
            gate_up, scales = quantize_1x128(gate_up.flatten(0, 1))
        offsets = torch.arange(case.num_experts + 1, device=device) * case.tokens
        rows = torch.randperm(num_rows, device=device).view(-1, 8).int()
        weights = torch.rand(rows.shape, device=device)
        inputs = ActivationColumnsInputs(
            grad, gate_up, scales, offsets.int(), rows, weights, SWIGLU, case.blocks
        )
        moved = _bytes_moved(inputs)
        return cls(case, inputs, torch.ones(moved // 2, dtype=torch.uint8, device=device))

    def differentiate(self) -> Results:
        """Blocks that no expert has, one behind each, are left out."""
        codes, scale_inv, *columns, of_weights, is_first = activation_columns_backward(*self.inputs)
        of_experts = (x.unflatten(0, (self.case.num_experts, -1))[:, :-1] for x in columns)
        return Results((codes, scale_inv, *of_experts, of_weights, is_first))

    def copy(self) -> Results:
        return Results((self.bytes.clone(),))

    @property
    def work(self) -> dict[str, float]:
        """Bytes that are read and written."""
        return {"gbps": 2 * self.bytes.numel() / 1e3}

    @property
    def num_bytes(self) -> int:
        return 2 * self.bytes.numel()

    def errors(self, results: dict[str, Results]) -> dict[str, dict[str, float]]:
        """Of the first expert, against FP32; a copy has 0 if it is one."""
        return {
            name: self._errors(found) if name == OURS else {"error": differs(found[0], self.bytes)}
            for name, found in results.items()
        }

    def _errors(self, results: Results) -> dict[str, float]:
        found, (num_rows, size) = ActivationColumnsGradients(*results), self.inputs.grad.shape
        end = self.case.tokens
        gate_up = self.inputs.gate_up
        if self.inputs.gate_up_scale_inv is None:
            gate_up = gate_up[:end].float()
        else:
            some = BlockScaled(gate_up[: 2 * end], self.inputs.gate_up_scale_inv[: 2 * end])
            gate_up = dequantize(some).view(end, 2, size)
        weights = self.inputs.top_k_weights.new_empty(num_rows)
        weights[self.inputs.token_to_row.flatten().long()] = self.inputs.top_k_weights.flatten()
        weights, grad = weights[:end, None], self.inputs.grad[:end].float()
        *of_halves, activated = activate_grad(grad, *gate_up.float().unbind(1))
        of_gate_up = torch.stack(of_halves, 1) * weights[:, None]
        rows = dequantize(BlockScaled(found.codes[:end], found.scale_inv[:end])).float()
        of_rows = (grad * activated).sum(1)
        is_here = self.inputs.token_to_row < end
        of_choices = of_rows[self.inputs.token_to_row[is_here].long()]
        columns = values_of_columns(found.gate_up_columns[0], found.gate_up_scale_inv[0], end)
        of_activated = values_of_columns(
            found.activated_columns[0], found.activated_scale_inv[0], end
        )
        return {
            "error": error_of(rows.view(end, 2, -1)[..., :size], of_gate_up),
            "error_of_columns": error_of(columns, of_gate_up.flatten(1)),
            "error_of_activated": error_of(of_activated, weights * activated),
            "error_of_weights": error_of(found.grad_weights[is_here], of_choices),
        }


def _bytes_moved(inputs: ActivationColumnsInputs) -> int:
    """Elements that are read, codes and scales that are written, in whole column blocks."""
    tensors = inputs.grad, inputs.gate_up, inputs.gate_up_scale_inv
    read = sum(x.numel() * x.element_size() for x in tensors if x is not None)
    num_rows, size = inputs.grad.shape
    padded = 2 * round_up(size, 128)
    codes = num_rows * (padded + 3 * size)
    column_scales = num_blocks(num_rows) * (
        2 * size + (num_blocks(size) if inputs.blocks else size)
    )
    return read + codes + 4 * (num_blocks(num_rows * padded) + column_scales)


def values_of_columns(data: torch.Tensor, scale_inv: torch.Tensor, num_rows: int) -> torch.Tensor:
    """fp32 [rows, features] of column codes [B, features, 128], whose rows are of one expert."""
    features = data.shape[1]
    if scale_inv.shape[1] != features:  # one for 128 of them
        scale_inv = scale_inv.repeat_interleave(128, 1)[:, :features]
    values = data.float() * scale_inv[..., None]
    return values.transpose(1, 2).flatten(0, 1)[:num_rows]


def differs(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(not torch.equal(actual, expected))
