"""Dense FP8 GEMM: d = dequantize(a) @ dequantize(b).T + bias, in BF16."""

from functools import partial
from typing import NamedTuple

import torch

from ..common.blocks import BLOCK, e4m3_to_float, num_blocks
from ..common.checks import check_bias
from ..registry import Written, register_inputs
from .call import GemmCall, launch_gemm
from .operands import Operand, Operands, check_operands, check_pairs

_OP = "fp8_gemm_nt"


def block_scaled_matmul(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    exact: bool = False,
) -> torch.Tensor:
    """fp32 [M, N] from e4m3 a [M, K] and b [N, K]: the numerics that all kernels here follow.

    Two-level accumulation: the products of 128 of K are summed in FP32, then promoted with the
    product of both scales into the FP32 result. No row of the result reads another row of `a`.

    exact: the products of 128 of K are summed in FP64, which holds any such sum, and rounded to
        FP32 once. Then no bit of a row depends on M, by which PyTorch chooses the order of sums.
    """
    m, k = a.shape
    n = b.shape[0]
    result = torch.zeros(m, n, dtype=torch.float32, device=a.device)
    if m == 0 or n == 0:
        return result
    dtype = torch.float64 if exact else torch.float32
    a_values = e4m3_to_float(a).to(dtype)
    for block in range(num_blocks(k)):
        columns = slice(block * BLOCK, min((block + 1) * BLOCK, k))
        products = a_values[:, columns] @ e4m3_to_float(b[:, columns]).to(dtype).T
        b_scale = b_scale_inv[:, block].repeat_interleave(BLOCK)[:n]
        result.addcmul_(products.float(), a_scale_inv[:, block, None] * b_scale)
    return result


class DenseInputs(NamedTuple):
    """The arguments of `fp8_gemm_nt`, with its pairs unpacked.

    batch_invariant: a row of d has the same bits whatever M is.
    """

    a: torch.Tensor
    a_scale_inv: torch.Tensor
    b: torch.Tensor
    b_scale_inv: torch.Tensor
    d: Written
    bias: torch.Tensor | None
    batch_invariant: bool = False

    @property
    def operands(self) -> Operands:
        return Operands(self.a, self.a_scale_inv, self.b, self.b_scale_inv, self.d)


def _check(inputs: DenseInputs) -> None:
    operands, bias = inputs.operands, inputs.bias
    check_operands(_OP, operands, (2, 2), bias=bias)
    check_bias(_OP, bias, len(inputs.b))


def _body(inputs: DenseInputs) -> None:
    _check(inputs)
    *operands, d, bias, exact = inputs
    result = block_scaled_matmul(*operands, exact=exact)
    d.copy_(result if bias is None else result + bias.float())


def launch_dense(
    inputs: DenseInputs, *, programmatic: bool = False, d_is_padded: bool = False
) -> None:
    """`fp8_gemm_nt` on a Hopper GPU; options as in `GemmCall`."""

    def describe() -> GemmCall:
        return GemmCall(
            _OP,
            partial(_check, inputs),
            inputs.operands,
            inputs.bias,
            programmatic=programmatic,
            d_is_padded=d_is_padded,
            batch_invariant=batch_invariant,
        )

    *optional, batch_invariant = inputs
    tensors = [x for x in optional if x is not None]
    launch_gemm(tensors, (_OP, programmatic, d_is_padded, batch_invariant), describe)


_fp8_gemm_nt = register_inputs(
    _OP, DenseInputs, "()", reference=_body, fake=_check, kernels=launch_dense
)


def fp8_gemm_nt(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    *,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Write `d = dequantize(a) @ dequantize(b).T + bias`, with FP32 accumulation, rounded once.

    Args:
        a: (e4m3 [M, K], fp32 scale_inv [M, ceil(K/128)]), from `quantize_1x128`. Its rows are
            contiguous; the scales may have any memory order.
        b: (e4m3 [N, K], fp32 scale_inv [ceil(N/128), ceil(K/128)]), from `quantize_128x128`.
        d: bf16 [M, N], rows contiguous; overwritten, whatever it held. K = 0 gives the bias.
        c, recipe, compiled_dims, disable_ue8m0_cast: DeepGEMM's further arguments. `c` must be
            None and `recipe` None or (1, 128, 128); the other two change nothing on Hopper.
        bias: [N] in bf16, fp16 or fp32, added in FP32.
        batch_invariant: a row of d has the same bits whatever M is. On a Hopper GPU no CTAs divide
            K then, which up to 512 rows is faster for some shapes; elsewhere sums are in FP64.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
    """
    check_recipe(_OP, recipe)
    if c is not None:
        raise ValueError(f"{_OP}: c must be None, accumulation into c is not supported")
    check_pairs(_OP, a, b)
    _fp8_gemm_nt(*a, *b, d, bias, batch_invariant)


def check_recipe(op: str, recipe: tuple[int, int, int] | None) -> None:
    if recipe is not None and tuple(recipe) != (1, BLOCK, BLOCK):
        raise ValueError(f"{op}: recipe must be None or (1, 128, 128), got {recipe}")
