"""How tensors become FP8: `scale = max(amax, 1e-4) / 448`, and `data = x / scale`.

Casts take bf16, fp16 or fp32 and give (e4m3 data, fp32 scales), both contiguous; `use_ue8m0` rounds
scales up to powers of two. Scales are row-major, as in DeepGEMM, and the GEMMs copy those of
activations at every call into the order that `moefp8.quant.quantize_1x128` gives. The GEMMs
take blocks of 128; other granularities are for the casts alone.
"""

from collections.abc import Sequence

import torch

from ... import kernels, quant
from ...kernels.common.blocks import zero_padded

__all__ = [
    "align",
    "ceil_div",
    "ceil_to_ue8m0",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp8",
]

ceil_div, align = kernels.ceil_div, kernels.round_up

Cast = tuple[torch.Tensor, torch.Tensor]


def ceil_to_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """The magnitudes of fp32 `x`, each rounded up to a power of two from 2^-126 to 2^127."""
    bits = x.abs().float().view(torch.int32)
    exponents = (bits >> 23) + (bits & 0x7FFFFF).bool()
    return (exponents.clamp(1, 254) << 23).view(torch.float32)


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> Cast:
    """One scale for each `gran_k` elements of a row: x [M, K], scales [M, ceil(K/gran_k)].

    Raises:
        ValueError: `x` has not 2 dimensions, or `use_packed_ue8m0` asks for Blackwell's scales.
    """
    op = "per_token_cast_to_fp8"
    _check(op, x, gran_k)
    if use_packed_ue8m0:
        raise ValueError(
            f"{op}: use_packed_ue8m0 must be False, packed UE8M0 scales are for Blackwell; "
            "use_ue8m0=True alone gives the same powers of two in FP32"
        )
    if gran_k == kernels.BLOCK:
        data, scale_inv = quant.quantize_1x128(x, ue8m0=use_ue8m0)
        return data, scale_inv.contiguous()
    return _cast_blocks(x, 1, gran_k, use_ue8m0)


def per_block_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = 128) -> Cast:
    """One scale for each `gran_k` rows and columns of x [N, K]: scales [N, K] / gran_k, rounded up.

    Raises:
        ValueError: `x` has not 2 dimensions.
    """
    _check("per_block_cast_to_fp8", x, gran_k)
    if gran_k == kernels.BLOCK:
        data, scale_inv = quant.quantize_128x128(x, ue8m0=use_ue8m0)
        return data, scale_inv
    return _cast_blocks(x, gran_k, gran_k, use_ue8m0)


def per_channel_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = False, gran_k: int = 128) -> Cast:
    """One scale for each `gran_k` elements of a column: x [K, N], scales [K/gran_k, N].

    Raises:
        ValueError: `x` has not 2 dimensions, or `gran_k` does not divide K.
    """
    op = "per_channel_cast_to_fp8"
    _check(op, x, gran_k)
    if len(x) % gran_k:
        raise ValueError(f"{op}: gran_k must divide K = {len(x)}, got {gran_k}; pad x with zeros")
    return _cast_blocks(x, gran_k, 1, use_ue8m0)


def per_custom_dims_cast_to_fp8(
    x: torch.Tensor, dims: Sequence[int], use_ue8m0: bool = False
) -> Cast:
    """One scale for each index of the dimensions `dims` of `x`, which has any shape.

    The scales have the sizes of `dims`, without those that are 1.
    """
    others = [i for i in range(x.ndim) if i not in dims]
    amax = x.abs().float().amax(others, keepdim=True) if others else x.abs().float()
    scale_inv = amax.clamp(min=1e-4) / amax.new_full((), 448.0)
    scale_inv = ceil_to_ue8m0(scale_inv) if use_ue8m0 else scale_inv
    data = (x.float() / scale_inv).clamp(-448.0, 448.0).to(kernels.E4M3)
    return data.contiguous(), scale_inv.squeeze().contiguous()


def _check(op: str, x: torch.Tensor, gran_k: int) -> None:
    if x.ndim != 2 or gran_k < 1:
        raise ValueError(
            f"{op}: x must have 2 dimensions and gran_k be at least 1, got shape {list(x.shape)} "
            f"and gran_k {gran_k}"
        )


def _cast_blocks(x: torch.Tensor, rows: int, columns: int, use_ue8m0: bool) -> Cast:
    """One scale for each block of `rows` and `columns`; the last ones may be smaller."""
    m, n = x.shape
    num_blocks = ceil_div(m, rows), ceil_div(n, columns)
    padded = zero_padded(zero_padded(x, 1, columns), 0, rows)
    blocks = padded.reshape(num_blocks[0], rows, num_blocks[1], columns)
    data, scale_inv = per_custom_dims_cast_to_fp8(blocks, (0, 2), use_ue8m0)
    return data.view(padded.shape)[:m, :n].contiguous(), scale_inv.view(num_blocks)
